"""Write a record of verl's trainer: call `record_run(trainer, "run.jsonl")` before `trainer.fit(...)`.

Importing this module imports neither torch nor verl. The driver reads a batch once its advantages are known,
just before it goes to the actor's workers. These may split it into several optimizer steps; here it is one
update.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.audit.writers.loss_recorder import LossRecorder, record_worker, watch_terms
from covey.audit.writers.recorder import (
    BatchRecorder,
    RecordedCompletion,
    Recorder,
    facts_of,
    keep_tokenizer,
    score_again,
    settings_of,
    tokens_of,
)

if TYPE_CHECKING:
    from torch import Tensor

VALUES = {
    "old_log_probs": "old_logprobs",
    "ref_log_prob": "ref_logprobs",
    "rollout_log_probs": "sampler_logprobs",
    "rollout_is_weights": "corrections",
    "token_level_rewards": "token_rewards",
    "token_level_scores": "token_scores",
    "returns": "returns",
    "values": "values",
}
"""verl's name of a field -> the record's name."""
TOKEN_FIELDS = ("prompts", "responses", "attention_mask", "response_mask", "advantages", *VALUES)
REWARD_FIELDS = ("token_level_rewards", "token_level_scores", "rm_scores")
"""Names of rewards: advantages are computed from the first one in a batch; the last one is before any KL."""
LOSSES = "verl.trainer.ppo.core_algos"
"""The module with the policy losses, loaded only in processes that compute them."""
LOSS_VALUES = {
    "log_prob": "logprobs",
    "old_log_prob": "old_logprobs",
    "advantages": "advantage",
    "rollout_is_weights": "corrections",
}
COUNTS = {"batch_num_tokens": "tokens", "global_batch_size": "completions"}
UPDATE_METHOD = "_update_actor"
"""The trainer's method that updates the actor."""
LOGPROB_METHOD = "_compute_old_log_prob"
"""The trainer's method that computes old log-probs."""
ROW_FIELDS = ("uid", "score", "data_source", "reward_model", "extra_info")


def record_run(
    trainer: Any, path: str | Path, batches: int = 20, looks: int = 3, score: Callable[..., Any] | None = None
) -> None:
    """Record the batches on which the actor of RayPPOTrainer, or of 0.9's PPOTrainer, trains.

    ``batches``: number of batches that are recorded; later ones add only metrics, or the file would grow too
    large. ``looks``: batches whose log-probs RayPPOTrainer's actor computes again, before and after the
    update. ``score``: the function of `custom_reward_function`; it is called up to four more times for each
    completion of the first batch.
    """
    writer = _VerlWriter(trainer, Path(path), batches, looks, score)
    setattr(trainer, UPDATE_METHOD, writer.update_actor)
    if LOSSES in sys.modules:
        _watch(writer.file)


def record_losses(path: str | Path) -> None:
    """Record the first calls of the policy loss in this worker's process. The file `run.losses.jsonl` belongs
    to `run.jsonl`. Only the first process writes.
    """
    record_worker(path, "verl", LOSSES, _watch)


def _watch(file: Recorder) -> None:
    core = sys.modules[LOSSES]
    calls = LossRecorder(file)
    for name, loss in list(core.POLICY_LOSS_REGISTRY.items()):
        watched = wraps(loss)(partial(_watched, calls, name, loss))
        core.POLICY_LOSS_REGISTRY[name] = watched
        loss_name = str(getattr(loss, "__name__", ""))
        if getattr(core, loss_name, None) is loss:
            setattr(core, loss_name, watched)
    watch_terms(calls, core.kl_penalty, core.agg_loss)


def _watched(calls: LossRecorder, name: str, loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = calls.call(loss, *args, **kwargs)
    calls.file.attempt(_record_call, calls, name, result[0], signature(loss).bind(*args, **kwargs).arguments)
    return result


def _record_call(calls: LossRecorder, name: str, loss: Any, arguments: Mapping[str, Any]) -> None:
    values = {field: arguments.get(verls) for verls, field in LOSS_VALUES.items()}
    totals = getattr(arguments.get("config"), "global_batch_info", None) or {}
    counts = {field: totals.get(verls) for verls, field in COUNTS.items()}
    calls.write(name, arguments["response_mask"], values, loss, totals.get("dp_size") or 1, counts)


class _VerlWriter:
    def __init__(
        self, trainer: Any, path: Path, batches: int, looks: int, score: Callable[..., Any] | None
    ) -> None:
        data = [_prompts(getattr(trainer, f"{part}_dataset", None)) for part in ("train", "val")]
        words = {"settings": settings_of(trainer.config), "tokens": tokens_of(trainer.tokenizer)}
        self.file = BatchRecorder(path, framework="verl", data=facts_of(*data), **words)
        keep_tokenizer(trainer.tokenizer, path)
        self.trainer = trainer
        self.inner = getattr(trainer, UPDATE_METHOD)
        self.batches = batches
        self.looks = min(looks, batches)
        self.score = score

    def update_actor(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.file.attempt(self._record_rollout, batch)
        result = self.inner(batch, *args, **kwargs)
        # verl 0.9's trainer puts its metrics into a dict argument; RayPPOTrainer returns them.
        metrics = [*args, *kwargs.values()] or [result.meta_info["metrics"]]
        self.file.attempt(self._record_update, batch, metrics[0])
        return result

    def _record_rollout(self, batch: Any) -> None:
        completions = list[RecordedCompletion]()
        if self.file.count < self.batches:
            completions += _completions(_columns(batch), self.trainer.tokenizer)
        score = self.score
        if score is not None and self.file.count == 0:
            texts = [completion.sample["text"] for completion in completions]
            score_again(lambda text, row, _: score(solution_str=text, **row), "score", completions, texts)
        # verl counts its steps from 1.
        self.file.rollout(self.trainer.global_steps - 1, completions, self._logprobs_now(batch))

    def _record_update(self, batch: Any, metrics: Mapping[str, Any]) -> None:
        names = ("actor/pg_loss", "actor/grad_norm", "actor/lr")
        self.file.update(metrics, names, self._logprobs_now(batch))

    def _logprobs_now(self, batch: Any) -> Any:
        """Return the actor's log-probs of a batch; None for a late one, or one in the transfer queue."""
        if self.file.count >= self.looks or not hasattr(batch, "non_tensor_batch"):
            return None
        return getattr(self.trainer, LOGPROB_METHOD)(batch)[0].batch["old_log_probs"]


def _columns(batch: Any) -> dict[str, Any]:
    """Return verl's fields of a DataProto, or of a batch whose fields are in the transfer queue."""
    if hasattr(batch, "non_tensor_batch"):
        return {**dict(batch.batch.items()), **batch.non_tensor_batch}
    get = import_module("transfer_queue").kv_batch_get
    names = [*dict.fromkeys((*TOKEN_FIELDS, *REWARD_FIELDS, *ROW_FIELDS))]
    data = get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    return dict(data.items())


def _completions(columns: Mapping[str, Any], tokenizer: Any) -> Iterator[RecordedCompletion]:
    names = dict.fromkeys((*TOKEN_FIELDS, *REWARD_FIELDS))
    tensors = {name: columns[name] for name in names if columns.get(name) is not None}
    others = {name: columns[name].tolist() for name in ROW_FIELDS if columns.get(name) is not None}
    groups = {uid: n for n, uid in enumerate(dict.fromkeys(others["uid"]))}
    for n, uid in enumerate(others["uid"]):
        tensors_of_row = {name: column[n] for name, column in tensors.items()}
        row = {name: column[n] for name, column in others.items()}
        prompt, response = _without_padding(tensors_of_row)
        scores = [float(tensors_of_row[name].sum()) for name in REWARD_FIELDS if name in tensors_of_row]
        columns_of_row = {name: row.get(name) for name in ("data_source", "extra_info")}
        sample = {
            "prompt": tokenizer.decode(prompt.tolist()),
            "prompt_ids": prompt.tolist(),
            "text": tokenizer.decode(response.tolist(), skip_special_tokens=True),
            "ids": response.tolist(),
            "group": groups[uid],
            "row": {"ground_truth": (row.get("reward_model") or {}).get("ground_truth"), **columns_of_row},
            "rewards": {"score": float(row.get("score", scores[-1]))},
            "reward": scores[0],
        }
        values = {name: tensors_of_row.get(verls) for verls, name in VALUES.items()}
        yield RecordedCompletion(
            sample, tensors_of_row["response_mask"], tensors_of_row["advantages"], values
        )


def _without_padding(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the ids of a prompt, padded on the left, and of its response, padded on the right."""
    prompt = tensors["prompts"]
    response = tensors["responses"]
    if "attention_mask" not in tensors:
        return prompt, response
    present = tensors["attention_mask"].bool()
    return prompt[present[: -len(response)]], response[: int(present[-len(response) :].sum())]


def _prompts(dataset: Any) -> list[Any]:
    """Return the prompts of an RLHFDataset; none for another kind of dataset."""
    frame = getattr(dataset, "dataframe", None)
    return [] if frame is None else list(frame[dataset.prompt_key])

"""Write a record of OpenRLHF's trainer: put `record_run(self, "run.jsonl")` at the end of
`BasePPOTrainer.__init__`.

Importing this module imports neither torch nor OpenRLHF. The trainer's process reads a batch once its
advantages are known. The actor's workers may split it into several optimizer steps; here it is one update.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from covey.audit.writers.loss_recorder import LossRecorder, record_worker, watch_terms
from covey.audit.writers.recorder import (
    BatchRecorder,
    RecordedCompletion,
    Recorder,
    keep_tokenizer,
    score_again,
    settings_of,
    tokens_of,
)

VALUES = {
    "action_log_probs": "old_logprobs",
    "base_action_log_probs": "ref_logprobs",
    "rollout_log_probs": "sampler_logprobs",
    "values": "values",
    "returns": "returns",
    "covey_reference": "ref_logprobs",
    "covey_kl": "kl",
    "covey_rewards": "token_rewards",
    "covey_scores": "token_scores",
}
"""Attribute of an Experience -> field of the record. `covey_...`: a value that its maker drops."""
LOSSES = "openrlhf.models.loss"
"""The module with the policy loss, loaded only in processes that compute it."""
PENALTIES = "openrlhf.models.utils"
"""The module with the KL, which the module with the loss imports."""
SUMS = {"get_cumulative_returns": 0, "get_advantages_and_returns": 1}
"""Methods of its experience maker that sum the rewards of tokens -> the position of that argument."""
LOSS_VALUES = {
    "log_probs": "logprobs",
    "old_log_probs": "old_logprobs",
    "advantages": "advantage",
    "rollout_log_probs": "sampler_logprobs",
}
COUNTS = {"batch_num_tokens": "tokens", "global_batch_size": "completions"}
FORWARD_METHOD = "_dispatch_forward"
"""The method of its experience maker that asks a model for log-probs."""
GATHER_METHOD = "_flatten_results"
"""The method of its experience maker that gathers the answers of all ranks."""
MAKE_METHOD = "make_experience"
"""The method of its experience maker that makes a batch."""


def record_run(
    trainer: Any, path: str | Path, batches: int = 20, looks: int = 3, score: Callable[..., Any] | None = None
) -> None:
    """Record the batches on which a PPOTrainer, or its asynchronous variant, trains.

    ``batches``: number of batches that are recorded; later ones add only metrics, or the file would grow too
    large. ``looks``: batches whose log-probs the actor computes again, before and after the update.
    ``score``: the `reward_func`; it is called up to four more times for each completion of the first batch.
    """
    writer = _OpenRlhfWriter(trainer, Path(path), batches, looks, score)
    maker = trainer.experience_maker
    maker.make_experience_batch = writer.make_experience_batch
    trainer.ppo_train = writer.ppo_train
    for name in (*SUMS, FORWARD_METHOD, GATHER_METHOD, MAKE_METHOD):
        if hasattr(maker, name):
            setattr(maker, name, partial(writer.noticed, name, getattr(maker, name)))
    if LOSSES in sys.modules:
        _watch(writer.file)


def record_losses(path: str | Path) -> None:
    """Record the first calls of the policy loss in this worker's process. The file `run.losses.jsonl` belongs
    to `run.jsonl`. Only the first process writes.
    """
    record_worker(path, "openrlhf", LOSSES, _watch)


def _watch(file: Recorder) -> None:
    kind = sys.modules[LOSSES].PolicyLoss
    inner = kind.forward
    calls = LossRecorder(file)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = calls.call(inner, self, *args, **kwargs)
        arguments = signature(inner).bind(self, *args, **kwargs).arguments
        file.attempt(_record_call, calls, self.policy_loss_type, result[0], arguments)
        return result

    kind.forward = forward
    watch_terms(calls, sys.modules[PENALTIES].compute_approx_kl, sys.modules[LOSSES].aggregate_loss)


def _record_call(calls: LossRecorder, name: str, loss: Any, arguments: Mapping[str, Any]) -> None:
    values = {field: arguments.get(argument) for argument, field in LOSS_VALUES.items()}
    counts = {field: arguments.get(argument) for argument, field in COUNTS.items()}
    calls.write(name, arguments["action_mask"], values, loss, arguments.get("dp_size", 1), counts)


class _OpenRlhfWriter:
    def __init__(
        self, trainer: Any, path: Path, batches: int, looks: int, score: Callable[..., Any] | None
    ) -> None:
        words = {"settings": settings_of(trainer.args), "tokens": tokens_of(trainer.tokenizer)}
        self.file = BatchRecorder(path, framework="openrlhf", **words)
        keep_tokenizer(trainer.tokenizer, path)
        self.trainer = trainer
        self.maker = trainer.experience_maker
        self.make = self.maker.make_experience_batch
        self.train = trainer.ppo_train
        self.batches = batches
        self.looks = min(looks, batches)
        self.score = score
        self.experiences: list[Any] = []
        self.unpaid: list[Any] = []
        self.references: list[Any] = []
        self.reference_forward: Any = ()

    def make_experience_batch(self, *args: Any, **kwargs: Any) -> Any:
        self.experiences = self.make(*args, **kwargs)
        return self.experiences

    def noticed(self, name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the experience maker, and keep the values that the maker drops."""
        result = inner(*args, **kwargs)
        self.file.attempt(self._notice, name, [*args, *kwargs.values()], result)
        return result

    def _notice(self, name: str, arguments: Sequence[Any], result: Any) -> None:
        if name == FORWARD_METHOD and arguments[0] is getattr(self.maker, "initial_model_group", None):
            self.reference_forward = result
        elif name == GATHER_METHOD and arguments[0] is self.reference_forward:
            self.references = list(result)
        elif name == MAKE_METHOD:
            for experience, reference in zip(result, self.references, strict=False):
                experience.covey_reference = reference
                # For a KL in the loss, the workers get the reference, and the KL of the rewards is 0.
                if experience.base_action_log_probs is None:
                    experience.covey_kl = experience.kl.clone()
            self.references, self.unpaid = [], list(result)
        elif name in SUMS and self.unpaid:
            # The maker computes the returns of one experience after the other, in their order.
            experience, rewards = self.unpaid.pop(0), arguments[SUMS[name]].clone()
            charged = getattr(experience, "covey_kl", None)
            coef = max(0.0, float(self.maker.kl_ctl.value))
            experience.covey_rewards = rewards
            experience.covey_scores = rewards if charged is None else rewards + coef * charged

    def ppo_train(self, step: int) -> Any:
        self.file.attempt(self._record_rollout, step)
        status = self.train(step)
        self.file.attempt(self._record_update, status)
        return status

    def _record_rollout(self, step: int) -> None:
        completions = list[RecordedCompletion]()
        if self.file.count < self.batches:
            completions += _completions(self.experiences, self.trainer.args, self.trainer.tokenizer)
        if self.score is not None and self.file.count == 0:
            # Its rewards read special tokens too, for example the end token.
            texts = [self.trainer.tokenizer.decode(c.sample["ids"]) for c in completions]
            score_again(partial(_score_of, self.score), "reward", completions, texts)
        self.file.rollout(step, completions, self._logprobs_now())

    def _record_update(self, status: Mapping[str, object]) -> None:
        self.file.update(status, ("policy_loss", "actor_grad_norm", "actor_lr"), self._logprobs_now())

    def _logprobs_now(self) -> list[Any] | None:
        """Return the actor's log-probs of each completion; None for a late batch, or one with images."""
        images = any(image for e in self.experiences for image in e.mm_train_inputs or ())
        if self.file.count >= self.looks or images:
            return None
        names = ("sequences", "action_mask", "attention_mask")
        fields = {name: [getattr(e, name) for e in self.experiences] for name in names}
        deepspeed = self.trainer.args.ds
        # All ranks of a ring or a tensor group give the same answer.
        copies = deepspeed.ring_attn_size * deepspeed.tensor_parallel_size
        answers = getattr(self.maker, FORWARD_METHOD)(self.trainer.actor_model_group, True, **fields)
        return [row for batch in getattr(self.maker, GATHER_METHOD)(answers, copies) for row in batch]


def _score_of(score: Callable[..., Any], text: str, row: Mapping[str, Any], prompt: str) -> Any:
    return score([prompt + text], [prompt], [row["label"]])["rewards"][0]


def _completions(experiences: Sequence[Any], args: Any, tokenizer: Any) -> Iterator[RecordedCompletion]:
    for experience in experiences:
        for n, number in enumerate(experience.index):
            # Sequences are padded on the right. The mask does not show the prompt's own length.
            ids = experience.sequences[n][: int(experience.attention_mask[n].sum())].tolist()
            prompt = tokenizer(text=experience.prompts[n], add_special_tokens=False)["input_ids"]
            if ids[: len(prompt)] != prompt:
                prompt = ids[: int(experience.action_mask[n].int().argmax()) + 1]
            answer = ids[len(prompt) :]
            sample = {
                "prompt": experience.prompts[n],
                "prompt_ids": prompt,
                "text": tokenizer.decode(answer, skip_special_tokens=True),
                "ids": answer,
                "group": number // args.rollout.n_samples_per_prompt,
                "row": {"label": experience.labels[n]},
                "rewards": {"reward": float(experience.info["reward"][n])},
                "reward": float(experience.rewards[n]),
            }
            tensors = [(name, getattr(experience, attribute, None)) for attribute, name in VALUES.items()]
            values = {name: value[n] for name, value in tensors if value is not None}
            # The value of token t is at t - 1.
            yield RecordedCompletion(
                sample, experience.action_mask[n], experience.advantages[n], values, len(prompt) - 1
            )

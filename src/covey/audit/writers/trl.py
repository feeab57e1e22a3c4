"""Write a record of a trainer of TRL: `record_run(trainer, "run.jsonl")` before it trains.

This module follows GRPOTrainer and RLOOTrainer, `trl_data_writer` those that learn from data.

Importing this module imports neither torch nor TRL. The trainer's methods run unchanged; their arguments and
results are copied. Only the first process writes. If recording fails, the record ends and training continues.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.audit.probes import ANSWERS, probe
from covey.audit.writers.recorder import (
    PLAIN_TYPES,
    Recorder,
    T,
    facts_of,
    frozen_tokens,
    keep_tokenizer,
    numbers,
    opening_of,
    plain_logprobs,
    row_of,
    token_logprobs,
    tokens_of,
    up_to,
    version_of,
)
from covey.audit.writers.trl_data import DataRecorder, learns_from_data

if TYPE_CHECKING:
    from torch import Tensor

WRAPPED = (
    "_calculate_rewards",
    "_generate",
    "_generate_and_score_completions",
    "compute_loss",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
    "_get_grad_norm",
)
Rows = list[dict[str, Any]]
Tensors = dict[str, "Tensor"]
MAX_KEPT_ROLLOUTS = 8
"""Most rollouts whose completions are kept in memory."""
MAX_ROWS = 100_000
"""Most rows of a dataset whose answers are kept in memory."""
GRADIENT_STEPS = 8
"""Last update whose gradient is computed once more; not the first one, which no earlier one disturbs."""
SAME_LOGPROBS = 0.02
"""Most nats per token between two forward passes of a completion that have the same gradient."""


def record_run(trainer: Any, path: str | Path, looks: int = 8, probes: bool = True) -> None:
    """Record a trainer's work in a file, with a line for each rollout and update.

    ``looks``: completions of each rollout, or of the first batches of data, whose log-probs are computed
    again; those of a rollout before and after updates.
    ``probes``: call the reward functions up to four more times for each completion of the first rollout.
    """
    if not trainer.accelerator.is_main_process:
        return
    from transformers import TrainerCallback

    if learns_from_data(trainer):
        ends = DataRecorder(trainer, Path(path), looks, _settings_of(trainer)).callbacks()
        trainer.add_callback(type("AuditCallback", (TrainerCallback,), ends)())
        return
    recorder = _TrlRecorder(trainer, Path(path), looks, probes)
    for name in WRAPPED:
        if hasattr(trainer, name):
            hook = getattr(recorder, name)
            setattr(trainer, name, functools.partial(recorder.around, hook, getattr(trainer, name)))
    ends = {
        "on_train_begin": lambda *_, **__: recorder.file.attempt(recorder.begin),
        "on_pre_optimizer_step": lambda *_, **__: recorder.file.attempt(recorder.before_step),
        "on_step_end": lambda *_, **__: recorder.file.attempt(recorder.after_step),
    }
    trainer.add_callback(type("AuditCallback", (TrainerCallback,), ends)())


class _TrlRecorder:
    def __init__(self, trainer: Any, path: Path, looks: int, probes: bool) -> None:
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        tokens = tokens_of(tokenizer)
        tokens["eos"] = list(getattr(trainer, "eos_token_ids", tokens["eos"]))
        tokens["frozen"] = frozen_tokens(trainer.model, tokenizer)
        datasets = (trainer.train_dataset, getattr(trainer, "eval_dataset", None))
        prompts = [_prompts(data) for data in datasets]
        # A model in parts on several devices may not run outside of its trainer's steps.
        with suppress(Exception):
            tokens |= opening_of(trainer.model, tokenizer, next(iter(prompts[0]), None))
        self.file = Recorder(
            path,
            **version_of("trl"),
            settings=_settings_of(trainer),
            tokens=tokens,
            data=facts_of(*prompts),
        )
        keep_tokenizer(tokenizer, path)
        self.trainer = trainer
        self.answers = _answers_by_prompt(trainer.train_dataset)
        self.looks = looks
        self.probes = probes
        self.scored: tuple[Any, ...] = ()
        self.written: list[list[int]] | None = None
        """For each completion of a rollout with tools, which of its tokens the model wrote."""
        self.count = -1
        self.logprobs: Tensor
        self.entropies: Tensor | None = None
        self.passes: list[Tensor] = []
        """Log-probs that were computed since the last loss."""
        self.samples: dict[tuple[int, int], dict[str, Any]] = {}
        self.update: dict[str, Any] = {"rows": [], "loss": 0.0}
        self.gradients_due = 2 if looks else 0
        """Updates whose gradient is still to be computed once more."""

    def around(self, hook: Callable[..., T], inner: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a method of the trainer, and pass its result to ``hook``, which may return another result."""
        result = inner(*args, **kwargs)
        replaced = self.file.attempt(hook, result, *args, **kwargs)
        return result if replaced is None else replaced

    def _generate(self, result: Sequence[Any], *_: object) -> None:
        # The third of its results says which tokens the model wrote, if a tool wrote others.
        masks = result[2] if len(result) > 2 else None
        self.written = list(masks) if isinstance(masks, list) else None

    def _calculate_rewards(
        self, rewards: Tensor, inputs: Rows, prompts: list[Any], texts: list[Any], ids: list[list[int]]
    ) -> None:
        rows = [{k: v for k, v in row.items() if k not in ("prompt", "completion")} for row in inputs]
        self.scored = (prompts, texts, ids, rows, rewards.tolist())

    def _generate_and_score_completions(self, output: Tensors, inputs: Rows) -> Tensors:
        passes = [*self.passes]
        self.passes.clear()
        if not self.trainer.model.training:
            return output
        # An update may use several rollouts, and several updates one rollout, so the last ones are kept.
        number = self.count = self.count + 1
        samples = [self._sample(output, index) for index in range(len(inputs))]
        # A completion without an advantage says nothing about an update, so it comes last.
        for sample in sorted(samples, key=lambda sample: sample["advantage"] == 0)[: self.looks]:
            sample["model_logprobs"], sample["model_logprobs_at_1"] = self._looked(sample)
        for sample, answers in zip(samples, self._asked(), strict=False):
            sample.update(answers)
        self.samples = {
            at: sample for at, sample in self.samples.items() if at[0] > number - MAX_KEPT_ROLLOUTS
        }
        self.samples |= {(number, index): sample for index, sample in enumerate(samples)}
        step = self.trainer.state.global_step
        self.file.write(kind="rollout", number=number, step=step, completions=samples)
        # TRL shuffles and splits all tensors of its batch alike, so these numbers tell where a row came from.
        places = [[number, index] for index in range(len(inputs))]
        origin = {"covey_origin": output["prompt_ids"].new_tensor(places)}
        return {**output, **_rloo_logprobs(output, passes), **origin}

    def _sample(self, output: Tensors, index: int) -> dict[str, Any]:
        prompts, texts, ids, rows, rewards = (part[index] for part in self.scored)
        names = self.trainer.reward_func_names
        sample = {
            "prompt": prompts,
            "prompt_ids": output["prompt_ids"][index][output["prompt_mask"][index].bool()].tolist(),
            "text": texts if isinstance(texts, str) else str(texts[-1].get("content")),
            "ids": list(ids),
            "group": index // self.trainer.num_generations,
            "row": rows,
            "rewards": {n: None if isnan(v) else v for n, v in zip(names, rewards, strict=True)},
            "advantage": float(output["advantages"][index].flatten()[0]),
        }
        due = self.answers.get(_key(prompts))
        answers = _key({name: rows.get(name) for name in ANSWERS if name in rows})
        if due is not None and answers not in due:
            sample["foreign"] = True
        if "sampling_per_token_logps" in output:
            sample["sampler_logprobs"] = numbers(output["sampling_per_token_logps"][index][: len(ids)])
        if "tool_mask" in output:
            sample["inserted"] = (output["tool_mask"][index][: len(ids)] == 0).int().tolist()
        elif self.written is not None and len(self.written[index]) == len(ids):
            sample["inserted"] = [int(not wrote) for wrote in self.written[index]]
        return sample

    def _looked(self, sample: dict[str, Any]) -> list[list[float]]:
        trainer = self.trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        temperatures = (trainer.args.temperature, 1.0)
        context = trainer.accelerator.autocast()
        return plain_logprobs(model, sample["prompt_ids"], sample["ids"], temperatures, context)

    def _asked(self) -> list[dict[str, Any]]:
        """Return the rewards of the probes for the first rollout; none for later ones."""
        if not self.probes:
            return []
        self.probes = False
        prompts, texts, ids, rows, _ = self.scored
        named = zip(self.trainer.reward_func_names, self.trainer.reward_funcs, strict=True)
        functions = {name: f for name, f in named if not hasattr(f, "state_dict")}
        columns = {name: [row.get(name) for row in rows] for name in rows[0]}
        columns |= {"prompts": prompts, "completions": texts, "completion_ids": ids}
        extra = {"trainer_state": self.trainer.state, "log_extra": _ignore, "log_metric": _ignore}
        return probe(functions, columns, prompts, extra)

    def _get_per_token_logps_and_entropies(self, result: Sequence[Tensor], *_: object, **__: object) -> None:
        self.logprobs, self.entropies = result[0], result[1]
        self.passes.append(result[0])

    def compute_loss(self, loss: Tensor, *_: object, **__: object) -> None:
        # This is the outer of two methods. A subclass that scales the loss overrides it.
        if self.trainer.model.training:
            self.update["loss"] += loss.item()

    def _compute_loss(self, _loss: Tensor, _model: object, inputs: Tensors) -> None:
        if not self.trainer.model.training:
            return
        self.passes.clear()
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        values = {"logprobs": self.logprobs}
        if self.entropies is not None:
            values["entropies"] = self.entropies
        for name in ("old", "ref"):
            for key in (f"{name}_per_token_logps", f"covey_{name}_logprobs"):
                if key in inputs:
                    values[f"{name}_logprobs"] = inputs[key]
        ids, advantages = inputs["completion_ids"], inputs["advantages"]
        rows: Rows = []
        for n, (number, index) in enumerate(inputs["covey_origin"].tolist()):
            length = len(self.samples[number, index]["ids"])
            logprobs = {name: v[n] for name, v in values.items()}
            row = row_of((number, index), length, mask[n], advantages[n], logprobs)
            rows.append({**row, "ids": ids[n][: len(row["mask"])].tolist()})
        self.update["rows"] += rows
        if self.logprobs.requires_grad:
            self.logprobs.register_hook(lambda gradient: self.file.attempt(_keep_gradient, gradient, rows))

    def _get_grad_norm(self, norm: Tensor | float | None, *_: object, **__: object) -> None:
        self.update["grad_norm"] = None if norm is None else float(norm)

    def begin(self) -> None:
        """Watch the steps of the optimizer, which exists only now."""
        self.file.watch(self.trainer.model, self.trainer.optimizer)

    def before_step(self) -> None:
        """Keep the learning rate of the next update, and some of the weights before it."""
        frozen = _frozen_part(self.trainer.accelerator.unwrap_model(self.trainer.model))
        if frozen is not None:
            self.update["adapter_frozen"] = frozen
        self.update["learning_rate"] = self.trainer.optimizer.param_groups[0]["lr"]
        self.file.weights_changed(self.trainer.model.parameters())
        step = self.trainer.state.global_step
        if self.gradients_due and 0 < step <= GRADIENT_STEPS:
            cosine = self._gradient_cosine()
            self.update["gradient_cosine"] = cosine
            self.gradients_due -= cosine is not None

    def _gradient_cosine(self) -> float | None:
        """Compare the weights' gradient with that of the loss; None where other terms or noise are in it."""
        trainer, motions = self.trainer, self.file.motions
        has_terms = getattr(trainer.args, "entropy_coef", 0) or _has_noise(trainer.model)
        # Other processes add their completions.
        is_all = trainer.accelerator.num_processes == 1 and not has_terms
        if motions is None or not is_all or not all("gradients" in row for row in self.update["rows"]):
            return None
        # Without dropout, which would draw random numbers; without memory for it there is no comparison.
        trainer.model.eval()
        try:
            with suppress(RuntimeError), trainer.accelerator.autocast():
                return motions.gradient_cosine(map(self._along_gradients, self.update["rows"]))
        finally:
            trainer.model.train()
        return None

    def _along_gradients(self, row: dict[str, Any]) -> Tensor:
        """Return a number whose gradient is that of the loss by the log-probs of a completion."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        prompt = self.samples[row["rollout"], row["completion"]]["prompt_ids"]
        (logprobs,) = token_logprobs(model, prompt, row["ids"], (self.trainer.args.temperature,))
        of_loss = logprobs.new_tensor(row["logprobs"])
        if float((logprobs.detach() - of_loss).abs().mean()) > SAME_LOGPROBS:
            raise RuntimeError("the forward pass of the loss is another one, as with dropout")
        return (logprobs * logprobs.new_tensor(row["gradients"][: len(logprobs)])).sum()

    def after_step(self) -> None:
        """Write the update's line."""
        for row in self.update["rows"]:
            sample = self.samples[row["rollout"], row["completion"]]
            if "model_logprobs" in sample:
                row["after_logprobs"] = self._looked(sample)[0]
        changed = self.file.weights_changed(self.trainer.model.parameters())
        step = self.trainer.state.global_step - 1
        self.file.write(kind="update", step=step, weights_changed=changed, **self.update)
        self.update = {"rows": [], "loss": 0.0}


def _settings_of(trainer: Any) -> dict[str, Any]:
    """Return the arguments of a trainer that are plain values, and what its objects say otherwise."""
    settings = {k: v for k, v in trainer.args.to_dict().items() if isinstance(v, PLAIN_TYPES)}
    kwargs = getattr(trainer.args, "generation_kwargs", None) or {}
    settings |= {f"generation_kwargs.{k}": v for k, v in kwargs.items() if isinstance(v, PLAIN_TYPES)}
    settings["processes"] = trainer.accelerator.num_processes
    settings["model"] = trainer.model.config.name_or_path
    settings["dtype"] = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
    noise = trainer.model.config.to_dict().items()
    settings |= {f"model.{name}": rate for name, rate in noise if _is_dropout(name, rate)}
    # An optimizer or a schedule that the script made is not that of the arguments.
    if trainer.optimizer is not None:
        settings["learning_rate"] = trainer.optimizer.param_groups[0]["lr"]
    if trainer.lr_scheduler is not None:
        settings["lr_scheduler_type"] = type(trainer.lr_scheduler).__name__
    return settings


def _rloo_logprobs(output: Tensors, passes: Sequence[Tensor]) -> Tensors:
    """Return the log-probs of tokens that RLOOTrainer computes for a rollout, of which it keeps only the
    sums: first the policy's, then the reference's if there is a reference.
    """
    if "old_logps" not in output or not passes or passes[0].shape != output["completion_mask"].shape:
        return {}
    names = ("covey_old_logprobs", "covey_ref_logprobs")
    return {name: logprobs.detach() for name, logprobs in zip(names, passes, strict=False)}


def _is_dropout(name: str, rate: object) -> bool:
    return bool(re.search("dropout|pdrop", name)) and isinstance(rate, float) and rate > 0


def _has_noise(model: Any) -> bool:
    """Whether a model has dropout, or a loss of its own for the load of experts."""
    config = model.config.to_dict()
    rates = [value for name, value in config.items() if re.search("dropout|pdrop", name)]
    rates += [getattr(module, "p", 0) for module in model.modules() if "Dropout" in type(module).__name__]
    return config.get("output_router_logits") is True or any(isinstance(p, float) and p > 0 for p in rates)


def _frozen_part(model: Any) -> float | None:
    """Return the fraction of the tensors of a model's LoRA adapter that are not trained; None without one."""
    active = getattr(model, "active_adapter", None)
    if not isinstance(active, str):
        return None
    named = model.named_parameters()
    trained = [p.requires_grad for name, p in named if re.search(rf"\blora_\w+\.{re.escape(active)}\b", name)]
    return trained.count(False) / len(trained) if trained else None


def _keep_gradient(gradient: Tensor, rows: Rows) -> None:
    """Add the derivative of the loss by the log-probs of a micro-batch to its rows."""
    for row, derivative in zip(rows, gradient, strict=True):
        row["gradients"] = up_to(len(row["mask"]), derivative)


def _answers_by_prompt(data: Any) -> dict[str, set[str]]:
    """Return the answers that a dataset has for each prompt; {} for a stream, or without answers."""
    names = [name for name in ANSWERS if name in (getattr(data, "column_names", None) or ())]
    prompts = _prompts(data) if names else []
    if len(prompts) > MAX_ROWS:
        return {}
    answers = dict[str, set[str]]()
    for prompt, *values in zip(prompts, *(data[name] for name in names), strict=True) if prompts else ():
        answers.setdefault(_key(prompt), set()).add(_key(dict(zip(names, values, strict=True))))
    return answers


def _key(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _prompts(data: Any) -> list[Any]:
    """Return the prompts of a dataset; none for a stream."""
    named = hasattr(data, "__len__") and "prompt" in getattr(data, "column_names", ())
    return list(data["prompt"]) if named else []


def _ignore(*_: object, **__: object) -> None:
    """Ignore the values that a reward function logs while it is probed."""

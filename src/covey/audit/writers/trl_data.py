"""Write a record of TRL's trainers that learn from data: SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer.

A batch is a rollout and a part of an update. What is trained is read where it happens: from the arguments of
the forward pass, and from the gradient that comes back to it. An own collator or loss therefore shows too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from covey.audit.writers.recorder import (
    Recorder,
    frozen_tokens,
    keep_tokenizer,
    numbers,
    plain_logprobs,
    tokens_of,
    version_of,
)
from covey.audit.writers.turns import Turns

if TYPE_CHECKING:
    from torch import Tensor

ALGORITHMS = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "kto": "kto", "robust": "robust_dpo"}
"""TRL's loss_type of preferences -> covey's name of the loss."""
BATCHES = 40
"""Batches whose completions are written; of later ones, only losses and rates."""
LOOKED_BATCHES = 4
"""Batches with log-probs of plain forward passes."""
IGNORED = -100
"""Label of a token that is not trained."""
MAX_KEYS = 100_000
"""Most rows of a dataset whose prompts' lengths are kept in memory."""


def learns_from_data(trainer: Any) -> bool:
    """Whether a trainer takes its completions from its data, and samples none."""
    return not hasattr(trainer, "_generate_and_score_completions")


class Pass(NamedTuple):
    """A forward pass: what the model got and gave. Tensors are (N, L)."""

    ids: Tensor
    present: Tensor
    """False for padding."""
    labels: Tensor | None
    logprobs: Tensor | None
    """(N, L - 1), or fewer places at the left: of each token after the first."""


class DataRecorder:
    """Follows a trainer batch by batch."""

    def __init__(self, trainer: Any, path: Path, looks: int, settings: Mapping[str, Any]) -> None:
        self.trainer = trainer
        self.tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        self.is_score = type(trainer.args).__name__ == "RewardConfig"
        self.has_pairs = self.is_score or type(trainer.args).__name__ == "DPOConfig"
        self.turns = Turns(self.tokenizer)
        self.starts = _prompt_lengths(trainer.train_dataset)
        self.masks_prompts = _masks_prompts(trainer)
        self.is_by_turns = bool(getattr(trainer.args, "assistant_only_loss", False))
        self.file = Recorder(
            path,
            **version_of("trl"),
            settings={**settings, "algorithm": _algorithm(trainer)},
            tokens={**tokens_of(self.tokenizer), "frozen": frozen_tokens(trainer.model, self.tokenizer)},
        )
        keep_tokenizer(self.tokenizer, path)
        self.looks = looks
        self.count = 0
        self.listening = False
        self.passes: list[tuple[bool, Pass]] = []
        """Whether a gradient is to come back, and the pass."""
        self.own_rows: list[dict[str, Any]] = []
        """Of the last batch."""
        self.width = 0
        self.update: dict[str, Any] = {"rows": [], "loss": 0.0}
        self._listen()

    def _listen(self) -> None:
        trainer = self.trainer
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                model.register_forward_hook(self._hears, with_kwargs=True)
        if self.is_score:
            trainer.model.get_input_embeddings().register_forward_hook(self._embeds)
        for name, around in (("compute_loss", self._loss), ("_get_grad_norm", self._norm)):
            setattr(trainer, name, functools.partial(around, getattr(trainer, name)))

    def callbacks(self) -> dict[str, Callable[..., object]]:
        """Return what the trainer is to call at the beginning, and before and after steps."""
        begin = (self.file.watch, self.trainer.model)
        return {
            "on_train_begin": lambda *_, **__: self.file.attempt(*begin, self.trainer.optimizer),
            "on_pre_optimizer_step": lambda *_, **__: self.file.attempt(self._before_step),
            "on_step_end": lambda *_, **__: self.file.attempt(self._after_step),
        }

    def _loss(
        self, inner: Callable[..., Any], model: Any, inputs: dict[str, Any], *args: Any, **kw: Any
    ) -> Any:
        """Call the trainer's loss, and write the batch that it got."""
        batch = dict(inputs)
        self.listening = self.trainer.model.training
        self.passes.clear()
        try:
            result = inner(model, inputs, *args, **kw)
        finally:
            is_training, self.listening = self.listening, False
        if is_training:
            self.file.attempt(self._batch, batch, result[0] if isinstance(result, tuple) else result)
        return result

    def _hears(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if self.listening and ids is not None:
            self.file.attempt(self._heard, ids, kwargs, output)

    def _heard(self, ids: Tensor, kwargs: Mapping[str, Any], output: Any) -> None:
        import torch

        present = kwargs.get("attention_mask")
        present = torch.ones_like(ids) if present is None or present.shape != ids.shape else present
        heard = Pass(ids, present.bool(), kwargs.get("labels"), getattr(output, "log_probs", None))
        is_trained = torch.is_grad_enabled()
        self.passes.append((is_trained, heard))
        logits = getattr(output, "logits", None) if heard.logprobs is None else None
        if is_trained and logits is not None and logits.requires_grad and logits.shape[:2] == ids.shape:
            logits.register_hook(lambda gradient: self.file.attempt(self._taught, gradient, ids))

    def _embeds(self, _module: Any, _args: Any, output: Tensor) -> None:
        """Follow the gradient back to the embeddings, which shows how far a score reads."""
        if self.listening and output.requires_grad:
            output.register_hook(lambda gradient: self.file.attempt(self._read, gradient))

    def _batch(self, inputs: Mapping[str, Any], loss: Tensor) -> None:
        self.update["loss"] += loss.item()
        policy = next((heard for is_trained, heard in self.passes if is_trained), None)
        if policy is None or self.count >= BATCHES:
            return
        following = [
            h
            for t, h in self.passes
            if not t and h.ids.shape == policy.ids.shape and (h.ids == policy.ids).all()
        ]
        # KTO's estimate of the KL has passes of its own; the reference's pass is the one over the same ids.
        ref = following[-1] if following and hasattr(self.trainer, "ref_model") else None
        samples: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        for n in range(len(policy.ids)):
            for start, end in _pieces(policy, inputs.get("position_ids"), n):
                sample, row = self._row(policy, ref, n, start, end)
                row |= {"rollout": self.count, "completion": len(rows)}
                self._place(sample, n, len(policy.ids), inputs)
                samples.append(sample)
                rows.append(row)
        self._look(samples)
        self.own_rows, self.width = rows, policy.ids.shape[1]
        if policy.logprobs is not None and policy.logprobs.requires_grad:
            policy.logprobs.register_hook(lambda gradient: self.file.attempt(self._keep, gradient, rows))
        self.file.write(
            kind="rollout", number=self.count, step=self.trainer.state.global_step, completions=samples
        )
        self.update["rows"] += rows
        self.count += 1

    def _row(
        self, policy: Pass, ref: Pass | None, n: int, start: int, end: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a sequence as a completion of the data, and as the loss trains it."""
        ids = policy.ids[n, start:end].tolist()
        labels = None if policy.labels is None else policy.labels[n, start : policy.labels.shape[1]].tolist()
        trained = [label != IGNORED for label in labels[: len(ids)]] if labels is not None else None
        answer = self._answer(ids, trained)
        last = self.turns.end(ids)
        row: dict[str, Any] = {"at": (n, start, answer, last)}
        if trained is not None:
            row["mask"] = [int(on) for on in trained[answer:last]]
            if self.masks_prompts:
                row["prompt_trained"] = self._trained_of_prompt(trained, answer)
        width = policy.ids.shape[1]
        for name, source in (("logprobs", policy), ("ref_logprobs", ref)):
            if source is not None and source.logprobs is not None:
                # Log-probs may lack places at the left.
                shift = width - source.logprobs.shape[1]
                values = source.logprobs[n].detach()[max(0, start + answer - shift) : start + last - shift]
                row[name] = [0.0] * (last - answer - len(values)) + numbers(values)
        return self._sample(ids, answer, last), row

    def _sample(self, ids: Sequence[int], answer: int, last: int) -> dict[str, Any]:
        """Return a sequence as a completion: its prompt ends at ``answer``, and its text at ``last``."""
        sample: dict[str, Any] = {
            "prompt": self.tokenizer.decode(ids[:answer]),
            "prompt_ids": ids[:answer],
            "ids": ids[answer:last],
            "text": self.tokenizer.decode(ids[answer:last]),
        }
        between = self.turns.between(ids[:last], answer) if self.is_by_turns else []
        if any(between):
            sample["inserted"] = [int(outside) for outside in between]
        return sample

    def _trained_of_prompt(self, trained: Sequence[bool], answer: int) -> int:
        """Return how many tokens of a prompt are trained."""
        begin = max(1, answer - self.turns.opening_length)
        opening = trained[begin:answer]
        # A template may count the opening as part of the answer, but not its last token alone.
        last_alone = len(opening) > 1 and opening[-1] and not any(opening[:-1])
        return sum(trained[1:begin]) + last_alone

    def _answer(self, ids: Sequence[int], trained: Sequence[bool] | None) -> int:
        """Return the place at which the answer begins: by the data, by the template, or else by the loss."""
        start = self.starts.get(tuple(ids))
        if start is None:
            start = self.turns.answer(ids)
        if start is None and trained is not None and any(trained):
            start = list(trained).index(True)
        return min(start or 0, max(0, len(ids) - 1))

    def _place(self, sample: dict[str, Any], n: int, size: int, inputs: Mapping[str, Any]) -> None:
        """Note the pair of a completion, and the one from which KTO estimates its KL."""
        if self.has_pairs and size % 2 == 0:
            sample["group"] = n % (size // 2)
            sample["rewards"] = {"chosen": float(n < size // 2)}
        other = inputs.get("KL_input_ids")
        if other is not None:
            mask = inputs["KL_completion_mask"][n].bool()
            sample["kl_ids"] = other[n][mask].tolist()

    def _look(self, samples: Sequence[dict[str, Any]]) -> None:
        if self.count >= LOOKED_BATCHES or self.is_score:
            return
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        for sample in samples[: self.looks]:
            prompt, ids = sample["prompt_ids"], sample["ids"]
            if prompt and ids:
                context = self.trainer.accelerator.autocast()
                (sample["model_logprobs"],) = plain_logprobs(model, prompt, ids, (1.0,), context)

    def _keep(self, gradient: Tensor, rows: Sequence[dict[str, Any]]) -> None:
        """Keep the derivative of the loss by the log-probs."""
        for row in rows:
            n, start, answer, last = row["at"]
            shift = 1 if gradient.shape[1] < self.width else 0
            values = [*[0.0] * shift, *gradient[n].tolist()][start + answer : start + last]
            # Log-probs of other tokens are constants, whatever comes back to them.
            trained = zip(values, row.get("mask", values), strict=False)
            row["gradients"] = [float(f"{value:.7g}") * bool(on) for value, on in trained]

    def _taught(self, gradient: Tensor, ids: Tensor) -> None:
        """Read from the gradient of logits which token each place is taught; it has the most negative one."""
        lowest, tokens = gradient.min(-1)
        for row in self.own_rows:
            n, start, answer, last = row["at"]
            places = range(start + answer - 1, start + last - 1)
            taught = [bool(lowest[n, place] < 0) if place >= 0 else False for place in places]
            row["mask"] = [int(on) for on in taught]
            if self.masks_prompts:
                before = lowest[n, start : max(start, start + answer - 1 - self.turns.opening_length)]
                row["prompt_trained"] = int((before < 0).sum())
            present = ids[n, start + answer : start + last].tolist()
            row["ids"] = [
                int(tokens[n, place]) if on else own
                for place, on, own in zip(places, taught, present, strict=True)
            ]

    def _read(self, gradient: Tensor) -> None:
        """Set the mask of a score to the last token that it reads."""
        reached = gradient.abs().sum(-1) > 0
        for row in self.own_rows:
            n, start, answer, _ = row["at"]
            places = reached[n].nonzero()[:, 0].tolist()
            if places:
                last = places[-1] - start - answer
                row["mask"] = [0] * last + [1] if last >= 0 else []

    def _norm(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = inner(*args, **kwargs)
        self.update["grad_norm"] = None if norm is None else float(norm)
        return norm

    def _before_step(self) -> None:
        self.update["learning_rate"] = self.trainer.optimizer.param_groups[0]["lr"]
        self.file.weights_changed(self.trainer.model.parameters())

    def _after_step(self) -> None:
        rows = [{k: v for k, v in row.items() if k != "at"} for row in self.update.pop("rows")]
        changed = self.file.weights_changed(self.trainer.model.parameters())
        step = self.trainer.state.global_step - 1
        self.file.write(kind="update", step=step, weights_changed=changed, rows=rows, **self.update)
        self.update = {"rows": [], "loss": 0.0}


def _algorithm(trainer: Any) -> str:
    """Return covey's name of a trainer's loss."""
    name = type(trainer.args).__name__.removesuffix("Config").lower()
    kind = getattr(trainer.args, "loss_type", None)
    kinds = [kind] if isinstance(kind, str) else kind
    single = kinds[0] if name in ("dpo", "kto") and kinds and len(kinds) == 1 else None
    return ALGORITHMS.get(single, f"{name} {single}") if single else name


def _masks_prompts(trainer: Any) -> bool:
    """Whether a run is to train completions alone."""
    args = trainer.args
    if type(args).__name__ != "SFTConfig":
        return True
    if getattr(args, "assistant_only_loss", False) or getattr(args, "completion_only_loss", False):
        return True
    data = trainer.train_dataset
    labels = data[:64]["labels"] if "labels" in (getattr(data, "column_names", None) or ()) else []
    return any(IGNORED in row for row in labels)


def _prompt_lengths(data: Any) -> dict[tuple[int, ...], int]:
    """Return the length of the prompt of each sequence that a dataset's rows make."""
    columns = set(getattr(data, "column_names", None) or ())
    answers = [name for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in columns]
    if "prompt_ids" not in columns or not hasattr(data, "__len__") or len(data) > MAX_KEYS:
        return {}
    lengths = {}
    for name in answers:
        for prompt, ids in zip(data["prompt_ids"], data[name], strict=True):
            lengths[(*prompt, *ids)] = len(prompt)
    return lengths


def _pieces(policy: Pass, positions: Tensor | None, n: int) -> list[tuple[int, int]]:
    """Return the first and the last place of each sequence in a row of a batch, which may hold several."""
    present = policy.present[n].nonzero()[:, 0].tolist()
    if not present:
        return []
    start, end = present[0], present[-1] + 1
    if positions is None or positions.shape != policy.ids.shape:
        return [(start, end)]
    starts = [place for place in range(start, end) if int(positions[n, place]) == 0] or [start]
    return list(zip(starts, [*starts[1:], end], strict=True))

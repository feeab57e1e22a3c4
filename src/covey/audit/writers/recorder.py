"""The recorder on which all writers of records are built, those here and your own.

torch is imported late, so that a writer can be imported without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat, TypeVar

from covey.audit.probes import probe
from covey.audit.record import FORMAT, VERSION
from covey.audit.writers.motions import MotionRecorder
from covey.audit.writers.turns import Turns

if TYPE_CHECKING:
    from torch import Tensor, nn

FINGERPRINT_WEIGHTS = 4096
"""Most weights of each tensor of a model that are compared before and after an update."""
PLAIN_TYPES = (str, int, float, list, tuple, type(None))
"""Types of the settings that are recorded."""
BEHIND = ("token_rewards", "token_scores", "gradients")
"""Fields of a row that may extend past the end of its completion."""
SECRET_WORDS = ("key", "token", "secret", "password")
"""Last words of settings that are not recorded, because they may be secrets."""
TOKENIZER = ".tokenizer.json"
"""Ending of the file next to a record with its tokenizer."""
T = TypeVar("T")


class Recorder:
    """Writes a record: the header, then a line whenever something happens.

    It replaces an earlier record of this name. If recording fails, the record ends and training continues.
    """

    def __init__(self, path: Path, **header: object) -> None:
        self.path = path
        self.failed = False
        self._before: list[Tensor] = []
        self.motions: MotionRecorder | None = None
        path.write_text("")
        self.write(format=FORMAT, version=VERSION, **header)

    def write(self, **line: object) -> None:
        """Append a line. That of an update gets the motions of watched weights."""
        if self.motions is not None and line.get("kind") == "update":
            line |= self.motions.take()
        with self.path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def watch(self, model: nn.Module, optimizer: Any) -> None:
        """Keep for each update how its step moves some weights, and how the optimizer's formula would.

        An optimizer that is none of torch's, such as DeepSpeed's, is left alone.
        """
        motions = MotionRecorder(model, optimizer)
        if not hasattr(motions.optimizer, "register_step_pre_hook"):
            return
        self.motions = motions
        motions.optimizer.register_step_pre_hook(lambda *_: self.attempt(motions.before))
        motions.optimizer.register_step_post_hook(lambda *_: self.attempt(motions.after))

    def attempt(self, part: Callable[..., T], *args: object, **kwargs: object) -> T | None:
        """Call a part of a writer. If it fails, print the reason and record nothing more."""
        if self.failed:
            return None
        try:
            return part(*args, **kwargs)
        except Exception as error:
            self.failed = True
            reason = f"{type(error).__name__}: {error}"
            print(f"{self.path}: the record ends here ({reason}); training continues")
            return None

    def weights_changed(self, parameters: Iterable[Tensor]) -> float | None:
        """Return the fraction of the trained weights that changed since the last call; None at first."""
        trained = [p.detach() for p in parameters if p.requires_grad]
        present = [p.flatten()[:FINGERPRINT_WEIGHTS].clone() for p in trained[:: max(1, len(trained) // 32)]]
        before = self._before
        self._before = present
        if not before:
            return None
        change_count = sum(int((a != b).sum()) for a, b in zip(before, present, strict=True))
        return change_count / max(1, sum(len(a) for a in present))


class RecordedCompletion(NamedTuple):
    """A completion of a batch that is trained as a whole.

    The tensors have a value for each of its tokens, after ``start`` other places.
    """

    sample: dict[str, Any]
    """The fields of its entry in the rollout's line, with `ids`."""
    mask: Tensor
    advantage: Tensor
    values: Mapping[str, Tensor | None]
    """The fields of its row in the update that have a number per token, and `sampler_logprobs`."""
    start: int = 0


class BatchRecorder(Recorder):
    """Writes a record of a trainer that holds whole batches: a rollout and then an update for each batch."""

    def __init__(self, path: Path, **header: Any) -> None:
        super().__init__(path, **{**header, **version_of(header["framework"])})
        self.count = 0
        self._step = 0
        self._rows: list[dict[str, Any]] = []
        self._starts: list[int] = []

    def rollout(
        self, step: int, completions: Sequence[RecordedCompletion], logprobs: Sequence[Tensor] | None
    ) -> None:
        """Write the batch that is trained next; an empty batch writes no line.

        ``logprobs``: the log-probs of each completion, computed just before.
        """
        self._step, self._starts = step, [c.start for c in completions]
        self._rows = []
        for index, (sample, mask, advantage, values, start) in enumerate(completions):
            tensors = {name: v[start:] for name, v in values.items() if v is not None}
            length = len(sample["ids"])
            if "sampler_logprobs" in tensors:
                sample["sampler_logprobs"] = numbers(tensors.pop("sampler_logprobs")[:length])
            if logprobs is not None:
                tensors["logprobs"] = logprobs[index][start:]
            row = row_of((self.count, index), length, mask[start:], advantage[start:], tensors)
            self._rows.append({**row, "prompt_trained": int(mask[:start].sum())})
        samples = [completion.sample for completion in completions]
        if samples:
            self.write(kind="rollout", number=self.count, step=step, completions=samples)

    def update(
        self, metrics: Mapping[str, Any], named: Sequence[str], logprobs: Sequence[Tensor] | None
    ) -> None:
        """Write the update on the last rollout.

        ``named``: the names of the loss, the gradient norm and the learning rate in ``metrics``.
        ``logprobs``: the log-probs of each completion, computed after the update.
        """
        numbers_by_name = plain_metrics(metrics)
        following_logprobs = () if logprobs is None else logprobs
        for row, start, values in zip(self._rows, self._starts, following_logprobs, strict=False):
            row["after_logprobs"] = numbers(values[start:][: len(row["mask"])])
        loss, norm, rate = (numbers_by_name.get(name) for name in named)
        fields = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "metrics": numbers_by_name}
        self.write(kind="update", step=self._step, rows=self._rows, **fields)
        self.count += 1


def version_of(framework: str) -> dict[str, str]:
    """Return the header's fields of a framework: its name, and its version if it is installed."""
    try:
        return {"framework": framework, "framework_version": version(framework)}
    except PackageNotFoundError:
        return {"framework": framework}


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers, and the means of those that are lists of numbers."""
    means = {}
    for name, value in metrics.items():
        values = getattr(value, "values", value)
        values = values if isinstance(values, list | tuple) else [values]
        if values and all(isinstance(v, SupportsFloat) and not getattr(v, "ndim", 0) for v in values):
            means[name] = fmean(float(v) for v in values)
    return means


def plain_logprobs(
    model: nn.Module,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    temperatures: Sequence[float],
    context: AbstractContextManager[object],
) -> list[list[float]]:
    """Return the log-probs of a completion at each temperature, without padding or dropout.

    The forward pass runs in ``context``, the trainer's autocast.
    """
    import torch

    was_training = model.training
    with torch.no_grad(), context:
        by_temperature = token_logprobs(model.eval(), prompt_ids, ids, temperatures)
    model.train(was_training)
    return [numbers(logprobs) for logprobs in by_temperature]


def token_logprobs(
    model: nn.Module, prompt_ids: Sequence[int], ids: Sequence[int], temperatures: Sequence[float]
) -> list[Tensor]:
    """Return (T,) for each temperature: the log-probs of a completion's tokens."""
    import torch

    input_ids = torch.tensor([[*prompt_ids, *ids]], device=next(model.parameters()).device)
    # The logits at a token predict the next one.
    logits = model(input_ids=input_ids).logits[0, len(prompt_ids) - 1 : -1].float()
    chosen = input_ids[0, len(prompt_ids) :, None]
    return [(logits / t).log_softmax(-1).gather(-1, chosen)[:, 0] for t in temperatures]


def numbers(values: Tensor) -> list[float]:
    """Return a one-dimensional tensor as numbers with seven digits, the precision of float32."""
    return [float(f"{value:.7g}") for value in values.tolist()]


def row_of(
    origin: tuple[int, int],
    length: int,
    mask: Tensor,
    advantage: Tensor,
    values: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return the row of an update for a completion of ``length`` tokens; ``origin``: (rollout, completion).

    ``mask`` and ``values`` have a value for each token and may be longer. Values after the last token that
    was sampled or is trained are left out, except rewards and gradients. ``advantage`` is one number, or one
    per token.
    """
    trained = [n for n, on in enumerate(mask.tolist()) if on]
    end = max(length, *(n + 1 for n in trained[-1:]), 0)
    row = {"rollout": origin[0], "completion": origin[1], "mask": mask[:end].int().tolist()}
    for name, value in values.items():
        row[name] = up_to(end, value) if name in BEHIND else numbers(value[:end].detach())
    token_advantages = [float(value) for value in advantage.reshape(-1)[:end].tolist()]
    used = {token_advantages[n] for n in trained if len(token_advantages) > 1} or set(token_advantages[:1])
    return {**row, "advantage": used.pop() if len(used) == 1 else token_advantages}


def up_to(end: int, values: Tensor) -> list[float]:
    """Return the first numbers of a tensor, and those behind them up to the last that is not 0."""
    places = [n + 1 for n in values.nonzero()[-1:, 0].tolist()]
    return numbers(values[: max(end, *places, 0)].detach())


def settings_of(config: Any, name: str = "") -> dict[str, Any]:
    """Return nested settings, in mappings or namespaces, by their dotted names, without secrets."""
    inner = config if hasattr(config, "items") else getattr(config, "__dict__", None)
    if inner is None:
        secret = name.rpartition(".")[2].rpartition("_")[2] in SECRET_WORDS
        return {name: config} if isinstance(config, PLAIN_TYPES) and not secret else {}
    parts = [settings_of(_value(inner, key), f"{name}.{key}".strip(".")) for key in inner]
    return {key: value for part in parts for key, value in part.items()}


def _value(inner: Any, key: str) -> Any:
    try:
        return inner[key]
    except Exception:  # hydra's `???`, or a variable that is not set
        return None


def tokens_of(tokenizer: Any) -> dict[str, Any]:
    """Return the header's `tokens` for a tokenizer of transformers."""
    names = {str(i): token.content for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    ends = [tokenizer.eos_token_id]
    return {"bos": tokenizer.bos_token_id, "eos": ends, "pad": tokenizer.pad_token_id, "names": names}


def frozen_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the added tokens that a model's checkpoint lacks, if no step trains their embeddings."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    if any(p.requires_grad for layer in layers if layer is not None for p in layer.parameters()):
        return []
    # A model that was not loaded from a folder with a config has no vocabulary of before.
    with suppress(Exception):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model.config.name_or_path, local_files_only=True)
        size = config.get_text_config().vocab_size
        return [token for token in tokenizer.added_tokens_decoder if token >= size]
    return []


def opening_of(model: Any, tokenizer: Any, prompt: object) -> dict[str, Any]:
    """Return the tokens that open an answer in the template, and how the model expects them behind a prompt.

    {} for messages, to which a trainer applies the template, and where no template opens answers.
    """
    opening = Turns(tokenizer).opening
    if not isinstance(prompt, str) or not opening:
        return {}
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before = tokenizer(text, add_special_tokens=False)["input_ids"][: -len(opening)]
    if not before:
        return {}
    (logprobs,) = plain_logprobs(model, before, opening, (1.0,), nullcontext())
    return {"opening": opening, "opening_logprob": fmean(logprobs)}


def keep_tokenizer(tokenizer: Any, record: Path) -> None:
    """Save a tokenizer of the tokenizers library next to a record, so that pages show the text of tokens."""
    # The record is complete without it, so an unknown kind of tokenizer must not end the record.
    with suppress(Exception):
        tokenizer.backend_tokenizer.save(str(tokenizer_file(record)))


def tokenizer_file(record: Path) -> Path:
    """Return the path of the tokenizer that belongs to a record."""
    return record.with_name(record.name.partition(".")[0] + TOKENIZER)


def score_again(
    score: Callable[[str, Any, Any], Any],
    name: str,
    completions: Sequence[RecordedCompletion],
    texts: Sequence[str],
) -> None:
    """Score each completion up to four more times, for `alone`, `elsewhere`, `empty` and `listed`.

    ``score`` gets a text, a data row and a prompt, and returns a number, or a dict with a number in `score`.
    ``texts``: the completions in the form that the trainer's rewards get.
    """

    def function(
        completions: Sequence[str], rows: Sequence[Any], prompts: Sequence[Any], **_: Any
    ) -> list[float]:
        answer = score(completions[0], rows[0], prompts[0])
        return [float(answer["score"] if isinstance(answer, dict) else answer)]

    samples = [completion.sample for completion in completions]
    prompts = [sample["prompt"] for sample in samples]
    columns = {"completions": list(texts), "rows": [s["row"] for s in samples]}
    answers = probe({name: function}, {**columns, "prompts": prompts}, prompts, {})
    for sample, scores in zip(samples, answers, strict=True):
        sample.update(scores)


def facts_of(prompts: Sequence[object], eval_prompts: Sequence[object]) -> Mapping[str, int]:
    """Return the header's `data`: counts of rows, of different prompts, and of prompts in both lists."""
    train, held_out = (
        [json.dumps(p, sort_keys=True, default=str) for p in part] for part in (prompts, eval_prompts)
    )
    distinct = set(train)
    facts = {"rows": len(train), "distinct": len(distinct)}
    if held_out:
        facts |= {"eval_rows": len(held_out), "eval_in_train": sum(p in distinct for p in held_out)}
    return facts

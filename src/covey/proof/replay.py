"""A run folder through the shadow trainer, to see whether its record follows from the formulas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from covey.errors import ConfigError
from covey.proof import shadow
from covey.proof.decoder import NamedWeights, exactly, rounded
from covey.proof.formulas import AxisSettings, Row
from covey.runs.folder import read_numbers
from covey.runs.reader import read_environment, recorded_settings
from covey.runs.rollouts import read_rollouts


@dataclass(frozen=True)
class Agreement:
    """One step's record beside the shadow's: the largest differences."""

    step: int
    logprobs: float
    """Nats, between what the sampler recorded and float64 under the shadow's weights, of tokens that these
    weights drew."""
    advantages: float
    """As a fraction of the step's largest advantage."""
    gradient: float
    """Of the mean norm of the step's updates, relative."""
    kl_coef: float
    """Of the KL coefficient, relative."""
    weights: float | None = None
    """Of the weights after the step, where a checkpoint holds them."""
    course: float | None = None
    """The norm of that difference as a fraction of how far the run has moved the weights."""
    apart: Agreement | None = None
    """The same differences between the shadow and its twin: what rounding alone comes to by then."""


class StepFigures(NamedTuple):
    """What one trainer's step is compared by with another's, in this order of completions."""

    logprobs: Sequence[torch.Tensor]
    """Of the tokens, under the weights that the step began with."""
    advantages: Sequence[torch.Tensor]
    norm: float
    """The mean of the updates' gradients."""
    kl_coef: float | None
    weights: NamedWeights
    """After the step; none where they were not kept."""


NUDGE, COARSE_NUDGE = 2.0**-21, 2.0**-9
"""By how much a twin's first weights differ, relative: where they are rounded to bfloat16 it is by 2^-9."""


def replay(
    folder: Path, model: NamedWeights, architecture: AxisSettings, steps: int, twin: bool = False
) -> Iterator[Agreement]:
    """Repeat the first steps of a recorded stage from the weights it began with.

    ``model`` holds these weights by their Hugging Face names, in float64; those that are trained
    require a gradient. With ``twin`` another shadow begins beside them and repeats the same steps. Raises
    ConfigError where the run used a function the shadow does not know.
    """
    setting = read_setting(folder, architecture)
    start = {name: w.detach().clone() for name, w in model.items()}
    trainers = [
        _begun(folder, setting, w) for w in ([model, _nudged(model, setting.rounded)] if twin else [model])
    ]
    for number, record in enumerate(read_numbers(folder, "metrics.jsonl")[:steps]):
        rows, _ = read_rows(folder, number)
        fresh = [slice(None) if v is None else torch.from_numpy(v == trainers[0].updates) for *_, v in rows]
        own, *twins = [_repeated(folder, trainer, setting, number) for trainer in trainers]
        where = "final" if number + 1 == setting.train["steps"] else f"checkpoints/step_{number + 1:06d}"
        written = StepFigures(
            [row.sampled for row, *_ in rows],
            [advantage for _, advantage, _ in rows],
            record.get("optimizer/grad_norm", 0.0),
            record.get("kl/coef"),
            _saved(folder / where, [name for name, w in own.weights.items() if w.requires_grad]),
        )
        apart = next((_agreement(number, own, other, fresh, start) for other in twins), None)
        yield replace(_agreement(number, own, written, fresh, start), apart=apart)


def _begun(folder: Path, setting: shadow.ShadowConfig, model: NamedWeights) -> shadow.Trainer:
    start = {name: w.detach().clone() for name, w in model.items()}
    # Without its adapters a model is the one they were put into.
    reference = {name: w for name, w in start.items() if "lora_" not in name}
    kl, bonus = setting.algorithm["kl"], setting.algorithm["entropy"]
    trainer = shadow.Trainer(model, reference, _critic(setting, start, folder))
    trainer.kl_coef, trainer.entropy_coef = kl["coef"] if kl else 0.0, bonus["coef"] if bonus else 0.0
    return trainer


def _nudged(model: NamedWeights, coarsely: bool) -> NamedWeights:
    """The same weights but for their rounding."""
    random, nudge = torch.Generator().manual_seed(0), COARSE_NUDGE if coarsely else NUDGE
    moved = {
        name: w.detach() * (1 + nudge * torch.randn(w.shape, generator=random, dtype=w.dtype))
        for name, w in model.items()
    }
    return {name: moved[name].requires_grad_(w.requires_grad) for name, w in model.items()}


def _repeated(
    folder: Path, trainer: shadow.Trainer, setting: shadow.ShadowConfig, number: int
) -> StepFigures:
    """A step of a shadow, which moves it."""
    recorded, sampled = read_rows(folder, number)
    coefficient = trainer.kl_coef
    try:
        done = shadow.step(trainer, setting, [row for row, *_ in recorded], number)
    except KeyError as error:
        raise ConfigError(f"{folder}: the replay knows covey's own functions only, not {error}") from None
    shadow.steer(trainer, setting, done, sampled)
    norm = sum(done.norms) / max(len(done.norms), 1)
    return StepFigures(
        done.logprobs, [row.advantage for row in done.rows], norm, coefficient, trainer.weights
    )


def _agreement(
    number: int,
    own: StepFigures,
    other: StepFigures,
    fresh: Sequence[slice | torch.Tensor],
    start: NamedWeights,
) -> Agreement:
    """A shadow's step beside another; of log-probs where ``fresh`` says that the step's own weights drew."""
    logprobs = zip(own.logprobs, other.logprobs, fresh, strict=True)
    advantages = zip(own.advantages, other.advantages, strict=True)
    largest = max((float(a.abs().max()) for a in other.advantages), default=0.0)
    coefficient = own.kl_coef or 0.0
    theirs = coefficient if other.kl_coef is None else other.kl_coef
    largest_gap, course = _weights(own.weights, other.weights, start)
    return Agreement(
        number,
        logprobs=max((_gap(a[now], b[now]) for a, b, now in logprobs), default=0.0),
        advantages=max((_gap(a, b) for a, b in advantages), default=0.0) / max(largest, 1e-9),
        gradient=abs(own.norm - other.norm) / max(own.norm, 1e-9),
        kl_coef=abs(coefficient - theirs) / max(coefficient, 1e-9),
        weights=largest_gap,
        course=course,
    )


def _critic(setting: shadow.ShadowConfig, start: NamedWeights, folder: Path) -> shadow.Trainer | None:
    """The critic as it began: the policy's weights under a head that is 0, or that head alone."""
    axis = setting.algorithm["critic"]
    if not axis:
        return None
    own = axis["trunk"] == "own"
    if own and (axis["model"] or any("lora_" in name for name in start)):
        raise ConfigError(f"{folder}: the replay knows no critic that begins as another model")
    body = {name: w.clone() for name, w in start.items() if own and name != "lm_head.weight"}
    width = len(start["model.norm.weight"])
    head = {"value.weight": torch.zeros(width).double(), "value.bias": torch.zeros(()).double()}
    return shadow.Trainer({name: w.requires_grad_() for name, w in {**body, **head}.items()}, {})


def read_setting(folder: Path, architecture: AxisSettings) -> shadow.ShadowConfig:
    """What of a run's config moves the weights. Raises ConfigError for what the shadow cannot repeat."""
    config = recorded_settings(folder) or {}
    if config["method"] != "rl":
        raise ConfigError(
            f"{folder}: the replay repeats reinforcement learning, this stage is {config['method']}"
        )
    if config["guards"]["kl_action"] == "raise_coef" or config["train"]["optimizer"] != "adamw":
        raise ConfigError(f"{folder}: the replay knows neither guards.kl_action raise_coef nor 8-bit moments")
    rollout, record = config["rollout"], read_environment(folder) or {}
    return shadow.ShadowConfig(
        architecture,
        config["algorithm"],
        config["train"],
        rollout["temperature"],
        rollout["max_tokens"],
        rollout["mask_truncated"],
        rollout["group_size"],
        config["seed"],
        rounded=config["dtype"] == "bfloat16",
        product=rounded if record.get("rounds_products") else exactly,
        known=record.get("known_tokens"),
    )


def read_rows(folder: Path, number: int) -> tuple[list[tuple[Row, torch.Tensor, np.ndarray | None]], int]:
    """A step's trained completions, advantage and, where they differ, version of each token; its groups."""
    log = read_rollouts(folder, number)
    rows, arrays = [], log.arrays
    for place, line in enumerate(log.rows):
        if line["trained"]:
            span = slice(*_span(arrays["ends"], place))
            prompt = slice(*_span(arrays["prompt_ends"], line["group"]))
            drawn = np.arange(span.stop - span.start)
            drawn = drawn[arrays["sampled"][span]] if "sampled" in arrays else drawn
            row = Row(
                prompt=arrays["prompt_tokens"][prompt].tolist(),
                tokens=arrays["tokens"][span].tolist(),
                drawn=drawn.tolist(),
                sampled=torch.from_numpy(arrays["logprobs"][span][drawn]).double(),
                reward=_number(line["reward"]),
                components={k: _number(v) for k, v in line["components"].items()},
                weights=line["weights"],
                truncated=line["finish"] == "length",
                steps=line["steps"],
                kept=_kept(arrays, span),
                greedy=line["greedy_reward"],
                running=line.get("running_mean", 0.0),
                segments=[(int(end), float(value)) for end, value in line.get("segments", ())],
                correct=line.get("correct", False),
                group=line["group"],
            )
            advantages = torch.from_numpy(arrays["advantages"][span][drawn]).double()
            versions = arrays["versions"][span][drawn] if "versions" in arrays else None
            rows.append((row, advantages, versions))
    return rows, len(arrays["prompt_ends"])


def _kept(arrays: Mapping[str, np.ndarray], span: slice) -> list[list[int]] | None:
    """For each token of a completion, the tokens there were to draw from; None: all."""
    if "kept_ends" not in arrays:
        return None
    places = (_span(arrays["kept_ends"], t) for t in range(span.start, span.stop))
    return [arrays["kept_ids"][a:b].tolist() for a, b in places]


def _span(ends: np.ndarray, place: int) -> tuple[int, int]:
    return int(ends[place - 1]) if place else 0, int(ends[place])


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max()) if len(one) else 0.0


def _weights(
    own: NamedWeights, other: NamedWeights, start: NamedWeights
) -> tuple[float | None, float | None]:
    """A shadow's weights beside others, if there are any: the largest difference; the course."""
    if not other:
        return None, None
    trained = [name for name, w in own.items() if w.requires_grad]
    gap, way = (
        torch.cat([(begin[name] - other[name]).detach().flatten() for name in trained])
        for begin in (own, start)
    )
    return float(gap.abs().max()), float(gap.norm() / way.norm().clamp(min=1e-30))


def _saved(folder: Path, trained: Sequence[str]) -> NamedWeights:
    """The weights under training as a folder holds them; nothing where there is no such folder."""
    adapter = next(folder.glob("**/adapter_model.safetensors"), None)
    if adapter is not None:
        names = {f"base_model.model.{name}.weight": name for name in trained}
        return {names[name]: w.double() for name, w in load_file(adapter).items()}
    if not (folder / "model.safetensors").exists():
        return {}
    recorded = {name: w.double() for name, w in load_file(folder / "model.safetensors").items()}
    if (masters := folder / "optimizer.safetensors").exists():
        kept = load_file(masters)  # a bfloat16 model's float32 weights, numbered as they are trained
        recorded |= {name: kept.get(f"master.{i}", recorded[name]).double() for i, name in enumerate(trained)}
    return recorded

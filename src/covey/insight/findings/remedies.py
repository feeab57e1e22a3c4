"""Config lines that help: a setting with another value, scaled, or rewards that are changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from covey.insight.findings.settings import UNKNOWN, unknown, yaml_line
from covey.insight.findings.view import RunView

BY_STD = ("group_zscore", "leave_one_out_zscore", "component_zscore", "component_leave_one_out")
"""Estimators that divide by the std of a group."""
MODELS = ("reward_model", "process_reward_model", "judge")
"""Rewards that are a model's opinion."""
FAINT = 0.1
"""A LoRA's alpha / rank below which updates hardly count; in use are 1 to 2."""
Specs = list[object]
"""Entries of `rewards`."""


@dataclass(frozen=True)
class ChangeTo:
    """A setting with another value, unless the run's own is as good."""

    key: str
    value: object
    unless: Callable[[Any], bool] | None = None

    def __call__(self, run: RunView) -> str | None:
        """The config line, if it is not the run's own already."""
        own = run.setting(self.key)
        if own is UNKNOWN:  # an algorithm without this setting
            return yaml_line(self.key, self.value) if run.setting is unknown else None
        good = own == self.value if self.unless is None else self.unless(own)
        return None if good else yaml_line(self.key, self.value)


@dataclass(frozen=True)
class ScaleBy:
    """A number times a factor, at most ``most``; ``otherwise`` if the run's own is not known."""

    key: str
    factor: float
    otherwise: float
    most: float = math.inf

    def __call__(self, run: RunView) -> str | None:
        """The config line; None if the setting is no number, or would be too large."""
        own = run.setting(self.key)
        if not isinstance(own, int | float):
            return yaml_line(self.key, self.otherwise) if run.setting is unknown else None
        value = own * self.factor
        value = round(value) if isinstance(own, int) else float(f"{value:.2g}")
        return None if value > self.most else yaml_line(self.key, value)


@dataclass(frozen=True)
class ChangeRewards:
    """The run's own list of rewards, changed."""

    change: Callable[[Specs], Specs]

    def __call__(self, run: RunView) -> str | None:
        """The config line, if the change makes a difference."""
        own = specs_of(run) or ["math_answer"]
        changed = self.change(own)
        return None if changed == own else yaml_line("rewards", changed)


@dataclass(frozen=True)
class IfRewardsFail:
    """A setting for functions that fail, not for those that say nothing; ``models``: for models, too."""

    remedy: ChangeTo
    models: bool = True

    def __call__(self, run: RunView) -> str | None:
        """The config line."""
        failing, part = largest(run.names("reward/", "/infra_error"))
        return self.remedy(run) if part > 0 and (self.models or failing not in MODELS) else None


def at_least(bound: float) -> Callable[[Any], bool]:
    """Whether a number is at least so large."""
    return lambda own: isinstance(own, int | float) and own >= bound


def largest(values: Mapping[str, float]) -> tuple[str, float]:
    """The name with the largest value; ("", NaN) if there are none."""
    return max(values.items(), key=lambda item: item[1], default=("", math.nan))


def spec_name(spec: object) -> str:
    """The name of an entry of `rewards`."""
    return str(next(iter(spec)) if isinstance(spec, Mapping) else spec)


def spec_settings(spec: object) -> dict[str, object]:
    """The settings of an entry of `rewards`; a number alone is its weight."""
    inside = next(iter(spec.values())) if isinstance(spec, Mapping) else {}
    return dict(inside) if isinstance(inside, Mapping) else {"weight": inside}


def specs_of(run: RunView) -> Specs:
    """The run's entries of `rewards`; none if the config is not known."""
    own = run.setting("rewards")
    return list(own) if isinstance(own, list | tuple) else []


def with_reward(name: str, settings: object) -> ChangeRewards:
    """One more reward, unless it is in the list already."""
    return ChangeRewards(lambda own: own if name in map(spec_name, own) else [*own, {name: settings}])


def gated(specs: Specs) -> Specs:
    """Every reward but the first counts only if the first one is satisfied."""
    first, *others = specs
    verdict = spec_settings(first).get("name", spec_name(first).rpartition(":")[2])
    rule = {"gated_by": f"{verdict}:correct"}
    return [first, *({spec_name(s): {**spec_settings(s), **rule}} for s in others)]


def reading_last_number(specs: Specs) -> Specs:
    """The verdict is replaced by a verifier that reads the last number of a text."""
    judge = next((s for s in specs if spec_settings(s).get("verdict")), specs[0] if specs else None)
    known = spec_settings(judge) if judge is not None else {}
    marked = {name: known[name] for name in ("weight", "verdict") if name in known}
    ours: object = {"math_answer": {"rule": "last_number", **marked}}
    return [ours if s is judge else s for s in specs]


def verified(specs: Specs) -> Specs:
    """A verdict from the user's own file is replaced by the tested verifier."""
    declared = [s for s in specs if spec_settings(s).get("verdict")]
    judge = (declared or [s for s in specs if ":" in spec_name(s)] or [None])[0]
    if judge is None or ":" not in spec_name(judge):
        return list(specs)
    ours = {"math_answer": {"rule": "answer_tag", **({"verdict": True} if declared else {})}}
    return [ours if s is judge else s for s in specs]


def all_points(specs: Specs) -> Specs:
    """Only programs that pass every test are paid."""
    return [{"code_tests": {**spec_settings(s), "points": "all"}} for s in specs]


def longer_limit(run: RunView) -> str:
    """A limit that lets most completions end: a quarter above what is needed now, or twice the limit."""
    limit, ended = run.setting("rollout.max_tokens"), run.late("length/ended_q90")
    limit = limit if isinstance(limit, int) else 512
    most = 2 * limit if run.late("length/truncated") > 0.5 else 1.25 * max(limit, ended)
    return yaml_line("rollout.max_tokens", math.ceil(most))


def weaker_pull(run: RunView) -> str | None:
    """A tenth of a KL coefficient above published ones (.001 to .1), which holds the policy in place."""
    own = run.setting("algorithm.kl.coef")
    strong = isinstance(own, int | float) and own > 0.1
    return ScaleBy("algorithm.kl.coef", 0.1, 0.01)(run) if strong else None


def faint_adapter(run: RunView) -> bool:
    """Whether the run trains adapters whose updates are scaled by alpha / rank of a tenth or less."""
    alpha, rank = run.setting("lora.alpha"), run.setting("lora.rank")
    return isinstance(alpha, int | float) and isinstance(rank, int) and alpha / rank <= FAINT


def larger_alpha(run: RunView) -> str | None:
    """An alpha of twice the rank for such an adapter."""
    return yaml_line("lora.alpha", 2.0 * float(run.setting("lora.rank"))) if faint_adapter(run) else None


def raised_lr(run: RunView) -> str | None:
    """Ten times the learning rate, and no less than the smallest in use."""
    own = run.setting("train.lr")
    low = isinstance(own, int | float) and own < 1e-7
    return yaml_line("train.lr", 1e-6) if low else ScaleBy("train.lr", 10, 1e-5)(run)


def half_solving_size(run: RunView) -> str:
    """A group size at which half of the groups have a correct answer, between 16 and 64."""
    p = run.late("accuracy")
    wanted = math.log(0.5) / math.log1p(-p) if 0 < p < 1 else 64
    return yaml_line("rollout.group_size", int(min(64, max(16, 2 ** math.ceil(math.log2(wanted))))))


SMALLER_LR = ScaleBy("train.lr", 1 / 3, 1e-6)
TENTH_OF_LR = ScaleBy("train.lr", 0.1, 1e-6)
FEWER_UPDATES = (ChangeTo("train.inner_epochs", 1), ChangeTo("train.updates_per_batch", 1))
PULL = ChangeTo("algorithm.kl.coef", 0.05, at_least(0.05))
WITHOUT_STD = ChangeTo("algorithm.advantage", "group_centered", lambda own: own not in BY_STD)
WIDER_SAMPLING = (
    ChangeTo("rollout.temperature", 1.0, at_least(0.7)),
    ChangeTo("rollout.top_p", 1.0, at_least(0.5)),
    ChangeTo("rollout.top_k", 0, lambda own: own == 0 or own > 4),
)
HOTTER = ScaleBy("rollout.temperature", 1.3, 1.3, most=2.0)
ENTROPY_BONUS = ChangeTo("algorithm.entropy.coef", 0.01, at_least(0.001))
LARGER_GROUPS = ScaleBy("rollout.group_size", 2, 16, most=64)
FRONTIER = ChangeTo("rollout.curriculum", "frontier")
INFORMATIVE = ChangeTo("algorithm.filter", "informative", lambda own: own is not None)
CORRECTION = ChangeTo("algorithm.correction", "truncated", bool)
QUIET = ChangeTo("scoring.noise", 0.0)
GATED = ChangeRewards(gated)
VERIFIED = ChangeRewards(verified)

"""Config lines that help: a setting with another or scaled value, or changed rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from covey.insight.findings.settings import UNKNOWN, unknown, yaml_line
from covey.insight.findings.view import RunView
from covey.objective.axes import AXES
from covey.objective.axis_function import has_trait

DIVIDES_BY_STD = tuple(f.__name__ for f in AXES["advantage"] if has_trait(f, "divides_by_std"))
"""Estimators that divide by the std of the rewards that they compare."""
MODELS = ("reward_model", "process_reward_model", "judge")
"""Rewards that come from a model."""
FAINT = 0.1
"""Value of alpha / rank of a LoRA up to which updates hardly have an effect; 1 to 2 are in use."""
Specs = list[object]
"""Entries of `rewards`."""


@dataclass(frozen=True)
class ChangeTo:
    """A remedy that changes a setting, unless the run's value is as good."""

    key: str
    value: object
    unless: Callable[[Any], bool] | None = None

    def __call__(self, run: RunView) -> str | None:
        """Return the config line, or None if the run has such a value."""
        current = run.setting(self.key)
        if current is UNKNOWN and run.setting is not unknown:
            return None  # the run's algorithm does not have this setting
        if current is UNKNOWN:
            return yaml_line(self.key, self.value)
        good = current == self.value if self.unless is None else self.unless(current)
        return None if good else yaml_line(self.key, self.value)


@dataclass(frozen=True)
class ScaleBy:
    """A remedy that scales a number, up to ``bound``; ``otherwise`` is the value if the run's is unknown."""

    key: str
    factor: float
    otherwise: float
    bound: float = math.inf

    def __call__(self, run: RunView) -> str | None:
        """Return the config line; None if the setting is no number, or would be too large."""
        current = run.setting(self.key)
        if not isinstance(current, int | float):
            return yaml_line(self.key, self.otherwise) if run.setting is unknown else None
        value = current * self.factor
        value = round(value) if isinstance(current, int) else float(f"{value:.2g}")
        return None if value > self.bound else yaml_line(self.key, value)


@dataclass(frozen=True)
class ChangeRewards:
    """A remedy that changes the run's list of rewards."""

    change: Callable[[Specs], Specs]

    def __call__(self, run: RunView) -> str | None:
        """Return the config line, if the change makes a difference."""
        current = specs_of(run) or ["math_answer"]
        changed = self.change(current)
        return None if changed == current else yaml_line("rewards", changed)


@dataclass(frozen=True)
class IfRewardsFail:
    """A remedy for rewards that fail, not for those without a score. ``models``: for learned ones too."""

    remedy: ChangeTo
    models: bool = True

    def __call__(self, run: RunView) -> str | None:
        """Return the config line."""
        failing, part = largest(run.names("reward/", "/infra_error"))
        return self.remedy(run) if part > 0 and (self.models or failing not in MODELS) else None


def at_least(bound: float) -> Callable[[object], bool]:
    """Return a test whether a value is a number of at least ``bound``."""
    return lambda value: isinstance(value, int | float) and value >= bound


def largest(values: Mapping[str, float]) -> tuple[str, float]:
    """Return the name with the largest value and that value; ("", NaN) if there are none."""
    return max(values.items(), key=lambda item: item[1], default=("", math.nan))


def spec_name(spec: object) -> str:
    """Return the name of an entry of `rewards`."""
    return str(next(iter(spec)) if isinstance(spec, Mapping) else spec)


def spec_settings(spec: object) -> dict[str, object]:
    """Return the settings of an entry of `rewards`; a number alone is its weight."""
    content = next(iter(spec.values())) if isinstance(spec, Mapping) else {}
    return dict(content) if isinstance(content, Mapping) else {"weight": content}


def specs_of(run: RunView) -> Specs:
    """Return the run's entries of `rewards`; empty if the config is unknown."""
    specs = run.setting("rewards")
    return list(specs) if isinstance(specs, list | tuple) else []


def with_reward(name: str, settings: object) -> ChangeRewards:
    """Return a remedy that adds a reward, unless it is in the list already."""

    def change(specs: Specs) -> Specs:
        return specs if name in map(spec_name, specs) else [*specs, {name: settings}]

    return ChangeRewards(change)


def gate_rewards(specs: Specs) -> Specs:
    """Make every reward but the first count only if the first is satisfied."""
    first, *others = specs
    # Rewards are called by their `name`, else by the function after the colon.
    verdict = spec_settings(first).get("name", spec_name(first).rpartition(":")[2])
    rule = {"gated_by": f"{verdict}:correct"}
    return [first, *({spec_name(s): {**spec_settings(s), **rule}} for s in others)]


def verdict_in(specs: Specs) -> object:
    """Return the entry that says what is correct: the one marked so, else the first; None without any."""
    return next((s for s in specs if spec_settings(s).get("verdict")), specs[0] if specs else None)


def stop_after_answer(run: RunView) -> str | None:
    """Return the config line that ends a completion after its answer, if a reward reads it in tags."""
    in_tags = run.setting is unknown or any(map(_reads_tags, specs_of(run)))
    return ChangeTo("rollout.stop", ["</answer>"], bool)(run) if in_tags else None


def _reads_tags(spec: object) -> bool:
    # The rule of exact_answer without a setting.
    default = "answer_tag" if spec_name(spec) == "exact_answer" else None
    in_tags = spec_settings(spec).get("rule", default) == "answer_tag"
    return in_tags or spec_name(spec) == "answer_format"


def read_last_number(run: RunView) -> str | None:
    """Return the config line with a verdict that reads the last number, if all answers are numbers."""
    return ChangeRewards(_reading_last_number)(run) if run.late("text/reference_number") == 1 else None


def _reading_last_number(specs: Specs) -> Specs:
    """Replace the verdict, unless it compares words, with a verifier that reads the last number of a text."""
    judge = verdict_in(specs)
    if judge is not None and spec_name(judge) == "exact_answer":
        return specs
    settings = spec_settings(judge) if judge is not None else {}
    # The replacement counts as much as the verdict did, and stays marked as the verdict.
    role = {name: settings[name] for name in ("weight", "verdict") if name in settings}
    reader: object = {"math_answer": {"rule": "last_number", **role}}
    return [reader if s is judge else s for s in specs]


def with_tested_verifier(specs: Specs) -> Specs:
    """Replace a verdict from the user's own file with covey's tested verifier."""
    declared = [s for s in specs if spec_settings(s).get("verdict")]
    users_own = [s for s in specs if ":" in spec_name(s)]  # module.py:function
    # Without a declared verdict, the first function of the user's is taken for it.
    judge = next(iter(declared or users_own), None)
    if judge is None or ":" not in spec_name(judge):
        return list(specs)
    settings: dict[str, object] = {"rule": "answer_tag"}
    if declared:
        settings["verdict"] = True
    verifier = {"math_answer": settings}
    return [verifier if s is judge else s for s in specs]


def all_points(specs: Specs) -> Specs:
    """Reward only programs that pass every test."""
    return [{"code_tests": {**spec_settings(s), "points": "all"}} for s in specs]


def longer_limit(run: RunView) -> str:
    """Return a limit that lets most completions end: 1.25 times the length needed now, or twice the limit."""
    limit = run.setting("rollout.max_tokens")
    limit = limit if isinstance(limit, int) else 512
    if run.late("length/truncated") > 0.5:
        longer = 2 * limit
    else:
        longer = math.ceil(1.25 * max(limit, run.late("length/ended_q90")))
    return yaml_line("rollout.max_tokens", longer)


def weaker_pull(run: RunView) -> str | None:
    """Return a tenth of a KL coefficient that is above published ones (.001 to .1)."""
    coef = run.setting("algorithm.kl.coef")
    strong = isinstance(coef, int | float) and coef > 0.1
    return ScaleBy("algorithm.kl.coef", 0.1, 0.01)(run) if strong else None


def faint_adapter(run: RunView) -> bool:
    """Whether the run trains adapters whose updates are scaled by alpha / rank of ``FAINT`` or less."""
    alpha = run.setting("lora.alpha")
    rank = run.setting("lora.rank")
    return isinstance(alpha, int | float) and isinstance(rank, int) and alpha / rank <= FAINT


def larger_alpha(run: RunView) -> str | None:
    """Return an alpha of twice the rank, if the adapter is faint."""
    return yaml_line("lora.alpha", 2.0 * float(run.setting("lora.rank"))) if faint_adapter(run) else None


def raised_lr(run: RunView) -> str | None:
    """Return ten times the learning rate, and at least the smallest in use."""
    lr = run.setting("train.lr")
    tiny = isinstance(lr, int | float) and lr < 1e-7
    return yaml_line("train.lr", 1e-6) if tiny else ScaleBy("train.lr", 10, 1e-5)(run)


def half_solving_size(run: RunView) -> str:
    """Return the group size, 16 to 64, at which half of the groups have a correct answer."""
    p = run.late("accuracy")
    # Solves 1 - (1 - p)^G = 1/2 for G, then rounds up to a power of two.
    size = math.log(0.5) / math.log1p(-p) if 0 < p < 1 else 64
    power = 2 ** math.ceil(math.log2(size))
    return yaml_line("rollout.group_size", int(min(64, max(16, power))))


SMALLER_LR = ScaleBy("train.lr", 1 / 3, 1e-6)
TENTH_OF_LR = ScaleBy("train.lr", 0.1, 1e-6)
FEWER_UPDATES = (ChangeTo("train.inner_epochs", 1), ChangeTo("train.updates_per_batch", 1))
PULL = ChangeTo("algorithm.kl.coef", 0.05, at_least(0.05))
WITHOUT_STD = ChangeTo("algorithm.advantage", "group_centered", lambda name: name not in DIVIDES_BY_STD)
WIDER_SAMPLING = (
    ChangeTo("rollout.temperature", 1.0, at_least(0.7)),
    ChangeTo("rollout.top_p", 1.0, at_least(0.5)),
    ChangeTo("rollout.top_k", 0, lambda k: k == 0 or k > 4),
)
HOTTER = ScaleBy("rollout.temperature", 1.3, 1.3, bound=2.0)
ENTROPY_BONUS = ChangeTo("algorithm.entropy.coef", 0.01, at_least(0.001))
LARGER_GROUPS = ScaleBy("rollout.group_size", 2, 16, bound=64)
FRONTIER = ChangeTo("rollout.curriculum", "frontier")
INFORMATIVE = ChangeTo("algorithm.filter", "informative", lambda name: name is not None)
CORRECTION = ChangeTo("algorithm.correction", "truncated", bool)
QUIET = ChangeTo("scoring.noise", 0.0)
GATED = ChangeRewards(gate_rewards)
VERIFIED = ChangeRewards(with_tested_verifier)

"""What findings are made of: config lines that mend, and keys that point at the completion that shows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.insight.findings import UNKNOWN, Key, Mend, Seen, unknown, yaml_line
from covey.objective.signs import shared_prefixes
from covey.types import Group

BY_STD = ("group_zscore", "leave_one_out_zscore", "component_zscore", "component_leave_one_out")
"""Estimators that divide by the std of a group."""
MODELS = ("reward_model", "process_reward_model", "judge")
"""Rewards that are a model's opinion."""


def at_least(bound: float) -> Callable[[Any], bool]:
    """Whether a number is as large."""
    return lambda own: isinstance(own, int | float) and own >= bound


def to(key: str, value: object, unless: Callable[[Any], bool] | None = None) -> Mend:
    """A setting with another value, unless the run's own is as good."""

    def line(seen: Seen) -> str | None:
        own = seen.setting(key)
        if own is UNKNOWN:  # an algorithm that has no such setting
            return yaml_line(key, value) if seen.setting is unknown else None
        return None if (own == value if unless is None else unless(own)) else yaml_line(key, value)

    return line


def largest(found: Mapping[str, float]) -> tuple[str, float]:
    """The name with the largest value; ("", NaN) of none."""
    return max(found.items(), key=lambda item: item[1], default=("", math.nan))


def where_failed(key: str, value: object, models: bool = True) -> Mend:
    """A setting for functions that failed; none for those that say nothing. ``models``: for models too."""

    def line(seen: Seen) -> str | None:
        failing, part = largest(seen.names("reward/", "/infra_error"))
        return to(key, value)(seen) if part > 0 and (models or failing not in MODELS) else None

    return line


def scaled(key: str, factor: float, otherwise: float, most: float = math.inf) -> Mend:
    """A number times a factor; ``otherwise`` where the run's own is not known."""

    def line(seen: Seen) -> str | None:
        own = seen.setting(key)
        if not isinstance(own, int | float):
            return yaml_line(key, otherwise) if seen.setting is unknown else None
        value = round(own * factor) if isinstance(own, int) else float(f"{own * factor:.2g}")
        return None if value > most else yaml_line(key, value)

    return line


def spec_name(spec: object) -> str:
    """The name of an entry of `rewards`."""
    return str(next(iter(spec)) if isinstance(spec, Mapping) else spec)


def spec_settings(spec: object) -> dict[str, object]:
    """What an entry of `rewards` says beyond the name; a number alone is its weight."""
    inside = next(iter(spec.values())) if isinstance(spec, Mapping) else {}
    return dict(inside) if isinstance(inside, Mapping) else {"weight": inside}


def specs_of(seen: Seen) -> list[object]:
    """The run's entries of `rewards`; none where the config is not known."""
    own = seen.setting("rewards")
    return list(own) if isinstance(own, list | tuple) else []


def rewards(changed: Callable[[list[object]], list[object]]) -> Mend:
    """The run's own list of rewards, changed."""

    def line(seen: Seen) -> str | None:
        specs = specs_of(seen) or ["math_answer"]
        return None if (new := changed(specs)) == specs else yaml_line("rewards", new)

    return line


def with_reward(name: str, settings: object) -> Mend:
    """One more reward, unless it is among them."""
    return rewards(lambda own: own if name in map(spec_name, own) else [*own, {name: settings}])


def gated(specs: Sequence[object]) -> list[object]:
    """Every reward but the first counts only where that one is satisfied."""
    first, *others = specs
    verdict = spec_settings(first).get("name", spec_name(first).rpartition(":")[2])
    rule = {"gated_by": f"{verdict}:correct"}
    return [first, *({spec_name(s): {**spec_settings(s), **rule}} for s in others)]


def reading_last_number(specs: Sequence[object]) -> list[object]:
    """A verifier that reads the last number of a text, in place of what says what is correct."""
    declared = [s for s in specs if spec_settings(s).get("verdict")]
    judge = (declared or [*specs] or [None])[0]
    known = spec_settings(judge) if judge is not None else {}
    marked = {name: known[name] for name in ("weight", "verdict") if name in known}
    ours: object = {"math_answer": {"rule": "last_number", **marked}}
    return [ours if s is judge else s for s in specs]


def verified(specs: Sequence[object]) -> list[object]:
    """The verifier that is tested in place of a function of one's own that says what is correct."""
    declared = [s for s in specs if spec_settings(s).get("verdict")]
    judge = (declared or [s for s in specs if ":" in spec_name(s)] or [None])[0]
    if judge is None or ":" not in spec_name(judge):
        return list(specs)
    ours = {"math_answer": {"rule": "answer_tag", **({"verdict": True} if declared else {})}}
    return [ours if s is judge else s for s in specs]


def room(seen: Seen) -> str:
    """A limit that lets most completions end: a quarter above what is needed now, or twice the limit."""
    limit, ended = seen.setting("rollout.max_tokens"), seen.late("length/ended_q90")
    limit = limit if isinstance(limit, int) else 512
    most = 2 * limit if seen.late("length/truncated") > 0.5 else 1.25 * max(limit, ended)
    return yaml_line("rollout.max_tokens", math.ceil(most))


def weaker_pull(seen: Seen) -> str | None:
    """A tenth of a KL above published ones, .001 to .1: it holds the policy where it is."""
    own = seen.setting("algorithm.kl.coef")
    strong = isinstance(own, int | float) and own > 0.1
    return scaled("algorithm.kl.coef", 0.1, 0.01)(seen) if strong else None


def scaled_adapter(seen: Seen) -> str | None:
    """An alpha of twice the rank, where a LoRA's scale is a tenth or less."""
    return yaml_line("lora.alpha", 2.0 * float(seen.setting("lora.rank"))) if faint_adapter(seen) else None


def faint_adapter(seen: Seen) -> bool:
    """Whether the run trains adapters whose update is scaled by alpha / rank of a tenth or less."""
    alpha, rank = seen.setting("lora.alpha"), seen.setting("lora.rank")
    return isinstance(alpha, int | float) and isinstance(rank, int) and alpha / rank <= FAINT


def raised_lr(seen: Seen) -> str | None:
    """Ten times the learning rate, and no less than the smallest in use."""
    own = seen.setting("train.lr")
    low = isinstance(own, int | float) and own < 1e-7
    return yaml_line("train.lr", 1e-6) if low else scaled("train.lr", 10, 1e-5)(seen)


def group_size(seen: Seen) -> str:
    """A group size at which half of the groups have a correct answer, between 16 and 64."""
    p = seen.late("accuracy")
    wanted = math.log(0.5) / math.log1p(-p) if 0 < p < 1 else 64
    return yaml_line("rollout.group_size", int(min(64, max(16, 2 ** math.ceil(math.log2(wanted))))))


FAINT = 0.1
"""Of alpha / rank, which is 1 to 2 in use."""
SMALLER_LR = scaled("train.lr", 1 / 3, 1e-6)
FEWER_UPDATES = (to("train.inner_epochs", 1), to("train.updates_per_batch", 1))
PULL = to("algorithm.kl.coef", 0.05, at_least(0.05))
WITHOUT_STD = to("algorithm.advantage", "group_centered", lambda own: own not in BY_STD)
WIDER = (
    to("rollout.temperature", 1.0, at_least(0.7)),
    to("rollout.top_p", 1.0, at_least(0.5)),
    to("rollout.top_k", 0, lambda own: own == 0 or own > 4),
)
HOTTER = scaled("rollout.temperature", 1.3, 1.3, most=2.0)
LARGER_GROUPS = scaled("rollout.group_size", 2, 16, most=64)
FRONTIER = to("rollout.curriculum", "frontier")
INFORMATIVE = to("algorithm.filter", "informative", lambda own: own is not None)
QUIET = to("scoring.noise", 0.0)


def was_truncated(group: Group, i: int) -> float:
    """1 for a completion that was truncated."""
    return float(group.completions[i].finish == "length")


def last_token(group: Group, i: int) -> int:
    """The place of the last token."""
    return max(0, len(group.completions[i].tokens) - 1)


def dead(group: Group, i: int) -> float:
    """1 for the first completion of a dead group."""
    return float(group.dead and i == 0)


def of_status(*statuses: str) -> Key:
    """1 for a completion of which a reward said one of these."""
    return lambda group, i: float(any(own[i].status in statuses for own in group.scores.values()))


def reward_of(group: Group, i: int) -> float:
    """What it was paid."""
    return float(group.rewards[i]) if group.scorable[i] else 0.0


def paid_incorrect(group: Group, i: int) -> float:
    """What an incorrect completion was paid."""
    return 0.0 if group.correct[i] else reward_of(group, i)


def long_incorrect(group: Group, i: int) -> float:
    """The length of an incorrect completion."""
    return 0.0 if group.correct[i] else float(len(group.completions[i].tokens))


def near_tie(group: Group, i: int) -> float:
    """Larger the less the rewards of a group that trains differ."""
    known = group.rewards[group.scorable]
    return 0.0 if group.dead or i else 1.0 / float(known.max() - known.min())


def paid_differently(group: Group, i: int) -> float:
    """1 where a sibling has the same tokens and another reward."""
    own = group.completions[i].tokens.tobytes()
    pairs = zip(group.completions, group.rewards, strict=True)
    return float(any(c.tokens.tobytes() == own and r != group.rewards[i] for c, r in pairs))


def shared_tokens(group: Group, i: int) -> int:
    """How many tokens a completion below the mean has in common with a sibling above it."""
    mean = group.rewards[group.scorable].mean() if group.scorable.any() else 0.0
    above = [group.rewards[[j]] - mean for j in range(len(group.completions))]
    return shared_prefixes(group, above).get(i, 0)

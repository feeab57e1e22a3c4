"""Reward functions: loading them, calling them, and what they may return.

Two forms, told apart by their first argument's name, sync or async:

    def reward(completions, **columns) -> list[float | None]     # TRL's: one group at a time
    def reward(completion, **columns) -> float | None            # one completion

Columns of the dataset arrive by name, only those the signature accepts. None means "not
applicable". A reward may give StepRewards for process supervision.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from covey.config.algorithm import hint
from covey.config.usercode import load_function
from covey.rewards import answers, formats, length
from covey.types import Completion, ConfigError, CoveyError, Group, Problem, StepRewards

BUILT_IN: Mapping[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        answers.math_answer,
        answers.exact_answer,
        formats.think_format,
        formats.answer_format,
        length.soft_overlong,
        length.cosine_length,
        length.repetition_penalty,
    )
}
PROVIDED = {"prompts", "completions", "completion_ids", "prompt", "completion"}
"""Arguments every reward may ask for; all others are columns or have defaults."""


class RewardError(CoveyError):
    """A reward function broke its contract: wrong count, wrong type, not finite, or it raised."""

    code = 5


@dataclass(frozen=True)
class Reward:
    """A reward function with its weight and settings."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def per_sample(self) -> bool:
        """Whether it is called with one completion at a time."""
        return "completion" in inspect.signature(self.function).parameters

    def missing_columns(self, columns: Sequence[str]) -> list[str]:
        """Arguments without default that no column fills."""
        parameters = inspect.signature(self.function).parameters.values()
        required = [
            p.name
            for p in parameters
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        return [n for n in required if n not in {*PROVIDED, *self.settings, *columns}]

    async def __call__(self, problem: Problem, completions: Sequence[Completion]) -> list[Any]:
        """One raw value per completion."""
        texts = [_as_prompted(problem, c.text) for c in completions]
        if self.per_sample:
            # A column named completion (the worked answer) must not stand in for what was sampled.
            rows = [{**problem.columns, "prompt": problem.prompt, "completion": t} for t in texts]
            return [await _maybe_await(self._call(row)) for row in rows]
        size = len(texts)
        values = await _maybe_await(
            self._call(
                {
                    **{k: [v] * size for k, v in problem.columns.items()},
                    "prompts": [problem.prompt] * size,
                    "completions": texts,
                    "completion_ids": [c.tokens.tolist() for c in completions],
                }
            )
        )
        if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str):
            raise TypeError(f"returned {_shown(values)}; a list with one number per completion is expected")
        if len(values) != size:
            raise TypeError(f"returned {len(values)} values for {size} completions")
        return list(values)

    def _call(self, available: Mapping[str, Any]) -> Any:
        parameters = inspect.signature(self.function).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            accepted = dict(available)
        else:
            accepted = {p.name: available[p.name] for p in parameters if p.name in available}
        return self.function(**{**accepted, **self.settings})


def load_rewards(specs: Sequence[Any], folder: Path) -> tuple[Reward, ...]:
    """Rewards from a config's list. Raises ConfigError naming the entry and the nearest name."""
    if not specs:
        raise ConfigError("rewards: nothing judges the completions; name at least one reward function")
    rewards = tuple(_load(spec, folder) for spec in specs)
    names = [r.name for r in rewards]
    if len(set(names)) < len(names):
        raise ConfigError(f"rewards: a function is named twice: {', '.join(names)}")
    return rewards


def _load(spec: Any, folder: Path) -> Reward:
    if isinstance(spec, Reward):
        return spec
    target, options = next(iter(spec.items())) if isinstance(spec, Mapping) and len(spec) == 1 else (spec, {})
    settings = dict(options) if isinstance(options, Mapping) else {"weight": options}
    weight = settings.pop("weight", 1.0)
    if not isinstance(weight, int | float):
        raise ConfigError(f"rewards: the weight of {target} must be a number, this is {weight!r}")
    function = _function(target, folder)
    reward = Reward(getattr(function, "__name__", str(target)), function, float(weight), settings)
    parameters = inspect.signature(function).parameters
    if not {"completion", "completions", "completion_ids"} & set(parameters) and not any(
        p.kind is p.VAR_KEYWORD for p in parameters.values()
    ):
        raise ConfigError(
            f"rewards: {reward.name} takes neither `completions` (all of a group) nor `completion` (one)"
        )
    unknown = [s for s in settings if s not in parameters]
    if unknown:
        raise ConfigError(
            f"rewards: {reward.name} has no setting {unknown[0]!r}{hint(unknown[0], parameters)}"
        )
    return reward


def _function(target: Any, folder: Path) -> Callable[..., Any]:
    if callable(target):
        return target
    if isinstance(target, str) and ":" in target:
        return load_function(target, folder)
    if isinstance(target, str) and target in BUILT_IN:
        return BUILT_IN[target]
    raise ConfigError(f"rewards: {target!r} is unknown{hint(str(target), BUILT_IN)}; or module.py:function")


def score(
    problem: Problem,
    prompt: np.ndarray,
    completions: Sequence[Completion],
    rewards: Sequence[Reward],
) -> Group:
    """Judge the completions of one problem. Raises RewardError naming function and problem."""
    raw = asyncio.run(_gather(problem, completions, rewards))
    steps = next((tuple(v) for v in raw if any(isinstance(x, StepRewards) for x in v)), None)
    components = {
        r.name: np.array([_number(r, problem, v) for v in values])
        for r, values in zip(rewards, raw, strict=True)
    }
    weights = {r.name: r.weight for r in rewards}
    return Group(
        problem,
        prompt,
        tuple(completions),
        combine(components, weights),
        components,
        weights,
        steps,
    )


def combine(components: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Weighted sum of what applies; NaN where nothing does. name -> (G,) to (G,) float64."""
    values = np.stack([weights[name] * value for name, value in components.items()])
    return np.where(np.isnan(values).all(0), np.nan, np.nansum(values, axis=0))


async def _gather(
    problem: Problem, completions: Sequence[Completion], rewards: Sequence[Reward]
) -> list[list[Any]]:
    async def guarded(reward: Reward) -> list[Any]:
        try:
            return await reward(problem, completions)
        except Exception as error:
            raise RewardError(
                f"reward {reward.name} on problem {problem.id}: {type(error).__name__}: {error}"
            ) from error

    return list(await asyncio.gather(*map(guarded, rewards)))


def _number(reward: Reward, problem: Problem, value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, StepRewards):
        return value.total
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(
            f"reward {reward.name} on problem {problem.id}: returned {_shown(value)}; "
            "a finite number or None is expected"
        )
    return float(value)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"


def _as_prompted(problem: Problem, text: str) -> Any:
    """A completion in the form of its prompt: text, or a list of one assistant message."""
    return text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": text}]


async def _maybe_await(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value

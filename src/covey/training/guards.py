"""Guards: end a run before it does harm. They are pure functions from measurements to actions.

Their memory is an argument and a result; it is part of the checkpointed state, so that a resumed run
judges exactly as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from covey.config.schema import Guards
from covey.runs.checkpoint import GuardMemory


@dataclass(frozen=True)
class Stop:
    """End the run."""

    why: str


@dataclass(frozen=True)
class Warn:
    """Print a warning and log an event."""

    text: str
    event: str
    details: Mapping[str, float]


class KLAlarm(IntEnum):
    """The highest threshold of the guards (``kl_warn``, ``kl_act``, ``kl_stop``) that the KL exceeds."""

    NONE = 0
    WARN = 1
    ACT = 2
    STOP = 3


Action = Stop | Warn
MIN_EXPLAINED_VARIANCE = -0.25
"""Explained variance below which a critic is diverging, not merely untrained or noisy."""
CRITIC_WARNING_STEPS = 5


def count_skipped_update(
    finite: bool, memory: GuardMemory, limits: Guards, step: int
) -> tuple[GuardMemory, Stop | None]:
    """Count updates that were skipped because their loss or gradient was not finite."""
    bad = 0 if finite else memory.bad_updates + 1
    memory = replace(memory, bad_updates=bad)
    if bad < limits.bad_updates:
        return memory, None
    return memory, Stop(
        f"step {step}: the loss or gradient of {bad} updates in a row was not finite; the batches are "
        "in the folder skipped/ of the run. Lower train.lr or train.grad_clip, or fix the rewards if their "
        "values are huge (guards.bad_updates)"
    )


def apply_guards(
    step: int,
    metrics: Mapping[str, float],
    has_signal: bool,
    memory: GuardMemory,
    limits: Guards,
    why_none: Callable[[int], str],
    cause: Callable[[], str],
) -> tuple[GuardMemory, list[Action]]:
    """Judge a completed step: whether anything had an advantage, the KL, the entropy.

    ``why_none`` explains the given number of last steps without a signal. ``cause`` returns the gravest
    finding with its remedy; it replaces a guard's own advice.
    """
    actions: list[Action] = []
    dead = 0 if has_signal else memory.dead_steps + 1
    if limits.dead_steps and dead >= limits.dead_steps:
        actions.append(
            Stop(
                f"step {step}: for {limits.dead_steps} steps no group had a nonzero advantage: "
                f"{why_none(limits.dead_steps)} (guards.dead_steps)"
            )
        )
    kl = metrics.get("kl/completion_k1", math.nan)
    # Without a measured KL it is NaN, which exceeds no bound.
    alarm = kl_alarm(kl, limits)
    actions += _on_kl(step, kl, alarm, memory.kl_alarm, limits, cause)
    bad_critic_steps, value_actions = _on_values(
        step, metrics.get("value/explained_variance", math.nan), memory.bad_critic_steps
    )
    actions += value_actions
    entropy = metrics["entropy/sampled"]
    if entropy < limits.entropy_floor:
        actions.append(
            Stop(
                f"step {step}: the entropy is {entropy:.3g} nats per token, below guards.entropy_floor "
                f"{limits.entropy_floor:g}. "
                f"{cause() or 'Raise rollout.temperature, set algorithm.entropy, or lower train.lr'}"
            )
        )
    return replace(memory, dead_steps=dead, kl_alarm=alarm, bad_critic_steps=bad_critic_steps), actions


def _on_values(step: int, explained: float, previous: int) -> tuple[int, list[Action]]:
    """Count the consecutive steps with a critic worse than a constant; warn when there are five."""
    # A comparison with NaN is false: a step without a critic resets the count.
    steps = previous + 1 if explained < MIN_EXPLAINED_VARIANCE else 0
    # Equal, not at least: the warning comes once in a row of bad steps.
    if steps != CRITIC_WARNING_STEPS:
        return steps, []
    text = (
        f"step {step}: for {steps} steps the critic predicted returns worse than their mean would "
        f"(explained variance {explained:.2g}). Lower algorithm.critic.lr, or set algorithm.critic.warmup"
    )
    return steps, [Warn(text, "critic diverges", {"explained_variance": explained})]


def kl_alarm(kl: float, limits: Guards) -> KLAlarm:
    """Return the highest threshold that the KL in nats per completion exceeds."""
    bounds = {KLAlarm.WARN: limits.kl_warn, KLAlarm.ACT: limits.kl_act, KLAlarm.STOP: limits.kl_stop}
    return max((a for a, bound in bounds.items() if bound is not None and kl > bound), default=KLAlarm.NONE)


def _on_kl(
    step: int, kl: float, alarm: KLAlarm, previous: int, limits: Guards, cause: Callable[[], str]
) -> list[Action]:
    if alarm == KLAlarm.STOP or (alarm == KLAlarm.ACT and limits.kl_action == "stop"):
        setting = "kl_stop" if alarm == KLAlarm.STOP else "kl_act"
        bound = limits.kl_stop if alarm == KLAlarm.STOP else limits.kl_act
        advice = "Lower train.lr, raise algorithm.kl.coef, or allow more if that is what you want"
        return [
            Stop(
                f"step {step}: the KL to the reference is {kl:.1f} nats per completion, above "
                f"guards.{setting} ({bound:g}). {cause() or advice}"
            )
        ]
    # Warn when a threshold is first exceeded, not in every step above it.
    if alarm <= previous:
        return []
    text = (
        f"step {step}: the KL to the reference is {kl:.1f} nats per completion (guards.kl_stop ends the "
        f"run at {limits.kl_stop})"
    )
    return [Warn(text, "far from the reference", {"kl": kl})]

"""Settings that were given and that nothing reads: which methods read a section is said here, once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import get_args

from covey.config.schema import Config, Method
from covey.objective.preference import PREFERENCES

ALL: Collection[str] = get_args(Method)
RL = ("rl",)
COLLECTS = ("pairs", "rejection_sampling")
RANKS = (*PREFERENCES, "reward_model")
TRAINS = ("rl", "sft", *RANKS)
MODEL_ONLY = tuple(m for m in ALL if m != "filter")

READ_BY: Mapping[str, Collection[str]] = {
    **dict.fromkeys(("method", "output", "model", "data", "stages"), ALL),
    "data.held_out": RANKS,
    "rewards": tuple(m for m in MODEL_ONLY if m != "reward_model"),
    "algorithm": RL,
    **dict.fromkeys(("rollout.group_size", "rollout.prompts_per_step", "scoring.noise"), (*RL, *COLLECTS)),
    **dict.fromkeys(("rollout.curriculum", "rollout.adapt_group_size", "rollout.prepass"), (*RL, *COLLECTS)),
    **dict.fromkeys(("rollout.retire_after", "rollout.max_resampling_rounds"), (*RL, *COLLECTS)),
    "rollout.staleness": (*RL, *COLLECTS),
    "rollout.mask_truncated": RL,
    "train": TRAINS,
    **dict.fromkeys(("train.steps", "train.save_every", "train.keep"), MODEL_ONLY),
    **dict.fromkeys(("train.inner_epochs", "train.updates_per_batch"), RL),
    "train.batch_size": ("sft", *RANKS),
    "train.final": ("rl", "sft", *PREFERENCES),
    "eval": TRAINS,
    "train.optimizer": MODEL_ONLY,
    "guards": RL,
    "guards.bad_updates": TRAINS,
    "guards.stall_minutes": MODEL_ONLY,
    "keep": (),
    "keep.margin": ("pairs",),
    "keep.per_problem": COLLECTS,
    "keep.least": ("rejection_sampling",),
    "keep.score": ("filter",),
}
"""A section or a setting -> the methods that read it; the longest name counts. Others: all but filter."""


def reads(method: str, key: str) -> bool:
    """Whether a run of this method reads a setting, as train.lr."""
    while key and key not in READ_BY:
        key = key.rpartition(".")[0]
    return method in READ_BY.get(key, MODEL_ONLY)


def unread_settings(stages: Sequence[tuple[str, Config, Mapping[str, str]]]) -> Iterator[str]:
    """What was given and changes nothing, a note for each stage and one for what all stages share.

    ``stages``: (name, config, where each key was set); a run without stages is one, without a name.
    """
    methods = {config.method for _, config, _ in stages}
    shared: dict[str, str] = {}
    for name, config, origins in stages:
        own = dict[str, str]()
        for key, origin in _given(config, origins):
            mine = not name or origin.endswith(f"(stage {name})") or origin.startswith("--stages.")
            if not any(reads(m, key) for m in ({config.method} if mine else methods)):
                (own if mine else shared)[key] = origin
        if own:
            who = f"stage {name}: method" if name else "method"
            yield f"{who} {config.method} does not read {_listed(own)}"
    if shared:
        yield f"no stage reads {_listed(shared)}"


def _listed(keys: Mapping[str, str]) -> str:
    """Keys, and where the first of them was set."""
    place = next(iter(keys.values()))
    where = "" if place.startswith("--") or place in keys else f" ({place.partition(' (stage')[0]})"
    return f"{', '.join(keys)}{where}: {'this changes' if len(keys) == 1 else 'these change'} nothing"


def _given(config: Config, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(setting, where it was given) of what differs from the default; an algorithm counts as one."""
    standard, seen = Config(), set[str]()
    for name, origin in origins.items():
        inner = any(other.startswith(f"{name}.") for other in origins)
        key = "algorithm" if name.startswith("algorithm.") else name
        if not key or key in seen or (inner and key != "algorithm") or key.startswith("stages"):
            continue
        seen.add(key)
        if key == "algorithm" or _value(config, key) != _value(standard, key):
            yield key, origin


def _value(config: object, key: str) -> object:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    return config

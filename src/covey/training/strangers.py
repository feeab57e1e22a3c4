"""Groups whose recorded log-probs cannot be those of the prompt and the weights that they are trained with.

A reply says which request it answers where the server has a word for it. Where it has none, a proxy or a
cache may give one request the reply to another; then the trainer's log-probs, which an update computes
anyway, are far off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from covey.objective.diagnostics import TokenStats
from covey.runs.journal import Journal
from covey.types import Group

STRANGE = 1.0
"""Nats a token, on average over a group: rounding is a hundredth of it."""
STRANGER = "answer to another request"


@dataclass(frozen=True)
class Stranger:
    """A group that is far off."""

    problem: str
    servers: tuple[str, ...]
    nats: float
    """Mean difference of the log-probs of its tokens."""


def strangers(groups: Sequence[Group], stats: Sequence[TokenStats], version: int) -> list[Stranger]:
    """The groups from servers that are far off, where ``version`` drew them; the worst one first.

    ``stats`` are of the updates on these groups, in their order.
    """
    rows = [(number, c) for number, group in enumerate(groups) for c in group.completions]
    off, tokens, seen = np.zeros(len(groups)), np.zeros(len(groups)), set[int]()
    for s in stats:
        if s.origin is None or s.mismatch is None:
            continue
        for place, trained, values in zip(s.origin.tolist(), s.mask.numpy(), s.mismatch.numpy(), strict=True):
            number, completion = rows[place]
            if place in seen or not completion.server:  # later the policy has moved
                continue
            seen.add(place)
            own = trained[: len(completion.tokens)] & (completion.token_versions == version)
            off[number] += float(np.abs(values[: len(own)][own]).sum())
            tokens[number] += own.sum()
    mean = off / np.maximum(tokens, 1)
    found = [
        Stranger(group.problem.id, tuple(sorted({c.server for c in group.completions})), float(nats))
        for group, nats in zip(groups, mean, strict=True)
        if nats > STRANGE
    ]
    return sorted(found, key=lambda stranger: -stranger.nats)


def note_strangers(journal: Journal, step: int, found: Sequence[Stranger]) -> None:
    """Say which groups of a step are far off, and whose they are."""
    if not found:
        return
    worst, more = found[0], f", and {len(found) - 1} groups more" if len(found) > 1 else ""
    journal.say(
        f"step {step + 1}: the log-probs that {' and '.join(worst.servers)} gave for {worst.problem}{more} "
        f"differ from the trainer's by {worst.nats:.2g} nats a token. They belong to another prompt or "
        "to other weights; the group was trained on nevertheless. Is there a proxy or a cache in front of "
        "the server?",
        "yellow",
    )
    for one in found:
        journal.event(step, STRANGER, problem=one.problem, servers=list(one.servers), nats=one.nats)

"""Groups whose recorded log-probs cannot belong to their prompt and the weights that drew them.

A reply names the request that it answers, if the server supports that. If not, a proxy or a cache may give
one request the reply to another. Then the trainer's log-probs, which an update computes anyway, are far off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from covey.objective.diagnostics import TokenStats
from covey.runs.journal import Journal
from covey.types import Group

MAX_DIFFERENCE = 1.0
"""Mean difference in nats per token from which a group is reported; rounding causes about 0.01."""
EVENT = "answer to another request"


@dataclass(frozen=True)
class MisattributedGroup:
    """A group whose log-probs are far off."""

    problem: str
    servers: tuple[str, ...]
    nats: float
    """Mean difference of the log-probs of its tokens."""


def misattributed_groups(
    groups: Sequence[Group], stats: Sequence[TokenStats], version: int
) -> list[MisattributedGroup]:
    """Return groups from servers whose tokens of ``version`` have log-probs far off, the worst first.

    ``stats`` are those of the updates on these groups, in order.
    """
    nats = _mean_differences(groups, stats, version)
    cases = [
        MisattributedGroup(group.problem.id, _servers_of(group), float(nats[number]))
        for number, group in enumerate(groups)
        if nats[number] > MAX_DIFFERENCE
    ]
    return sorted(cases, key=lambda case: -case.nats)


def _servers_of(group: Group) -> tuple[str, ...]:
    return tuple(sorted({c.provenance.server for c in group.completions}))


def _mean_differences(groups: Sequence[Group], stats: Sequence[TokenStats], version: int) -> np.ndarray:
    """Return how far the log-probs of each group are off, in nats per token: (groups,) float64."""
    # In the order of the rollout batch, which ``origin`` counts.
    rows = [(number, c) for number, group in enumerate(groups) for c in group.completions]
    differences = np.zeros(len(groups))
    tokens = np.zeros(len(groups))
    counted = set[int]()
    for s in stats:
        if s.origin is None or s.mismatch is None:
            continue
        for row, trained, values in zip(s.origin.tolist(), s.mask.numpy(), s.mismatch.numpy(), strict=True):
            number, completion = rows[row]
            # Only the first update of a completion counts: at later ones the policy has moved.
            if row in counted or not completion.provenance.server:
                continue
            counted.add(row)
            # Tokens of older versions differ for a good reason: they were drawn by other weights.
            fresh = trained[: len(completion.tokens)] & (completion.token_versions == version)
            differences[number] += float(np.abs(values[: len(fresh)][fresh]).sum())
            tokens[number] += fresh.sum()
    means: np.ndarray = differences / np.maximum(tokens, 1)
    return means


def report_misattributed(journal: Journal, step: int, cases: Sequence[MisattributedGroup]) -> None:
    """Warn of the groups of a step that are far off, with their servers."""
    if not cases:
        return
    worst = cases[0]
    more = f", and {len(cases) - 1} groups more" if len(cases) > 1 else ""
    journal.say(
        f"step {step}: the log-probs from {' and '.join(worst.servers)} for {worst.problem}{more} differ "
        f"from the trainer's by {worst.nats:.2g} nats per token. They belong to another prompt or to other "
        "weights; the group was trained on nevertheless. Is there a proxy or a cache in front of the server?",
        "yellow",
    )
    for case in cases:
        journal.log_event(step, EVENT, problem=case.problem, servers=list(case.servers), nats=case.nats)

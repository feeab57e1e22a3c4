"""Metrics that are counted while a step samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from covey.sampling.tools.running import ERROR
from covey.types import Group
from covey_verify.errors import RewardError


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Measure how many optimizer steps older the sampling weights of the tokens are than ``version``."""
    completions = [c for g in groups for c in g.completions]
    if not completions:
        return {}
    versions = [c.token_versions[c.drawn_mask] for c in completions]
    behind = version - np.concatenate(versions)
    return {
        "staleness/mean": float(behind.mean()) if len(behind) else 0.0,
        "staleness/max": float(behind.max()) if len(behind) else 0.0,
        # A completion was continued by other weights if its tokens have several versions.
        "staleness/continued": sum(len(set(v.tolist())) > 1 for v in versions) / len(versions),
    }


def drawable_tokens(groups: Sequence[Group]) -> dict[str, float]:
    """Return how many tokens could be drawn on average, if top_p or top_k excluded some."""
    masked = [
        (c.sampling_mask, c.drawn_mask) for g in groups for c in g.completions if c.sampling_mask is not None
    ]
    # Ends are cumulative: their differences count the tokens that each place allowed.
    kept = [np.diff(mask.ends, prepend=0)[drawn] for mask, drawn in masked]
    places = sum(map(len, kept))
    return {"rollout/kept_tokens": sum(int(k.sum()) for k in kept) / places} if places else {}


MAX_FAULTS = 0.5
"""Largest fraction of a step's completions with a fault; beyond it the environment is taken to be broken."""


def tool_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return answered turns and inserted tokens per completion, and the fractions that failed.

    Raises RewardError if so many environments have failed that the model cannot be the cause.
    """
    completions = [c for g in groups for c in g.completions]
    # Parts of a completion are drawn or inserted; there is one inserted part per answered turn.
    answered = [sum(not drawn for drawn, _ in c.parts) for c in completions]
    turns = [turn for c in completions for turn in c.transcript.turns]
    answers = [str(turn["content"]) for turn in turns if turn["role"] == "tool"]
    faults = [c.transcript.fault for c in completions if c.transcript.fault]
    if len(faults) > MAX_FAULTS * len(completions):
        raise RewardError(
            f"rollout.tools.environment: in a step the environments of {len(faults)} of {len(completions)} "
            f"completions failed to return their reward; the last error: {faults[-1]}"
        )
    tokens = sum(len(c.tokens) - c.length for c in completions)
    return {
        "tools/turns": sum(answered) / len(completions),
        "tools/used": sum(map(bool, answered)) / len(completions),
        "tools/tokens": tokens / len(completions),
        "tools/broken": len(faults) / len(completions),
        "tools/failed": sum(answer.startswith(ERROR) for answer in answers) / max(len(answers), 1),
    }

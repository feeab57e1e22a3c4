"""Metrics that are counted while a step samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from covey.types import Group


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Measure how many optimizer steps older the sampling weights of the tokens are than ``version``."""
    completions = [c for g in groups for c in g.completions]
    if not completions:
        return {}
    versions = [c.token_versions[c.drawn] for c in completions]
    behind = version - np.concatenate(versions)
    return {
        "staleness/mean": float(behind.mean()) if len(behind) else 0.0,
        "staleness/max": float(behind.max()) if len(behind) else 0.0,
        # A completion was continued by other weights if its tokens have several versions.
        "staleness/continued": sum(len(set(v.tolist())) > 1 for v in versions) / len(versions),
    }


def kept_tokens(groups: Sequence[Group]) -> dict[str, float]:
    """Return how many tokens could be drawn on average, if top_p or top_k excluded some."""
    masked = [
        (c.sampling_mask, c.drawn) for g in groups for c in g.completions if c.sampling_mask is not None
    ]
    # Ends are cumulative: their differences count the tokens that each place allowed.
    kept = [np.diff(mask.ends, prepend=0)[drawn] for mask, drawn in masked]
    places = sum(map(len, kept))
    return {"rollout/kept_tokens": sum(int(k.sum()) for k in kept) / places} if places else {}

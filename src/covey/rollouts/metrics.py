"""What is counted while a step samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from covey.types import Group


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """By how many optimizer steps the weights that drew the tokens are older than those that are trained."""
    completions = [c for g in groups for c in g.completions]
    if not completions:
        return {}
    versions = [c.token_versions[c.drawn] for c in completions]
    behind = version - np.concatenate(versions)
    return {
        "staleness/mean": float(behind.mean()) if len(behind) else 0.0,
        "staleness/max": float(behind.max()) if len(behind) else 0.0,
        "staleness/continued": sum(len(set(v.tolist())) > 1 for v in versions) / len(versions),
    }


def continued_tokens(groups: Sequence[Group]) -> dict[str, float]:
    """How many tokens went into the values of segments, where an estimator asks for these."""
    return {"rollout/continued_tokens": float(sum(g.continued for g in groups))} if groups[0].segments else {}


def kept_tokens(groups: Sequence[Group]) -> dict[str, float]:
    """How many tokens could be drawn on average, where top_p or top_k excluded some."""
    masked = [
        (c.sampling_mask, c.drawn) for g in groups for c in g.completions if c.sampling_mask is not None
    ]
    kept = [np.diff(mask.ends, prepend=0)[drawn] for mask, drawn in masked]
    places = sum(map(len, kept))
    return {"rollout/kept_tokens": sum(int(k.sum()) for k in kept) / places} if places else {}

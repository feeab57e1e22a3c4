"""Rewards that shape length and repetition."""

from __future__ import annotations

from typing import Any


def soft_overlong(completion_ids: list[list[int]], *, limit: int, buffer: int, **_: Any) -> list[float]:
    """0 up to ``limit - buffer`` tokens, falling linearly to -1 at ``limit``, -1 beyond.

    DAPO, arXiv 2503.14476, equation 13.

    >>> soft_overlong([[0] * 6, [0] * 9, [0] * 12], limit=10, buffer=2)
    [0.0, -0.5, -1.0]
    """
    return [max(-1.0, min(0.0, (limit - buffer - len(ids)) / buffer)) for ids in completion_ids]

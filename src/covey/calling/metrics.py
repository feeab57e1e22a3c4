"""How tools were used in a step, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from covey.calling.running import ERROR
from covey.types import Group


def tool_metrics(groups: Sequence[Group], decode: Callable[[Sequence[int]], str]) -> dict[str, float]:
    """Turns that were answered and tokens inserted, per completion; how many answers report an error."""
    completions = [c for g in groups for c in g.completions]
    said = [[decode(ids.tolist()) for drawn, ids in c.parts if not drawn] for c in completions]
    answers = [text for own in said for text in own]
    tokens = sum(len(c.tokens) - c.length for c in completions)
    return {
        "tools/turns": len(answers) / len(completions),
        "tools/used": sum(map(bool, said)) / len(completions),
        "tools/tokens": tokens / len(completions),
        "tools/failed": sum(ERROR in text for text in answers) / max(len(answers), 1),
    }

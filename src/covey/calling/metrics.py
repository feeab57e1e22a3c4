"""How tools were used in a step, as metrics."""

from __future__ import annotations

from collections.abc import Sequence

from covey.calling.running import ERROR
from covey.types import Group


def tool_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Turns that were answered and tokens inserted, per completion; the fraction of answers with an error."""
    completions = [c for g in groups for c in g.completions]
    answered = [sum(not drawn for drawn, _ in c.parts) for c in completions]
    answers = [turn["content"] for c in completions for turn in c.turns if turn["role"] == "tool"]
    tokens = sum(len(c.tokens) - c.length for c in completions)
    return {
        "tools/turns": sum(answered) / len(completions),
        "tools/used": sum(map(bool, answered)) / len(completions),
        "tools/tokens": tokens / len(completions),
        "tools/failed": sum(answer.startswith(ERROR) for answer in answers) / max(len(answers), 1),
    }

"""Metrics of the use of tools in a step."""

from __future__ import annotations

from collections.abc import Sequence

from covey.sampling.tools.running import ERROR
from covey.types import Group
from covey_verify.errors import RewardError

MOST_FAULTS = 0.5
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
    if len(faults) > MOST_FAULTS * len(completions):
        raise RewardError(
            f"rollout.tools.environment: the environments of {len(faults)} of {len(completions)} completions "
            f"of a step failed when asked for their reward; the last one: {faults[-1]}"
        )
    tokens = sum(len(c.tokens) - c.length for c in completions)
    return {
        "tools/turns": sum(answered) / len(completions),
        "tools/used": sum(map(bool, answered)) / len(completions),
        "tools/tokens": tokens / len(completions),
        "tools/broken": len(faults) / len(completions),
        "tools/failed": sum(answer.startswith(ERROR) for answer in answers) / max(len(answers), 1),
    }

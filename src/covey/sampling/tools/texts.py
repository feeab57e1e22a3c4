"""Calls in a completion of which only the text is known, for rewards that run without a model."""

from __future__ import annotations

from covey.types import Completion, Problem


def calls_by_text(_: Problem, completion: Completion) -> list[dict[str, object]]:
    """Return the calls as messages have them, in the format whose mark the text has."""
    from covey.sampling.tools.forms import text_calls  # it loads torch, and few rewards ask for calls

    return text_calls(completion.text)

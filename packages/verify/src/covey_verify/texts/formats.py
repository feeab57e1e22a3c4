"""Rewards for the format of a completion. They pay little and are best gated by a reward for correctness."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated

from covey_verify.contract import in_subprocess, reward, score_without_result
from covey_verify.extract import (
    THINK_CLOSE,
    THINK_OPEN,
    TextOrMessages,
    Turns,
    extract,
    model_turns,
    text_of,
    visible,
)
from covey_verify.types import Check, Score


def _check_pattern(pattern: str) -> str:
    """Return a pattern if it can be compiled. Raises ValueError."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a pattern: {error}") from None
    return pattern


Pattern = Annotated[str, Check(_check_pattern)]


def _think(*_: object, **__: object) -> str:
    return "<think>so it must be</think><answer>4</answer>"


@reward(weight=0.1, concurrent=True, example=_think, format_only=True)
def think_format(completion: TextOrMessages, turns: Turns = (), *, strict: bool = True) -> float:
    """Return 1 for `<think>some reasoning</think>` and something after it, else 0.

    If ``strict``, each tag occurs exactly once, with nothing before. Otherwise one closing tag with text on
    both sides is enough, for models whose prompt opens the reasoning. With tools, the tags may occur once
    in the completion or once in each turn.
    """
    model_texts = model_turns(completion, turns)
    return float(_thinks(text_of(completion), strict) or all(_thinks(turn, strict) for turn in model_texts))


def _thinks(text: str, strict: bool) -> bool:
    before, opening, rest = text.strip().partition(THINK_OPEN)
    if not strict and not opening:
        rest = text  # the prompt has opened the reasoning, so the text begins within it
    elif before or not opening:
        return False
    reasoning, closing, answer = rest.partition(THINK_CLOSE)
    repeats_a_tag = any(tag in part for tag in (THINK_OPEN, THINK_CLOSE) for part in (reasoning, answer))
    return bool(closing and visible(reasoning) and visible(answer)) and not repeats_a_tag


@reward(weight=0.1, concurrent=True, example=_think, format_only=True)
def answer_format(completion: TextOrMessages, turns: Turns = ()) -> float:
    """Return 1 for reasoning and then exactly one non-empty `<answer>...</answer>` at the end, else 0."""
    text = text_of(completion)
    answer = model_turns(completion, turns)[-1].rpartition(THINK_CLOSE)[2].strip()
    inside = answer.removeprefix("<answer>").removesuffix("</answer>")
    once = text.count("<answer>") == text.count("</answer>") == 1
    # Both tags were removed, so the answer begins and ends with them.
    whole = len(answer) == len(inside) + len("<answer></answer>")
    return float(bool(think_format(text, turns) and once and whole and visible(inside)))


@reward(concurrent=True, format_only=True)
def regex_match(
    completion: TextOrMessages, turns: Turns = (), *, pattern: Pattern, whole: bool = False
) -> Score:
    """Return 1 if ``pattern`` is found (or matches the ``whole`` answer) after the reasoning, else 0.

    Matching is done in a killable subprocess: endless backtracking ends as a `timeout`.
    """
    text = extract(completion, "whole", turns if whole else ())
    if text is None:
        return Score(0.0, "no_answer")
    how = "fullmatch" if whole else "search"
    result = in_subprocess("find_match", pattern, how, text)
    if result.kind == "ok":
        return Score(float(result.value is not None), extracted=result.value)
    if result.kind == "error":  # re.error: the pattern is the user's
        raise ValueError(f"regex_match: {result.text}")
    return replace(score_without_result(result), detail=f"pattern {pattern!r}")

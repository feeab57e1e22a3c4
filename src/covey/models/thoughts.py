"""Checks of the thoughts in a model's worked answers: at most one pair in each turn."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from covey.models.template import HEADER, template_facts, thoughts_fault, with_begun_thoughts
from covey.types import Problem
from covey_verify.errors import DataError
from covey_verify.extract import Thoughts
from covey_verify.types import Messages


def text_after_prompt(tokenizer: PreTrainedTokenizerBase, problem: Problem, words: str) -> str:
    """The text of an answer after a prompt that may have opened thoughts; without any it closes them first.

    Raises DataError if the template does not show how an answer closes them.
    """
    marks = problem.thoughts
    if not marks.begun:
        return words
    # The prompt has the opening mark already, and the line break that templates write after it.
    if words.lstrip().startswith(marks.open):
        return words.lstrip().removeprefix(f"{marks.open}\n").removeprefix(marks.open)
    if marks.close in words:
        return words
    closing = template_facts(tokenizer, problem.template).unthinking
    if closing is None:
        raise DataError(
            f"{problem.id}: the chat template opens thoughts in the prompt ({marks.open}), but the answer "
            "has none, and the template does not show how to write an answer without thoughts. Write it as "
            f"{marks.open}...{marks.close}answer, or use a template that lets the model answer at once"
        )
    return closing + words


def pairs_fault(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, whole: np.ndarray, trained: np.ndarray, good: bool
) -> str | None:
    """The reason why a turn, with its header, has more than one pair of thoughts or a broken one; or None.

    ``whole`` is prompt and answer, ``trained`` (L,) the mask of the answer's tokens. Only an answer that is
    no ``good`` example may end within its thoughts.
    """
    marks = problem.thoughts
    first = len(whole) - len(trained)
    is_trained = np.concatenate([np.zeros(first, dtype=bool), trained])
    # A turn is a stretch of trained tokens: rows of [first, one after the last] in `whole`.
    edges = np.flatnonzero(np.diff(is_trained.astype(int), prepend=0, append=0)).reshape(-1, 2)
    for start, stop in edges.tolist():
        # Thoughts that the prompt opens belong to the first turn after it.
        opened: bool | None = (marks.begun and start == first) or None
        if problem.chat and not opened:
            opened = _header_opens(tokenizer, whole[max(0, start - HEADER) : start], marks)
        text = tokenizer.decode(whole[start:stop])
        fault = thoughts_fault(text, marks, opened, ended=good)
        if fault:
            return fault + _remedy(tokenizer, problem, opened)
    return None


def _header_opens(tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray, marks: Thoughts) -> bool | None:
    """Whether a turn's header opens thoughts; False if it closes them too, None if it has no marks."""
    header = tokenizer.decode(tokens).rstrip()
    return with_begun_thoughts(header, marks).begun if header.endswith((marks.open, marks.close)) else None


def _remedy(tokenizer: PreTrainedTokenizerBase, problem: Problem, opened: bool | None) -> str:
    """The remedy for answers with thoughts after a prompt that has closed an empty pair; else empty."""
    switch = template_facts(tokenizer, problem.template).switch
    if opened is not False:
        return ""
    return (
        ". The chat template closes thoughts in the prompt: "
        + (f"set data.chat_template_kwargs: {switch} (a row may have its own), or " if switch else "")
        + "leave the thoughts out of the answer"
    )


def check_channels(problem: Problem, answer: Messages) -> None:
    """Raise DataError if an answer has channels in its content, since the template itself writes them."""
    marks = problem.thoughts
    texts = [str(m["content"]) for m in answer if m["role"] == "assistant"]
    if marks.answer and any(mark in text for text in texts for mark in (marks.open, *marks.answer)):
        raise DataError(
            f"{problem.id}: the chat template writes {marks.open} and {marks.answer[-1]} itself, but the "
            "answer's content has them too. Give the thoughts separately: messages with content and "
            "reasoning_content"
        )

"""Metrics of what completions say: reflection, mixed scripts, repetition, answers that occur in them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from covey.objective.signs import known_mean, mixes_scripts, repeated_windows
from covey.types import Group
from covey_verify.extract import NUMBER

REFLECTION = {
    "doubt": re.compile(r"\b(?:wait|hmm+|hold on)\b", re.IGNORECASE),
    "check": re.compile(r"\b(?:let me (?:check|verify|re)|double-check)", re.IGNORECASE),
    "alternative": re.compile(r"\b(?:alternatively|another way|on second thought)\b", re.IGNORECASE),
    "correction": re.compile(r"\b(?:actually|i made a mistake|that's wrong)\b", re.IGNORECASE),
}
MAX_ANSWER = 32
"""Longest reference answer, in characters, for which texts are searched; a longer one is a text itself."""


def text_metrics(texts: Sequence[str], correct: np.ndarray) -> dict[str, float]:
    """Measure how the model writes: reflection, script mixing, repetition, duplicates.

    ``correct`` (N,) bool splits the signs of reflection by whether the answer was correct.
    """
    signs = {k: np.array([len(p.findall(t)) for t in texts]) for k, p in REFLECTION.items()}
    every = np.sum(list(signs.values()), axis=0)
    return {
        "text/reflection": known_mean(every),
        "text/reflection/correct": known_mean(every[correct]),
        "text/reflection/incorrect": known_mean(every[~correct]),
        **{f"text/reflection/{kind}": known_mean(counts) for kind, counts in signs.items()},
        "text/mixed_scripts": known_mean(np.array([mixes_scripts(t) for t in texts])),
        "text/repetition": known_mean(np.array([repeated_windows(t) for t in texts])),
        "text/duplicates": 1 - len(set(texts)) / max(len(texts), 1),
    }


def answers_inside(groups: Sequence[Group]) -> dict[str, float]:
    """Return how often a completion contains its problem's answer, and how often another problem's.

    The answer counts wherever it occurs as a number or word of its own, whatever the verdict is. The third
    value is the fraction of the answers that are numbers. Empty if no problem has a short `answer`.
    """
    contain_answer = list[bool]()
    contain_other = list[bool]()
    answers = [short_answer(g) for g in groups]
    for n, group in enumerate(groups):
        # The next problem with another answer, beyond the end the first one: it occurs only by chance.
        later = (*answers[n + 1 :], *answers[:n])
        elsewhere = next((a for a in later if a and a != answers[n]), "")
        texts = [c.text for c in group.completions]
        contain_answer += _contains_answer(answers[n], texts)
        contain_other += _contains_answer(elsewhere, texts)
    if not contain_answer or not contain_other:
        return {}
    return {
        "text/reference": float(np.mean(contain_answer)),
        "text/reference_elsewhere": float(np.mean(contain_other)),
        "text/reference_number": float(np.mean([bool(NUMBER.fullmatch(a)) for a in answers if a])),
    }


def _contains_answer(answer: str, texts: Sequence[str]) -> list[bool]:
    """Return whether each text contains the answer as a number or word of its own; [] without an answer."""
    # No match inside a longer word or number: 4 is not in 14, 4.5, -4 or x4.
    pattern = re.compile(rf"(?<![\w.-]){re.escape(answer)}(?!\w|[.,]\d)")
    return [bool(pattern.search(text)) for text in texts] if answer else []


def short_answer(group: Group) -> str:
    """Return the reference answer, the part after the last #### if there is one; empty if it is long."""
    answer = str(group.problem.columns.get("answer", "")).rpartition("####")[2].strip()
    return answer if len(answer) <= MAX_ANSWER else ""

"""Rewards that shape length and repetition. They see the whole group; lengths are in tokens.

They get the tokens that the model sampled, so inserted tokens do not count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from covey_verify.contract import reward
from covey_verify.errors import ConfigError
from covey_verify.extract import Rule, TextOrMessages, Turns, extract, text_of


@reward(concurrent=True, format_only=True)
def soft_overlong(sampled_ids: list[list[int]], *, limit: int, buffer: int, **_: object) -> list[float]:
    """Return 0 up to ``limit - buffer`` tokens, then falling linearly to -1 at ``limit``, -1 beyond.

    DAPO, arXiv 2503.14476, equation 13.

    >>> soft_overlong([[0] * 6, [0] * 9, [0] * 12], limit=10, buffer=2)
    [0.0, -0.5, -1.0]
    """
    if not 0 < buffer <= limit:
        raise ConfigError(f"soft_overlong: buffer {buffer} must be between 1 and limit {limit}")
    return [max(-1.0, min(0.0, (limit - buffer - len(ids)) / buffer)) for ids in sampled_ids]


@reward(concurrent=True, format_only=True)
def cosine_length(
    sampled_ids: list[list[int]],
    *,
    limit: int,
    short: float = 1.0,
    long: float = 0.5,
    exceeded: float | None = None,
    **_: object,
) -> list[float]:
    """Return long + (short - long)(1 + cos(pi L / limit)) / 2 for length L, ``exceeded`` from the limit on.

    ``exceeded`` is ``long`` by default. Demystifying Long Chain-of-Thought Reasoning, arXiv 2502.03373, C.1,
    uses it twice: for correct answers, where brevity pays (`gated_by: math_answer:correct`, 2 to 1), and for
    incorrect answers, where effort does (`gated_by: math_answer:incorrect`, -10 to 0, exceeded -10).

    >>> cosine_length([[], [0] * 5, [0] * 10, [0] * 20], limit=10)
    [1.0, 0.75, 0.5, 0.5]
    """
    if limit < 1:
        raise ConfigError(f"cosine_length: limit {limit} must be at least 1 token")
    beyond = long if exceeded is None else exceeded

    def value(length: int) -> float:
        if length >= limit:
            return beyond
        cosine = math.cos(math.pi * length / limit)
        return long + (short - long) * (1 + cosine) / 2

    return [value(len(ids)) for ids in sampled_ids]


@reward(concurrent=True, format_only=True)
def short_in_group(sampled_ids: list[list[int]], **_: object) -> list[float]:
    """Return 1/2 for the shortest of the group, falling linearly to -1/2 for the longest; 0 if all are equal.

    Kimi k1.5, arXiv 2501.12599, section 2.3.3. Meant for correct answers.

    >>> short_in_group([[0], [0] * 2, [0] * 3])
    [0.5, 0.0, -0.5]
    """
    lengths = [len(ids) for ids in sampled_ids]
    span = max(lengths) - min(lengths)
    return [0.5 - (n - min(lengths)) / span if span else 0.0 for n in lengths]


@reward(concurrent=True, format_only=True)
def repetition(sampled_ids: list[list[int]], *, n: int = 4, **_: object) -> list[float]:
    """Return minus the fraction of token n-grams that occurred before: 0 without repetition, down to -1.

    It follows arXiv 2502.03373, C.2, but as a fraction of the completion.

    >>> repetition([[1, 2, 1, 2, 1, 2], [1, 2, 3, 4]], n=2)
    [-0.6, 0.0]
    """
    if n < 1:
        raise ConfigError(f"repetition: n {n} must be at least 1")
    grams = [[tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)] for ids in sampled_ids]
    return [len(set(g)) / len(g) - 1 if g else 0.0 for g in grams]


@reward(concurrent=True, format_only=True)
def duplicates(completions: list[TextOrMessages], **_: object) -> list[float]:
    """Return minus the fraction of the group's other completions with exactly the same text.

    >>> duplicates(["a", "a", "b"])
    [-0.5, -0.5, 0.0]
    """
    counts = Counter(map(text_of, completions))
    others = max(len(completions) - 1, 1)
    return [-(counts[text_of(c)] - 1) / others for c in completions]


@reward(concurrent=True, format_only=True)
def majority_vote(
    completions: list[TextOrMessages], turns: Sequence[Turns] = (), *, rule: Rule = "boxed", **_: object
) -> list[float]:
    """Return 1 for the most frequent answer of the group, without a reference answer: TTRL, arXiv 2504.16084.

    Answers are compared as texts; a missing answer does not vote. Ties go to the answer that was given first.

    >>> majority_vote(["4", "5", "4"], rule="whole")
    [1.0, 0.0, 1.0]
    """
    turns = turns or [()] * len(completions)
    pairs = zip(completions, turns, strict=True)
    answers = [extract(completion, rule, its_turns) for completion, its_turns in pairs]
    votes = Counter(a for a in answers if a is not None)
    winner = votes.most_common(1)[0][0] if votes else None
    return [float(a is not None and a == winner) for a in answers]

"""What a completion is worth on its way: cut it, sample continuations from the cuts, score these.

The value of a beginning is the mean reward of completions that go on from it (VinePPO, SPO), under the policy
that sampled it. Nothing of a continuation is trained on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from covey.rewards.contract import token_ends
from covey.rewards.scorer import GroupScoring, Scorer
from covey.rewards.steps import split, token_spans
from covey.sampling.base import Request, Sampler, SamplingParams
from covey.types import Completion, Group, StepRewards

BANDS = 8
"""Continuations with about as many tokens left are sampled together, under one of so many limits."""


@dataclass(frozen=True)
class Cut:
    """A place in a completion after which it is sampled anew."""

    group: int
    sample: int
    end: int
    """The last token that is kept."""


def with_segments(
    groups: Sequence[Group],
    settings: Mapping[str, Any],
    sampler: Sampler,
    params: SamplingParams,
    scorer: Scorer,
    stream: Callable[[int, Cut, int], int],
    progress: Callable[[int, int], None],
) -> list[Group]:
    """Groups with the value after each segment but the last of every completion.

    ``settings`` are those of ``credit.segment_difference``; ``stream`` gives the key of a continuation by
    group, cut and number. A cut whose continuations nobody could judge is left out.
    """
    cuts = [
        Cut(g, s, end)
        for g, group in enumerate(groups)
        for s, completion in enumerate(group.completions)
        if group.scorable[s]
        for end in cut_places(completion, settings["split_by"], settings["most"], params, scorer)
    ]
    values = _values(groups, cuts, settings["continuations"], sampler, params, scorer, stream, progress)
    found: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for cut, value in zip(cuts, values, strict=True):
        if value == value:  # noqa: PLR0124 - NaN: nobody could judge
            found[cut.group, cut.sample][cut.end] = value
    return [
        replace(
            group,
            segments=tuple(
                StepRewards(list(found[g, s].values()), list(found[g, s]))
                for s in range(len(group.completions))
            ),
        )
        for g, group in enumerate(groups)
    ]


def cut_places(
    completion: Completion, split_by: str, most: int, params: SamplingParams, scorer: Scorer
) -> list[int]:
    """The last tokens of a completion's segments, its own last token excepted; at most ``most`` segments."""
    length = len(completion.tokens)
    if split_by == "tokens":
        size = max(-(-params.max_tokens // most), 1)
        return list(range(size - 1, length - 1, size))
    if split_by == "unlikely":
        rare = np.argsort(completion.logprobs[1:], kind="stable")[: most - 1]
        return sorted(int(place) for place in rare)  # the token after the cut is the rare one
    spans = split(completion.text, split_by)  # type: ignore[arg-type]
    ends = token_ends(completion.tokens.tolist(), scorer.context.decode)
    places = sorted({b - 1 for a, b in token_spans(spans, ends) if b > a and b < length})
    chosen = (
        np.linspace(0, len(places), most, endpoint=False)[1:].astype(int) if len(places) >= most else None
    )
    return places if chosen is None else [places[i] for i in chosen]


def _values(
    groups: Sequence[Group],
    cuts: Sequence[Cut],
    count: int,
    sampler: Sampler,
    params: SamplingParams,
    scorer: Scorer,
    stream: Callable[[int, Cut, int], int],
    progress: Callable[[int, int], None],
) -> list[float]:
    """The mean reward of the continuations from each cut."""
    left = [params.max_tokens - cut.end - 1 for cut in cuts]
    together: dict[int, list[int]] = defaultdict(list)
    for number, tokens in enumerate(left):
        together[tokens * BANDS // params.max_tokens].append(number)
    values, done = [float("nan")] * len(cuts), 0
    for members in (together[size] for size in sorted(together, reverse=True)):
        limit = replace(params, max_tokens=min(left[number] for number in members))
        scorings: list[GroupScoring] = []
        requests = []
        for number in members:
            cut, group = cuts[number], groups[cuts[number].group]
            kept = group.completions[cut.sample].tokens[: cut.end + 1]
            streams = [stream(cut.group, cut, n) for n in range(count)]
            requests.append(Request(np.concatenate([group.prompt, kept]), streams))
            scorings.append(scorer.group(group.problem, group.prompt, count))
        for request, sample, tail in sampler.sample(requests, limit):
            cut = cuts[members[request]]
            done += 1
            progress(done, len(cuts) * count)
            whole = groups[cut.group].completions[cut.sample]
            scorings[request].add(sample, _joined(whole, cut.end, tail, scorer.context.decode))
        for number, scoring in zip(members, scorings, strict=True):
            rewards = scoring.result().rewards
            known = rewards[~np.isnan(rewards)]
            values[number] = float(known.mean()) if len(known) else float("nan")
    return values


def _joined(
    whole: Completion, end: int, tail: Completion, decode: Callable[[Sequence[int]], str]
) -> Completion:
    """A completion up to a token, and what was sampled from there, as one that rewards can judge."""
    tokens = np.concatenate([whole.tokens[: end + 1], tail.tokens])
    logprobs = np.concatenate([whole.logprobs[: end + 1], tail.logprobs])
    return Completion(tokens, logprobs, decode(tokens.tolist()), tail.finish, tail.version)

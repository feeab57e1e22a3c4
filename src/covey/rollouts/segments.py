"""What a completion is worth on its way: cut it, sample continuations from the cuts, score these.

The value of a beginning is the mean reward of completions that go on from it (VinePPO, SPO), under the policy
that sampled it. Nothing of a continuation is trained on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from covey.objective.algorithms import Algorithm
from covey.objective.bound import setting_defaults
from covey.objective.credit import Segments, segment_difference
from covey.prompts import Prompted
from covey.rewards.ends import token_ends
from covey.rewards.steps import split, token_spans
from covey.sampling.base import Request, Sampled, Sampler, SamplingParams, Weights
from covey.types import Completion, Group, StepRewards

BANDS = 8
"""Continuations with about as many tokens left are sampled together, under one of so many limits."""
Decode: TypeAlias = Callable[[Sequence[int]], str]
ScoreAll: TypeAlias = Callable[[Sequence[Prompted], Sequence[Request], Sampler, SamplingParams], list[Group]]
"""Samples requests and judges what comes, on however many processes."""


@dataclass(frozen=True)
class Cut:
    """A place in a completion after which it is sampled anew."""

    group: int
    sample: int
    end: int
    """The last token that is kept."""


class Expected(NamedTuple):
    """What continuations come to, of one completion."""

    cuts: float = 0.0
    each: int = 0
    """Continuations from a cut."""
    length: float = 0.0
    """Tokens of a continuation, mean."""

    @property
    def tokens(self) -> float:
        """Of all of them."""
        return self.cuts * self.each * self.length


def cutting_of(algorithm: Algorithm) -> dict[str, Any] | None:
    """How an estimator by segments has completions cut; None for any other."""
    if "segments" not in algorithm.needs:
        return None
    return {**setting_defaults(segment_difference), **algorithm.advantage.all_settings}


def expected(algorithm: Algorithm, limit: int, length: float) -> Expected:
    """Of completions of ``length`` tokens, if what follows a cut is as long as what was there.

    Where text decides, as many cuts as there may be, spread over the completion.
    """
    settings = cutting_of(algorithm)
    if settings is None or length <= 1:
        return Expected()
    most, each = settings["most"], settings["continuations"]
    if settings["split_by"] == "tokens":
        size = part_size(limit, most)
        left = [length - end for end in range(size, math.ceil(length), size)]
        return Expected(len(left), each, sum(left) / max(len(left), 1))
    return Expected(min(most - 1, length - 1), each, length / 2)


class PrefixSampler:
    """A sampler whose completions start with a given beginning: it samples the rest."""

    def __init__(self, sampler: Sampler, begun: Mapping[int, tuple[Completion, int]], decode: Decode) -> None:
        """``begun``: first stream of a request -> the completion it goes on with, its last token kept."""
        self.sampler, self.begun, self.decode = sampler, begun, decode
        self.version, self.shares, self.bit_exact = sampler.version, sampler.shares, sampler.bit_exact

    def sync(self, weights: Weights) -> None:
        """As the sampler."""
        self.sampler.sync(weights)

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[Sampled]:
        """Yield whole completions as their ends are sampled."""
        for request, sample, tail in self.sampler.sample(requests, params):
            whole, end = self.begun[requests[request].streams[0]]
            tokens = np.concatenate([whole.tokens[: end + 1], tail.tokens])
            logprobs = np.concatenate([whole.logprobs[: end + 1], tail.logprobs])
            text = self.decode(tokens.tolist())
            yield Sampled(request, sample, Completion(tokens, logprobs, text, tail.finish, tail.version))


def with_segments(
    groups: Sequence[Group],
    settings: Mapping[str, Any],
    sampler: Sampler,
    params: SamplingParams,
    decode: Decode,
    stream: Callable[[Cut, int], int],
    score: ScoreAll,
) -> list[Group]:
    """Groups with the value after each segment but the last of every completion.

    ``settings`` are those of ``credit.segment_difference``; ``stream`` gives the key of a continuation by
    cut and number. A cut whose continuations nobody could judge is left out.
    """
    cuts = [
        Cut(g, s, end)
        for g, group in enumerate(groups)
        for s, completion in enumerate(group.completions)
        if group.scorable[s]
        for end in cut_places(completion, settings["split_by"], settings["most"], params.max_tokens, decode)
    ]
    together: dict[int, list[Cut]] = defaultdict(list)
    for cut in cuts:
        together[(params.max_tokens - cut.end - 1) * BANDS // params.max_tokens].append(cut)
    found: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    tokens = [0] * len(groups)
    for band in sorted(together, reverse=True):
        alike, problems, requests, begun = together[band], [], [], {}
        for cut in alike:
            group, whole = groups[cut.group], groups[cut.group].completions[cut.sample]
            prompt = np.concatenate([group.prompt, whole.tokens[: cut.end + 1]])
            streams = [stream(cut, n) for n in range(settings["continuations"])]
            problems.append(Prompted(group.problem, prompt))
            requests.append(problems[-1].request(streams))
            begun[streams[0]] = (whole, cut.end)
        limit = replace(params, max_tokens=params.max_tokens - 1 - max(cut.end for cut in alike))
        judged = score(problems, requests, PrefixSampler(sampler, begun, decode), limit)
        for cut, group in zip(alike, judged, strict=True):
            tokens[cut.group] += sum(len(c.tokens) - cut.end - 1 for c in group.completions)
            if group.scorable.any():
                value = float(group.rewards[group.scorable].mean())
                found[cut.group, cut.sample][cut.end] = value
    return [
        replace(
            group,
            segments=tuple(_segments(found[g, s]) for s in range(len(group.completions))),
            continued=tokens[g],
        )
        for g, group in enumerate(groups)
    ]


def part_size(limit: int, most: int) -> int:
    """Tokens of a segment where all are equal."""
    return max(-(-limit // most), 1)


def _segments(values: Mapping[int, float]) -> StepRewards:
    ends = sorted(values)
    return StepRewards([values[end] for end in ends], ends)


def cut_places(
    completion: Completion, split_by: Segments, most: int, limit: int, decode: Decode
) -> list[int]:
    """The last tokens of a completion's segments, its own last token excepted; at most ``most`` segments."""
    length = len(completion.tokens)
    if split_by == "tokens":
        size = part_size(limit, most)
        return list(range(size - 1, length - 1, size))
    if split_by == "unlikely":
        rare = np.argsort(completion.logprobs[1:], kind="stable")[: most - 1]
        return sorted(int(place) for place in rare)  # the token after the cut is the rare one
    spans = split(completion.text, split_by)
    ends = token_ends(completion.tokens.tolist(), decode)
    places = sorted({b - 1 for a, b in token_spans(spans, ends) if b > a and b < length})
    if len(places) < most:
        return places
    return [places[i] for i in np.linspace(0, len(places), most, endpoint=False)[1:].astype(int)]

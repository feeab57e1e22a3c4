"""Values of segments: continuations are sampled from places within completions and scored.

The value of a prefix is the mean reward of completions that continue it (VinePPO, SPO), under the policy
that sampled it. Continuations are never trained on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from covey.objective.algorithms import Algorithm
from covey.objective.axis_function import setting_defaults
from covey.objective.credit import Segments, segment_difference
from covey.rewards.ends import token_ends
from covey.sampling.base import Request, SampledCompletion, Sampler, SamplingParams, Weights
from covey.sampling.stops import ended_at_stop
from covey.types import Completion, Group
from covey_verify.mathematics.steps import split, token_spans
from covey_verify.types import StepRewards

BANDS = 8
"""Number of token limits: continuations with about as many tokens left are sampled under one of them."""
Decode: TypeAlias = Callable[[Sequence[int]], str]
ScoreAll: TypeAlias = Callable[[Sequence[Request], Sampler, SamplingParams], list[Group]]
"""Samples requests and scores the completions, on any number of processes."""


@dataclass(frozen=True)
class Cut:
    """A place in a completion from which continuations are sampled."""

    group: int
    sample: int
    end: int
    """The last token that is kept."""


class SegmentSettings(NamedTuple):
    """The settings of ``credit.segment_difference``, which are read where continuations are sampled."""

    continuations: int
    split_by: Segments
    most: int

    @classmethod
    def of(cls, algorithm: Algorithm) -> SegmentSettings | None:
        """Return those of an algorithm's estimator; None if it does not split completions."""
        if "segments" not in algorithm.needs:
            return None
        values = {**setting_defaults(segment_difference), **algorithm.advantage.all_settings}
        return cls(*(values[name] for name in cls._fields))


class Continuations(NamedTuple):
    """The expected continuations of one completion."""

    cuts: float = 0.0
    per_cut: int = 0
    """Continuations from each cut."""
    length: float = 0.0
    """Mean tokens of a continuation."""

    @property
    def tokens(self) -> float:
        """Tokens of all continuations of a completion."""
        return self.cuts * self.per_cut * self.length


def expected_continuations(algorithm: Algorithm, limit: int, length: float) -> Continuations:
    """Estimate the continuations of completions of ``length`` tokens, if they are as long as the originals.

    Segments by text are counted as the most there may be, spread evenly over the completion.
    """
    settings = SegmentSettings.of(algorithm)
    if settings is None or length <= 1:
        return Continuations()
    count = settings.continuations
    if settings.split_by == "tokens":
        size = part_size(limit, settings.most)
        lengths = [length - end for end in range(size, math.ceil(length), size)]
        return Continuations(len(lengths), count, sum(lengths) / max(len(lengths), 1))
    return Continuations(min(settings.most - 1, length - 1), count, length / 2)


class PrefixSampler:
    """A sampler that continues given prefixes and yields whole completions."""

    def __init__(
        self, sampler: Sampler, prefixes: Mapping[int, tuple[Completion, int]], decode: Decode
    ) -> None:
        """``prefixes``: first stream of a request -> (the completion that it continues, its last token)."""
        self.sampler = sampler
        self.prefixes = prefixes
        self.decode = decode
        self.version = sampler.version
        self.samples_on_every_rank = sampler.samples_on_every_rank
        self.bit_exact = sampler.bit_exact

    def sync(self, weights: Weights) -> None:
        """Sync the wrapped sampler."""
        self.sampler.sync(weights)

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[SampledCompletion]:
        """Yield whole completions as their continuations end."""
        for request, sample, tail in self.sampler.sample(requests, params):
            # Streams are unique, so the first one identifies the request in any order.
            whole, end = self.prefixes[requests[request].streams[0]]
            tokens = np.concatenate([whole.tokens[: end + 1], tail.tokens])
            logprobs = np.concatenate([whole.logprobs[: end + 1], tail.logprobs])
            completion = Completion(tokens, logprobs, self.decode(tokens.tolist()), tail.finish)
            # A stop string may begin in the prefix and end in the continuation.
            completion = ended_at_stop(completion, end + 1, params.stop, self.decode, self.decode)
            yield SampledCompletion(request, sample, completion)


def with_segments(
    groups: Sequence[Group],
    settings: SegmentSettings,
    sampler: Sampler,
    params: SamplingParams,
    decode: Decode,
    stream: Callable[[Cut, int], int],
    score: ScoreAll,
) -> tuple[list[Group], int]:
    """Return groups with the value after each segment but the last of every completion, and the number of
    tokens sampled in continuations.

    ``stream`` gives the key of a continuation by place and number. Places whose continuations could not be
    judged are left out.
    """
    # (group, sample) -> last token of a segment -> value after it.
    values: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    tokens = 0
    for cuts in _bands(groups, settings, params, decode):
        streams = [[stream(cut, n) for n in range(settings.continuations)] for cut in cuts]
        requests = [_request(groups[c.group], c, keys) for c, keys in zip(cuts, streams, strict=True)]
        prefixes = {
            keys[0]: (groups[cut.group].completions[cut.sample], cut.end)
            for cut, keys in zip(cuts, streams, strict=True)
        }
        # One limit for the band, at its latest place: no whole completion exceeds max_tokens.
        limit = replace(params, max_tokens=params.max_tokens - 1 - max(cut.end for cut in cuts))
        continued = score(requests, PrefixSampler(sampler, prefixes, decode), limit)
        for cut, group in zip(cuts, continued, strict=True):
            # Without the kept prefix, which was not sampled again.
            tokens += sum(len(c.tokens) - cut.end - 1 for c in group.completions)
            if group.scorable.any():
                values[cut.group, cut.sample][cut.end] = float(group.rewards[group.scorable].mean())
    return [_with_values(group, number, values) for number, group in enumerate(groups)], tokens


def _with_values(group: Group, number: int, values: Mapping[tuple[int, int], Mapping[int, float]]) -> Group:
    """Return a group with the values after the segments of its completions."""
    segments = tuple(_segments(values.get((number, s), {})) for s in range(len(group.completions)))
    return replace(group, baselines=replace(group.baselines, segments=segments))


def _request(group: Group, cut: Cut, streams: Sequence[int]) -> Request:
    """Return a request for continuations of a completion from a place in it."""
    tokens = group.completions[cut.sample].tokens[: cut.end + 1]
    return Request(np.concatenate([group.prompt, tokens]), streams, problem=group.problem)


def _bands(
    groups: Sequence[Group], settings: SegmentSettings, params: SamplingParams, decode: Decode
) -> Iterator[list[Cut]]:
    """Yield all places to continue from, those with about as many tokens left together.

    Longest limits come first, in an order that is the same on all processes.
    """
    limit = params.max_tokens
    bands: dict[int, list[Cut]] = defaultdict(list)
    for g, group in enumerate(groups):
        for s, completion in enumerate(group.completions):
            if group.scorable[s]:
                for end in cut_places(completion, settings.split_by, settings.most, limit, decode):
                    # The band is the fraction of tokens left, in eighths.
                    bands[(limit - end - 1) * BANDS // limit].append(Cut(g, s, end))
    for band in sorted(bands, reverse=True):
        yield bands[band]


def part_size(limit: int, most: int) -> int:
    """Return the tokens of a segment if all are equal."""
    return max(-(-limit // most), 1)


def _segments(values: Mapping[int, float]) -> StepRewards:
    ends = sorted(values)
    return StepRewards([values[end] for end in ends], ends)


def cut_places(
    completion: Completion, split_by: Segments, most: int, limit: int, decode: Decode
) -> list[int]:
    """Return the last token of each segment but the final one; at most ``most`` segments."""
    length = len(completion.tokens)
    if split_by == "tokens":
        size = part_size(limit, most)
        return list(range(size - 1, length - 1, size))
    if split_by == "unlikely":
        # Position p of [1:] is token p + 1: p is the last token before it.
        rare = np.argsort(completion.logprobs[1:], kind="stable")[: most - 1]
        return sorted(int(place) for place in rare)  # a segment ends before a rare token
    spans = split(completion.text, split_by)
    ends = token_ends(completion.tokens.tolist(), decode)
    # Spans are [a, b) in tokens; empty ones and the one that ends the completion set no place.
    places = sorted({b - 1 for a, b in token_spans(spans, ends) if b > a and b < length})
    if len(places) < most:
        return places
    # Too many: ``most`` - 1 of them, evenly spread.
    return [places[i] for i in np.linspace(0, len(places), most, endpoint=False)[1:].astype(int)]

"""A sampler of several turns: what tools say to a turn is inserted, and the completion continues.

A turn that ends with calls is answered while others are still being sampled. Once all turns of a round have
ended, those that were answered continue from their tokens, each with its own random stream. Inserted tokens
are read and never trained (``Completion.sampled``). Where there is an environment, each completion has an
object of its own from its first call on, and ends with what that has become.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from covey.calling.calls import ToolCall, calls_in
from covey.calling.environments import Episode
from covey.calling.forms import reader_of
from covey.calling.inserted import answer_tokens, plain_result
from covey.calling.running import Toolbox
from covey.models.policy import Policy
from covey.rewards.structured import CLOSE_CALL
from covey.rewards.threads import Call
from covey.sampling.base import Request, Sampled, Sampler, SamplingParams, Weights
from covey.sampling.local import Owner
from covey.types import NO_PROBLEM, Completion, SamplingMask


class Called(NamedTuple):
    """A completion whose last turn ended with calls, and what will be said to them."""

    owner: Owner
    begun: Completion
    calls: Sequence[ToolCall]
    results: Sequence[Call[str]]


class TurnSampler:
    """``covey.sampling.base.Sampler``, around another that samples the turns."""

    def __init__(self, sampler: Sampler, policy: Policy, toolbox: Toolbox) -> None:
        self.sampler, self.policy, self.toolbox = sampler, policy, toolbox
        self.read = reader_of(policy, toolbox.schemas)

    @property
    def version(self) -> int:
        """Of the weights that are sampled from."""
        return self.sampler.version

    @property
    def shares(self) -> bool:
        """As the other."""
        return self.sampler.shares

    @property
    def bit_exact(self) -> bool:
        """As the other: a turn continues the very tokens that are trained on."""
        return self.sampler.bit_exact

    def sync(self, weights: Weights) -> None:
        """As the other."""
        self.sampler.sync(weights)

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[Sampled]:
        """Yield completions as their last turn ends. Inserted tokens count for ``params.max_tokens``."""
        episodes = {
            (r, s): self.toolbox.episode(request.problem, stream)
            for r, request in enumerate(requests)
            for s, stream in enumerate(request.streams)
        }
        finished = self._in_rounds(requests, params, episodes)
        if self.toolbox.environment is None:
            yield from finished
            return
        begun = {owner: episode for owner, episode in episodes.items() if episode is not None}
        try:
            yield from _as_they_ended(finished, begun)
        finally:
            for episode in begun.values():
                episode.close()

    def _in_rounds(
        self, requests: Sequence[Request], params: SamplingParams, episodes: Mapping[Owner, Episode | None]
    ) -> Iterator[Sampled]:
        assert all(r.problem is not NO_PROBLEM for r in requests), (
            "a chat is answered as one, a text as a text"
        )
        asked = list(requests)
        owners = [[(r, s) for s in range(len(request.streams))] for r, request in enumerate(requests)]
        begun: dict[Owner, Completion] = {}
        tools = self.toolbox.tools
        rounds = tools.max_calls
        while asked:
            called: list[Called] = []
            for place, sample, turn in self._turns(asked, params):
                owner = owners[place][sample]
                calls = self._calls(asked[place], turn) if turn.finish == "stop" and rounds else []
                said, before = _said("assistant", turn.text), begun.get(owner)
                whole = turn if before is None else before.then(replace(turn, turns=(said,)))
                if calls:
                    problem = requests[owner[0]].problem
                    results = [self.toolbox.begin(call, problem, episodes[owner]) for call in calls]
                    called.append(Called(owner, whole, calls, results))
                else:
                    yield Sampled(*owner, whole)
            asked, owners, rounds = [], [], rounds - 1
            for one in called:
                whole = self._answered(requests[one.owner[0]], one)
                room = params.max_tokens - len(whole.tokens)
                if room < 1:
                    yield Sampled(*one.owner, replace(one.begun, finish="length"))
                    continue
                begun[one.owner] = whole
                asked.append(_continued(requests[one.owner[0]], one.owner[1], whole, room))
                owners.append([one.owner])

    def _calls(self, asked: Request, turn: Completion) -> list[ToolCall]:
        return self.read(turn.tokens, asked.prompt) if asked.problem.chat else calls_in(turn.text)

    def _turns(self, asked: Sequence[Request], params: SamplingParams) -> Iterator[Sampled]:
        """The next turn of each. In plain text a call's end ends it, in a chat the model has to."""
        in_text = replace(params, stop=(*params.stop, CLOSE_CALL))
        for kind, chat in ((params, True), (in_text, False)):
            places = [n for n, request in enumerate(asked) if request.problem.chat is chat]
            for sampled in self.sampler.sample([asked[n] for n in places], kind) if places else ():
                yield sampled._replace(request=places[sampled.request])

    def _answered(self, request: Request, called: Called) -> Completion:
        """A completion with the results of its calls. Raises CoveyError where one could not be tried."""
        tools, begun = self.toolbox.tools, called.begun
        results = [plain_result(self.policy, r.result(), tools.result_tokens) for r in called.results]
        closed = int(begun.tokens[-1]) in self.policy.end_ids
        ids = answer_tokens(self.policy, request.problem, called.calls, results, closed)
        tokens, nothing = np.array(ids, np.int64), np.zeros(len(ids), np.float32)
        inserted = Completion(
            tokens,
            nothing,
            "",
            "stop",
            begun.version,
            SamplingMask.of(list(tokens[:, None])) if begun.sampling_mask is not None else None,
            sampled=nothing > 0,
            versions=None if begun.versions is None else np.full(len(ids), begun.versions[-1]),
            turns=tuple(_said("tool", result) for result in results),
        )
        first = begun if begun.turns else replace(begun, turns=(_said("assistant", begun.text),))
        return first.then(inserted)


def _as_they_ended(finished: Iterator[Sampled], episodes: Mapping[Owner, Episode]) -> Iterator[Sampled]:
    """Completions with what their environments have become, which is asked for while others are sampled."""
    ending: deque[tuple[Sampled, Call[dict[str, object] | None]]] = deque()
    for one in finished:
        episode = episodes[one.request, one.sample]
        ending.append((one, episode.submit(episode.end)))
        while ending and ending[0][1].future.done():
            yield _ended(*ending.popleft())
    yield from (_ended(*pair) for pair in ending)


def _ended(sampled: Sampled, state: Call[dict[str, object] | None]) -> Sampled:
    return sampled._replace(completion=replace(sampled.completion, environment=state.result()))


def _said(role: str, text: str) -> Mapping[str, str]:
    return {"role": role, "content": text}


def _continued(request: Request, sample: int, whole: Completion, room: int) -> Request:
    """The request for what follows a completion that has begun: its draws continue where they were."""
    return replace(
        request,
        prompt=np.concatenate([request.prompt, whole.tokens]),
        streams=[request.streams[sample]],
        begun=request.begun + len(whole.tokens),
        room=room,
    )


def innermost(sampler: Sampler) -> Sampler:
    """The sampler of turns, where there are any."""
    return sampler.sampler if isinstance(sampler, TurnSampler) else sampler

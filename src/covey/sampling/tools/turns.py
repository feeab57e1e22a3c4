"""The sampler of several turns: the results of a turn's calls are inserted, and the completion continues.

A turn that ends with calls is answered while others are still being sampled. Once all turns of a round have
ended, the answered turns continue from their tokens, each with its own random stream. Inserted tokens
are read and never trained (``Completion.drawn_mask``). With an environment, each completion has an object of
its own from its first call on, and ends with that object's final state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import NamedTuple

import numpy as np

from covey.models.policy import Policy
from covey.sampling.base import Request, SampledCompletion, Sampler, SamplingParams, Weights
from covey.sampling.local import Owner
from covey.sampling.stops import ended_at_stop
from covey.sampling.tools.allowance import Allowance, WaitingTime
from covey.sampling.tools.environments import Episode, FinalState
from covey.sampling.tools.inserted import answer_tokens, plain_result, result_words
from covey.sampling.tools.reader import calls_in_text, turn_reader
from covey.sampling.tools.running import Toolbox
from covey.types import NO_PROBLEM, Completion, SamplingMask, Transcript
from covey_verify.calls.call import UNENDED, ToolCall, as_message
from covey_verify.calls.forms import CLOSE_CALL
from covey_verify.threads import Call

MAX_ADDED = 8
"""Largest number of times that a turn is continued because `</tool_call>` ended it inside an argument."""


@dataclass
class Dialogue:
    """A completion over its turns."""

    owner: Owner
    request: Request
    """The request of its group."""
    episode: Episode | None
    """The environment of this completion, if there is one."""
    allowance: Allowance
    """The seconds that its calls may take."""
    answered: Completion | None = None
    """The completion up to the results of its last calls."""
    parts: list[Completion] = field(default_factory=list)
    """Parts of the current turn."""

    def with_turn(self, turn: Completion) -> Completion:
        """Return the completion up to the end of a turn."""
        return turn if self.answered is None else self.answered.then(turn)

    def request_rest(self, completion: Completion, params: SamplingParams) -> Request:
        """Return the request for the rest after ``completion``, drawn with the next numbers of its stream."""
        request = self.request
        _, sample = self.owner
        length = len(completion.tokens)
        return replace(
            request,
            prompt=np.concatenate([request.prompt, completion.tokens]),
            streams=[request.streams[sample]],
            prefix_tokens=request.prefix_tokens + length,
            max_tokens=params.max_tokens - length,
        )


class TurnRequest(NamedTuple):
    """A request for a next turn: the first of a whole group, later ones of single completions.

    After the first turn the completions of a group have different tokens.
    """

    request: Request
    dialogues: Sequence[Dialogue]


class ToolTurn(NamedTuple):
    """A completion whose last turn ended with calls, and a function that waits for their results."""

    dialogue: Dialogue
    completion: Completion
    calls: Sequence[ToolCall]
    results: Callable[[], list[str]]


class TurnSampler:
    """``covey.sampling.base.Sampler``, around another that samples the turns."""

    def __init__(self, sampler: Sampler, policy: Policy, toolbox: Toolbox) -> None:
        self.sampler = sampler
        self.policy = policy
        self.toolbox = toolbox
        self.read = turn_reader(policy, toolbox.schemas)
        self.words = result_words(policy)
        self.waited = 0.0
        """Seconds spent waiting for tools while nothing was sampled."""

    @property
    def version(self) -> int:
        """Version of the weights that are sampled from."""
        return self.sampler.version

    @property
    def samples_on_every_rank(self) -> bool:
        """Whether each process samples some of the requests; it depends on the inner sampler."""
        return self.sampler.samples_on_every_rank

    @property
    def bit_exact(self) -> bool:
        """Whether the inner sampler is bit-exact: a turn continues the very tokens that are trained on."""
        return self.sampler.bit_exact

    def sync(self, weights: Weights) -> None:
        """Let the inner sampler follow these weights."""
        self.sampler.sync(weights)

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[SampledCompletion]:
        """Yield completions as their last turn ends. Inserted tokens count for ``params.max_tokens``."""
        assert all(request.problem is not NO_PROBLEM for request in requests), (
            "a chat is answered as one, a text as a text"
        )
        waiting = self.toolbox.time_limit()
        groups = [
            TurnRequest(request, self._dialogues(number, request, waiting))
            for number, request in enumerate(requests)
        ]
        finished = self._in_rounds(groups, params, waiting)
        # No environment's process runs yet: it starts with the first call, or at the end for its state.
        dialogues = [dialogue for group in groups for dialogue in group.dialogues]
        episodes = {d.owner: d.episode for d in dialogues if d.episode is not None}
        try:
            if self.toolbox.environment is None:
                yield from finished
            else:
                yield from _as_they_ended(finished, episodes, waiting)
        finally:
            self.waited += waiting.waited
            for episode in episodes.values():
                episode.close()

    def _dialogues(self, number: int, request: Request, waiting: WaitingTime) -> list[Dialogue]:
        """Return the completions of a request before their first turn."""
        toolbox = self.toolbox
        return [
            Dialogue(
                (number, sample),
                request,
                toolbox.episode(request.problem, stream),
                toolbox.allowance(waiting),
            )
            for sample, stream in enumerate(request.streams)
        ]

    def _in_rounds(
        self, turn_requests: Sequence[TurnRequest], params: SamplingParams, waiting: WaitingTime
    ) -> Iterator[SampledCompletion]:
        """Yield completions as they end: each round samples a turn of all that have not ended."""
        while turn_requests:
            # Calls run while other turns are sampled; their results are waited for at the end of the round.
            tool_turns = list[ToolTurn]()
            continued = list[tuple[Dialogue, Completion]]()
            for number, sample, part in self._turns([turn.request for turn in turn_requests], params):
                request, dialogues = turn_requests[number]
                dialogue = dialogues[sample]
                dialogue.parts.append(part)
                turn = self._join_parts(dialogue.parts, params)
                # A stop string inside an argument has ended it: the same turn continues in the next round.
                if self._continues(dialogue, turn, params):
                    continued.append((dialogue, dialogue.with_turn(turn)))
                    continue
                ended = self._end_turn(request, dialogue, turn)
                if isinstance(ended, ToolTurn):
                    tool_turns.append(ended)
                else:
                    yield SampledCompletion(*dialogue.owner, ended)
            for tool_turn in tool_turns:
                dialogue = tool_turn.dialogue
                completion = self._add_results(tool_turn, waiting)
                if len(completion.tokens) < params.max_tokens:
                    dialogue.answered = completion
                    continued.append((dialogue, completion))
                else:
                    # There is no room for another turn, so the completion ends before these results.
                    yield SampledCompletion(*dialogue.owner, replace(tool_turn.completion, finish="length"))
            turn_requests = [
                TurnRequest(dialogue.request_rest(completion, params), [dialogue])
                for dialogue, completion in continued
            ]

    def _end_turn(self, request: Request, dialogue: Dialogue, turn: Completion) -> Completion | ToolTurn:
        """Start the calls of a turn that has ended; return the completion itself if there are none."""
        dialogue.parts = []
        calls = self._calls(request, turn, dialogue.answered)
        # The first turn gets its message only if a tool answers it.
        completion = turn if dialogue.answered is None else dialogue.with_turn(_as_turn(turn, calls))
        if not calls:
            return completion
        results = self.toolbox.begin(calls, request.problem, dialogue.episode, dialogue.allowance)
        return ToolTurn(dialogue, completion, calls, results)

    def _join_parts(self, parts: Sequence[Completion], params: SamplingParams) -> Completion:
        """Join the parts of a turn; there are several if its stop string was inside an argument.

        A stop string of the user's that begins in one part and ends in the next ends the turn too.
        """
        if len(parts) == 1:
            return parts[0]
        turn = reduce(Completion.then, parts)
        decode = self.policy.decode
        turn = replace(turn, text=decode(turn.tokens.tolist()))
        first = len(turn.tokens) - len(parts[-1].tokens)
        return ended_at_stop(turn, first, params.stop, decode.text_with_specials, decode)

    def _continues(self, dialogue: Dialogue, turn: Completion, params: SamplingParams) -> bool:
        """Whether a turn was ended by a stop string inside a call's text, and has room to continue."""
        answered = dialogue.answered
        length = len(turn.tokens) + (0 if answered is None else len(answered.tokens))
        if len(dialogue.parts) > MAX_ADDED or length >= params.max_tokens or dialogue.request.problem.chat:
            return False
        if turn.finish != "stop" or int(turn.tokens[-1]) in self.policy.end_ids:
            return False
        text = self.policy.decode.text_with_specials(turn.tokens.tolist())
        if any(stop in text for stop in params.stop):
            return False
        calls = calls_in_text(turn.text + CLOSE_CALL)
        return bool(calls) and calls[-1].wrong == UNENDED

    def _calls(self, request: Request, turn: Completion, answered: Completion | None) -> Sequence[ToolCall]:
        """Return a turn's calls; none if it was truncated, or no more turns may be answered."""
        tools = self.toolbox.tools
        answer_count = 0 if answered is None else sum(not sampled for sampled, _ in answered.parts)
        if turn.finish != "stop" or answer_count >= tools.max_calls:
            return []
        if not request.problem.chat:
            return calls_in_text(turn.text)
        # The problem says only of the first turn whether it begins with open thoughts.
        opens_thoughts = request.problem.thoughts.begun if answered is None else None
        return self.read(turn.tokens, request.prompt, opens_thoughts)

    def _turns(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[SampledCompletion]:
        """Sample the next turn of each. In plain text a call's end is a stop string, in chats it is not."""
        text_params = replace(params, stop=(*params.stop, CLOSE_CALL))
        # Two passes, since a pass has one set of stop strings.
        for pass_params, chat in ((params, True), (text_params, False)):
            numbers = [n for n, request in enumerate(requests) if request.problem.chat is chat]
            if not numbers:
                continue
            for sampled in self.sampler.sample([requests[n] for n in numbers], pass_params):
                yield sampled._replace(request=numbers[sampled.request])

    def _add_results(self, tool_turn: ToolTurn, waiting: WaitingTime) -> Completion:
        """Return a completion with the results of its calls. Raises CoveyError if one could not be tried."""
        limit = self.toolbox.tools.result_tokens
        completion = tool_turn.completion
        with waiting():
            texts = tool_turn.results()
        results = [plain_result(self.policy, self.words, text, limit) for text in texts]
        closed = int(completion.tokens[-1]) in self.policy.end_ids
        problem = tool_turn.dialogue.request.problem
        ids = answer_tokens(self.policy, problem, tool_turn.calls, results, closed)
        tokens = np.array(ids, np.int64)
        zeros = np.zeros(len(ids), np.float32)
        # Inserted tokens have log-prob 0, the last version, and a mask in which each was the only choice.
        # ``drawn_mask`` is False on all of them (no zero is above 0).
        versions = completion.provenance.versions
        if versions is not None:
            versions = np.full(len(ids), versions[-1])
        mask = completion.sampling_mask
        if mask is not None:
            mask = SamplingMask.of(list(tokens[:, None]))
        inserted = Completion(
            tokens,
            zeros,
            "",
            "stop",
            replace(completion.provenance, versions=versions),
            drawn_mask=zeros > 0,
            sampling_mask=mask,
            transcript=Transcript(tuple(_message("tool", result) for result in results)),
        )
        if not completion.transcript.turns:
            completion = _as_turn(completion, tool_turn.calls)
        return completion.then(inserted)


def _as_turn(turn: Completion, calls: Sequence[ToolCall]) -> Completion:
    """Return a turn with a transcript: one message, with its calls."""
    message: dict[str, object] = {**_message("assistant", turn.text)}
    if calls:
        message["tool_calls"] = list(map(as_message, calls))
    return replace(turn, transcript=Transcript((message,)))


def _as_they_ended(
    finished: Iterator[SampledCompletion], episodes: Mapping[Owner, Episode], waiting: WaitingTime
) -> Iterator[SampledCompletion]:
    """Yield completions with the final state of their environments, asked for while others are sampled."""
    pending: deque[tuple[SampledCompletion, Call[FinalState]]] = deque()
    for sampled in finished:
        episode = episodes[sampled.request, sampled.sample]
        pending.append((sampled, episode.submit(partial(episode.end, waiting))))
        # In the order in which completions ended; one whose state is late holds up those after it.
        while pending and pending[0][1].future.done():
            yield _with_end(*pending.popleft())
    for sampled, call in pending:
        with waiting():
            call.result()
        yield _with_end(sampled, call)


def _with_end(sampled: SampledCompletion, call: Call[FinalState]) -> SampledCompletion:
    end = call.result()
    completion = sampled.completion
    transcript = replace(completion.transcript, environment=end.state, fault=end.fault)
    return sampled._replace(completion=replace(completion, transcript=transcript))


def seconds_waited(sampler: Sampler) -> float:
    """Return the seconds that a sampler has spent waiting for tools."""
    return sampler.waited if isinstance(sampler, TurnSampler) else 0.0


def _message(role: str, text: str) -> Mapping[str, str]:
    return {"role": role, "content": text}


def innermost(sampler: Sampler) -> Sampler:
    """Return the sampler that draws tokens, without the one of turns around it."""
    return sampler.sampler if isinstance(sampler, TurnSampler) else sampler

"""Problems as the model reads them: prompts and given answers as tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from covey.config.schema import Config
from covey.models.chat import (
    assistant_spans,
    chat_text,
    encoded_apart,
    leaves_out,
    spelled_out,
    without_seams,
)
from covey.models.policy import Policy
from covey.models.template import template_facts, thoughts_of
from covey.models.thoughts import check_channels, pairs_fault, text_after_prompt
from covey.sampling.base import Request
from covey.tasks.examples import UNTRAINED, AnswerText, Example
from covey.tasks.sampled import REMEDY
from covey.tasks.source import Source
from covey.types import Problem
from covey_verify.errors import ConfigError, DataError
from covey_verify.types import Messages

Read = TypeVar("Read")
THOUGHTS = ("reasoning_content", "thinking")
"""Keys of a message that may hold its thoughts, apart from its content."""


class GivenAnswer(NamedTuple):
    """An answer from the data, as tokens."""

    tokens: np.ndarray
    """(L,) int64, end of sequence included."""
    trained: np.ndarray
    """(L,) bool: the tokens that the model itself has to write, not tokens of tools and users in between."""
    judgements: np.ndarray | None = None
    """(L,) float32: 1 or -1 where a token is judged, for example by labelled steps; None if no token is."""


@dataclass(frozen=True)
class EncodedProblem:
    """A problem and its prompt as the model reads it; given answers to it as the model would write them."""

    problem: Problem
    tokens: np.ndarray
    """(P,) int64."""
    answers: tuple[GivenAnswer, ...] = ()
    labels: tuple[float, ...] = ()
    """Label of each answer: 1 imitated, chosen, good; 0 rejected, bad."""

    def request(self, streams: Sequence[int]) -> Request:
        """Return a request for one completion per key."""
        return Request(self.tokens, streams, problem=self.problem)


def texts_of(source: Source, config: Config) -> Iterable[str]:
    """Yield the texts that the tokenizer of `tiny` learns from: prompts and worked answers."""
    for problem in source.train:
        yield _plain(problem.prompt)
        yield str(problem.columns.get(config.data.completion, ""))
    for example in source.examples:
        yield from map(_plain, (example.problem.prompt, *example.answers))


def _plain(text: AnswerText) -> str:
    """Return a text with all that a tokenizer meets in it: contents as a template writes them, and calls."""
    if isinstance(text, str):
        return text
    parts = list[str]()
    for message in text:
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        parts.append(f"{message['content']}{calls}")
    return " ".join(parts)


def prompt_ids(policy: Policy, problem: Problem) -> Sequence[int]:
    """Return the ids of a prompt: the recorded ones if there are any, else its text's. Raises DataError."""
    if problem.sampled_tokens is not None:
        # Completions of an earlier stage are kept as tokens, which mean nothing to another tokenizer.
        if problem.sampled_tokens.tokenizer != policy.vocabulary_hash:
            raise DataError(
                f"{problem.id}: its tokens come from tokenizer {problem.sampled_tokens.tokenizer[:8]}; this "
                f"model has {policy.vocabulary_hash[:8]}. Train the model that sampled them, or one with the "
                f"same tokenizer. {REMEDY}"
            )
        return problem.sampled_tokens.prompt
    return call_for(problem, lambda: policy.encode(problem.prompt, problem.template))


def call_for(problem: Problem, read: Callable[[], Read]) -> Read:
    """Call ``read``; if the chat template refuses the problem, the error names it."""
    try:
        return read()
    except DataError as error:
        raise DataError(f"{problem.id}: {error}") from None


def encode(policy: Policy, problems: Sequence[Problem], config: Config) -> list[EncodedProblem]:
    """Encode prompts. Those that leave no room for max_tokens are an error or left out."""
    # The longest prompt after which a completion of max_tokens still fits.
    room = policy.context - config.rollout.max_tokens
    encoded = _encode_problems(policy, problems)
    empty = [p for p in encoded if not len(p.tokens)]
    if empty:
        raise DataError(f"{empty[0].problem.id}: the prompt is empty")
    too_long = [p for p in encoded if len(p.tokens) > room]
    if too_long and config.data.long_prompts == "error":
        longest = max(too_long, key=lambda p: len(p.tokens))
        raise DataError(
            f"{len(too_long)} of {len(encoded)} prompts are too long: with rollout.max_tokens "
            f"{config.rollout.max_tokens} they exceed the model's context of {policy.context_in_words}; the "
            f"longest, {longest.problem.id}, has {len(longest.tokens)}. Lower rollout.max_tokens or set "
            "data.long_prompts: drop"
        )
    fitting = [p for p in encoded if len(p.tokens) <= room]
    if problems and not fitting:
        raise DataError("every prompt is too long for the model's context, so none is left")
    return fitting


def _encode_problems(policy: Policy, problems: Iterable[Problem]) -> list[EncodedProblem]:
    encoded = [_encode_problem(policy, problem) for problem in problems]
    check_vocabulary(policy, encoded)
    return encoded


def _encode_problem(policy: Policy, problem: Problem) -> EncodedProblem:
    tokens = np.array(prompt_ids(policy, problem), dtype=np.int64)
    thoughts = thoughts_of(policy.tokenizer, tokens.tolist(), problem.prompt, problem.template)
    return EncodedProblem(replace(problem, thoughts=thoughts), tokens)


def dropped_rows(rows: Sequence[object], fitting: Sequence[object]) -> list[str]:
    """Return a note on the rows that ``data.long_prompts: drop`` has left out, if there are any."""
    count = len(rows) - len(fitting)
    if count == 0:
        return []
    return [f"{count:,} of {len(rows):,} rows exceed the model's context and are dropped (data.long_prompts)"]


def encode_examples(policy: Policy, examples: Sequence[Example], config: Config) -> list[EncodedProblem]:
    """Encode examples. Those that are longer than the model's context are an error or left out."""
    encoded = []
    prompts = _encode_problems(policy, (example.problem for example in examples))
    for prompted, example in zip(prompts, examples, strict=True):
        answers = _answers(policy, prompted, example)
        if example.kind == "pair" and np.array_equal(answers[0].tokens, answers[1].tokens):
            raise DataError(
                f"{example.problem.id}: chosen and rejected have the same tokens, so there is no preference; "
                "remove this row"
            )
        encoded.append(replace(prompted, answers=answers, labels=example.labels))
    # Again: the first check saw prompts only.
    check_vocabulary(policy, encoded)
    sizes = [len(p.tokens) + max(len(a.tokens) for a in p.answers) for p in encoded]
    too_long = [n for n, size in enumerate(sizes) if size > policy.context]
    if too_long and config.data.long_prompts == "error":
        raise DataError(
            f"{len(too_long)} of {len(encoded)} examples exceed the model's context of "
            f"{policy.context_in_words}; {encoded[too_long[0]].problem.id} has {sizes[too_long[0]]}. "
            "Shorten them, or set data.long_prompts: drop"
        )
    fitting = [p for p, size in zip(encoded, sizes, strict=True) if size <= policy.context]
    if examples and not fitting:
        raise DataError("every example is too long for the model's context, so none is left")
    return fitting


def _answers(policy: Policy, prompted: EncodedProblem, example: Example) -> tuple[GivenAnswer, ...]:
    """Return an example's answers: answers that an earlier stage sampled are tokens, others are rendered."""
    if example.sampled_tokens:
        return tuple(
            GivenAnswer(np.array(a.ids, np.int64), np.array(a.drawn_mask)) for a in example.sampled_tokens
        )
    labelled = zip(example.answers, example.labels, strict=True)
    return tuple(_answer(policy, prompted, text, label > 0) for text, label in labelled)


def _answer(policy: Policy, prompted: EncodedProblem, answer: AnswerText, good: bool) -> GivenAnswer:
    """Return an answer as tokens, with its end: the chat template's where the prompt is a chat.

    The assistant's messages are trained; a text is one such message. Thoughts are opened and closed once.
    Only an answer that is not ``good`` may end within them, as a truncated one does.
    """
    problem = prompted.problem
    if isinstance(problem.prompt, str):
        assert isinstance(answer, str), "an answer in messages has a prompt in messages"
        words = spelled_out(_without_end_token(policy, problem, answer), ())
        ids = _encoded_without_template(policy, words, policy.end_id)
        return _check_thoughts(policy, prompted, ids, good)
    # ``bare_messages`` are ``messages`` without our marks and without end tokens.
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else list(answer)
    skipped = [n for n, message in enumerate(messages) if UNTRAINED in message]
    bare_messages = [_bare_message(policy, problem, message) for message in messages]
    check_channels(problem, bare_messages)
    _check_calls(policy, problem, bare_messages)
    rendered = _in_conversation(policy, prompted, bare_messages, skipped)
    # Only the template can write calls, thoughts under a key of their own, or several messages.
    needs_template = bool({"tool_calls", *THOUGHTS} & set(bare_messages[0])) or len(bare_messages) > 1
    if isinstance(rendered, DataError):
        if needs_template:
            raise rendered
    # A rendering may have a fault: some templates put an empty pair of marks before thoughts in the content.
    elif needs_template or _fault(policy, prompted, rendered, good) is None:
        return _check_thoughts(policy, prompted, rendered, good)
    # Templates of reasoning models, such as DeepSeek R1's, leave out thoughts of earlier answers. A single
    # message can be written without the template.
    words = text_after_prompt(policy.tokenizer, problem, str(bare_messages[0]["content"]))
    words = spelled_out(words, template_facts(policy.tokenizer, problem.template).controls)
    end = policy.end_id if policy.turn_end is None else policy.turn_end
    return _check_thoughts(policy, prompted, _encoded_without_template(policy, words, end), good)


def _bare_message(policy: Policy, problem: Problem, message: Mapping[str, object]) -> dict[str, object]:
    """Return a message without our mark UNTRAINED, and one of the assistant without an end token."""
    bare = {name: value for name, value in message.items() if name != UNTRAINED}
    if bare["role"] == "assistant":
        bare["content"] = _without_end_token(policy, problem, str(bare["content"]))
    return bare


def _in_conversation(
    policy: Policy, prompted: EncodedProblem, answer: list[dict[str, object]], skipped: Sequence[int]
) -> GivenAnswer | DataError:
    """Return the answer as the template renders it after the prompt, or why it cannot be located there.

    It can if the whole conversation begins with the prompt's tokens and shows all that the assistant says.
    """
    problem = prompted.problem
    messages = [*problem.prompt, *answer]
    text = call_for(problem, lambda: chat_text(policy.tokenizer, messages, problem.template, False))
    tokens = _conversation(policy, problem, messages, False)
    omitted = _left_out(without_seams(text), answer)
    if omitted is not None:
        return _not_shown(problem, omitted)
    start = len(prompted.tokens)
    if tokens[:start] != prompted.tokens.tolist():
        return _rerender_error(problem)
    return _as_rendered(policy, problem, tokens, start, answer, skipped)


def _check_thoughts(policy: Policy, prompted: EncodedProblem, answer: GivenAnswer, good: bool) -> GivenAnswer:
    """Return the answer if its turns open and close thoughts at most once each. Raises DataError."""
    fault = _fault(policy, prompted, answer, good)
    if fault:
        raise DataError(f"{prompted.problem.id}: {fault}")
    return answer


def _fault(policy: Policy, prompted: EncodedProblem, answer: GivenAnswer, good: bool) -> str | None:
    tokens = np.concatenate([prompted.tokens, answer.tokens])
    return pairs_fault(policy.tokenizer, prompted.problem, tokens, answer.trained, good)


def _encoded_without_template(policy: Policy, words: str, end: int) -> GivenAnswer:
    tokens = [*encoded_apart(policy.tokenizer, words, after_prompt=True), end]
    return GivenAnswer(np.array(tokens, dtype=np.int64), np.ones(len(tokens), dtype=bool))


def _without_end_token(policy: Policy, problem: Problem, answer: str) -> str:
    """Return an answer without its end token, which is added later. Raises DataError for one within it."""
    added = policy.tokenizer.added_tokens_decoder
    ends = [added[n].content for n in policy.end_ids if n in added and added[n].special]
    # White space may follow the end token in data that a template has rendered.
    stripped = answer.rstrip()
    answer = next((stripped.removesuffix(end) for end in ends if stripped.endswith(end)), answer)
    inner_ends = [end for end in ends if end in answer]
    if inner_ends:
        raise DataError(
            f"{problem.id}: the answer contains the end token {inner_ends[0]}, but a completion ends there, "
            "so the model could never sample the rest. Remove it; if this is a conversation, give its "
            "messages"
        )
    return answer


def _left_out(rendered: str, answer: Messages) -> str | None:
    """Return a text of the assistant that the template does not show, if any; white space is ignored."""
    rendered = "".join(rendered.split())
    for message in answer:
        if message["role"] != "assistant":
            continue
        for name in ("content", *THOUGHTS):
            text = message.get(name)
            if isinstance(text, str) and "".join(text.split()) not in rendered:
                return text
    return None


def _check_calls(policy: Policy, problem: Problem, answer: Messages) -> None:
    """Raise DataError if the assistant calls tools and the template does not show it."""
    if not any(m.get("tool_calls") for m in answer):
        return
    bare_answer = [{k: v for k, v in m.items() if k != "tool_calls"} for m in answer]
    assert not isinstance(problem.prompt, str), "only messages have calls"
    messages = [*problem.prompt, *answer]
    if leaves_out(policy.tokenizer, messages, problem.template, [*problem.prompt, *bare_answer]):
        raise DataError(
            f"{problem.id}: the chat template omits the assistant's tool_calls, so the model would learn "
            "answers without them. Use a template that shows them, or write the calls into the content"
        )


def _as_rendered(
    policy: Policy,
    problem: Problem,
    conversation: list[int],
    first: int,
    answer: Messages,
    skipped: Sequence[int],
) -> GivenAnswer:
    """Return the answer in a conversation's tokens; the assistant's messages are trained, each with its end.

    ``first``: index of its first token, after the prompt and the template's beginning of a turn.
    ``skipped``: numbers of messages that are not trained.
    """
    spans = assistant_spans(
        lambda messages, begin: _conversation(policy, problem, messages, begin),
        [*problem.prompt, *answer],
        len(problem.prompt),
        conversation,
        policy.end_ids,
    )
    if spans is None:
        raise _rerender_error(problem)
    last = spans[-1]
    tokens = [*conversation[: last.start], *_with_end(policy, conversation[last.start : last.stop])]
    trained = np.zeros(len(tokens), dtype=bool)
    for span in spans:
        stop = len(tokens) if span is last else span.stop
        trained[span.start : stop] = span.message - len(problem.prompt) not in skipped
    return GivenAnswer(np.array(tokens[first:], dtype=np.int64), trained[first:])


def _with_end(policy: Policy, tokens: list[int]) -> list[int]:
    """Return a last message with its end token; if the template writes none, the model's own is added."""
    if tokens and tokens[-1] in policy.end_ids:
        return tokens
    # White space that the template writes after the message is not the model's.
    while tokens and not policy.tokenizer.decode(tokens[-1:]).strip():
        tokens = tokens[:-1]
    return [*tokens, policy.end_id]


def _conversation(policy: Policy, problem: Problem, messages: Messages, begin: bool) -> list[int]:
    return call_for(problem, lambda: policy.conversation(messages, problem.template, begin))


def _not_shown(problem: Problem, omitted: str) -> DataError:
    return DataError(
        f"{problem.id}: the chat template omits a text of the assistant, {omitted[:60]!r}, so it would not "
        "be trained. Templates of reasoning models keep only the last answer's thoughts, in its content: "
        "give each answer its own row, with the messages before it as the prompt"
    )


def _rerender_error(problem: Problem) -> DataError:
    return DataError(
        f"{problem.id}: the chat template changes earlier messages when one is added, so the assistant's "
        "tokens cannot be located. Give each answer its own row, with the messages before it as the prompt, "
        "or use a template that only appends"
    )


def check_vocabulary(policy: Policy, encoded: Sequence[EncodedProblem]) -> None:
    """Raise ConfigError if prompts or answers have tokens that the model does not know."""
    for prompted in encoded:
        check_known(policy, prompted.tokens, f"{prompted.problem.id}: the prompt")
        for answer in prompted.answers:
            check_known(policy, answer.tokens, f"{prompted.problem.id}: the answer")


def check_known(policy: Policy, tokens: Sequence[int] | np.ndarray, subject: str) -> None:
    """Raise ConfigError where the model has no embedding of a token."""
    largest = int(np.max(tokens, initial=0))
    if largest >= policy.embedded:
        raise ConfigError(
            f"model: {subject} has token {largest} ({policy.tokenizer.convert_ids_to_tokens(largest)!r}), "
            f"but the model has {policy.embedded} embeddings. The tokenizer belongs to another model, or the "
            "token was added without model.resize_token_embeddings(len(tokenizer))"
        )

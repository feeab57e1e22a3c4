"""Facts about a model's chat template, found once by rendering made-up conversations.

They tell how a turn ends, how thoughts are marked and whether the prompt has opened them. Worked answers,
rewards, tools, the sampler's ends and `covey check MODEL` rely on them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from covey.models.chat import chat_text, render_at, rendered_at
from covey_verify.errors import ConfigError, DataError
from covey_verify.extract import Thoughts
from covey_verify.types import Messages

# Contents of the made-up conversations, by which they are found in a rendered text.
QUESTION = "some question"
THOUGHT = "some thought"
ANSWER = "some answer"
RESULT = "some words"
ASKED: Messages = [{"role": "user", "content": QUESTION}]
KNOWN = (
    Thoughts("<think>", "</think>"),
    Thoughts("[THINK]", "[/THINK]"),
    Thoughts("<|channel>thought", "<channel|>"),
)
"""Known marks, for templates that do not render thoughts given apart from an answer."""
MARK = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
XML_TAG = re.compile(r"<(/?)([A-Za-z][\w-]*)>$")
BRACKETS = re.compile(r"\[(/?)([A-Z][A-Z_]*)\]$")
"""A tag at the end of a text."""
NO_THOUGHTS = ("answer", "final", "response", "output", "solution", "assistant", "inst")
"""Names of tags that hold something other than thoughts."""
HEADER = 16
"""Number of tokens before a turn in which a header's marks of thoughts are looked for."""
ROLES = ("system", "developer", "tool")
SWITCHES = ("enable_thinking", "thinking")
"""Arguments by which templates in use switch thinking on and off."""


@dataclass(frozen=True)
class TemplateFacts:
    """The behaviour of a tokenizer's chat template under given arguments."""

    refusal: str = ""
    """Reason why it does not render a question and its answer; empty if it does."""
    answer_header: str = ""
    """Text after a question, for the model to continue: the end of that turn and the next one's header."""
    unbegun: str = ""
    """Text that it writes before an answer but not for the model to continue: it begins no turn for it."""
    turn_end: int | None = None
    """The token that ends an answer; None if no single token does."""
    thoughts: Thoughts | None = None
    """The marks of thoughts, and whether the prompt has opened them; None if it knows none."""
    unthinking: str | None = None
    """Text that closes opened thoughts for an answer without any; None if the template does not show it."""
    controls: tuple[str, ...] = ()
    """Ends, and tokens written around contents: within a content they would forge a turn."""
    result_marks: tuple[str, ...] = ()
    """Marks written around the result of a tool, which a content with them would forge."""
    dated: bool = False
    """Whether the template prints the date."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Role -> whether its messages are `read`, `left out` or `refused`."""
    forgets: bool = False
    """Whether the template leaves out the thoughts of earlier answers."""
    end_count: int = 0
    """Number of ends it writes after a last answer; one of them is trained."""
    switch: str = ""
    """The argument, as JSON, with which the prompt leaves thoughts to the model; empty if there is none."""
    unopened: str = ""
    """The argument, as JSON, with which the prompt leaves no thoughts open; empty if there is none."""

    @property
    def marks(self) -> Thoughts:
        """The marks of thoughts; `<think>` if the template does not tell."""
        return self.thoughts or KNOWN[0]


def template_facts(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object] | None = None
) -> TemplateFacts:
    """The facts of a tokenizer's template. ``arguments`` are its other variables; tools do not matter."""
    variables = {k: v for k, v in (arguments or {}).items() if k not in ("tools", "documents")}
    try:
        key = json.dumps(variables, sort_keys=True)
    except (TypeError, ValueError):  # arguments that are no JSON cannot be a key of the cache
        return _facts_of(_Template(tokenizer, variables))
    # A tokenizer can be changed after it was asked, so the key includes everything that its facts depend on.
    state = (str(tokenizer.chat_template), len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id)
    return _cached_facts(tokenizer, state, key)


@lru_cache(64)
def _cached_facts(tokenizer: PreTrainedTokenizerBase, _: object, arguments: str) -> TemplateFacts:
    return _facts_of(_Template(tokenizer, json.loads(arguments)))


class _Template:
    """A template with its arguments, and its renderings of made-up conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object]) -> None:
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.source = str(tokenizer.chat_template or "")

    def after_question(self, messages: Messages = (), begin: bool = False) -> str | None:
        """The text after the question, or all text if that is not found; None if the template refuses."""
        try:
            text = chat_text(self.tokenizer, [*ASKED, *messages], self.arguments, begin)
        except (ConfigError, DataError):
            return None
        _, question, after = text.partition(QUESTION)
        return after if question else text

    def conversation(self, messages: Messages = ASKED) -> str:
        """The rendered conversation; empty if the template refuses it."""
        try:
            return chat_text(self.tokenizer, messages, self.arguments, False)
        except (ConfigError, DataError):
            return ""

    def with_arguments(self, **arguments: object) -> _Template:
        """The same template with further arguments."""
        return _Template(self.tokenizer, {**self.arguments, **arguments})


def _facts_of(template: _Template) -> TemplateFacts:
    try:
        chat_text(template.tokenizer, [*ASKED, _answer()], template.arguments, False)
    except (ConfigError, DataError) as error:
        return TemplateFacts(str(error))
    # Texts after the question: when the model is to answer, and with an answer that has no thoughts.
    answer_header = template.after_question(begin=True) or ""
    plain = template.after_question([_answer()]) or ""
    end = _turn_end(template.tokenizer, plain)
    marks = _marks(template, answer_header, plain)
    result_marks = _result_marks(template)
    facts = TemplateFacts(
        "",
        answer_header,
        _unbegun_header(template, answer_header, plain),
        end,
        controls=_controls(template, end, marks, result_marks),
        result_marks=result_marks,
        dated=_has_date(template),
        roles={role: _role(template, role) for role in ROLES},
        end_count=_end_count(template, plain, end),
    )
    if marks is None:
        return facts
    thoughts = with_begun_thoughts(answer_header, marks)
    unthinking = _empty_thoughts(template, answer_header, plain, marks) if thoughts.begun else None
    switch = _switch(template, answer_header, marks)
    unopened = _closing_argument(template, answer_header, marks)
    # In a conversation that continues, an earlier answer's thoughts are rendered or not.
    forgets = THOUGHT not in template.conversation([*ASKED, _thinking_answer(), *ASKED])
    return replace(
        facts, thoughts=thoughts, unthinking=unthinking, switch=switch, unopened=unopened, forgets=forgets
    )


def _unbegun_header(template: _Template, answer_header: str, plain: str) -> str:
    """The header of an answer, if the template ignores `add_generation_prompt`; empty if it does not."""
    header = plain.partition(ANSWER)[0]
    if answer_header != template.after_question() or not header.startswith(answer_header):
        return ""
    return header.removeprefix(answer_header).strip()


def _result_marks(template: _Template) -> tuple[str, ...]:
    """The marks that a result of a tool brings into a conversation, such as `<tool_response>`."""
    messages = [*ASKED, _call()]
    without = template.conversation(messages)
    before, shown, after = template.conversation([*messages, _message("tool")]).partition(RESULT)
    marks = dict.fromkeys(MARK.findall(before) + MARK.findall(after)) if shown and without else {}
    # The name and the id of a call are not the template's words.
    ours = ("look_up", "call00000")
    return tuple(mark for mark in marks if mark not in without and not any(word in mark for word in ours))


def _controls(
    template: _Template, end: int | None, marks: Thoughts | None, result_marks: tuple[str, ...]
) -> tuple[str, ...]:
    """The added tokens of a made-up conversation, except marks of thoughts, which contents may mention.

    Marks of results are among them only if they are special tokens: rows in use have others in contents.
    """
    tokenizer = template.tokenizer
    added = template.tokenizer.added_tokens_decoder
    # Rendered with and without a system message, since some templates refuse that role.
    chat = [*ASKED, _answer(), *ASKED]
    texts = (
        template.conversation([{"role": "system", "content": QUESTION}, *chat]),
        template.conversation(chat),
    )
    written_ids = {n for text in texts for n in tokenizer(text, add_special_tokens=False)["input_ids"]}
    ids = {*written_ids, end, tokenizer.eos_token_id, tokenizer.bos_token_id}
    words = {added[n].content for n in ids if n in added and len(added[n].content) > 1}
    words |= {token.content for token in added.values() if token.special and token.content in result_marks}
    tags = () if marks is None or marks.answer else (marks.open, marks.close)
    return tuple(sorted(word for word in words if word not in tags))


def _has_date(template: _Template) -> bool:
    if "strftime_now" not in template.source:
        return False
    # Two times that differ in year, month, day and hour; equal texts mean that no date is printed.
    original = rendered_at()
    texts = set()
    for day in (datetime(1999, 1, 2, 3), datetime(2044, 12, 30, 23)):
        render_at(day)
        texts.add(template.conversation())
    render_at(original)
    return len(texts) > 1


def _answer(**fields: object) -> Mapping[str, object]:
    return {"role": "assistant", "content": ANSWER, **fields}


def _thinking_answer() -> Mapping[str, object]:
    # Templates read thoughts under different names; each takes the name that it knows.
    return _answer(reasoning_content=THOUGHT, reasoning=THOUGHT, thinking=THOUGHT)


def _message(role: str) -> Mapping[str, object]:
    # Nine characters as id, because Mistral's templates refuse other lengths.
    return {"role": role, "content": RESULT, "name": "look_up", "tool_call_id": "call00000"}


def _call() -> Mapping[str, object]:
    function = {"name": "look_up", "arguments": {}}
    call = {"id": "call00000", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _role(template: _Template, role: str) -> str:
    """The treatment of a message of a role: first in a chat, or for `tool` after a call."""
    message = _message(role)
    text = template.conversation([*ASKED, _call(), message] if role == "tool" else [message, *ASKED])
    if RESULT in text:
        return "read"
    return "left out" if text else "refused"


def _end_count(template: _Template, plain: str, end: int | None) -> int:
    ids = template.tokenizer(plain.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
    return sum(n in (end, template.tokenizer.eos_token_id) for n in ids)


def _turn_end(tokenizer: PreTrainedTokenizerBase, plain: str) -> int | None:
    """The token that ends an answer.

    It may differ from the tokenizer's end of sequence: Gemma's is `<end_of_turn>`, and base models with a
    template often have `<|im_end|>`.
    """
    _, answer, ending = plain.rpartition(ANSWER)
    ids = tokenizer(ending, add_special_tokens=False)["input_ids"] if answer else []
    special = {n for n, token in tokenizer.added_tokens_decoder.items() if token.special}
    # A beginning of sequence behind an answer belongs to the next turn, unless it is the end as well.
    if tokenizer.bos_token_id != tokenizer.eos_token_id:
        special -= {tokenizer.bos_token_id}
    return next((n for n in ids if n in special), None)


def _marks(template: _Template, answer_header: str, plain: str) -> Thoughts | None:
    """The marks around thoughts given apart from an answer, or else marks that the template mentions."""
    # A rendering that shows marks consists of: before, THOUGHT, between, ANSWER.
    rendered = template.after_question([_thinking_answer()]) or ""
    before, thought, after = rendered.partition(THOUGHT)
    between, answered, _ = after.partition(ANSWER)
    if not (thought and answered and between.strip()):
        texts = (answer_header, plain, template.source)
        known_marks = next((k for k in KNOWN if any(k.open in t and k.close in t for t in texts)), None)
        return known_marks or _prompted_marks(answer_header, plain)
    known_marks = next((k for k in KNOWN if k.open in before and k.close in between), None)
    return known_marks or _shown_marks(answer_header, plain, before, between)


def _shown_marks(answer_header: str, plain: str, before: str, between: str) -> Thoughts | None:
    """The marks that a rendering shows ``before`` thoughts and ``between`` thoughts and answer."""
    # The header of a turn is what thoughts and the bare beginning share; where that opens thoughts it is all.
    header = _common_prefix(answer_header, before)
    opening = before.removeprefix(header).strip() or "".join(MARK.findall(before)[-1:])
    if not opening:
        return None
    if header.rstrip().endswith(opening):
        header = header.rpartition(opening)[0]
    prefix = plain.partition(ANSWER)[0]
    answer_mark = prefix.removeprefix(header).strip() if prefix.startswith(header) else ""
    if not answer_mark or opening in answer_mark:
        return Thoughts(opening, between.strip())
    # Answers have a mark of their own, such as a channel's, and thoughts end like any message.
    close = (MARK.search(between) or [between.strip()])[0]
    return Thoughts(opening, close, (between.partition(close)[2].strip(), answer_mark))


def _prompted_marks(answer_header: str, plain: str) -> Thoughts | None:
    """The tag at the prompt's end, opened, or opened and closed; None if plain answers have it as well."""
    tail = answer_header.rstrip()
    header = plain.partition(ANSWER)[0].rstrip()
    known_marks = next((k for k in KNOWN if tail.endswith(k.open) and not header.endswith(k.open)), None)
    if known_marks is not None:
        return known_marks
    for pattern, form in ((XML_TAG, "<{}>"), (BRACKETS, "[{}]")):
        tag = pattern.search(tail)
        if tag is None or tag[2].lower() in NO_THOUGHTS:
            continue
        marks = Thoughts(form.format(tag[2]), form.format(f"/{tag[2]}"))
        if not tag[1] and not header.endswith(marks.open):
            return marks
        # A closing tag marks thoughts only if the pair before it is empty.
        _, opened, inside = tail.rpartition(marks.open)
        if tag[1] and opened and not inside.removesuffix(marks.close).strip():
            return marks
    return None


def _common_prefix(first: str, second: str) -> str:
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return first[:length]


def _empty_thoughts(template: _Template, answer_header: str, plain: str, marks: Thoughts) -> str | None:
    """The text that an answer without thoughts begins with after a prompt that has opened some."""
    # Templates show it as an empty pair before a plain answer, the last one or an earlier one.
    earlier = template.after_question([_answer(), {"role": "user", "content": "another question"}]) or ""
    opened = answer_header.rpartition(marks.open)[2]
    for text in (plain, earlier):
        _, opening, pair = text.partition(ANSWER)[0].rpartition(marks.open)
        inside, closed, _ = pair.partition(marks.close)
        if opening and closed and not inside.strip():
            return pair.removeprefix(opened) if pair.startswith(opened) else pair.lstrip()
    return None


def _switch(template: _Template, answer_header: str, marks: Thoughts) -> str:
    """The argument that lets the model think, if the prompt closes an empty pair of marks without it."""
    if not closed_in(answer_header, marks):
        return ""
    for name in SWITCHES:
        header = template.with_arguments(**{name: True}).after_question(begin=True)
        if header is not None and not closed_in(header, marks):
            return json.dumps({name: True})
    return ""


def _closing_argument(template: _Template, answer_header: str, marks: Thoughts) -> str:
    """The argument with which a prompt that opens thoughts, or leaves them to the model, has closed them."""
    for name in SWITCHES:
        header = template.with_arguments(**{name: False}).after_question(begin=True)
        if header is not None and header != answer_header and not with_begun_thoughts(header, marks).begun:
            return json.dumps({name: False})
    return ""


def with_begun_thoughts(prompt: str, marks: Thoughts) -> Thoughts:
    """The marks, with ``begun`` true if the last of them in a text opens thoughts."""
    return marks._replace(begun=prompt.rfind(marks.open) > prompt.rfind(marks.close))


def closed_in(prompt: str, marks: Thoughts) -> bool:
    """Whether a text has opened thoughts and closed them again."""
    return marks.open in prompt and prompt.rfind(marks.close) > prompt.rfind(marks.open)


def thoughts_of(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    prompt: str | Messages,
    arguments: Mapping[str, object],
) -> Thoughts:
    """The marks of thoughts of a problem's model, and whether its prompt (``tokens``) has opened them."""
    facts = template_facts(tokenizer, arguments)
    text = str(tokenizer.decode(tokens)).rstrip()
    if isinstance(prompt, str):  # a text may mention marks anywhere; only at its end do they open thoughts
        return facts.marks.begun_by(text)
    return with_begun_thoughts(_prompt_end(text, prompt, facts.answer_header), facts.marks)


def _prompt_end(prompt: str, messages: Messages, answer_header: str) -> str:
    """The end of a rendered prompt, after the last content: text of the template alone."""
    _, content, ending = prompt.rpartition(str(messages[-1]["content"]).strip() or "\0")
    # A short content may occur within the template's words, and some templates change a content.
    header_length = len(answer_header.rstrip())
    return ending if content and len(ending) > header_length else prompt[len(prompt) - header_length :]


def thoughts_fault(text: str, marks: Thoughts, opened: bool | None, ended: bool) -> str | None:
    """The reason why a turn's thoughts are not one pair, or None. ``opened``: what the header did before it.

    True: it opened thoughts. False: it opened and closed them. None: neither.

    >>> thoughts_fault("<think>a</think>3", Thoughts(), opened=False, ended=True)
    'the answer opens thoughts (<think>) a second time'
    """
    inside = opened is True
    opens = int(opened is not None)
    for mark in re.findall(f"{re.escape(marks.open)}|{re.escape(marks.close)}", text):
        if mark == marks.open:
            opens += 1
            if opens > 1:
                return f"the answer opens thoughts ({marks.open}) a second time"
        elif not inside and not marks.answer:
            return f"the answer closes thoughts ({marks.close}) that are not open"
        inside = mark == marks.open
    return f"the answer ends within its thoughts: {marks.close} is missing" if inside and ended else None

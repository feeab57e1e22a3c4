"""What a chat template does, found out once, without a model, by rendering made-up conversations.

Whoever has to know how a turn ends, how thoughts are marked or whether the prompt has opened them asks here:
worked answers, rewards, tools, the sampler's ends, and `covey check MODEL`.
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
from covey.types import Thoughts
from covey_verify.errors import ConfigError, DataError
from covey_verify.types import Messages

QUESTION, THOUGHT, ANSWER = "some question", "some thought", "some answer"
"""What is said in made-up conversations."""
ASKED: Messages = [{"role": "user", "content": QUESTION}]
KNOWN = (
    Thoughts("<think>", "</think>"),
    Thoughts("[THINK]", "[/THINK]"),
    Thoughts("<|channel>thought", "<channel|>"),
)
"""Marks of templates that do not show thoughts given apart from an answer."""
MARK = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
XML_TAG, BRACKETS = re.compile(r"<(/?)([A-Za-z][\w-]*)>$"), re.compile(r"\[(/?)([A-Z][A-Z_]*)\]$")
"""A tag at the end of a text."""
NO_THOUGHTS = ("answer", "final", "response", "output", "solution", "assistant", "inst")
"""Names of tags that hold something else."""
HEADER = 16
"""Tokens before a turn that hold the marks of thoughts with which its header may end."""
ROLES = ("system", "developer", "tool")
SWITCHES = ("enable_thinking", "thinking")
"""Arguments of templates in use that let the model think, or not."""


@dataclass(frozen=True)
class TemplateFacts:
    """What a tokenizer's chat template does, with the arguments it is given."""

    refusal: str = ""
    """Why it does not render a question and its answer; nothing where it does."""
    begins: str = ""
    """What it writes behind a question for the model to continue: that turn's end, the next one's header."""
    turn_end: int | None = None
    """The token by which it ends an answer; None where no token does."""
    thoughts: Thoughts | None = None
    """How it marks thoughts, and whether the prompt has opened them; None where it knows none."""
    unthinking: str | None = None
    """What closes thoughts that the prompt opens, where an answer has none; None: it does not show that."""
    controls: tuple[str, ...] = ()
    """Tokens that it writes around what is said, and ends: as somebody's words they would forge a turn."""
    dated: bool = False
    """Whether it prints the date."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Role -> whether what it says is `read`, `left out` or `refused`."""
    forgets: bool = False
    """Whether it leaves out the thoughts of earlier answers."""
    ends: int = 0
    """How many ends it writes behind a last answer; one is trained."""
    switch: str = ""
    """The argument, as JSON, under which the prompt leaves thoughts to the model; nothing where none does."""

    @property
    def marks(self) -> Thoughts:
        """How thoughts are marked, `<think>` where the template does not say."""
        return self.thoughts or KNOWN[0]


def template_facts(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object] | None = None
) -> TemplateFacts:
    """What a tokenizer's template does. ``arguments``: what it gets besides messages, tools left aside."""
    own = {k: v for k, v in (arguments or {}).items() if k not in ("tools", "documents")}
    try:
        written = json.dumps(own, sort_keys=True)
    except (TypeError, ValueError):
        return _found(_Template(tokenizer, own))
    state = (str(tokenizer.chat_template), len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id)
    return _remembered(tokenizer, state, written)


@lru_cache(64)
def _remembered(tokenizer: PreTrainedTokenizerBase, _: object, arguments: str) -> TemplateFacts:
    return _found(_Template(tokenizer, json.loads(arguments)))


class _Template:
    """A template with its arguments: renderings from the end of the question on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object]) -> None:
        self.tokenizer, self.arguments = tokenizer, arguments
        self.source = str(tokenizer.chat_template or "")

    def behind(self, said: Messages = (), begin: bool = False) -> str | None:
        """What stands behind the question, or all of it; None where the template refuses."""
        try:
            text = chat_text(self.tokenizer, [*ASKED, *said], self.arguments, begin)
        except (ConfigError, DataError):
            return None
        _, found, rest = text.partition(QUESTION)
        return rest if found else text

    def whole(self, said: Messages = ASKED) -> str:
        """A conversation; nothing where the template refuses it."""
        try:
            return chat_text(self.tokenizer, said, self.arguments, False)
        except (ConfigError, DataError):
            return ""

    def given(self, **more: object) -> _Template:
        """The same template with further arguments."""
        return _Template(self.tokenizer, {**self.arguments, **more})


def _found(template: _Template) -> TemplateFacts:
    try:
        chat_text(template.tokenizer, [*ASKED, _answer()], template.arguments, False)
    except (ConfigError, DataError) as error:
        return TemplateFacts(str(error))
    begins, plain = template.behind(begin=True) or "", template.behind([_answer()]) or ""
    end, marks = _turn_end(template.tokenizer, plain), _marks(template, begins, plain)
    facts = TemplateFacts(
        "",
        begins,
        end,
        controls=_controls(template, end, marks),
        dated=_dated(template),
        roles={role: _role(template, role) for role in ROLES},
        ends=_ends(template, plain, end),
    )
    if marks is None:
        return facts
    thoughts = begun_in(begins, marks)
    unthinking = _unthinking(template, begins, plain, marks) if thoughts.begun else None
    switch = _switch(template, begins, marks)
    forgets = THOUGHT not in template.whole([*ASKED, _thinking(), *ASKED])
    return replace(facts, thoughts=thoughts, unthinking=unthinking, switch=switch, forgets=forgets)


def _controls(template: _Template, end: int | None, marks: Thoughts | None) -> tuple[str, ...]:
    """The added tokens of a made-up conversation; marks of thoughts are everybody's to write about."""
    tokenizer, added = template.tokenizer, template.tokenizer.added_tokens_decoder
    said = [*ASKED, _answer(), *ASKED]
    texts = (template.whole([{"role": "system", "content": QUESTION}, *said]), template.whole(said))
    written = {n for text in texts for n in tokenizer(text, add_special_tokens=False)["input_ids"]}
    ids = {*written, end, tokenizer.eos_token_id, tokenizer.bos_token_id}
    words = {added[n].content for n in ids if n in added and len(added[n].content) > 1}
    tags = () if marks is None or marks.answer else (marks.open, marks.close)
    return tuple(sorted(word for word in words if word not in tags))


def _dated(template: _Template) -> bool:
    if "strftime_now" not in template.source:
        return False
    now, texts = rendered_at(), set()
    for day in (datetime(1999, 1, 2, 3), datetime(2044, 12, 30, 23)):
        render_at(day)
        texts.add(template.whole())
    render_at(now)
    return len(texts) > 1


def _answer(**more: object) -> Mapping[str, object]:
    return {"role": "assistant", "content": ANSWER, **more}


def _thinking() -> Mapping[str, object]:
    return _answer(reasoning_content=THOUGHT, reasoning=THOUGHT, thinking=THOUGHT)


def _role(template: _Template, role: str) -> str:
    """What becomes of a message of a role, first or after a call."""
    words = {"role": role, "content": "some words", "name": "look_up", "tool_call_id": "call00000"}
    function = {"name": "look_up", "arguments": {}}
    call = {"id": "call00000", "type": "function", "function": function}
    before = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, words]
    text = template.whole(before if role == "tool" else [words, *ASKED])
    return "read" if "some words" in text else "left out" if text else "refused"


def _ends(template: _Template, plain: str, end: int | None) -> int:
    ids = template.tokenizer(plain.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
    return sum(n in (end, template.tokenizer.eos_token_id) for n in ids)


def _turn_end(tokenizer: PreTrainedTokenizerBase, plain: str) -> int | None:
    """The token by which an answer ends.

    It need not be the tokenizer's end of sequence: Gemma's is `<end_of_turn>`, that of base models with a
    template often `<|im_end|>`.
    """
    _, found, behind = plain.rpartition(ANSWER)
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"] if found else []
    special = {n for n, token in tokenizer.added_tokens_decoder.items() if token.special}
    if tokenizer.bos_token_id != tokenizer.eos_token_id:
        special -= {tokenizer.bos_token_id}
    return next((n for n in ids if n in special), None)


def _marks(template: _Template, begins: str, plain: str) -> Thoughts | None:
    """Marks around thoughts that are given apart from an answer, else those that the template mentions."""
    shown = template.behind([_thinking()]) or ""
    before, found, after = shown.partition(THOUGHT)
    between, answered, _ = after.partition(ANSWER)
    if not (found and answered and between.strip()):
        texts = (begins, plain, template.source)
        known = next((k for k in KNOWN if any(k.open in t and k.close in t for t in texts)), None)
        return known or _prompted_marks(begins, plain)
    known = next((k for k in KNOWN if k.open in before and k.close in between), None)
    if known is not None:
        return known
    # The header of a turn is what thoughts and the bare beginning share; where that opens thoughts it is all.
    header = _shared(begins, before)
    opening = before.removeprefix(header).strip() or "".join(MARK.findall(before)[-1:])
    if not opening:
        return None
    if header.rstrip().endswith(opening):
        header = header.rpartition(opening)[0]
    prefix = plain.partition(ANSWER)[0]
    lead = prefix.removeprefix(header).strip() if prefix.startswith(header) else ""
    if not lead or opening in lead:
        return Thoughts(opening, between.strip())
    # Answers have a mark of their own, a channel's say, and thoughts end as any message does.
    close = (MARK.search(between) or [between.strip()])[0]
    return Thoughts(opening, close, (between.partition(close)[2].strip(), lead))


def _prompted_marks(begins: str, plain: str) -> Thoughts | None:
    """The tag that the prompt opens, or opens and closes; answers do not all begin behind it."""
    tail = begins.rstrip()
    header = plain.partition(ANSWER)[0].rstrip()
    known = next((k for k in KNOWN if tail.endswith(k.open) and not header.endswith(k.open)), None)
    if known is not None:
        return known
    for pattern, write in ((XML_TAG, "<{}>"), (BRACKETS, "[{}]")):
        found = pattern.search(tail)
        if found is None or found[2].lower() in NO_THOUGHTS:
            continue
        marks = Thoughts(write.format(found[2]), write.format(f"/{found[2]}"))
        if not found[1] and not header.endswith(marks.open):
            return marks
        _, opened, inside = tail.rpartition(marks.open)
        if found[1] and opened and not inside.removesuffix(marks.close).strip():
            return marks
    return None


def _shared(one: str, other: str) -> str:
    """What two texts begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _unthinking(template: _Template, begins: str, plain: str, marks: Thoughts) -> str | None:
    """What an answer without thoughts has to write first behind a prompt that has opened some."""
    earlier = template.behind([_answer(), {"role": "user", "content": "another question"}]) or ""
    opened = begins.rpartition(marks.open)[2]
    for text in (plain, earlier):
        _, found, pair = text.partition(ANSWER)[0].rpartition(marks.open)
        inside, closed, _ = pair.partition(marks.close)
        if found and closed and not inside.strip():
            return pair.removeprefix(opened) if pair.startswith(opened) else pair.lstrip()
    return None


def _switch(template: _Template, begins: str, marks: Thoughts) -> str:
    """How to let the model think where the prompt has closed an empty pair of marks."""
    if not closed_in(begins, marks):
        return ""
    for name in SWITCHES:
        other = template.given(**{name: True}).behind(begin=True)
        if other is not None and not closed_in(other, marks):
            return json.dumps({name: True})
    return ""


def begun_in(prompt: str, marks: Thoughts) -> Thoughts:
    """The same marks, and whether the last of them in a text opens thoughts."""
    return marks._replace(begun=prompt.rfind(marks.open) > prompt.rfind(marks.close))


def closed_in(prompt: str, marks: Thoughts) -> bool:
    """Whether a text has opened thoughts and closed them again."""
    return marks.open in prompt and prompt.rfind(marks.close) > prompt.rfind(marks.open)


def thoughts_of(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    said: str | Messages,
    arguments: Mapping[str, object],
) -> Thoughts:
    """How a problem's model marks its thoughts, and whether its prompt, as ``tokens``, has opened them."""
    facts = template_facts(tokenizer, arguments)
    text = str(tokenizer.decode(tokens)).rstrip()
    if isinstance(said, str):  # what a text says about the marks is no thought, but one may end with them
        return facts.marks._replace(begun=text.endswith(facts.marks.open))
    return begun_in(_beginning(text, said, facts.begins), facts.marks)


def _beginning(prompt: str, said: Messages, begins: str) -> str:
    """The end of a rendered prompt, in which only the template speaks."""
    _, found, rest = prompt.rpartition(str(said[-1]["content"]).strip() or "\0")
    # Short contents may stand in the template's own words, and some are written otherwise than they came.
    least = len(begins.rstrip())
    return rest if found and len(rest) > least else prompt[len(prompt) - least :]


def thoughts_fault(text: str, marks: Thoughts, opened: bool | None, ended: bool) -> str | None:
    """Why the thoughts of a turn are not one pair; ``opened``: by what precedes it, False: and closed again.

    >>> thoughts_fault("<think>a</think>3", Thoughts(), opened=False, ended=True)
    'the answer opens thoughts (<think>) a second time'
    """
    inside, opens = opened is True, int(opened is not None)
    for mark in re.findall(f"{re.escape(marks.open)}|{re.escape(marks.close)}", text):
        if mark == marks.open:
            opens += 1
            if opens > 1:
                return f"the answer opens thoughts ({marks.open}) a second time"
        elif not inside and not marks.answer:
            return f"the answer closes thoughts ({marks.close}) that are not open"
        inside = mark == marks.open
    return f"the answer ends within its thoughts: {marks.close} is missing" if inside and ended else None


def without_thoughts(text: str, marks: Thoughts) -> str | None:
    """A turn without its thoughts; None where it ends within them. ``marks.begun``: it begins within some.

    >>> without_thoughts("so</think>3", Thoughts(begun=True)), without_thoughts("<think>so", Thoughts())
    ('3', None)
    """
    parts, rest, inside = list[str](), text, marks.begun
    while inside or marks.open in rest:
        if not inside:
            before, _, rest = rest.partition(marks.open)
            parts.append(before)
        _, closed, rest = rest.partition(marks.close)
        if not closed:
            return None
        inside = False
    said = "".join([*parts, rest])
    return said if marks.answer else said.rpartition(marks.close)[2]

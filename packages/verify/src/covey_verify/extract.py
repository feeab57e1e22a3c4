"""The extraction of the answer from a completion by one declared rule, applied after the reasoning."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

BLANK = "\u115f\u1160\u2800\u3164\uffa0"
"""Letters and signs that are invisible in print."""
TextOrMessages = str | list[dict[str, Any]]
Turns = Sequence[Mapping[str, Any]]
"""The turns of the model and its tools as {role, content}, with `tool_calls` if the model called any."""
Rule = Literal["boxed", "answer_tag", "hash4", "last_number", "choice", "whole"]
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
MAX_CHARACTERS = 50_000
"""Number of characters at the end in which an answer is searched; the text before is never read."""
# NUMBER: sign, currency, thousands, decimals or a denominator. CHOICE: an option from A to J outside of
# words. FENCE: the opening or closing line of a code block (its marks, its language).
NUMBER = re.compile(r"[-+]?[$€£]?\d(?:,?\d)*(?:\.\d+)?(?:/\d+)?|[-+]?[$€£]?\.\d+")
CHOICE = re.compile(r"(?<![A-Za-z])\(?([A-J])(?:\)|(?![A-Za-z'’]))")
FENCE = re.compile(r"^ {0,3}(```+|~~~+)[ \t]*([^\s`]*)", re.MULTILINE)


class Thoughts(NamedTuple):
    """The marks that a chat template puts around thoughts, and whether the prompt has opened some."""

    open: str = THINK_OPEN
    close: str = THINK_CLOSE
    answer: tuple[str, ...] = ()
    """Marks before an answer, in templates that have some (the channels of gpt-oss)."""
    begun: bool = False
    """Whether the prompt ends within thoughts, so that a completion begins inside them."""

    def begun_by(self, header: str) -> Thoughts:
        """Return the marks for a turn after a text, which opens thoughts if it ends with their mark."""
        return self._replace(begun=header.rstrip().endswith(self.open))


TAGS = Thoughts()
"""The marks of most models; the prompt has opened none."""


def text_of(completion: TextOrMessages) -> str:
    """Return the text of a completion, which is a list of messages if the prompt was a chat."""
    if isinstance(completion, str):
        return completion
    return "".join(str(m.get("content") or "") for m in completion if m.get("role") == "assistant")


def content_text(content: object) -> str:
    """Return a message's content as text; it may be null or a list of parts.

    >>> content_text([{"type": "text", "text": "2 + "}, {"type": "text", "text": "2"}])
    '2 + 2'
    """
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "".join(str(text) for text in texts if text is not None)


def message_texts(chat: str | Turns) -> list[str]:
    """Return the text of each message of a prompt or an answer; a plain text counts as one message."""
    if isinstance(chat, str):
        return [chat]
    return [content_text(message.get("content")) for message in chat]


def last_text(prompt: str | Turns) -> str:
    """Return the text of a prompt, or of its last message if it is a chat."""
    return message_texts(prompt)[-1]


def prompt_text(prompt: str | Turns) -> str:
    r"""Return a prompt as one text: of a chat all messages, each after its role.

    >>> prompt_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    'system: Be brief.\nuser: Hi'
    """
    if isinstance(prompt, str):
        return prompt
    texts = message_texts(prompt)
    return "\n".join(f"{message.get('role')}: {text}" for message, text in zip(prompt, texts, strict=True))


def model_turns(completion: TextOrMessages, turns: Turns) -> list[str]:
    """Return the model's turns, between which tools answered."""
    return [t["content"] for t in turns if t["role"] == "assistant"] or [text_of(completion)]


def extract(completion: TextOrMessages, rule: Rule, turns: Turns = ()) -> str | None:
    r"""Return the answer that ``rule`` finds after the reasoning; None if there is none.

    `whole` reads only the last of several turns: the calls before it do not belong to an answer.

    >>> extract("<think>2+2</think><answer> 4 </answer>", "answer_tag")
    '4'
    >>> extract(r"<think>so \boxed{4}", "boxed") is None  # the reasoning never ended
    True
    """
    text = model_turns(completion, turns)[-1] if rule == "whole" else text_of(completion)
    answer = after_reasoning(text)
    extracted = None if answer is None else EXTRACTORS[rule](answer)
    return extracted.strip() if extracted is not None and visible(extracted) else None


def visible(text: str) -> bool:
    """Return whether a text has any visible character (letter, number, punctuation, symbol)."""
    return (text.isascii() and text.isalnum()) or any(
        c not in BLANK and unicodedata.category(c)[0] in "LNPS" for c in text
    )


def after_reasoning(text: str, longest: int = MAX_CHARACTERS) -> str | None:
    """Return the end of the text after the last closing reasoning tag, ``longest`` characters at most.

    None if reasoning was opened and never closed.
    """
    answer = text.rpartition(THINK_CLOSE)[2]
    return None if THINK_OPEN in answer else answer[-longest:]


def find_tagged(text: str, tag: str) -> str | None:
    """Return the content of the last complete <tag>...</tag>, or None."""
    before, close, _ = text.rpartition(f"</{tag}>")
    if not close:
        return None
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if opening else None


def find_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...} with balanced braces; escaped braces do not count.

    >>> find_boxed(r"\boxed{1} no, \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    # One pass pairs all braces: closing[index of "{"] = index of its "}". The pattern skips escaped braces.
    opened: list[int] = []
    closing: dict[int, int] = {}
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    starts = [m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s?{", text) if m.end() - 1 in closing]
    return text[starts[-1] : closing[starts[-1] - 1]] if starts else None


def hash4(text: str) -> str | None:
    """Return the line after the last `####`, as GSM8K writes answers, or None."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().split("\n")[0] if mark else None


def last_number(text: str) -> str | None:
    """Return the last number of the text, or None."""
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def choice(text: str) -> str | None:
    """Return the last option named, from A to J: alone, in parentheses, in a box or in an answer tag."""
    inside = find_boxed(text) or find_tagged(text, "answer")
    letters = CHOICE.findall(inside if inside is not None else text)
    # Several options in one box are not a choice.
    return letters[-1] if letters and (inside is None or len(set(letters)) == 1) else None


def code_block(text: str, language: str) -> str | None:
    """Return the last complete fenced block of a language (or without one); None if there is none."""
    content: str | None = None
    opening: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        if opening is None:
            opening = fence
        # A closing fence has the same character, is at least as long, and names no language.
        elif fence[1].startswith(opening[1][:3]) and len(fence[1]) >= len(opening[1]) and not fence[2]:
            if opening[2].casefold() in ("", language, *ALIASES.get(language, ())):
                content = text[opening.end() : fence.start()].partition("\n")[2]
            opening = None
    return content


ALIASES = {"python": ("py", "python3"), "lean": ("lean4",)}
EXTRACTORS: Mapping[str, Callable[[str], str | None]] = {
    "boxed": find_boxed,
    "answer_tag": lambda text: find_tagged(text, "answer"),
    "hash4": hash4,
    "last_number": last_number,
    "choice": choice,
    "whole": lambda text: text,
}
FORMS: Mapping[str, str] = {
    "boxed": "The answer is \\boxed{{{}}}.",
    "answer_tag": "<answer>{}</answer>",
    "hash4": "So it is.\n#### {}",
    "last_number": "The answer is {}",
    "choice": "({})",
    "whole": "{}",
}
"""The form of a correct completion under each rule."""

"""The kinds of instructions that IFEval's rows name, arXiv 2311.07911, each with the check of a text.

A check gets a normalized text without its reasoning, and the instruction's arguments by name. It returns
what is missing, or "" if the instruction is met. Its docstring says what counts. A new kind is a function and
a row of KINDS.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from covey_verify.isolated import strict_json
from covey_verify.texts.language import SCRIPT_OF, in_language
from covey_verify.texts.words import (
    CLOSERS,
    fold_case,
    has_words,
    normalize,
    occurrences,
    paragraphs,
    sentences,
    words,
)

RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "at least": lambda count, limit: count >= limit,
    "less than": lambda count, limit: count < limit,
}
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
LINE_MARKS = " \t*_#>~\"'“”‘(["
"""Markup that may precede the first word of a line."""
COMMA = re.compile("[,،、，﹐﹑､︐]")
TITLE = re.compile(r"<<([^<>\n]++)>>")
# No link, no index of an array, no box to tick.
PLACEHOLDER = re.compile(r"(?<![\w\])])\[([^\[\]\n]++)\](?![(\[])")
TICK_BOX = re.compile(r"^[ \t]*+[-*+][ \t]++\[[xX ]\]", re.MULTILINE)
HIGHLIGHT = re.compile(r"(?<![*\w\\])(\*{1,3})(?![\s*])([^*\n]++)(?<!\s)\1(?!\*)")
DIVIDER = re.compile(r"^[ \t]*+\*\*\*[ \t]*+$", re.MULTILINE)
SEPARATOR = re.compile(r"(?<!\S)\*{6}(?!\S)")
FENCES = ("```", "~~~")
WRAPPINGS = {'"': '"', "“": "”", "„": "“”", "«": "»", "＂": "＂"}
"""Opening quotation mark -> the marks that close it."""


def existence(text: str, *, keywords: list[str]) -> str:
    """Each keyword occurs as a whole word or phrase, in any case: `cats` is not `cat`."""
    plain = fold_case(text)
    missing = [keyword for keyword in keywords if not occurrences(fold_case(keyword), plain)]
    return f"{missing[0]!r} does not occur" if missing else ""


def frequency(text: str, *, keyword: str, frequency: int, relation: str) -> str:
    """The keyword occurs that often as a whole word or phrase, in any case."""
    return compare_count(
        occurrences(fold_case(keyword), fold_case(text)), relation, frequency, f"times {keyword!r}"
    )


def forbidden_words(text: str, *, forbidden_words: list[str]) -> str:
    """No forbidden word occurs as a whole word or phrase, in any case, markup or width."""
    plain = fold_case(text)
    forbidden = [word for word in forbidden_words if occurrences(fold_case(word), plain)]
    return f"{forbidden[0]!r} occurs" if forbidden else ""


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> str:
    """The letter or sign occurs that often, in any case; with an accent it is another letter."""
    count = unicodedata.normalize("NFKC", text).lower().count(letter.lower())
    return compare_count(count, let_relation, let_frequency, f"times {letter!r}")


def response_language(text: str, *, language: str) -> str:
    """Four fifths of the words, or more, are in the language; see ``in_language``."""
    return "" if in_language(text, language) else f"not in the language {language!r}"


def number_sentences(text: str, *, num_sentences: int, relation: str) -> str:
    """So many sentences: `at least` counts the sentences that end with punctuation, `less than` all."""
    ended, every = sentences(text)
    return compare_count(ended if relation == "at least" else every, relation, num_sentences, "sentences")


def number_paragraphs(text: str, *, num_paragraphs: int) -> str:
    """Exactly so many parts, each with words, between lines that are `***` alone."""
    parts = DIVIDER.split(text)
    if not all(map(has_words, parts)):
        return "a part between two *** is empty"
    return exactly(len(parts), num_paragraphs, "paragraphs")


def number_words(text: str, *, num_words: int, relation: str) -> str:
    """So many words: `don't`, `well-known` and `3.14` are one each."""
    return compare_count(len(words(text)), relation, num_words, "words")


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> str:
    """Exactly so many paragraphs between blank lines, and the nth begins with the word, in any case."""
    parts = paragraphs(text)
    if fault := exactly(len(parts), num_paragraphs, "paragraphs"):
        return fault
    expected = words(fold_case(first_word))
    begins = words(fold_case(parts[nth_paragraph - 1][: 200 + 4 * len(first_word)]))[: len(expected)]
    return "" if begins == expected else f"paragraph {nth_paragraph} begins with {' '.join(begins)!r}"


def number_placeholders(text: str, *, num_placeholders: int) -> str:
    """At least so many `[names]` with a letter, without links, tick boxes and indices of arrays."""
    placeholders = PLACEHOLDER.findall(TICK_BOX.sub("", text))
    count = sum(any(map(str.isalpha, inside)) for inside in placeholders)
    return compare_count(count, "at least", num_placeholders, "placeholders")


def postscript(text: str, *, postscript_marker: str) -> str:
    """A line begins with the marker, in any case; there are words before the line and after the marker."""
    letters = [re.escape(c) for c in postscript_marker if not c.isspace()]
    marker = re.compile(r"\s?".join(letters) + r"(?![^\W_])", re.IGNORECASE)
    start = 0  # of the line in the text
    for line in text.split("\n"):
        content = line.lstrip(LINE_MARKS)
        match = marker.match(content)
        end = start + len(line)
        if match and has_words(text[:start]):
            rest = text[end - len(content) + match.end() :]
            return "" if has_words(rest) else "the postscript is empty"
        start = end + 1
    return f"no postscript begins with {postscript_marker!r}"


def number_bullet_lists(text: str, *, num_bullets: int) -> str:
    """Exactly so many lines that begin with `*`, `-` or `+`, a space and a text, outside code blocks."""
    count = 0
    fence = ""
    for line in map(str.strip, text.split("\n")):
        if line.startswith(FENCES):
            fence = "" if fence and line.startswith(fence) else fence or line[:3]
        elif not fence:
            count += line[:1] in ("*", "-", "+") and line[1:2].isspace() and has_words(line)
    return exactly(count, num_bullets, "bullet points")


def constrained_response(text: str) -> str:
    """Exactly one of IFEval's three answers occurs as it is written, such as `My answer is yes.`."""
    options = [option for option in OPTIONS if occurrences(option, text)]
    return exactly(len(options), 1, f"of the answers {', '.join(OPTIONS)}")


def number_highlighted_sections(text: str, *, num_highlights: int) -> str:
    """At least so many `*highlights*` (or `**`) with a word, each in one line; bullets do not count."""
    count = sum(has_words(inside) for _, inside in HIGHLIGHT.findall(text))
    return compare_count(count, "at least", num_highlights, "highlighted sections")


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> str:
    """At least so many lines begin with the word, as written, and a number of their own; a text follows."""
    mark = re.compile(re.escape(section_spliter.strip()) + r"[ \t]?(\d{1,6})(?!\w)")
    section = ""
    numbers = set[str]()
    for line in text.split("\n"):
        content = line.lstrip(LINE_MARKS)
        match = mark.match(content)
        if match:
            section = match[1].lstrip("0")
            content = content[match.end() :]
        if section and has_words(content):
            numbers.add(section)
    return compare_count(len(numbers), "at least", num_sections, f"sections marked {section_spliter!r}")


def json_format(text: str) -> str:
    """The whole text, or the one code block that it is, is strict JSON: an object or list with content."""
    lines = text.split("\n")
    mark = text[:3]
    language = lines[0].lstrip("`~").strip().casefold()
    if mark in FENCES and language in ("", "json") and len(lines) > 2 and lines[-1].strip() == mark:
        text = "\n".join(lines[1:-1])
    try:
        value = strict_json(text)
    except ValueError as error:
        return f"not JSON: {str(error)[:100]}"
    return "" if isinstance(value, dict | list) and value else "neither an object nor a list with content"


def title(text: str) -> str:
    """Some words of one line are in `<<double angular brackets>>`."""
    return "" if any(map(has_words, TITLE.findall(text))) else "no <<title>>"


def two_responses(text: str) -> str:
    """Two texts that differ in more than case and space, between which `******` occurs, once."""
    parts = [fold_case(part) for part in SEPARATOR.split(text)]
    if not all(map(has_words, parts)):
        return "a response is empty"
    return exactly(len(parts), 2, "responses") or ("" if parts[0] != parts[1] else "the two are the same")


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> str:
    """The text begins with the request as it is written, but for white space, and an answer follows."""
    prompt, answer = (" ".join(part.split()) for part in (prompt_to_repeat, text))
    if not answer.startswith(prompt):
        return "it does not begin with the request"
    return "" if has_words(answer[len(prompt) :]) else "nothing follows the request"


def end_checker(text: str, *, end_phrase: str) -> str:
    """The text ends with the phrase, in any case; only quotation marks and markup may follow.

    There are words before it.
    """
    phrase, answer = (fold_case(part).rstrip(CLOSERS + " ") for part in (end_phrase, text))
    before = answer.removesuffix(phrase)
    if before == answer or (before[-1:].isalnum() and phrase[:1].isalnum()):
        return f"it does not end with {end_phrase!r}"
    return "" if has_words(before) else "nothing precedes the phrase"


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> str:
    """So many words are in capitals; words of one letter (`I`, `A`) are not counted."""
    count = sum(w.isupper() and sum(map(str.isalpha, w)) > 1 for w in words(text))
    return compare_count(count, capital_relation, capital_frequency, "words in capitals")


def english_capital(text: str) -> str:
    """The text is English and has no small letter."""
    return ("" if text.isupper() else "there are small letters") or response_language(text, language="en")


def english_lowercase(text: str) -> str:
    """The text is English and has no capital letter."""
    return ("" if text.islower() else "there are capital letters") or response_language(text, language="en")


def no_comma(text: str) -> str:
    """There is no comma, nor a comma of another script."""
    return "there is a comma" if COMMA.search(text) else ""


def quotation(text: str) -> str:
    """The text begins and ends with a pair of double quotation marks; `"a" and "b"` has two pairs."""
    closing = WRAPPINGS.get(text[:1], "")
    if len(text) < 2 or not closing or text[-1] not in closing:
        return "not in double quotation marks"
    depth = 0
    for position in (match.start() for match in re.finditer(f"[{text[0]}{closing}]", text[:-1])):
        before = text[position - 1 : position]
        is_straight = text[0] in closing  # it looks the same where it opens and where it closes
        at_a_beginning = not before or before in " \n\t([{-—–/:=*_"
        opens = text[position] == text[0] and (not is_straight or at_a_beginning)
        depth += 1 if opens else -1
        if depth < 1:
            return "the first quotation mark is closed before the end"
    return "" if has_words(text) else "the quotation is empty"


def compare_count(count: int, relation: str, limit: int, counted: str) -> str:
    """Return "" if a count meets its limit, otherwise both in words."""
    return "" if RELATIONS[relation](count, limit) else f"{count} {counted}, not {relation} {limit}"


def exactly(count: int, expected: int, counted: str) -> str:
    """Return "" if a count is the expected one, otherwise both in words."""
    return "" if count == expected else f"{count} {counted}, not {expected}"


def a_phrase(value: object) -> str:
    """Return a normalized text that is not empty. Raises ValueError."""
    phrase = normalize(value) if isinstance(value, str) else ""
    if not phrase:
        raise ValueError("must be a text")
    return phrase


def a_text(value: object) -> str:
    """Return a normalized text with a letter or digit. Raises ValueError."""
    phrase = a_phrase(value)
    if not has_words(phrase):
        raise ValueError("must be a text with a letter or digit")
    return phrase


def phrases(value: object) -> list[str]:
    """Return a list of texts, one at least. Raises ValueError."""
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("must be a list of texts")
    return list(map(a_phrase, value))


def a_count(value: object) -> int:
    """Return a whole number from 1 up, which a table may hold as 3.0. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 1e9 or value % 1:
        raise ValueError("must be a whole number from 1 up")
    return int(value)


def a_relation(value: object) -> str:
    """Return a key of RELATIONS. Raises ValueError."""
    if not isinstance(value, str) or value not in RELATIONS:
        raise ValueError("must be 'at least' or 'less than'")
    return value


def one_letter(value: object) -> str:
    """Return a single letter or sign. Raises ValueError."""
    letter = unicodedata.normalize("NFKC", a_phrase(value))
    if len(letter) != 1:
        raise ValueError("must be one letter or sign")
    return letter


def a_language(value: object) -> str:
    """Return a language that can be told from others. Raises ValueError."""
    if not isinstance(value, str) or value not in SCRIPT_OF:
        raise ValueError(f"must be one of {', '.join(sorted(SCRIPT_OF))}")
    return value


def beyond(*, num_paragraphs: int, nth_paragraph: int, **_: object) -> str:
    """Return why there is no such paragraph, or ""."""
    if nth_paragraph <= num_paragraphs:
        return ""
    return f"there is no paragraph {nth_paragraph} of {num_paragraphs}"


Reader = Callable[[object], object]


@dataclass(frozen=True)
class Kind:
    """A kind of instruction: its check, and a reader of each argument of a row."""

    check: Callable[..., str]
    arguments: Mapping[str, Reader]
    language: str = ""
    """The language that it looks for, unless its argument `language` names another."""
    clash: Callable[..., str] | None = None
    """(arguments) -> why no text can meet them all, or ""."""


KINDS: Mapping[str, Kind] = {
    "keywords:existence": Kind(existence, {"keywords": phrases}),
    "keywords:frequency": Kind(
        frequency, {"keyword": a_phrase, "frequency": a_count, "relation": a_relation}
    ),
    "keywords:forbidden_words": Kind(forbidden_words, {"forbidden_words": phrases}),
    "keywords:letter_frequency": Kind(
        letter_frequency, {"letter": one_letter, "let_frequency": a_count, "let_relation": a_relation}
    ),
    "language:response_language": Kind(response_language, {"language": a_language}),
    "length_constraints:number_sentences": Kind(
        number_sentences, {"num_sentences": a_count, "relation": a_relation}
    ),
    "length_constraints:number_paragraphs": Kind(number_paragraphs, {"num_paragraphs": a_count}),
    "length_constraints:number_words": Kind(number_words, {"num_words": a_count, "relation": a_relation}),
    "length_constraints:nth_paragraph_first_word": Kind(
        nth_paragraph_first_word,
        {"num_paragraphs": a_count, "nth_paragraph": a_count, "first_word": a_text},
        clash=beyond,
    ),
    "detectable_content:number_placeholders": Kind(number_placeholders, {"num_placeholders": a_count}),
    "detectable_content:postscript": Kind(postscript, {"postscript_marker": a_text}),
    "detectable_format:number_bullet_lists": Kind(number_bullet_lists, {"num_bullets": a_count}),
    "detectable_format:constrained_response": Kind(constrained_response, {}),
    "detectable_format:number_highlighted_sections": Kind(
        number_highlighted_sections, {"num_highlights": a_count}
    ),
    "detectable_format:multiple_sections": Kind(
        multiple_sections, {"section_spliter": a_text, "num_sections": a_count}
    ),
    "detectable_format:json_format": Kind(json_format, {}),
    "detectable_format:title": Kind(title, {}),
    "combination:two_responses": Kind(two_responses, {}),
    "combination:repeat_prompt": Kind(repeat_prompt, {"prompt_to_repeat": a_text}),
    "startend:end_checker": Kind(end_checker, {"end_phrase": a_text}),
    "startend:quotation": Kind(quotation, {}),
    "change_case:capital_word_frequency": Kind(
        capital_word_frequency, {"capital_frequency": a_count, "capital_relation": a_relation}
    ),
    "change_case:english_capital": Kind(english_capital, {}, "en"),
    "change_case:english_lowercase": Kind(english_lowercase, {}, "en"),
    "punctuation:no_comma": Kind(no_comma, {}),
}

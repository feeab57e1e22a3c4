"""The parts of a text that instructions count: words, sentences, paragraphs, and given phrases.

Every function takes time that grows with the length of the text and no faster.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import groupby

from covey_verify.extract import BLANK
from covey_verify.texts.language import SCRIPTS

UNSPACED = SCRIPTS["ja"] + SCRIPTS["th"]
"""Letters of the scripts that put no space between words, Chinese among them: each counts as a word."""
INVISIBLE = re.compile(
    f"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff{BLANK}\U000e0000-\U000e007f]|[\ud800-\udfff]"
)
"""Characters without a look, which could hide a word from a search or pose as one."""
QUOTES = str.maketrans(dict.fromkeys("‘’ʼ`´", "'") | dict.fromkeys("“”„‟", '"'))
QUOTATION = "\"'”’»"
CLOSERS = f"{QUOTATION})]*_"
"""Marks that may follow the end of a sentence or of a text."""
ENDS = re.compile(
    rf"[。！？｡]+[{re.escape(CLOSERS)}]*|[.!?…؟।॥۔]+[{re.escape(CLOSERS)}]*(?=\s|$)"
    # Without a space: "so it is.Then we go".
    r"|(?<=[a-z][a-z])[.!?](?=[A-Z][a-z ])"
)
LIST_MARK = re.compile(r"(?:[-*+•]|\d{1,3}[.)]|\(?[A-Za-z]\)) ")
"""The mark of a list's item."""
LETTER = re.compile(r"[^\W_]")
LAST_WORD = re.compile(r"[^\W\d_]+(?:\.[^\W\d_]+)*$")
TITLES = """
    mr mrs ms dr prof st sen rep gov gen col lt capt sgt rev hon vs cf fig vol pp approx e.g i.e
"""
"""Abbreviations that end no sentence."""
ENDINGS = "etc inc ltd co corp jr sr dept est a.m p.m u.s u.k u.n d.c ph.d"
"""Abbreviations that end a sentence if a capital follows."""


def normalize(text: str) -> str:
    r"""Return a text as all checks read it: composed, its lines ended by \n, without invisible characters.

    >>> normalize(" ro\u200bck\r\nand\rroll ")
    'rock\nand\nroll'
    """
    visible = INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    return "\n".join(visible.splitlines()).strip()


def fold_case(text: str) -> str:
    """Return a text without differences of case, width, quotation marks and white space.

    >>> fold_case("Is  it Mother’s?")
    "is it mother's?"
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().translate(QUOTES).split())


@cache
def marks() -> str:
    """Return the marks that belong to the letter before them (accents, vowel signs), as ranges of a class."""
    ranges = list[list[int]]()
    for code in range(0x300, 0x1F000):
        if not unicodedata.category(chr(code)).startswith("M"):
            continue
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)


@cache
def _word() -> re.Pattern[str]:
    letter = rf"[^\W_{UNSPACED}]"
    run = f"{letter}(?:{letter}|[{marks()}])*"
    # At most three joins, so that a chain of hyphens is not one word.
    joined = rf"(?:(?:['’‐‑-]|(?<=\d)[.,:](?=\d)){run}){{0,3}}"
    return re.compile(rf"(?![\W_])[{UNSPACED}]|{run}{joined}")


def words(text: str) -> list[str]:
    """Return the words of a text: letters and digits, joined by apostrophes, hyphens, a number's points.

    >>> words("It's a well-known 3.14, or **1,000** o'clock")
    ["It's", 'a', 'well-known', '3.14', 'or', '1,000', "o'clock"]
    """
    return _word().findall(text)


def has_words(text: str) -> bool:
    """Return whether a text has a letter or digit."""
    return LETTER.search(text) is not None


def occurrences(phrase: str, text: str) -> int:
    """Return how often a phrase occurs in whole words; ``fold_case`` made both texts. No sign is special.

    >>> occurrences("cat", "a cat, _cat_ and cat's concatenated cats"), occurrences("c++", "c++17 is c++")
    (3, 2)
    """
    start = f"(?<![^\\W_])(?<![{marks()}])" if _has_edge(phrase[0]) else ""
    end = f"(?![^\\W_])(?![{marks()}])" if _has_edge(phrase[-1]) else ""
    return len(re.findall(start + re.escape(phrase) + end, text))


def _has_edge(character: str) -> bool:
    """Return whether a word ends at a character: not at a sign, nor in scripts that do not separate words."""
    return character.isalnum() and not re.match(f"[{UNSPACED}]", character)


def paragraphs(text: str) -> list[str]:
    r"""Return the paragraphs of a text, which blank lines separate.

    >>> paragraphs("a\nb\n\n \nc")
    ['a\nb', 'c']
    """
    runs = groupby(text.split("\n"), key=lambda line: bool(line.strip()))
    return ["\n".join(lines) for filled, lines in runs if filled]


def sentences(text: str) -> tuple[int, int]:
    """Return how many sentences end with their punctuation, and how many there are in all.

    One without its punctuation ends with its paragraph, item of a list, or heading.

    >>> sentences("Mr. A. Smith left at 3.15 p.m. on foot. Why? No idea")
    (2, 3)
    """
    ended = every = 0
    for block in _blocks(text):
        start = 0
        for end in ENDS.finditer(block):
            if _ends(block, end) and has_words(block[start : end.start()]):
                ended += 1
                every += 1
                start = end.end()
        every += has_words(block[start:])
    return ended, every


def _blocks(text: str) -> list[str]:
    """Return a text's paragraphs in one line each; headings and items of lists are blocks of their own."""
    blocks = list[list[str]]()
    for paragraph in paragraphs(text):
        begins = True
        for line in map(str.strip, paragraph.split("\n")):
            mark = LIST_MARK.match(line)
            heading = line.startswith("#")
            if begins or mark or heading:
                blocks.append([line[mark.end() :] if mark else line])
            else:
                blocks[-1].append(line)
            begins = heading
    return [" ".join(block) for block in blocks]


def _ends(block: str, end: re.Match[str]) -> bool:
    """Return whether a sentence ends at a mark: not at an abbreviation, an initial, or before `he said`."""
    after = block[end.end() : end.end() + 40].lstrip()
    if after and after[0].islower() and end[0][-1] in QUOTATION:
        return False
    if not after or not end[0].startswith(".") or end[0].startswith(".."):
        return True
    last = LAST_WORD.search(block, max(0, end.start() - 20), end.start())
    word = last[0] if last else ""
    initial = len(word) == 1 and word.isupper()
    word = word.casefold()
    if initial or word in TITLES.split():
        return False
    return word not in ENDINGS.split() or after[0].isupper()

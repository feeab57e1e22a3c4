r"""The reader of answers, from LaTeX or plain text to a number, or to a small tree with typed nodes.

Nothing here evaluates anything, and every pattern is linear in the length of the text, which ``too_large``
bounds. The size of a formula's numbers is checked by ``magnitude``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from covey_verify.mathematics.units import SYMBOLS, measure

Percent = Literal["ignored", "hundredths"]
# Limits of a real answer: characters, nested brackets, digits of one number.
MAX_LENGTH, MAX_DEPTH, MAX_DIGITS = 4_000, 60, 400
HUGE = re.compile(rf"\d{{{MAX_DIGITS + 1}}}|\d[eE][-+]?\d{{4}}")
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00d7": "*", "\u00b7": "*", "\u2044": "/"})
FOREIGN = re.compile("([⁰¹²³⁴-⁹⁺⁻]+)|([₀-₉]+)|([¼-¾⅐-⅞])")
"""Superscripts, subscripts and one-character fractions, which NFKC would join to their neighbours."""
THOUSANDS, OPEN, CLOSE, ROW = "\ue000", "\ue001", "\ue002", "\ue003"
"""Private characters for a separator of digits, the braces of a set, and the end of a matrix row."""
OWN_SIGNS = str.maketrans(
    {"⟨": r"\langle ", "⟩": r"\rangle ", **dict.fromkeys((THOUSANDS, OPEN, CLOSE, ROW), "?")}
)
"""Replacements for our own signs in the text of an answer."""
TEXT_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|tt|sf)?|mbox|hbox|math(?:rm|bf|it|sf)|boldsymbol|bm)\s*\{([^{}]*)\}"
)
TEXT_LETTER = re.compile(
    r"(?:(?<=[\d})])|(?<=\}/)) ?(?:\\[,;:! ]|~)? ?\\(?:text|mbox|mathrm) ?\{ ?([mgshlLJNWVK]) ?\}"
)
"""A unit of one letter behind a number: 5\\text{ m} is not the product of 5 and m."""
LOOKS = re.compile(
    r"\\(?:text)?color ?\{[^{}]*\}|\\(?:underline|uline|mathbf|boldsymbol)(?= ?\{)"
    r"|\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|it|rm|sf|bfseries|boldmath)(?![a-zA-Z])"
)
"""Colour, size and weight, which have no meaning."""
QUOTED = re.compile(r"(\*{1,3}|`+|\"|“)([^*`\"“”]+)(?:\1|”)[.,]?")
"""An answer that is bold or quoted as a whole."""
INSIDE = r"\(((?:[^()]|\([^()]*\))*)\)"
"""The content of one pair of parentheses, with others nested one deep."""
END = r"(?![a-zA-Z])"
BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
"""A pair of braces, with others nested two deep."""
NAMED = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|pi|rho|sigma|tau|phi|varphi|psi|omega|infty"
SINGLE = rf"\d|[a-zA-Z]|\\(?:{NAMED}){END}"
"""A token that TeX takes as an argument without braces."""
# Applied in this order, as later patterns rely on the results of earlier ones: spacing and dollars first,
# then functions, fractions and roots with braces, then one spelling of each relation and sign, then units.
REWRITES: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\\\(?=(?:left|right|[dtc]?frac|sqrt|pi|leq?|geq?|infty|cup)(?![a-zA-Z]))", r"\\"),
        (r"\\\\(?:\[[^]]{0,9}\])?", ROW),
        (r"\\(?:display|text)style|\\(?:left|right|limits|[bB]ig{1,2}[lr]?)" + END, ""),
        (r", ?\\! ?| ?\{ ?, ?\} ?", THOUSANDS),
        (r"\\(?:[,;:! ]|q?quad)|~", " "),
        (r"(?:\bUS ?)?(?:\\\$|\$)|\\[()\[\]]|[€£]", ""),
        (r"\*\*(?=[\w({+-])", "^"),
        # Functions written as plain text; within ⟨⟩ they are words.
        (
            r"(?<![\\a-zA-Z])((?:sqrt|ln|log|exp|sin|cos|tan)(?= ?[(^_\d\\])|pi(?! ?[a-zA-Z]))(?![^⟨⟩]*⟩)",
            r"\\\1 ",
        ),
        (r"(?:\\sqrt|√) ?" + INSIDE, r"\\sqrt{\1}"),
        (r"(\\sqrt ?\[[^][]*\]) ?(\d|[a-zA-Z])", r"\1{\2}"),
        (r"\^ ?" + INSIDE, r"^{\1}"),
        (r"\^ ?-(\d+|[a-zA-Z])", r"^{-\1}"),
        (r"(?<!\\)\{ ?([^{}]*) ?\\choose ?([^{}]*) ?\}|^([^{}]*)\\choose ([^{}]*)$", r"\\binom{\1\3}{\2\4}"),
        (r"\\[dtc]frac" + END, r"\\frac"),
        (r"\\[dt]binom" + END, r"\\binom"),
        (rf"\\(frac|binom){END} ?({SINGLE})", r"\\\1{\2}"),
        (rf"(\\(?:frac|binom) ?{BRACED}) ?({SINGLE})", r"\1{\2}"),
        (rf"(\\sqrt|\^) ?(\\(?:frac|binom) ?{BRACED} ?{BRACED})", r"\1{\2}"),
        (rf"\\sqrt ?(\\(?:{NAMED}){END})", r"\\sqrt{\1}"),
        (r"(\.\d*)\\dot ?\{?(\d)\}?(\d*)\\dot ?\{?(\d)\}?", r"\1\\overline{\2\3\4}"),
        (r"(\.\d*)\\dot ?(?:\{(\d)\}|(\d))", r"\1\\overline{\2\3}"),
        (r"\\(overline|bar) ?(\d)", r"\\\1{\2}"),
        (r"\\sqrt ?(\d|[a-zA-Z])|√ ?(\d+|[a-zA-Z])", r"\\sqrt{\1\2}"),
        (r"(\\vec ?(?:\{[^{}]*\}|\w)) ?\\times" + END, r"\1 ⨯ "),  # in order, and no number
        (r"\\(?:cdot|times|ast)" + END, "*"),
        (r"\\leq?(?:slant)?" + END + "|<=|≤", r"\\leq "),
        (r"\\geq?(?:slant)?" + END + "|>=|≥", r"\\geq "),
        (r"\\(?:[lc]?dots[cbmi]?)" + END + r"|\.{2,}", r"\\ldots "),
        (r"\\neq?" + END + "|!=|≠", r"\\neq "),
        (r"\\lt" + END, "<"),
        (r"\\gt" + END, ">"),
        (r"≈", r"\\approx "),
        (r"\\varnothing" + END + "|∅", r"\\emptyset "),
        (r"\\?\b[Ii]nf(?:inity)?\b|∞|\boo\b", r"\\infty "),
        (r"∪", r"\\cup "),
        (r"∈", r"\\in "),
        (r"π", r"\\pi "),
        (r"\\(?:lbrace" + END + r"|\{)", OPEN),
        (r"\\(?:rbrace" + END + r"|\})", CLOSE),
        (r"\^ ?(?:\{ ?\\circ ?\}|\\circ" + END + r")|°|\\degree" + END, "⟨degree⟩"),
        (r"\\?%|⟨(?:percent(?:age)?|pct)⟩|(?<=[\d)} ])(?:percent(?:age)?|pct)\b(?![^⟨⟩]*⟩)", "⟨percent⟩"),
        (r"⟩ ?/ ?⟨", "/"),
        (r"\\operatorname\*? ?\{([^{}]*)\}", r"\\\1 "),
        # The argument of a function in degrees becomes radians: it is no quantity with a unit.
        (
            r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^ ?\{?\d\}?)? ?[({]? ?)(\d+(?:\.\d+)?) ?⟨degree⟩",
            r"\1\\frac{\2\\pi}{180}",
        ),
    )
]
GLUED = re.compile(rf"(?<=\d)((?:{'|'.join(SYMBOLS)})(?:/[a-z]+)?)(?![a-z(])", re.IGNORECASE)
"""A unit without a space before it: 12cm is not a product with c and m."""
NO_THOUSANDS = re.compile(rf"{THOUSANDS}(?!\d{{3}}(?!\d))|(?<!\d){THOUSANDS}")
"""A comma that separates no thousands: 3{,}14 is a decimal comma, or two numbers."""
GROUPED = re.compile(r"(?<![\w.,/^}])[1-9]\d{0,2}(?: \d{3})+(?! ?\d)")
"""Digits in groups of three, 1 000 000: besides mixed numbers the only ones with a space."""
MIXED = re.compile(r"(?<![\w.,/^}])(\d+) (\d+) ?/ ?(\d+)(?![.\d])")
"""A mixed number, 2 1/2, which is not 21/2."""
NO_SPACE = re.compile(r"(?<![\d.]) | (?![\d.])")
PERCENT = re.compile(r"⟨percent⟩(?! ?[\d.])")
# Groups: sign, integer part, decimals with the point, then a power of ten or a denominator.
NUMERAL = re.compile(
    rf"([-+]?)([1-9]\d{{0,2}}(?:[,{THOUSANDS}]\d{{3}})+|\d+)?(\.\d+)?(?:[eE]([-+]?\d{{1,3}})|/(\d+))?"
)
FRACTION = re.compile(r"([-+]?)(\d*)\\frac\{(-?)(\d+)\}\{(\d+)\}")
REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\}")
# A command, words in ⟨⟩, a conjunction, or any single character.
LATEX_TOKEN = re.compile(
    r"\\(?:begin|end)\{[a-z]+\*?\}|\\[a-zA-Z]+|⟨[^⟩]*⟩|(?<![a-zA-Z])(?:and|or)(?![a-z])|.", re.DOTALL
)
NUMBER_OR_TOKEN = re.compile(
    rf"(?<![\d,.])[1-9]\d{{0,2}}(?:,\d{{3}})+(?![\d,])|{LATEX_TOKEN.pattern}", re.DOTALL
)
"""Tokens outside of brackets, where 1,080 is one number; within them (1,080) stays a pair."""
OPENING, CLOSING = {"(", "[", "{", OPEN}, {")", "]", "}", CLOSE}
RELATIONS = {"=", "<", ">", r"\leq", r"\geq", r"\neq", r"\in", r"\approx"}
SEPARATORS = {",", ";", "and", "or"}
CONJUNCTION = re.compile(r"\b(and|or)\b", re.IGNORECASE)
# A quantity with words behind it, as in `5 ⟨cm⟩^2` (groups 1 to 3) or `5 square feet` (groups 4 to 6).
MEASURED = re.compile(
    r"([^⟨⟩]*[^⟨⟩ ]) ?⟨([^⟩]+)⟩ ?(?:\^ ?\{?([23])\}?)?"
    r"|([-+.,/\d ]*(?:\d|\\frac\{\d+\}\{\d+\})) ([^\W\d_]{2,}(?:[ /][^\W\d_]+)*|[mgl]/(?:s|h|min))"
    r"(?: ?\^ ?\{?([23])\}?)?"
)
CODE = re.compile(r"\d+(?:(?:-\d+){2,}|(?:/\d+){2,}|(?:\.\d+){2,})")
"""A date, a telephone number, an address or a version, which are no calculations."""
WORD_GROUP = re.compile(r"[^\W\d_]{3,}(?: [^\W\d_]+)*")
# A number with its base, 1011_2 or 2F_{16}.
BASED = re.compile(r"([0-9A-Fa-f]+)_ ?\{? ?([2-9]|[12]\d|3[0-6]) ?\}?")
PLUS_MINUS = re.compile(rf"±|\\pm{END}")
MATRIX = re.compile(
    r"[(\[]?\\begin\{([pbBvV]?matrix|array)\}(?:\{[lcr| ]*\})?((?:(?!\\begin).)*)\\end\{\1\}[)\]]?", re.DOTALL
)


@dataclass(frozen=True)
class Node:
    """An answer's structure.

    ``kind`` is `leaf`, `text`, `list`, `set`, `union`, `matrix`, `:`, `chain` (of relations), or the
    brackets of a tuple or an interval: `()`, `[)`, ...
    """

    kind: str
    text: str
    parts: tuple[Node, ...] = ()
    marks: tuple[str, ...] = ()
    """The relations of a chain, the size of a matrix, the unit or base of a leaf, a list's `and`, `or`."""


def too_large(text: str) -> bool:
    """Return whether a text is longer, deeper or has longer numbers than any real answer."""
    depth = deepest = 0
    for character in text[:MAX_LENGTH]:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return len(text) > MAX_LENGTH or deepest > MAX_DEPTH or HUGE.search(text) is not None


def number(text: str) -> Fraction | None:
    r"""Return the exact value of a number as people write it, or None.

    >>> [str(number(t)) for t in ("1,000", "$6.00", "0.5", r"\frac12", "-3", "42.", "3 apples")]
    ['1000', '6', '1/2', '1/2', '-3', '42', 'None']
    """
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return Fraction(int(text))
    return None if too_large(text) else value(clean(text))


def value(cleaned: str) -> Fraction | None:
    """Return the exact value of a clean text, or None if it is no number."""
    plain = cleaned if ", " in cleaned else without_spaces(cleaned)
    if match := NUMERAL.fullmatch(plain):
        sign, whole, decimals, exponent, below = match.groups()
        if not (whole or decimals) or (below and not int(below)):
            return None
        digits = re.sub(f"[,{THOUSANDS}]", "", whole or "0") + (decimals or "")
        return Fraction(f"{sign}{digits}") * Fraction(10) ** int(exponent or 0) / int(below or 1)
    if match := FRACTION.fullmatch(plain):
        sign, whole, minus, above, below = match.groups()
        if not int(below) or (whole and minus):
            return None
        size = int(whole or 0) + Fraction(int(above), int(below))  # 1\frac12 is a mixed number
        return -size if (sign == "-") != (minus == "-") else size
    # 0.1\overline{6}: the digits before the period, plus period / 99...9, shifted by the fixed decimals.
    if match := REPEATING.fullmatch(plain):
        sign, whole, fixed, period = match.groups()
        size = Fraction(int(f"0{whole}{fixed}")) + Fraction(int(period), 10 ** len(period) - 1)
        return (-size if sign == "-" else size) / 10 ** len(fixed)
    return None


def without_spaces(text: str) -> str:
    """Return a formula without meaningless spaces; between digits they are kept, as 1 2 is not 12."""
    return NO_SPACE.sub("", text)


def read(text: str, percent: Percent = "ignored") -> Node:
    """Return the structure of any text."""
    return parse(clean(text, percent))


def clean(text: str, percent: Percent = "ignored") -> str:
    r"""Return a text in one normal notation, with words in ⟨⟩.

    >>> clean(r"$\dfrac12\,\text{ cm}.$")
    '\\frac{1}{2} ⟨cm⟩'
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", FOREIGN.sub(_plain_digits, text)).translate(SIGNS)
        text = INVISIBLE.sub("", text).translate(OWN_SIGNS)
    if quoted := QUOTED.fullmatch(text.strip()):
        text = quoted[2]
    if LOOKS.search(text):
        text = TEXT_COMMAND.sub(_words, LOOKS.sub(" ", text))  # commands may be nested
    text = " ".join(TEXT_COMMAND.sub(_words, TEXT_LETTER.sub(r" ⟨\1⟩", text)).split())
    for pattern, by in REWRITES:
        text = pattern.sub(by, text)
    text = NO_THOUSANDS.sub(",", text)
    text = GROUPED.sub(lambda m: m[0].replace(" ", THOUSANDS), GLUED.sub(r" ⟨\1⟩", text))
    text = MIXED.sub(r"\1\\frac{\2}{\3}", text)
    if percent == "ignored":
        text = PERCENT.sub("", text)
    return " ".join(text.split()).rstrip(".,;: 。")


def _plain_digits(match: re.Match[str]) -> str:
    raised, lowered, fraction = (unicodedata.normalize("NFKC", group or "") for group in match.groups())
    if fraction:
        above, _, below = fraction.partition("\u2044")
        return rf"\frac{{{above}}}{{{below}}}"
    return f"^{{{raised}}}" if raised else f"_{{{lowered}}}"


def _words(match: re.Match[str]) -> str:
    """Put words in ⟨⟩, except conjunctions, which separate two answers."""
    pieces = [piece.strip() for piece in CONJUNCTION.split(match[1])]
    # ``split`` with a group: odd pieces are the conjunctions.
    return " ".join(piece.casefold() if i % 2 else _marked(piece) for i, piece in enumerate(pieces))


def _marked(words: str) -> str:
    r"""Mark words as such; a text that begins with a number, as in \text{5 cm}, is left plain."""
    plain = len(words) < 2 or not any(map(str.isalpha, words)) or words.lstrip("-+.")[:1].isdigit()
    return words if plain else f" ⟨{words}⟩ "


def parse(text: str) -> Node:
    r"""Return the structure of a clean text.

    >>> parse(clean(r"\{1, 2\}")).kind, parse(clean("[0, 1)")).kind, parse(clean("x = 3")).marks
    ('set', '[)', ('=',))
    """
    text = text.strip()
    if value(text) is not None:
        return Node("leaf", text)
    if match := MATRIX.fullmatch(text):
        rows = [_split(row, {"&"})[0] for row in match[2].strip(f" {ROW}").split(ROW)]
        # Row by row; the number of rows in `marks` then gives the shape.
        cells = tuple(parse(cell) for row in rows for cell in row)
        return Node("matrix", text, cells, (str(len(rows)), match[1][0] if match[1][0] in "vV" else ""))
    # The loosest binding first: the parts of a list may be relations, their sides unions, and so on.
    for kind, separators in (("list", SEPARATORS), ("chain", RELATIONS), ("union", {r"\cup"}), (":", {":"})):
        pieces, marks = _split(text, separators, NUMBER_OR_TOKEN)
        if kind == "list":
            pieces = [p for p in pieces if p.strip()]
        if len(pieces) > 1:
            words = tuple(word for word in ("and", "or") if word in marks)
            kept = {"chain": tuple(marks), "list": words}.get(kind, ())
            parts: Sequence[Node] = [parse(piece) for piece in pieces]
            if kind == "list":  # \pm 1, \pm 2 are four values
                parts = [one for part in parts for one in flat(part)]
            return Node(kind, text, tuple(parts), kept)
    if inside := _inside(text):
        # (1 or 2, 3) is no triple
        separators = SEPARATORS if text[0] == OPEN else SEPARATORS - {"or"}
        pieces = [p for p in _split(inside, separators)[0] if p.strip()]
        if text[0] == OPEN:
            return Node("set", text, tuple(p for piece in pieces for p in flat(parse(piece))))
        if text[0] == "{" or (text[0] == "(" and len(pieces) == 1):
            return parse(inside)
        # The kind is the pair of brackets: a tuple, an interval, or both, which only the reference can tell.
        return Node(text[0] + text[-1], text, tuple(map(parse, pieces)))
    if pair := _plus_minus(text):
        return Node("list", text, tuple(map(parse, pair)))
    return _leaf(text)


def _leaf(text: str) -> Node:
    if text.startswith("⟨") and text.endswith("⟩") and text.count("⟨") == 1:
        return Node("text", text[1:-1])
    if WORD_GROUP.fullmatch(text) or text.casefold() == "no":
        return Node("text", text)
    if CODE.fullmatch(bare := text.replace(" ", "")):
        return Node("text", re.sub(r"\b0+(?=\d)", "", bare))
    if match := MEASURED.fullmatch(text):
        return _measured(match[1] or match[4], match[2] or match[5], match[3] or match[6] or "")
    if match := BASED.fullmatch(text):
        return Node("leaf", match[1], marks=() if match[2] == "10" else (f"base {match[2]}",))
    return Node("leaf", text)


def _measured(quantity: str, words: str, power: str) -> Node:
    """Return a quantity with a unit, multiplied by its size (thousand)."""
    factor, unit = (Fraction(1, 100), "") if words == "percent" else measure(words)
    text, marks = quantity.strip(), (unit + power,) if unit else ()
    if factor == 1:
        return Node("leaf", text, marks=marks)
    size = value(text)
    above, below = Fraction(factor).as_integer_ratio()
    formula = rf"\frac{{{above}}}{{{below}}}*({text})" if size is None else str(size * factor)
    return Node("leaf", formula, marks=marks)


def flat(node: Node) -> Sequence[Node]:
    """Return the elements of a list, or the node itself as the only one."""
    return node.parts if node.kind == "list" else (node,)


def _plus_minus(text: str) -> list[str] | None:
    if PLUS_MINUS.search(text) is None:
        return None
    return [PLUS_MINUS.sub(sign, text) for sign in "+-"]


def _tokens(text: str, pattern: re.Pattern[str] = LATEX_TOKEN) -> Iterator[tuple[str, int]]:
    """Yield tokens with their depth of brackets; a bracket itself has the depth outside of it."""
    depth = 0
    for token in pattern.findall(text):
        if token in CLOSING or token.startswith(r"\end"):
            depth -= 1
        yield token, depth
        if token in OPENING or token.startswith(r"\begin"):
            depth += 1


def _split(
    text: str, separators: set[str], tokens: re.Pattern[str] = LATEX_TOKEN
) -> tuple[list[str], list[str]]:
    """Return the pieces between separators outside of all brackets, and the separators found."""
    pieces, found = [""], []
    for token, depth in _tokens(text, tokens):
        if depth == 0 and token in separators:
            pieces.append("")
            found.append(token)
        else:
            pieces[-1] += token
    return pieces, found


def _inside(text: str) -> str | None:
    """Return the content of one pair of brackets around the whole text, or None."""
    if not text or text[0] not in OPENING or text[-1] not in CLOSING:
        return None
    # In `(1)(2)` the depth returns to 0 within, so the first bracket does not close at the end.
    inner = [depth for _, depth in _tokens(text)][1:-1]
    return text[1:-1].strip() or None if min(inner, default=1) > 0 else None

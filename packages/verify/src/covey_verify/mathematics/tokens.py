r"""The tokens of an answer: TeX or plain text, without its looks (colours, sizes, dollars, spaces).

Every pattern is linear in the length of the text, which ``tree.too_large`` bounds.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from covey_verify.mathematics.tree import Unreadable

INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00b7": "*", "\u2044": "/", "⋅": "*", "√": "\\sqrt "})
GREEK = {
    ord(letter): f"\\{title if letter.islower() else title.capitalize()} "
    for letter in "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΣΦΨΩ"
    for title in [unicodedata.name(letter).rpartition(" ")[2].lower().replace("lamda", "lambda")]
}
"""Greek letters, and the commands for them."""
FOREIGN = re.compile("([⁰¹²³⁴-⁹⁺⁻]+)|([₀-₉]+)|([¼-¾⅐-⅞])|√ ?(\\d+)")
"""Superscripts, subscripts and one-character fractions, which NFKC would join to their neighbours."""
QUOTED = re.compile(r"(\*{1,3}|`+|\"|“)([^*`\"“”]+)(?:\1|”)[.,]?")
"""An answer that is bold or quoted as a whole."""
PREFIX = re.compile(
    r"(\\text\w* ?\{ ?)?(?:(?:the |my )?(?:final |correct )?(?:answer|ans|result|solution)(?: is ?:?| ?[:=])"
    r"|答案(?:是|为)?[:：]?) ?(\})?",
    re.IGNORECASE,
)
"""Words that only announce the answer."""
REMARK = re.compile(r" ?\(?(?:exact(?:ly)?|simplified|exact (?:value|form)|(?:in )?simplest form)\)? ?")
"""Words after an answer that do not belong to its value."""
END = r"(?![a-zA-Z])"
LOOKS = re.compile(
    r"\\(?:text)?color ?\{[^{}]*\}|\\(?:h|v)?phantom ?\{[^{}]*\}|\\(?:underline|uline|boxed|fbox|mathbf"
    r"|displaylimits|boldsymbol|bm|mathit|mathsf|mathtt|pmb|mathstrut|strut|left|right|[bB]ig{1,2}[lrm]?|limits"
    r"|nolimits|(?:display|text|script)style|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|it|rm|sf"
    r"|bfseries|boldmath|nonumber|hline|middle)" + END + r"|\\[()\[\]]|(?:\bUS ?)?\\?\$|[€£]"
)
"""Colour, size, weight and currency, which have no meaning here."""
TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal|tt|sf|up)?|mbox|hbox|mathrm) ?(?=\{)")
OPERATOR = re.compile(r"\\operatorname\*? ?\{ ?([a-zA-Z]+) ?\}")
GAP = r"\\[,;:!>]|\\ |\\q?quad|~|\s+"
SEPARATOR = r"\{ ?, ?\}|, ?\\! ?|\\! ?|\\,|\\ |~| "
NUMBER = (
    rf"(?P<number>(?P<fixed>\d*\.)(?P<period>\d*(?: ?\\(?:overline|bar) ?(?:\{{ ?\d+ ?\}}|\d)"
    r"|\\dot ?(?:\{ ?\d ?\}|\d)(?:\d*\\dot ?(?:\{ ?\d ?\}|\d))?|\(\d+\)))"
    rf"|[1-9]\d{{0,2}}(?P<by>{SEPARATOR}COMMA)\d{{3}}(?:(?P=by)\d{{3}})*(?!\d|[ ,]\d)(?:\.\d+)?"
    r"|(?:\d+(?: ?\{ ?, ?\} ?\d+|\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\w))?)"
)
REST = (
    rf"|(?P<row>\\\\(?:\[[^]]{{0,9}}\])?)|(?P<gap>{GAP})|\\(?P<edge>begin|end) ?\{{(?P<env>[a-zA-Z]+)\*?\}}"
    r"|(?P<degree>\^ ?(?:\{ ?\\circ ?\}|\\circ" + END + r")|°|\\degrees?" + END + ")"
    r"|\\(?P<command>[a-zA-Z]+)|(?P<escaped>\\[{}%&#_|])|(?P<letters>[a-zA-Z]+)|(?P<word>[^\W\d_]+)"
    r"|(?P<sign><=|>=|!=|<>|\*\*|\.{2,}|.)"
)
# Within brackets a comma never separates thousands: (1,080) is a pair.
OUTSIDE = re.compile(NUMBER.replace("COMMA", "|,") + REST, re.DOTALL)
WITHIN = re.compile(NUMBER.replace("COMMA", "") + REST, re.DOTALL)
SYNONYMS = {
    **dict.fromkeys(("cdot", "ast"), "*"),
    **dict.fromkeys(("le", "leq", "leqslant", "leqq", "<="), "≤"),
    **dict.fromkeys(("ge", "geq", "geqslant", "geqq", ">="), "≥"),
    **dict.fromkeys(("ne", "neq", "!=", "<>"), "≠"),
    **dict.fromkeys(("ldots", "dots", "cdots", "dotsc", "dotsb", "dotsm", "lcdots"), "…"),
    **dict.fromkeys(("lvert", "rvert", "vert", "|"), "|"),
    **dict.fromkeys(("Vert", "lVert", "rVert", "‖"), "‖"),
    **dict.fromkeys(("setminus", "backslash", "smallsetminus"), "∖"),
    **dict.fromkeys(("varnothing", "emptyset"), "∅"),
    **dict.fromkeys(("langle", "<("), "⟨"),
    "times": "×", "**": "^", "div": "/", "lt": "<", "gt": ">", "in": "∈", "approx": "≈", "equiv": "≡",
    "pm": "±", "mp": "∓", "cup": "∪", "cap": "∩", "infty": "∞", "infin": "∞", "rangle": "⟩",
    "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "colon": ":", "mid": "∣",
    "percent": "%", "prime": "'", "pi": "π", "lparen": "(", "rparen": ")", "doteq": "≈", "simeq": "≈",
}  # fmt: skip
"""Names of signs, and the signs."""
OPENING = {"(", "[", r"\{", "⟨"}
CLOSING = {")", "]", r"\}", "⟩"}


def currency(text: str) -> str:
    r"""Return the unit of the only sign of money in a text, or "".

    A dollar sign without a backslash is money only if no second dollar sign could close a formula.

    >>> currency(r"\$5"), currency("$5$"), currency("$5"), currency("€5")
    ('dollar', '', 'dollar', 'euro')
    """
    plain = text.replace(r"\$", "")
    money = {
        "dollar": len(plain) < len(text) or plain.count("$") % 2,
        "euro": "€" in text,
        "sterling": "£" in text,
    }
    units = [unit for unit, present in money.items() if present]
    return units[0] if len(units) == 1 else ""


class Token(NamedTuple):
    """A piece of a text.

    ``kind``: `number`, `letters`, `word` (of running text), `command`, `sign`, `row`, `begin` or `end`.
    """

    kind: str
    text: str
    gap: bool = False
    """Whether there is a space before it."""


def tokens(text: str) -> list[Token]:
    r"""Return the tokens of an answer.

    >>> [t.text for t in tokens(r"$\color{red}{\dfrac12}\,\text{ cm}.$")]
    ['{', 'dfrac', '12', '}', 'cm']
    """
    text = _plain(text)
    parsed = list(_tokens(LOOKS.sub(" ", text)))
    while parsed and parsed[-1].text in (".", ",", ";", ":", "。"):
        parsed.pop()
    if len(parsed) > 1 and parsed[-1].kind == "word" and REMARK.fullmatch(parsed[-1].text):
        parsed.pop()
    return _ohms(parsed)


def _ohms(parsed: list[Token]) -> list[Token]:
    r"""Return tokens in which a last \Omega after a number, perhaps with a prefix, is a unit."""
    prefix = parsed[-2].text if len(parsed) > 2 and parsed[-2].text in ("k", "M", "m") else ""
    before = parsed[-2 - len(prefix)] if len(parsed) > 1 + len(prefix) else None
    if parsed and parsed[-1].text == "Omega" and before is not None and before.kind == "number":
        return [*parsed[: -1 - len(prefix)], Token("word", f"{prefix}Ω", True)]
    return parsed


def _plain(text: str) -> str:
    """Return a text without foreign digits, invisible characters, quotes and announcements."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", FOREIGN.sub(_plain_digits, text)).translate(SIGNS | GREEK)
    # The backslash of a space at the end is alone once the space is gone; {:} is a colon with other spaces.
    text = re.sub(r"(?<!\\)\\$", "", INVISIBLE.sub("", text).strip()).replace("{:}", ":")
    if quoted := QUOTED.fullmatch(text):
        text = quoted[2]
    # A command with its backslash doubled, as JSON has it; the end of a row is never before these.
    text = re.sub(
        r"\\\\(?=(?:left|right|[dtc]?frac|sqrt|pi|leq?|geq?|infty|cup|text)(?![a-zA-Z]))", r"\\", text
    )
    announced = PREFIX.match(text)
    if announced and announced.end() < len(text):
        text = (announced[1] if announced[1] and not announced[2] else "") + text[announced.end() :]
    return text


def _plain_digits(match: re.Match[str]) -> str:
    raised, lowered, fraction = (unicodedata.normalize("NFKC", group or "") for group in match.groups()[:3])
    if match[4]:
        return rf"\sqrt{{{match[4]}}}"
    if fraction:
        above, _, below = fraction.partition("\u2044")
        return rf"\frac{{{above}}}{{{below}}}"
    return f"^{{{raised}}}" if raised else f"_{{{lowered}}}"


def _tokens(text: str) -> Iterator[Token]:
    position = depth = 0
    gap = False
    while position < len(text):
        if match := TEXT.match(text, position):
            body, position = _read_braces(text, match.end())
            yield from _words(body, gap)
            gap = False
            continue
        if match := OPERATOR.match(text, position):
            yield Token("command", match[1], gap)
            position = match.end()
            gap = False
            continue
        match = (WITHIN if depth else OUTSIDE).match(text, position)
        assert match is not None  # the last alternative is any character
        position = match.end()
        if match.lastgroup == "gap" or match["gap"]:
            gap = True
            continue
        token = _token(match, gap)
        depth += (token.text in OPENING) - (token.text in CLOSING)
        before = text[position - 3] if position > 2 else ""
        after_factor = before.isdigit() or (before and before in ")}")
        if match["sign"] == "!=" and not gap and after_factor:
            yield Token("sign", "!")  # 5!=120
            token = Token("sign", "=")
        gap = False
        yield token


def _token(match: re.Match[str], gap: bool) -> Token:
    if match["number"]:
        return Token("number", _numeral(match), gap)
    if match["row"] or match["edge"]:
        return Token("row", "row", gap) if match["row"] else Token(match["edge"], match["env"], gap)
    if match["degree"]:
        return Token("sign", "°", gap)
    if match["letters"] or match["word"]:
        return _letter_run(match["letters"] or match["word"], "letters" if match["letters"] else "word", gap)
    if match["escaped"]:
        text = {r"\{": r"\{", r"\}": r"\}", r"\|": "‖"}.get(match["escaped"], match["escaped"][1:])
        return Token("sign", text, gap)
    text = "…" if (match["sign"] or "").startswith("..") else match["command"] or match["sign"]
    if len(text) > 1 and text in SYNONYMS:
        return Token("sign", SYNONYMS[text], gap)
    if match["command"]:
        return Token("command", text, gap)
    return Token("separator" if text in (",", ";", "，", "、") else "sign", text, gap)


def _letter_run(text: str, kind: str, gap: bool) -> Token:
    """Return a run of letters."""
    if text in ("and", "or"):
        return Token("separator", text, gap)
    if text.casefold() in ("percent", "percentage", "pct"):
        return Token("sign", "%", gap)
    return Token(kind, text, gap)


def _numeral(match: re.Match[str]) -> str:
    """Return a number's digits, without separators; a period is in parentheses: 0.1(6)."""
    if match["by"]:
        return match["number"].replace(match["by"], "")
    if match["period"] is None:
        return re.sub(r" ?\{ ?, ?\} ?", ".", match["number"])
    fixed, _, period = re.sub(r"[^\d(\\]", "", re.sub(r"\\[a-z]+|\(", "(", match["period"])).partition("(")
    if fixed and "\\" not in match["period"]:
        raise Unreadable("0.1(6) may have a period, or be a product")
    return f"{match['fixed']}{fixed}({period.replace('(', '')})"


def _read_braces(text: str, start: int) -> tuple[str, int]:
    """Return the content of the braces that begin at ``start``, and the index after them."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 1 : i], i + 1
    raise Unreadable("a brace is not closed")


def _words(body: str, gap: bool) -> Iterator[Token]:
    r"""Yield the tokens of running text: words, separators, or formulas in it, such as 5 in \text{5 cm}."""
    body = " ".join(re.sub(GAP, " ", body).split(" "))
    if re.match(r"[-+.$\s]*\d", body) or re.search(r"[\\^_=<>{}|%]", body):
        for token in _tokens(body):
            yield Token("word", token.text, token.gap) if token.kind == "letters" else token
        return
    gap = gap or body.startswith(" ")
    for piece in re.split(r"(,|;|\band\b|\bor\b)", body):
        word = piece.strip()
        if word in (",", ";", "and", "or"):
            yield Token("separator", word, True)
        elif word:
            yield _letter_run(word, "word", gap)
        gap = True


def value_of(text: str) -> Fraction:
    """Return the value of a numeral: 1.5, 1e-5 or 0.1(6).

    >>> value_of("0.1(6)"), value_of("1e-2")
    (Fraction(1, 6), Fraction(1, 100))
    """
    fixed, _, period = text.partition("(")
    if not period:
        return Fraction(f"0{text}" if text.startswith(".") else text)
    whole, _, decimals = fixed.partition(".")
    digits = period.rstrip(")")
    size = Fraction(int(f"0{whole}{decimals}")) + Fraction(int(digits), 10 ** len(digits) - 1)
    return size / 10 ** len(decimals)

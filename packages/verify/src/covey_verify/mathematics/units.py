"""The words after a number: its unit (`3 cm`), its size (`3 thousand`), or something else.

A unit is on a closed list, or it is one plain noun (`3 apples`). Everything else (`3 or so`, `3 maybe`,
`3 halves`, whole phrases) may change the meaning of the number, so it has to be in the reference answer too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

# Each group, between semicolons: a base unit, a factor (1 if none) and words for that many of it.
KNOWN: dict[str, tuple[Fraction, str]] = {}
for _group in """
    m 1 m meter metre 米; m 1/100 cm centimeter centimetre 厘米; m 1/1000 mm millimeter millimetre 毫米
    m 0.0254 in inch inche; m 1000 km kilometer kilometre 千米 公里; m 0.3048 ft foot feet; m 1609.344 mi mile
    m 0.9144 yd yard; s 1 s sec second 秒; s 60 min minute 分钟; s 3600 h hr hour 小时; s 86400 day 天
    s 604800 week; month 1 month; year 1 yr year; kg 0.001 g gram 克; kg 0.000001 mg milligram
    kg 1 kg kilogram 千克 公斤; kg 0.45359237 lb pound; oz 1 oz ounce; l 1 l liter litre; l 0.001 ml
    l 0.001 milliliter millilitre; gal 1 gal gallon; degree 1 degree deg; rad 1 rad radian; dollar 0.01 cent
    euro 1 euro eur; dollar 1 dollar usd; sterling 1 gbp sterling; ohm 1 ohm; n 1 n newton
    j 1 j joule; j 1000 kj kilojoule; w 1 w watt; w 1000 kw kilowatt; v 1 v volt
    pa 1 pa pascal; hz 1 hz hertz; k 1 k kelvin; mol 1 mol mole
    a 1 a ampere amp; unit 1 unit; celsius 1 celsius °C; fahrenheit 1 fahrenheit °F
""".replace("\n", ";").split(";"):
    if _group.strip():
        _base, _factor, *_words = _group.split()
        KNOWN |= {word.casefold(): (Fraction(_factor), _base) for word in _words}
POUND = KNOWN["pound"][0]
PREFIXES = {"": 0, "n": -9, "u": -6, "m": -3, "c": -2, "d": -1, "k": 3, "M": 6, "G": 9, "T": 12}
BASES = {
    **{
        symbol: symbol.casefold()
        for symbol in ("m", "s", "L", "l", "N", "J", "W", "V", "Pa", "Hz", "K", "mol", "A")
    },
    "g": "kg",
    "Ω": "ohm",
}
# Where case matters: mV and MV.
CASED = {
    prefix + symbol: (Fraction(10) ** (power - 3 * (symbol == "g")), base)
    for prefix, power in PREFIXES.items()
    for symbol, base in BASES.items()
}
DERIVED = {
    "n": {"kg": 1, "m": 1, "s": -2},
    "j": {"kg": 1, "m": 2, "s": -2},
    "w": {"kg": 1, "m": 2, "s": -3},
    "pa": {"kg": 1, "m": -1, "s": -2},
    "v": {"kg": 1, "m": 2, "s": -3, "a": -1},
    "ohm": {"kg": 1, "m": 2, "s": -3, "a": -2},
    "hz": {"s": -1},
}
"""Units that are products of other units."""
QUOTIENTS = {"mph": "mi/h", **dict.fromkeys(("kph", "kmph", "kmh", "kmhr"), "km/h"), "mps": "m/s"}
SYMBOLS = frozenset(w for w in (*KNOWN, *CASED) if 1 < len(w) < 4 and w.isalpha()) | set(QUOTIENTS)
"""Units that people write directly after the number; a single letter may be a variable."""
LETTERS = frozenset("mshglLJNWVKACFΩ")
"""Units of one letter, which count as units only if nothing follows them."""
SIZES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
HEDGE_WORDS = """
    or either maybe perhaps possibly probably likely presumably not no never neither nor isn unsure
    uncertain guess guessing oder ou nicht pas или не
"""
"""Words that take a number back or add another one."""
# Words that are not nouns, or change the number before them.
OTHER_WORDS = """
    and but except without versus vs alternatively otherwise instead rather however
    non none nothing nil zero one two three four five six seven eight nine ten eleven twelve twenty thirty
    forty fifty sixty seventy eighty ninety half halves third thirds fourth fourths quarter quarters fifth
    fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths
    thousandth thousandths millionth millionths billionth billionths couple score gross myriad googol lakh
    crore mil mill bil mln bln kilo mega giga milli micro nano ppm ppb permille bps double twice triple
    is are was were be been will would may might can could should must equals equal right wrong correct
    incorrect true false more less fewer greater smaller than least most plus minus times over under above
    below between through until till up about around approx approximate circa near almost some estimate
    estimated guessed unknown unclear doubt doubtful wait hmm sorry error mistake invalid undefined
    infinite infinity negative positive squared cubed factorial root mod modulo divided multiplied
    log exp sin cos tan sec cot csc sqrt max lim gcd lcm det first last other others etc
    tausend mille mila million millionen milliarde milliarden milliard milliards millones тысяч тысяча
    миллион
"""
HEDGES = frozenset(HEDGE_WORDS.split())
NO_NOUNS = HEDGES | frozenset(OTHER_WORDS.split())
NOUNS_IN_LY = {"family", "fly", "butterfly", "lily", "assembly"}
POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
LAST_LETTER = "\u052f"
"""The last letter of Latin, Greek and Cyrillic; in other scripts a few characters can be a sentence."""
UNKNOWN = "? "
"""The mark of words that are not a unit: only the same words equal them."""


def is_unit(word: str) -> bool:
    """Return whether a word is a unit of the list."""
    return word in CASED or word.casefold() in KNOWN or word.casefold() in QUOTIENTS


def measure(pieces: Sequence[tuple[str, int]]) -> tuple[Fraction, Fraction, str]:
    """Return the size, the factor to base units and the unit that words with their powers mean.

    >>> [str(part) for part in measure([("million km", 1), ("h", -1)])]
    ['1000000', '5/18', 'm s^-1']
    >>> measure([("square feet", 1)])[2], measure([("packs of gum", 1)])[2], measure([("apples", 1)])[2]
    ('m^2', '? packs of gum', 'apple')
    >>> [str(part) for part in measure([("kN", 1)])]
    ['1', '1000', 'kg m s^-2']
    """
    size = factor = Fraction(1)
    total: Counter[str] = Counter()
    for phrase, power in pieces:
        words = phrase.strip(" .").split()
        while words and words[0].casefold().removesuffix("s") in SIZES:
            size *= SIZES[words.pop(0).casefold().removesuffix("s")]
        if not words:
            continue
        parts = _units(words)
        if parts is None:
            return size, Fraction(1), UNKNOWN + " ".join(" ".join(p[0].casefold().split()) for p in pieces)
        for scale, base, exponent in parts:
            factor *= scale ** (exponent * power)
            for base_unit, times in DERIVED.get(base, {base: 1}).items():
                total[base_unit] += times * exponent * power
    written = (base if n == 1 else f"{base}^{n}" for base, n in sorted(total.items()) if n)
    return size, factor, " ".join(written)


def _units(words: Sequence[str]) -> list[tuple[Fraction, str, int]] | None:
    """Return a phrase as (factor, base, exponent) of each unit, or None."""
    text = " ".join(QUOTIENTS.get(word.casefold(), word) for word in words)
    units = []
    for i, part in enumerate(re.split(r"/| per ", text)):
        names = part.split()
        # "square feet" or "feet squared"; a single word is not a power.
        ends = [w.casefold() for w in names[:1] + names[-1:]]
        power = next((POWERS[w] for w in ends if w in POWERS), 1) if len(names) > 1 else 1
        unit = _unit(" ".join(w for w in names if not (power > 1 and w.casefold() in POWERS)))
        if unit is None or i > 1:
            return None
        units.append((*unit, -power if i else power))
    return units


def _unit(word: str) -> tuple[Fraction, str] | None:
    """Return one word as a unit of the list or as a noun, or None."""
    if word in CASED:
        return CASED[word]
    word = word.casefold()
    for form in (word, word.removesuffix("s")):
        if form in KNOWN:
            return KNOWN[form]
    noun = len(word) > 2 and word.isalpha() and max(word) <= LAST_LETTER
    if not noun or word in NO_NOUNS or word.endswith(("teen", "ieth", "ieths", "teenth", "teenths")):
        return None
    if word.endswith("ly") and word not in NOUNS_IN_LY:
        return None
    return Fraction(1), word.removesuffix("s")

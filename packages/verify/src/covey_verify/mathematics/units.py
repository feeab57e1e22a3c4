"""The words behind a number: its unit (`3 cm`), its size (`3 thousand`), or something else.

A unit is on a closed list, or it is one plain noun (`3 apples`). Everything else (`3 or so`, `3 maybe`,
`3 halves`, whole phrases) may change the meaning of the number, so it has to be in the reference answer too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Each group, between semicolons or line ends, lists a short name and its synonyms: word -> short name.
UNITS = {
    word: words.split()[0]
    for words in """
        m meter metre; cm centimeter centimetre 厘米; mm millimeter millimetre 毫米; in inch inche
        km kilometer kilometre 千米 公里; ft foot feet; mi mile; yd yard; s sec second; min minute 分钟
        h hr hour 小时; day; week; month; year yr; g gram; mg milligram
        kg kilogram 千克 公斤; lb pound; oz ounce
        l liter litre; ml milliliter millilitre; gal gallon; degree deg; rad radian; cent; eur euro
        dollar usd; mi/h mph; km/h kph kmh kmph; n newton; j joule; kj kilojoule; w watt; kw kilowatt
        v volt; pa pascal; hz hertz; k kelvin; mol mole; unit
    """.replace("\n", ";").split(";")
    for word in words.split()
}
SYMBOLS = sorted((w for w in UNITS if 1 < len(w) < 4 and w.isascii() and w.isalpha()), key=len, reverse=True)
"""Units that people write directly behind the number; a single letter may be a variable. Longest first."""
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
# Words that are no nouns, or change the number before them.
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
POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
LAST_LETTER = "\u052f"
"""The last letter of Latin, Greek and Cyrillic; in other scripts a few characters can be a sentence."""


def measure(words: str) -> tuple[int, str]:
    """Return the factor and the unit that the words behind a number mean.

    Unknown words are returned with a "? " before them: only the same words equal them.

    >>> measure("million square feet"), measure("miles per hour"), measure("maybe")
    ((1000000, 'ft2'), (1, 'mi/h'), (1, '? maybe'))
    """
    left = words.casefold().strip(" .").split()
    factor = 1
    while left and (size := SIZES.get(left[0], SIZES.get(left[0].removesuffix("s")))) is not None:
        factor, left = factor * size, left[1:]
    if not left:
        return factor, ""
    return factor, _unit(left) or f"? {' '.join(left)}"


def _unit(words: Sequence[str]) -> str | None:
    """Return the short name of a unit, or None."""
    # "square feet" or "feet squared"; a single word is no power.
    power = next((POWERS[w] for w in (words[0], words[-1]) if w in POWERS), "") if len(words) > 1 else ""
    bare = " ".join(w for w in words if not (power and w in POWERS))
    parts = [_plain(part.strip()) for part in re.split(r"/| per ", bare)]
    found = [part for part in parts if part is not None]
    return "/".join(found) + power if len(found) == len(parts) <= 2 else None


def _plain(word: str) -> str | None:
    """Return one word as a unit of the list or as a noun, or None."""
    for known in (word, word.removesuffix("s")):
        if known in UNITS:
            return UNITS[known]
    noun = len(word) > 2 and word.isalpha() and max(word) <= LAST_LETTER
    if not noun or word in NO_NOUNS or word.endswith(("teen", "ieth", "ieths", "teenth", "teenths")):
        return None
    if word.endswith("ly") and word not in NOUNS_IN_LY:
        return None
    return word.removesuffix("s")

"""The reward for staying in one language, judged by the script of the text, or by its words too."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import Any

from covey_verify.contract import reward
from covey_verify.errors import ConfigError
from covey_verify.extract import LONGEST, TextOrMessages, text_of
from covey_verify.types import Score

# Code blocks, inline code, formulas, TeX commands, tags and addresses.
NOT_PROSE = re.compile(r"```[^`]*(?:```|$)|`[^`\n]*`|\$\$?[^$]*\$\$?|\\[a-zA-Z]+|<[a-z_/]+>|https?://\S+")
HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
SCRIPTS = {
    "latin": "a-zA-Z\u00c0-\u024f\u1e00-\u1eff",
    "zh": HAN,
    "ja": f"\u3040-\u30ff{HAN}",
    "ko": "\uac00-\ud7af\u1100-\u11ff",
    "ru": "\u0400-\u052f",
    "ar": "\u0600-\u06ff",
    "he": "\u0590-\u05ff",
    "el": "\u0370-\u03ff",
    "hi": "\u0900-\u097f",
    "th": "\u0e00-\u0e7f",
}
LATIN = {"en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "no", "pl", "cs", "tr", "vi", "id"}
# A word, or a single character of the scripts that put no space between words.
WORD = re.compile(f"[{SCRIPTS['ja']}{SCRIPTS['th']}]|[^\\W\\d_]+")
LATIN_WORD, GREEK_WORD = (re.compile(f"[{SCRIPTS[name]}]+") for name in ("latin", "el"))
SENTENCE = re.compile(r"(?<![\\a-z])[a-z]{2,}(?:,? [a-z]{2,}){2,}", re.IGNORECASE)
FEWEST = 10
"""Fewest words that are judged: the language of `x = 4` is unknown."""


PIECE = 8
"""Fewest words from which a language is detected: with fewer it is often a guess."""


@reward(weight=0.1, concurrent=True, format_only=True)
def language_consistency(completion: TextOrMessages, *, language: str = "en", detect: bool = False) -> Score:
    """Return the fraction of words in the script of ``language``, without formulas, code and tags.

    Words in these that belong to no formula or code do count, so another language cannot hide there.
    DeepSeek-R1, arXiv 2501.12948, section 2.3.2. Languages of one script are not distinguished; with
    ``detect`` those of the Latin script are: words count in pieces that py3langid finds to be in
    ``language``. The score is None if there are too few words.

    >>> language_consistency("we add two and three, \u6240\u4ee5 so it is five").value
    0.8181818181818182
    """
    if language not in LATIN and language not in SCRIPTS:
        known = ", ".join(sorted(LATIN | SCRIPTS.keys()))
        raise ConfigError(f"language_consistency: language {language!r} is unknown; known: {known}")
    script = re.compile(f"[{SCRIPTS['latin' if language in LATIN else language]}]+")
    prose = NOT_PROSE.sub(lambda m: f" {_foreign(m[0], script)} ", text_of(completion)[:LONGEST])
    words = WORD.findall(prose)
    if len(words) < FEWEST:
        return Score(None, "not_applicable")
    fitting = [w for w in words if script.fullmatch(w)]
    if detect and language in LATIN:
        # Split into `count` pieces of nearly equal length, PIECE words or more.
        count = len(fitting) // PIECE or 1
        edges = [n * len(fitting) // count for n in range(count + 1)]
        pieces = [fitting[a:b] for a, b in pairwise(edges)]
        fitting = [w for p in pieces if identifier().classify(" ".join(p))[0] == language for w in p]
    return Score(len(fitting) / len(words))


def _foreign(notation: str, script: re.Pattern[str]) -> str:
    """Return the words of a formula, code or a tag that are prose all the same, so that they count.

    Formulas and code consist of Latin letters and short Greek names; three Latin words in a row are no
    formula.
    """
    words = [w for w in WORD.findall(notation) if not (script.fullmatch(w) or LATIN_WORD.fullmatch(w))]
    found = [w for w in words if len(w) > 2 or not GREEK_WORD.fullmatch(w)]
    if notation.startswith("$") and not script.fullmatch("a"):
        found += [w for run in SENTENCE.findall(notation) for w in run.split()]
    return " ".join(found)


@cache
def identifier() -> Any:
    """Return py3langid's classifier for the languages of the Latin script. Raises ConfigError."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise ConfigError(
            "language_consistency: detect needs py3langid: pip install 'covey-verify[language]'"
        ) from None
    found = LanguageIdentifier.from_model_file(MODEL_FILE)
    found.set_languages(sorted(LATIN))
    return found

"""The reward for staying in one language, judged by the script of the text, or by its words too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from covey_verify.contract import reward
from covey_verify.errors import ConfigError
from covey_verify.extract import MAX_CHARACTERS, TextOrMessages, text_of
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
    "bn": "\u0980-\u09ff",
    "pa": "\u0a00-\u0a7f",
    "gu": "\u0a80-\u0aff",
    "ta": "\u0b80-\u0bff",
    "te": "\u0c00-\u0c7f",
    "kn": "\u0c80-\u0cff",
    "ml": "\u0d00-\u0d7f",
    "th": "\u0e00-\u0e7f",
}
LATIN = {"en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "no", "pl", "cs", "tr", "vi", "id"}
RIVALS: Mapping[str, frozenset[str]] = {
    "latin": frozenset(LATIN | {"fi", "sw"}),
    "ru": frozenset({"ru", "uk", "bg"}),
    "ar": frozenset({"ar", "fa", "ur"}),
    "hi": frozenset({"hi", "mr", "ne"}),
}
"""Script -> the languages that share it, which only their words tell apart."""
SCRIPT_OF: Mapping[str, str] = {
    **{script: script for script in SCRIPTS if script != "latin"},
    **{language: script for script, languages in RIVALS.items() for language in languages},
}
"""Language -> its script in SCRIPTS, for all languages that ``in_language`` knows."""
# A word, or a single character of the scripts that put no space between words.
WORD = re.compile(f"[{SCRIPTS['ja']}{SCRIPTS['th']}]|[^\\W\\d_]+")
KANA = re.compile("[\u3040-\u30ff]")
LATIN_WORD = re.compile(f"[{SCRIPTS['latin']}]+")
GREEK_WORD = re.compile(f"[{SCRIPTS['el']}]+")
SENTENCE = re.compile(r"(?<![\\a-z])[a-z]{2,}(?:,? [a-z]{2,}){2,}", re.IGNORECASE)
MIN_WORDS = 10
"""Fewest words that are judged: `x = 4` could be in any language."""


PIECE = 8
"""Fewest words in which a language is detected: with fewer it is often a guess."""
LONG_PIECE = 15
"""Words of a piece in which ``in_language`` looks for another language."""
MAX_PIECES = 40
ENTIRE = 0.8
"""Fraction of a text's words that have to be in its language: names and quotations may be in another."""
CERTAIN = 5.0
"""Nats by which another language must be likelier before a piece counts as written in it."""


@reward(weight=0.1, concurrent=True, format_only=True)
def language_consistency(completion: TextOrMessages, *, language: str = "en", detect: bool = False) -> Score:
    """Return the fraction of words in the script of ``language``, without formulas, code and tags.

    Prose within these does count, so that another language cannot hide there. DeepSeek-R1, arXiv 2501.12948,
    section 2.3.2. Languages of one script are not distinguished, except that ``detect`` tells languages
    of the Latin script apart: words then count in pieces that py3langid finds to be in ``language``. The
    score is None if there are too few words.

    >>> language_consistency("we add two and three, \u6240\u4ee5 so it is five").value
    0.8181818181818182
    """
    if language not in LATIN and language not in SCRIPTS:
        names = ", ".join(sorted(LATIN | SCRIPTS.keys()))
        raise ConfigError(f"language_consistency: language {language!r} is unknown; known: {names}")
    script = re.compile(f"[{SCRIPTS['latin' if language in LATIN else language]}]+")
    words = WORD.findall(_prose(text_of(completion)[:MAX_CHARACTERS], script))
    if len(words) < MIN_WORDS:
        return Score(None, "not_applicable")
    fitting = [w for w in words if script.fullmatch(w)]
    if detect and language in LATIN:
        pieces = _pieces(fitting, len(fitting) // PIECE)
        in_that_language = [p for p in pieces if identifier().classify(" ".join(p))[0] == language]
        fitting = [word for piece in in_that_language for word in piece]
    return Score(len(fitting) / len(words))


def in_language(text: str, language: str) -> bool:
    """Return whether a text is in a language of SCRIPT_OF; a text without words is in none.

    ENTIRE of its words must be in the language's script and, if other languages share the script, in pieces
    that are not clearly in one of these languages. Formulas, code and addresses do not count. Capitals are
    read as small letters. Raises ConfigError without py3langid if the script is shared.
    """
    name = SCRIPT_OF[language]
    script = re.compile(f"[{SCRIPTS[name]}]+")
    prose = _prose(text.lower(), script)
    words = WORD.findall(prose)
    in_script = sum(script.fullmatch(word) is not None for word in words)
    share = in_script / max(len(words), 1)
    if name == "ja" and not KANA.search(prose):  # Chinese uses the other half of the script
        return False
    if name in RIVALS and share >= ENTIRE:
        # Whole tokens: the words above are without the vowel signs of some scripts.
        tokens = prose.split()
        pieces = _pieces(tokens, min(MAX_PIECES, len(tokens) // LONG_PIECE))
        fitting = 0
        for piece in pieces:
            scores = identifier(RIVALS[name]).rank(" ".join(piece))  # (language, nats), the likeliest first
            if scores[0][1] - dict(scores)[language] <= CERTAIN:
                fitting += len(piece)
        share *= fitting / len(tokens)
    return share >= ENTIRE


def needs_detector(language: str) -> bool:
    """Return whether ``in_language`` needs py3langid for a language."""
    return SCRIPT_OF[language] in RIVALS


def _prose(text: str, script: re.Pattern[str]) -> str:
    """Return a text without formulas, code and tags, except for the prose within them."""
    return NOT_PROSE.sub(lambda m: f" {_foreign(m[0], script)} ", text)


def _pieces(words: Sequence[str], count: int) -> list[Sequence[str]]:
    """Return the words in pieces of nearly equal length, one at least."""
    count = count or 1
    edges = [n * len(words) // count for n in range(count + 1)]
    return [words[a:b] for a, b in pairwise(edges)]


def _foreign(notation: str, script: re.Pattern[str]) -> str:
    """Return the words within a formula, code or a tag that are prose.

    Formulas and code consist of Latin words and short Greek names, so all other words are prose. In a formula
    three Latin words in a row are too.
    """
    words = [w for w in WORD.findall(notation) if not (script.fullmatch(w) or LATIN_WORD.fullmatch(w))]
    foreign = [w for w in words if len(w) > 2 or not GREEK_WORD.fullmatch(w)]
    if notation.startswith("$") and not script.fullmatch("a"):
        foreign += [w for run in SENTENCE.findall(notation) for w in run.split()]
    return " ".join(foreign)


@cache
def identifier(languages: frozenset[str] = frozenset(LATIN)) -> Any:
    """Return py3langid's classifier for some languages. Raises ConfigError."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise ConfigError(
            "telling languages of one script apart needs py3langid: pip install 'covey-verify[language]'"
        ) from None
    model = LanguageIdentifier.from_model_file(MODEL_FILE)
    model.set_languages(sorted(languages))
    return model

"""The explanation of a key that is no setting: the setting that it means, or up to three similar ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches

from covey.config import trl

MIN_SIMILARITY = 0.7
"""Least similarity of two names, 0 to 1, with which one is suggested for the other."""
MAX_GUESSES = 3


def explain_unknown(path: str, value: object, keys: Sequence[str], kind: str = "setting") -> str:
    """Return why a key is refused and what was probably meant; ``keys`` are all dotted keys.

    >>> explain_unknown("rolout", {"group_size": 8}, ["rollout.group_size", "train.lr"])
    'rolout is not a section; did you mean rollout?'
    >>> explain_unknown("train.use_peft", True, [])
    "train.use_peft is not a setting; for TRL's use_peft write lora: {rank: 16, alpha: 32}"
    """
    last = path.rpartition(".")[2]
    advice = trl.advice_on(last)
    if advice:
        return f"{path} is not a setting; {advice}"
    sections = _sections(path, value, keys) if isinstance(value, Mapping) else []
    if sections:
        return f"{path} is not a section{suggestion(sections)}"
    return f"{path} is not a {kind}{suggestion(_settings(path, keys))}"


def suggestion(names: Sequence[str]) -> str:
    """Return '; did you mean a, b or c?', or '' without names."""
    if not names:
        return ""
    *others, last = names[:MAX_GUESSES]
    choice = f"{', '.join(others)} or {last}" if others else last
    return f"; did you mean {choice}?"


def near(word: str, candidates: Sequence[str], likely: float = MIN_SIMILARITY) -> list[str]:
    """Return similar names, the most similar first. Names that are clearly less similar are left out."""
    names = get_close_matches(word, candidates, n=MAX_GUESSES, cutoff=likely)
    similarity = {name: SequenceMatcher(a=name, b=word).ratio() for name in names}
    return [name for name in names if similarity[name] > similarity[names[0]] - 0.1]


def _settings(path: str, keys: Sequence[str]) -> list[str]:
    """Return the keys that a path may mean, the likeliest first."""
    section, _, last = path.rpartition(".")
    by_name: dict[str, list[str]] = {}
    for key in keys:
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    # Names in the same section, the same name elsewhere, TRL's names, similar names elsewhere.
    siblings = [k.rpartition(".")[2] for k in keys if k.rpartition(".")[0] == section]
    named = near(last, siblings) or [n for n in siblings if n.startswith(last)]
    suggestions = [f"{section}.{n}".lstrip(".") for n in named]
    suggestions += by_name.get(last, [])
    suggestions += [trl.SAME_MEANING[n] for n in near(last, list(trl.SAME_MEANING), 0.85)]
    suggestions += [key for n in near(last, list(by_name), 0.8) for key in by_name[n]]
    return list(dict.fromkeys(suggestions))


def _sections(path: str, value: Mapping[str, object], keys: Sequence[str]) -> list[str]:
    """Return sections with a similar name, or with this name within another, or with all of these keys."""
    sections = list(dict.fromkeys(k.rpartition(".")[0] for k in keys if "." in k))
    within = [s for s in sections if value and {f"{s}.{name}" for name in value} <= set(keys)]
    same_end = [s for s in sections if s.endswith(f".{path}")]
    return near(path, sections) or same_end or within

"""Frameworks: the names that they give their metrics and settings, from the tables in `frameworks.yaml`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.resources import files

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter


class FrameworkWords(BaseModel):
    """The words of one framework; `frameworks.yaml` explains them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    remedy: str = ""
    metrics: Mapping[re.Pattern[str], str] = {}
    settings: Mapping[str, str] = {}
    dialect: str = ""
    estimator: str = ""
    presets: Mapping[str, str] = {}

    def metric(self, name: str) -> str | None:
        """Return covey's name of a metric; None if covey has no metric with the same meaning."""
        matches = ((pattern.fullmatch(name), translation) for pattern, translation in self.metrics.items())
        return next((match.expand(translation) for match, translation in matches if match), None)


def _frameworks() -> Mapping[str, FrameworkWords]:
    text = (files("covey") / "audit" / "frameworks.yaml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, FrameworkWords]).validate_python(yaml.safe_load(text))


FRAMEWORKS = _frameworks()
UNKNOWN = FrameworkWords()
"""The words of a framework without a table."""


def words_of(name: str) -> FrameworkWords:
    """Return the words of a framework."""
    return FRAMEWORKS.get(name, UNKNOWN)


def framework_of(metrics: Iterable[str]) -> str:
    """Return the framework that knows most of these metrics; '' if none knows at least two."""
    names = set(metrics)
    counts = {name: sum(words.metric(n) is not None for n in names) for name, words in FRAMEWORKS.items()}
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] > 1 else ""

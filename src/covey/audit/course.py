"""The course of another framework's run: covey's findings on its metrics, in the framework's own words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from covey.audit.frameworks import FRAMEWORKS, FrameworkWords
from covey.audit.record import AuditRecord
from covey.config.rows import schema_rows
from covey.insight.findings.finding import Finding
from covey.insight.findings.settings import unknown
from covey.insight.findings.table import explain

TRL_NAMES = {row.key: row.setting.trl_names[0] for row in schema_rows() if row.setting.trl_names}


def findings_from_metrics(record: AuditRecord) -> list[Finding]:
    """Return the findings of covey's rules on a run's metrics; none if covey does not know the framework.

    The run's config is unknown, so a remedy may name a value that is already set.
    """
    words = FRAMEWORKS.get(record.header.framework)
    if words is None:
        return []
    metrics = [
        {**dict(translated(words, update.metrics)), "step": update.step + 1} for update in record.updates
    ]
    sampled = [m for m in metrics if "reward/mean" in m]
    return [_in_words_of(words, finding) for finding in explain(sampled, [], unknown)]


def translated(words: FrameworkWords, logged: Mapping[str, float | None]) -> Iterator[tuple[str, float]]:
    """Yield a framework's metrics under covey's names, without those for which covey has no name."""
    for name, value in logged.items():
        translation = words.metric(name)
        if translation is not None and value is not None and math.isfinite(value):
            yield translation, value


def _in_words_of(words: FrameworkWords, finding: Finding) -> Finding:
    """Return a finding with a framework's names of settings; a remedy that has no such name is dropped."""
    names = names_of(words)
    key, _, value = finding.remedy.partition(": ")
    remedy = words.remedy.format(name=names[key], value=value) if key in names else ""
    sentence, advice = named(names, finding.sentence), named(names, finding.advice)
    return replace(finding, sentence=sentence, remedy=remedy, advice=advice)


def names_of(words: FrameworkWords) -> Mapping[str, str]:
    """Return a mapping from covey's names of settings to the framework's."""
    keys = {name: key for key, name in TRL_NAMES.items()}
    return {keys.get(name, name): own_name for name, own_name in words.settings.items()} or TRL_NAMES


def named(names: Mapping[str, str], text: str) -> str:
    """Return a sentence with other names of settings; names without a dot, such as `model`, may be words."""
    keys = "|".join(re.escape(key) for key in names if "." in key)
    return re.sub(rf"\b({keys})\b", lambda match: names[match[0]], text)

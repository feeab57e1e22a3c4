"""The course of another trainer's run: covey's findings on the metrics that it logged, in its words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from covey.audit.record import AuditRecord
from covey.config.rows import schema_rows
from covey.insight.findings.finding import Finding
from covey.insight.findings.settings import unknown
from covey.insight.findings.table import explain

METRICS: Mapping[str, str] = {
    "completions/clipped_ratio": "length/truncated",
    "completions/mean_length": "length/mean",
    "entropy": "entropy",
    "frac_reward_zero_std": "groups/dead",
    "grad_norm": "optimizer/grad_norm",
    "learning_rate": "optimizer/lr",
    "reward": "reward/mean",
    "reward_std": "reward/std",
}
"""TRL's metric -> covey's, where both mean the same; `kl` is a token's there and a completion's here."""
OF_REWARDS = re.compile(r"rewards/(.+)/(mean|std)")
TRL_NAMES = {row.key: row.setting.trl_names[0] for row in schema_rows() if row.setting.trl_names}
KEYS = re.compile(r"\b(" + "|".join(re.escape(key) for key in TRL_NAMES if "." in key) + r")\b")
"""Names of settings in a sentence; those without a dot, as `model`, are words too."""


def course_of(record: AuditRecord) -> list[Finding]:
    """Return what covey's rules find in a run's metrics; none if another trainer than TRL logged them.

    Nothing is known of its config, so a remedy may name what is set already.
    """
    if record.header.framework != "trl":
        return []
    metrics = [dict(_metrics(update.metrics)) | {"step": update.step} for update in record.updates]
    sampled = [m for m in metrics if "reward/mean" in m]
    return [_in_words_of_trl(finding) for finding in explain(sampled, [], unknown)]


def _metrics(logged: Mapping[str, float | None]) -> Iterator[tuple[str, float]]:
    for name, value in logged.items():
        reward = OF_REWARDS.fullmatch(name)
        if value is None:
            continue
        if reward:
            yield f"reward/{reward[1]}/{reward[2]}", value
        elif name in METRICS:
            yield METRICS[name], value


def _in_words_of_trl(finding: Finding) -> Finding:
    """Return a finding with TRL's names of settings, without a remedy that TRL has no name for."""
    key, _, value = finding.remedy.partition(": ")
    remedy = f"{TRL_NAMES[key]}={value}" if key in TRL_NAMES else ""
    return replace(finding, sentence=_named(finding.sentence), remedy=remedy, advice=_named(finding.advice))


def _named(text: str) -> str:
    return KEYS.sub(lambda match: TRL_NAMES[match[0]], text)

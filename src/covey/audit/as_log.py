"""The completions and metrics of another framework's run, in the form of covey's rollout log and streams."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from covey.audit.checks.groups import groups_of, totals, weights_of
from covey.audit.course import translated
from covey.audit.frameworks import words_of
from covey.audit.record import AuditRecord, Numbers, Rollout, Row, Sample, Use
from covey.insight.show import spoken_prompt
from covey.runs.rollouts import RolloutLog

TITLE = 60
"""Characters of a prompt that name its problem."""
ALWAYS = ("tokens", "sampled", "logprobs", "advantages")
"""Arrays that every rollout log has."""
PARTS = {
    "completions": {"ids", "text"},
    "token ids": {"ids"},
    "texts": {"text"},
    "log-probs of tokens": {"sampler_logprobs", "old_logprobs", "logprobs", "model_logprobs"},
    "advantages": {"advantage"},
    "masks": {"mask"},
    "rewards": {"rewards", "reward"},
}
"""Parts of completions that pages show -> fields of a record, any one of which provides the part."""


def lacking(record: AuditRecord) -> str:
    """Return a sentence that names the parts that pages could show but the record lacks; '' if none."""
    absent = [words for words, fields in PARTS.items() if not record.fields & fields]
    if not absent:
        return ""
    if absent[0] == "completions":
        return "This record has no completions."
    *first, last = absent
    sentence = f"{', '.join(first)} and {last}" if first else last
    return f"This record has no {sentence}."


def by_step(record: AuditRecord) -> dict[int, list[Rollout]]:
    """Return the rollouts of each step, counted from 1; a step may have one for each of its micro-batches."""
    rollouts_at: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in record.rollouts:
        rollouts_at[rollout.step + 1].append(rollout)
    return rollouts_at


def log_of(path: Path, record: AuditRecord, rollouts: Sequence[Rollout]) -> RolloutLog:
    """Return a step's rollouts as a log. Their groups are numbered one after another, and each group's
    completions follow one another.
    """
    used = {(use.row.rollout, use.row.completion): use.row.advantage for use in reversed(record.uses)}
    rows: list[dict[str, Any]] = []
    for rollout in rollouts:
        samples = rollout.completions
        rewards = totals(record, samples).rewards.tolist()
        numbers = groups_of(samples)
        for group in dict.fromkeys(numbers):
            first = 1 + max((row["group"] for row in rows), default=-1)
            places = [n for n, number in enumerate(numbers) if number == group]
            for n, index in enumerate(places):
                advantage = used.get((rollout.number, index), samples[index].advantage)
                head = {"group": first, "sample": n, "rollout": rollout.number, "place": index}
                rows.append(head | _row(record, samples[index], rewards[index], advantage))
    return RolloutLog(path, tuple(rows))


def _row(
    record: AuditRecord, sample: Sample, reward: float, advantage: float | Numbers | None
) -> dict[str, object]:
    ids = sample.ids
    prompt = sample.prompt if sample.prompt is not None else str(sample.prompt_ids)
    spoken = [line for line in spoken_prompt(prompt).splitlines() if line.strip()]
    names = list(sample.rewards)
    return {
        "problem": (spoken or [""])[-1].strip()[:TITLE],
        "prompt": prompt,
        "completion": sample.text if sample.text is not None else str(ids),
        "reward": None if math.isnan(reward) else reward,
        "advantage": advantage if isinstance(advantage, float) else math.nan,
        "tokens": len(ids) if ids is not None else math.nan,
        "finish": _finish(record, sample),
        "components": sample.rewards,
        "weights": dict(zip(names, weights_of(record, names), strict=True)),
        "columns": sample.row,
        "status": {},
        "extracted": {},
        "trained": True,
    }


def _finish(record: AuditRecord, sample: Sample) -> str:
    """Return `stop`, or `length` for a completion that reached the limit; '' if it is unknown."""
    if not sample.ids:
        return ""
    limit = record.number("max_completion_length", math.inf)
    if sample.ids[-1] in record.header.tokens.eos:
        return "stop"
    return "length" if len(sample.ids) >= limit else ""


def arrays_of(record: AuditRecord, log: RolloutLog) -> dict[str, np.ndarray]:
    """Return the arrays of a log's completions in the form of `rollouts.npz`; NaN for unknown values."""
    samples = {(r.number, n): s for r in record.rollouts for n, s in enumerate(r.completions)}
    sampled = [samples[row["rollout"], row["place"]] for row in log.rows]
    uses: dict[tuple[int, int], list[Use]] = defaultdict(list)
    for use in record.uses:
        uses[use.row.rollout, use.row.completion].append(use)
    used = [uses[row["rollout"], row["place"]] for row in log.rows]
    firsts = [sampled[places[0]] for places in log.groups.values()]
    prompts = [np.array(s.prompt_ids or (), np.int64) for s in firsts]
    values = [_token_values(*pair) for pair in zip(sampled, used, strict=True)]
    arrays = {name: np.concatenate([part[name] for part in values]) for name in values[0]}
    return {
        "prompt_tokens": np.concatenate(prompts),
        "prompt_ends": np.cumsum([len(ids) for ids in prompts]),
        "ends": np.cumsum([len(s.ids or ()) for s in sampled]),
        **{n: v for n, v in arrays.items() if n in ALWAYS or not np.isnan(v).all()},
    }


def _token_values(sample: Sample, uses: Sequence[Use]) -> dict[str, np.ndarray]:
    ids = np.array(sample.ids or (), np.int64)
    first = uses[0].row if uses else Row(rollout=0, completion=0)
    last = uses[-1].row if uses else first
    alternatives = (sample.sampler_logprobs, first.old_logprobs, first.logprobs, sample.model_logprobs)
    advantage = sample.advantage if first.advantage is None else first.advantage
    size = len(ids)
    advantages = (
        np.full(size, advantage, np.float64) if isinstance(advantage, float) else _fitted(advantage, size)
    )
    # A token without an advantage on the page is one that no update saw.
    mask = np.ones(size, bool) if first.mask is None else _fitted(first.mask, size) == 1
    present = _fitted(last.logprobs, size)
    inserted = _fitted(sample.inserted, size) == 1
    return {
        "tokens": ids,
        "sampled": ~inserted,
        "logprobs": _fitted(next((v for v in alternatives if v), None), size).astype(np.float32),
        "advantages": np.where(mask, advantages, np.nan).astype(np.float32),
        "ratios": np.exp(present - _fitted(last.old_logprobs, size)).astype(np.float32),
        "ref_log_ratios": (present - _fitted(last.ref_logprobs, size)).astype(np.float32),
    }


def _fitted(values: Sequence[float | None] | None, size: int) -> np.ndarray:
    """Return the first values as (size,) float64, with NaN for missing ones."""
    fitted = np.full(size, np.nan)
    part = np.array((values or ())[:size], dtype=np.float64)
    fitted[: len(part)] = part
    return fitted


def metrics_of(record: AuditRecord) -> list[dict[str, float]]:
    """Return each step's metrics under covey's names, with statistics of its completions if it has any."""
    words = words_of(record.header.framework)
    steps: dict[int, dict[str, float]] = {}
    for update in record.updates:
        metrics = steps.setdefault(update.step + 1, {})
        metrics.update(translated(words, update.metrics))
        if update.loss is not None:
            metrics.setdefault("loss", update.loss)
        if update.grad_norm is not None:
            metrics.setdefault("optimizer/grad_norm", update.grad_norm)
    for step, rollouts in by_step(record).items():
        log = log_of(Path(), record, rollouts)
        groups = [[log.rows[n]["reward"] for n in places] for places in log.groups.values()]
        counted = {
            "reward/mean": [row["reward"] for row in log.rows if row["reward"] is not None],
            "length/mean": [row["tokens"] for row in log.rows if not math.isnan(row["tokens"])],
            "groups/dead": [float(len(set(rewards)) == 1) for rewards in groups if len(rewards) > 1],
        }
        means = {name: fmean(values) for name, values in counted.items() if values}
        steps[step] = {**means, **steps.get(step, {})}
    return [{"step": float(step), **steps[step]} for step in sorted(steps)]

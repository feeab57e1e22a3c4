"""A preview as JSON and as lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from covey.insight.advice import advice
from covey.insight.forecast import seconds_text
from covey.insight.gpus import gpu_lines
from covey.insight.preview import Preview
from covey.objective.diagnostics import sampled_entropy, score_metrics
from covey.objective.texts import answers_inside
from covey.runs.rollouts import or_null
from covey.system.text import percent

SIZES_TOLD = (2, 4, 8, 16, 32, 64)
BAR = 40
"""Characters of the longest bar."""
BUCKETS = ("0 %", "below 25 %", "25 to 50 %", "50 to 75 %", "above 75 %", "100 %")
GROUPS = 32
"""Problems that are sampled if there is time."""


def record(preview: Preview) -> dict[str, object]:
    """Return the preview as JSON."""
    samples = preview.samples
    groups = samples.groups
    forecast = preview.forecast()
    sizes = _sizes(preview)
    temperatures = {}
    for temperature in preview.others:
        rate, dead, _ = preview.at(temperature)
        temperatures[f"{temperature:g}"] = {"pass@1": rate.as_json(), "dead": dead.as_json()}
    longer = preview.longer
    return {
        "can_learn": preview.promise,
        "groups": len(groups),
        "stopped": samples.stopped,
        "completions": len(preview.lengths),
        "max_tokens": samples.limit or preview.stage.config.rollout.max_tokens,
        "pass_rates": {g.problem.id: g.pass_rate for g in groups},
        "pass@1": preview.pass_rate().as_json(),
        "dead": {str(size): preview.dead(size).as_json() for size in sizes},
        "completions_for_a_live_group": {str(size): _for_a_live_group(preview, size) for size in sizes},
        "temperatures": temperatures,
        "truncated": float(preview.truncated.mean()),
        "continued": None if longer is None else {"max_tokens": longer.limit, **longer.outcome()},
        "length": {"mean": float(preview.lengths.mean()), **_quantiles(preview)},
        "duplicates": preview.copies,
        "entropy": or_null(sampled_entropy(groups)),
        "answers": answers_inside(groups),
        "rewards": {
            "seconds": dict(preview.reward_seconds),
            "waited": samples.scoring.waited,
            **score_metrics(groups, samples.scoring.logged),
        },
        "tokens_per_second": preview.speed,
        "forecast": forecast.record() if forecast else None,
        "gpus": [row.record() for row in preview.gpus],
        "memory": dict(preview.memory),
        "advice": [vars(a) for a in advice(preview)],
    }


def lines(preview: Preview) -> Iterator[str]:
    """Yield lines for people."""
    yield from _extent(preview)
    size = preview.group_size
    if preview.unfinished:
        yield "can it learn? unknown: the reward of a completion that has not ended means nothing"
    else:
        yield f"can it learn? {preview.promise}: with groups of {size}, {preview.dead(size)} would be dead"
        yield ""
        groups = preview.samples.groups
        yield f"pass rate {preview.pass_rate()}, by problem:"
        yield from _histogram(np.array([g.pass_rate for g in groups]))
        yield ""
        yield from _by_size(preview)
    yield ""
    for temperature in preview.others:
        rate, dead, facts = preview.at(temperature)
        count = len(preview.others[temperature])
        yield (
            f"at temperature {temperature:g}, {count} problems: pass rate {rate}, dead groups {dead}, {facts}"
        )
    yield from _texts(preview)
    forecast = preview.forecast()
    if forecast:
        yield from forecast.lines()
    if preview.gpus:
        yield from gpu_lines(preview.gpus)
    for item in advice(preview):
        yield f"- {item}"
        if item.sample:
            yield f"    {item.sample}"


def _extent(preview: Preview) -> Iterator[str]:
    """Yield how much was sampled, and why it was not more."""
    samples = preview.samples
    count = len(samples.groups)
    extent = f"{count} problems, {len(preview.lengths)} completions"
    if samples.stopped:
        extent += f", stopped before all {samples.requested}"
    yield extent
    if samples.limit is not None:
        yield (
            f"sampled only {samples.limit} of {preview.stage.config.rollout.max_tokens} tokens: about a "
            f"minute allows no more at {preview.speed:,.0f} tokens/s"
        )
        return
    possible = min(GROUPS, preview.problems)
    if samples.by_time and count < possible:
        yield (
            f"about a minute allows no more at {preview.speed:,.0f} tokens/s, and so few problems give wide "
            f"intervals: --groups {possible} would take {seconds_text(samples.seconds / count * possible)}"
        )


def _sizes(preview: Preview) -> list[int]:
    return sorted({*SIZES_TOLD, preview.group_size})


def _by_size(preview: Preview) -> Iterator[str]:
    yield "group size   dead groups        completions for a live group"
    samples = min(len(g.completions) for g in preview.samples.groups)
    for size in _sizes(preview):
        completions = _for_a_live_group(preview, size)
        needed = "-" if completions is None else f"{completions:.0f}"
        mark = " <- rollout.group_size" if size == preview.group_size else ""
        remark = " (extrapolated by a fitted prior)" if size > samples else ""
        yield f"{size:>10}   {preview.dead(size)!s:<18} {needed:>5}{mark}{remark}"


def _texts(preview: Preview) -> Iterator[str]:
    groups = preview.samples.groups
    ended = ", ".join(f"{k} {v:.0f}" for k, v in _quantiles(preview).items())
    yield (
        f"{percent(preview.truncated.mean())} truncated; tokens of those that ended: {ended or 'none did'}; "
        f"{percent(preview.copies)} copies; entropy {sampled_entropy(groups):.2f} nats per token; "
        f"{preview.speed:,.0f} tokens/s"
    )
    if inside := answers_inside(groups):
        reference = percent(inside["text/reference"])
        elsewhere = percent(inside["text/reference_elsewhere"])
        yield f"{reference} of the completions contain the reference answer, {elsewhere} another problem's"
    yield from _rewards(preview)


def _rewards(preview: Preview) -> Iterator[str]:
    """Yield a line for each reward function: its mean, its failures, its time."""
    groups = preview.samples.groups
    for name in groups[0].components:
        parts = [g.components[name] for g in groups]
        values = np.concatenate([part.values for part in parts])
        scored = values[~np.isnan(values)]
        statuses = Counter(s.status for part in parts for s in part.scores if s.status != "ok")
        failures = "".join(f", {percent(n / len(values))} {status}" for status, n in statuses.most_common())
        seconds = preview.reward_seconds.get(name)
        duration = f", {1e3 * seconds:.3g} ms per completion" if seconds is not None else ""
        mean = f"mean {scored.mean():.3f}" if len(scored) else "no value"
        yield f"{name}: {mean}{failures}{duration}"


def _quantiles(preview: Preview) -> dict[str, float]:
    ended = preview.ended
    levels = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {k: float(np.quantile(ended, q)) for k, q in levels.items()} if len(ended) else {}


def _for_a_live_group(preview: Preview, size: int) -> float | None:
    """Return the completions sampled for each live group, dead groups included; None if none is live."""
    live = 1 - preview.dead(size).value
    return size / live if live > 0.001 else None


def _histogram(rates: np.ndarray) -> Iterator[str]:
    # Bucket 0 is exactly 0 %, bucket 5 exactly 100 %, and 1 to 4 are the quarters between.
    bucket = 1 + np.minimum((4 * rates).astype(int), 3)
    bucket[rates <= 0] = 0
    bucket[rates >= 1] = 5
    counts = np.bincount(bucket, minlength=len(BUCKETS))
    for name, count in zip(BUCKETS, counts, strict=True):
        bar = "█" * round(BAR * count / counts.max())
        yield f"{name:>12} {bar or ('▏' if count else '')} {count or ''}".rstrip()

"""Read a run of prime-rl: its episodes, its trainer's token exports and its metrics, which it writes itself.

`rollouts/step_N/train/effective/traces.jsonl` (monitors.file), `token_exports/step_N/rank_R.jsonl`
(trainer.enable_token_export) and `metrics.jsonl` (monitors.file); each may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from covey.audit.readers.logs import read_log
from covey.audit.record import FORMAT, VERSION, AuditRecord, Header, Rollout, Row, Sample, Update
from covey.system.opening import load_json, read_regular, stream_bytes
from covey_verify.errors import DataError

TRACES = "rollouts/step_*/train/effective/traces.jsonl"
EXPORTS = "token_exports/step_*/rank_*.jsonl"
METRICS = "metrics.jsonl"
T = TypeVar("T")


class _Trace(NamedTuple):
    sample: Sample
    whole: tuple[int, ...]
    """The ids of prompt and completion."""
    version: int
    """Number of updates that the policy had when it was sampled."""


def is_prime_rl(folder: Path) -> bool:
    """Whether a folder has episodes or token exports of prime-rl."""
    return any(next(folder.glob(f"**/{name}"), None) is not None for name in (TRACES, EXPORTS))


def prime_rl_run(folder: Path) -> AuditRecord:
    """Read a run's output folder. Raises DataError, with file and line, for a damaged file."""
    lines: dict[tuple[int, int, int], Rollout | Update] = {}
    metrics = _metrics(folder)
    traces = {step: list(_traces(path, step)) for step, path in _steps(folder, TRACES)}
    rows: dict[int, list[Row]] = {}
    for step, path in _steps(folder, EXPORTS):
        rows.setdefault(step, []).extend(_rows(path, step, traces.get(step, ())))
    for step, sampled in traces.items():
        samples = [trace.sample for trace in sampled]
        # The rollout goes before the update whose policy sampled it, which may be earlier than its own step.
        number = min((trace.version for trace in sampled), default=step)
        lines[number, 0, step] = Rollout(kind="rollout", number=step, step=number, completions=samples)
    for step in {*rows, *metrics}:
        update = metrics.get(step) or Update(kind="update", step=step)
        lines[step, 1, step] = update.model_copy(update={"rows": rows.get(step, [])})
    ordered = tuple(lines[key] for key in sorted(lines))
    return AuditRecord(Header(format=FORMAT, version=VERSION, framework="prime-rl"), ordered)


def _steps(folder: Path, pattern: str) -> Iterator[tuple[int, Path]]:
    for path in sorted(folder.glob(f"**/{pattern}")):
        match = re.search(r"step_(\d+)", str(path.relative_to(folder)))
        if match:
            yield int(match[1]) - 1, path


def _metrics(folder: Path) -> dict[int, Update]:
    """Return the updates of all metrics files: orchestrator and trainer may write one each."""
    updates: dict[int, Update] = {}
    for path in sorted(folder.glob(f"**/{METRICS}")):
        for update in read_log(path).updates:
            earlier = updates.get(update.step, update)
            values = {name: value for name, value in update if value is not None}
            values["metrics"] = {**earlier.metrics, **update.metrics}
            updates[update.step] = earlier.model_copy(update=values)
    return updates


def _each(path: Path, kind: str, parts: Callable[[dict[str, object]], Iterable[T]]) -> Iterator[T]:
    """Yield the parts of each line's object. Raises DataError with file and line."""
    for n, line in enumerate(read_regular(path, stream_bytes()).splitlines(), start=1):
        try:
            items = list(parts(load_json(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise DataError(f"{path}:{n}: no {kind} of prime-rl ({reason})") from None
        yield from items


def _traces(path: Path, step: int) -> Iterator[_Trace]:
    """Yield an episode's traces that are one conversation; a tree of messages has no single completion."""
    groups: dict[str, int] = {}

    def traces(episode: dict[str, Any]) -> Iterator[_Trace]:
        group = groups.setdefault(episode["group"]["id"], len(groups))
        policy = ((episode.get("run") or {}).get("work") or {}).get("policy") or {}
        for trace in episode["traces"]:
            nodes = trace["nodes"]
            chain = all(node.get("parent") == (n - 1 if n else None) for n, node in enumerate(nodes))
            if chain and any(any(node.get("mask") or ()) for node in nodes):
                sample, whole = _sample(trace, episode["task"]["data"], group)
                yield _Trace(sample, whole, int(policy.get("start", step)))

    return _each(path, "episode", traces)


def _sample(trace: dict[str, Any], row: dict[str, Any], group: int) -> tuple[Sample, tuple[int, ...]]:
    nodes = trace["nodes"]
    ids = [token for node in nodes for token in node["token_ids"]]
    mask = [bool(on) for node in nodes for on in node["mask"]]
    start = mask.index(True)
    sampled = mask[start:]
    # Only sampled tokens have log-probs and advantages.
    logprobs = iter(_values(nodes, "logprobs"))
    advantages = set(_values(nodes, "advantages"))
    scores, weighted_sum = _rewards(trace)
    first_sampled = next(n for n, node in enumerate(nodes) if node.get("sampled"))
    turns = [node["message"] for node in nodes if node.get("sampled")]
    sample = Sample(
        prompt=[node["message"] for node in nodes[:first_sampled]],
        prompt_ids=ids[:start],
        text="".join(str(turn.get("content") or "") for turn in turns),
        ids=ids[start:],
        group=group,
        row={name: value for name, value in row.items() if name != "prompt"},
        rewards=dict(scores),
        reward=weighted_sum,
        advantage=advantages.pop() if len(advantages) == 1 else None,
        sampler_logprobs=[next(logprobs, None) if on else None for on in sampled],
        inserted=[not on for on in sampled],
    )
    return sample, tuple(ids)


def _rewards(trace: dict[str, Any]) -> tuple[dict[str, float], float]:
    """Return the score of each reward that gave one, and the sum of them by their weights."""
    rewards = {name: reward for name, reward in trace["rewards"].items() if reward is not None}
    scores = {name: float(reward["score"]) for name, reward in rewards.items()}
    return scores, sum(score * float(rewards[name].get("weight", 1.0)) for name, score in scores.items())


def _values(nodes: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [value for node in nodes for value in node.get(name) or ()]


def _rows(path: Path, step: int, traces: Sequence[_Trace]) -> Iterator[Row]:
    """Yield a rank's sequences that are traces of the step, in its trainer's form."""
    places: dict[tuple[int, ...], list[int]] = {}
    for index, trace in enumerate(traces):
        places.setdefault(trace.whole, []).append(index)

    def rows(row: dict[str, Any]) -> Iterator[Row]:
        alike = places.get(tuple(row["token_ids"]))
        if alike:
            start = len(traces[alike[0]].sample.prompt_ids or ())
            mask = [bool(on) for on in row["loss_mask"][start:]]
            used = {value for value, on in zip(row["advantages"][start:], mask, strict=True) if on}
            # If two groups sampled the same tokens, the advantage tells which of them a sequence belongs to.
            advantages = [traces[n].sample.advantage for n in alike]
            matches = (n for n, credit in zip(alike, advantages, strict=True) if credit in used)
            index = next(matches, alike[0])
            if len(alike) > 1:
                alike.remove(index)
            yield Row(
                rollout=step,
                completion=index,
                mask=mask,
                logprobs=row["trainer_logprobs"][start:],
                old_logprobs=row["inference_logprobs"][start:],
                advantage=used.pop() if len(used) == 1 else row["advantages"][start:],
            )

    return _each(path, "token export", rows)

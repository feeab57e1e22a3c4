"""Readers of runs: a record, covey's own run folder, and the files that trainers write by themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from covey.audit.readers.logs import EVENTS, read_log
from covey.audit.readers.prime_rl import is_prime_rl, prime_rl_run
from covey.audit.readers.record_file import read_record
from covey.audit.record import FORMAT, VERSION, AuditRecord, Header, Rollout, Row, Sample, Update
from covey.config.load import ResolvedConfig
from covey.runs.folder import read_numbers
from covey.runs.reader import last_stage, load_settings, stages_in
from covey.runs.rollouts import RolloutLog, read_rollouts, recorded_steps
from covey.system.opening import RECORD_BYTES, load_json, read_regular, stream_bytes
from covey_verify.errors import ConfigError, DataError

MAX_STEPS = 20
"""Most steps of a covey run whose completions are read: the first one and the last ones."""
LOSSES = ".losses.jsonl"
"""Ending of the file next to a record with calls of the loss function."""
STATE = "trainer_state.json"
PART = re.compile("reward|penalt|bonus", re.IGNORECASE)
"""Columns of a dump that may be parts of its score."""


def open_run(path: Path) -> AuditRecord:
    """Read a run: a record, a folder of covey, TRL or prime-rl, trainer_state.json, verl's dumps, a log.

    Raises ConfigError if there is no record, DataError, with file and line, if it is damaged.
    """
    if path.is_dir():
        return _of_folder(path)
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"{path} is a config, not a run: name the folder of its run (its `output`). Before a run, "
            f"`covey preview {path}` says whether it can learn"
        )
    if path.name == STATE or (
        path.suffix == ".json" and _has(read_regular(path, RECORD_BYTES), "log_history")
    ):
        return trl_state(path)
    if path.suffix in (".csv", ".db", ".json") or EVENTS in path.name:
        return read_log(path)
    first = read_regular(path, stream_bytes()).partition(b"\n")[0]
    if _has(first, "input", "output", "score"):
        return verl_dumps([path])
    return read_log(path) if _has(first, "step") or _has(first, "_step") else _with_losses(path)


def _with_losses(path: Path) -> AuditRecord:
    """Read a record, with the calls of the loss function that its workers wrote next to it."""
    record = read_record(path)
    path = path.with_suffix(LOSSES)
    if not path.is_file():
        return record
    losses = read_record(path)
    return replace(record, calls=(*record.calls, *losses.calls), terms=(*record.terms, *losses.terms))


def is_foreign(path: Path) -> bool:
    """Whether a path is a file, or a folder without a run of covey."""
    is_covey = path.is_dir() and ((path / "config.yaml").exists() or stages_in(path))
    return path.exists() and not is_covey


def _of_folder(folder: Path) -> AuditRecord:
    dumps = [p for p in folder.glob("*.jsonl") if p.stem.isdecimal()]
    if dumps:
        return verl_dumps(sorted(dumps, key=lambda p: int(p.stem)))
    # Checkpoints are numbered; the newest has the whole history.
    states = sorted(folder.glob(f"checkpoint-*/{STATE}"), key=lambda p: p.stat().st_mtime)
    states += [folder / STATE] if (folder / STATE).is_file() else []
    if states:
        return trl_state(states[-1])
    if (folder / "config.yaml").exists():
        return covey_run(folder)
    if is_prime_rl(folder):
        return prime_rl_run(folder)
    events = sorted(folder.glob(f"**/{EVENTS}*"), key=lambda p: p.stat().st_mtime)
    return read_log(events[-1]) if events else covey_run(folder)


# --- covey ----------------------------------------------------------------------------------------


def covey_run(folder: Path) -> AuditRecord:
    """Read a run folder of covey; of a pipeline, its last stage. Raises ConfigError if it has no run."""
    stage = last_stage(folder)
    resolved = load_settings(stage)
    steps = recorded_steps(stage)
    shown = sorted({*steps[: MAX_STEPS // 4], *steps[-MAX_STEPS:]})
    notes = [] if len(shown) == len(steps) else [f"{stage}: {len(shown)} of {len(steps)} steps were checked"]
    logs = {step: read_rollouts(stage, step) for step in shown}
    metrics = {int(m["step"]): m for m in read_numbers(stage, "metrics.jsonl")}
    lines: list[Rollout | Update] = []
    for step in sorted({*shown, *metrics}):
        if step in logs:
            lines.append(_covey_rollout(logs[step], step - 1))
        if step in metrics:
            lines.append(_covey_update(logs.get(step), metrics[step], step - 1))
    return AuditRecord(
        _header("covey", _covey_settings(resolved)),
        tuple(lines),
        algorithm=resolved.algorithm,
        notes=notes,
    )


def _header(framework: str, settings: dict[str, object] | None = None) -> Header:
    return Header(format=FORMAT, version=VERSION, framework=framework, settings=settings or {})


def _covey_settings(resolved: ResolvedConfig) -> dict[str, object]:
    """Return a run's settings by the names that checks know."""
    config = resolved.config
    return {
        "temperature": config.rollout.temperature,
        "max_completion_length": config.rollout.max_tokens,
        "num_generations": config.rollout.group_size,
        "max_grad_norm": config.train.grad_clip,
        "beta": resolved.algorithm.kl.coef if resolved.algorithm.kl is not None else 0.0,
    }


def _covey_rollout(log: RolloutLog, step: int) -> Rollout:
    samples = []
    for index, row in enumerate(log.rows):
        arrays = log.of_completion(index)
        sampled = arrays.get("sampled")
        samples.append(
            Sample(
                prompt=row["prompt"],
                prompt_ids=log.prompts[row["group"]].tolist(),
                text=row["completion"],
                ids=arrays["tokens"].tolist(),
                group=row["group"],
                rewards=row["components"],
                reward=row["reward"],
                sampler_logprobs=_numbers(arrays["logprobs"]),
                inserted=None if sampled is None else (~sampled.astype(bool)).tolist(),
            )
        )
    return Rollout(kind="rollout", number=step, step=step, completions=samples)


def _covey_update(log: RolloutLog | None, metrics: Mapping[str, float], step: int) -> Update:
    rows = []
    for index, row in enumerate(log.rows if log is not None else ()):
        if log is None or not row["trained"] or row["reward"] is None:
            continue
        arrays = log.of_completion(index)
        # Only tokens that entered a loss have a ratio.
        mask = np.isfinite(arrays["ratios"]) if "ratios" in arrays else np.ones(len(arrays["tokens"]), bool)
        advantage = _numbers(arrays["advantages"])
        rows.append(Row(rollout=step, completion=index, mask=mask.tolist(), advantage=advantage))
    numbers = {name: float(value) for name, value in metrics.items() if value is not None}
    return Update(
        kind="update",
        step=step,
        rows=rows,
        loss=numbers.get("loss"),
        grad_norm=numbers.get("optimizer/grad_norm"),
        learning_rate=numbers.get("optimizer/lr"),
        metrics=dict(numbers),
    )


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in values]


# --- TRL and verl, without a writer ---------------------------------------------------------------


def trl_state(path: Path) -> AuditRecord:
    """Read the history that transformers' Trainer keeps in each checkpoint. Raises DataError."""
    try:
        state = load_json(read_regular(path, RECORD_BYTES))
        history = state["log_history"]
        logged = [entry for entry in history if "loss" in entry and "step" in entry]
        lines = [_logged(entry) for entry in logged]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: not the state of a trainer: log_history is missing or damaged ({error})"
        ) from None
    if not lines:
        raise DataError(
            f"{path}: its history has no step with a loss; set logging_steps below the number of steps"
        )
    return AuditRecord(_header("trl"), tuple(lines), notes=[f"{path}: metrics only, no completions"])


def _logged(entry: Mapping[str, Any]) -> Update:
    numbers = {k: float(v) for k, v in entry.items() if isinstance(v, int | float)}
    return Update(
        kind="update",
        step=int(entry["step"]) - 1,
        loss=numbers.get("loss"),
        grad_norm=numbers.get("grad_norm"),
        learning_rate=numbers.get("learning_rate"),
        metrics=dict(numbers),
    )


def _has(line: bytes, *names: str) -> bool:
    """Whether a line is an object with these names, and no line of a record."""
    try:
        value = load_json(line)
    except (ValueError, TypeError):
        return False
    return isinstance(value, dict) and "kind" not in value and set(names) <= set(value)


def verl_dumps(paths: Iterable[Path]) -> AuditRecord:
    """Read the files that verl writes into trainer.rollout_data_dir, one per step.

    Raises DataError with file and line.
    """
    lines = []
    for number, path in enumerate(paths):
        samples: list[Sample] = []
        for n, text in enumerate(read_regular(path, stream_bytes()).splitlines(), start=1):
            try:
                row = load_json(text)
                columns = {k: v for k, v in row.items() if k not in ("input", "output", "score", "step")}
                sample = Sample(
                    prompt=row["input"],
                    text=row["output"],
                    rewards={"score": float(row["score"])},
                    row=columns,
                )
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}:{n}: not a row of a verl dump ({error})") from None
            samples.append(sample)
        # verl counts its steps from 1.
        step = int(path.stem) - 1 if path.stem.isdecimal() else number
        lines.append(Rollout(kind="rollout", number=number, step=step, completions=samples))
    notes = ["a dump of verl: texts and scores, no tokens"]
    return AuditRecord(_header("verl"), tuple(_with_parts_of_scores(lines)), notes=notes)


def _with_parts_of_scores(lines: Sequence[Rollout]) -> Iterator[Rollout]:
    """Yield rollouts with the parts of their scores as rewards, if reward functions wrote columns that add up
    to the score of every completion.
    """
    samples = [sample for line in lines for sample in line.completions]
    names = [name for name in (samples[0].row if samples else ()) if PART.search(name)]
    whole = len(names) > 1 and all(_is_sum(sample, names) for sample in samples)
    for line in lines:
        split = [_split(sample, names) for sample in line.completions] if whole else line.completions
        yield line.model_copy(update={"completions": split})


def _split(sample: Sample, names: Sequence[str]) -> Sample:
    parts = {name: float(str(sample.row[name])) for name in names}
    row = {name: value for name, value in sample.row.items() if name not in names}
    return sample.model_copy(update={"rewards": parts, "reward": sample.rewards["score"], "row": row})


def _is_sum(sample: Sample, names: Sequence[str]) -> bool:
    values = [sample.row.get(name) for name in names]
    numbers = [value for value in values if isinstance(value, int | float)]
    total = sample.rewards["score"] or 0.0
    return len(numbers) == len(names) and math.isclose(sum(numbers), total, rel_tol=1e-4, abs_tol=1e-4)

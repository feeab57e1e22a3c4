"""The rollout log, written and read by step: one JSONL row per completion, token arrays as npz."""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from covey.errors import CheckpointError
from covey.system.integrity import sealed_line, unsealed_line
from covey.system.opening import read_below, stream_bytes
from covey.types import ALL_DRAWN, Completion, Group, SamplingMask, Transcript
from covey_verify.errors import ConfigError
from covey_verify.types import StepRewards


class _Row(BaseModel, strict=True):
    """The fields that every row of the log has and readers rely on."""

    step: int
    group: int
    sample: int
    trained: bool
    problem: str
    prompt: str | list[dict[str, object]]
    completion: str
    finish: str
    tokens: float
    """NaN in a run of another trainer that did not record them."""
    inserted: int = 0
    """The tokens among them that tools inserted."""
    reward: float | None
    advantage: float
    components: dict[str, float | None]
    weights: dict[str, float]
    greedy_reward: float | None
    dead: bool = False
    status: dict[str, str] = {}
    extracted: dict[str, object] = {}
    extra: dict[str, dict[str, str]] = {}
    steps: dict[str, list[list[float]]] = {}
    rows: int
    """Number of rows in the file."""
    arrays: str
    """sha256 of the npz file."""


ROLLOUT = re.compile(r"step_(\d{6,})\.(jsonl|npz)")


@dataclass(frozen=True)
class RolloutLog:
    """The completions of one training step."""

    path: Path
    """Path of the JSONL file; the arrays lie next to it."""
    rows: tuple[Mapping[str, Any], ...]
    """One row per completion, in the order of the arrays."""

    @cached_property
    def groups(self) -> dict[int, list[int]]:
        """Number of a group -> indices of its completions in ``rows``."""
        indices: dict[int, list[int]] = {}
        for index, row in enumerate(self.rows):
            indices.setdefault(row["group"], []).append(index)
        return indices

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays of the npz. Raises CheckpointError if it is missing, damaged or not of these rows."""
        path = self.path.with_suffix(".npz")
        try:
            content = read_below(path.parent.parent, f"{path.parent.name}/{path.name}", stream_bytes())
            if hashlib.sha256(content).hexdigest() != self.rows[0]["arrays"]:
                raise ValueError("not as it was written")
            content_arrays = read_arrays(content)
            self._check(content_arrays)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {_remedy(self.path)}") from None
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing. {_remedy(self.path)}") from None
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path}: damaged ({error}). {_remedy(self.path)}") from None
        return content_arrays

    def _check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise ValueError, or KeyError, unless these are the arrays of the rows."""
        odd = [name for name, a in arrays.items() if a.ndim != 1 or a.dtype.kind not in "iufb"]
        if odd:
            raise ValueError(f"{odd[0]} is not a row of numbers")
        for ends, count, alike in (
            ("ends", len(self.rows), ("tokens", "logprobs", "advantages")),
            ("prompt_ends", len(self.groups), ("prompt_tokens",)),
        ):
            # `ends` are cumulative sums of lengths, so their differences must not be negative and must add up
            # to the length of the flat arrays.
            lengths = np.diff(arrays[ends], prepend=0)
            if len(lengths) != count or lengths.dtype.kind != "i" or (lengths < 0).any():
                raise ValueError(f"{ends} are not those of {count} of {self.path.name}")
            for name in alike:
                if len(arrays[name]) != lengths.sum():
                    raise ValueError(f"{name} has {len(arrays[name])} numbers for {lengths.sum()} tokens")

    @cached_property
    def prompts(self) -> dict[int, np.ndarray]:
        """Number of a group -> the token ids of its prompt, (P,)."""
        parts = np.split(self.arrays["prompt_tokens"], self.arrays["prompt_ends"][:-1])
        return dict(zip(self.groups, parts, strict=True))

    def completion(self, index: int) -> Completion:
        """Return the completion of a row as it was sampled. Raises as ``arrays``."""
        row = self.rows[index]
        arrays = self.of_completion(index)
        mask = None
        if "kept_ends" in arrays:
            # The ids of all completions lie one after another: these begin where the token before ended.
            first = self._first(index)
            start = int(self.arrays["kept_ends"][first - 1]) if first else 0
            ends = arrays["kept_ends"] - start
            stop = start + int(ends[-1]) if len(ends) else start
            mask = SamplingMask(self.arrays["kept_ids"][start:stop], ends)
        fault = str(row.get("environment_fault", ""))
        return Completion(
            arrays["tokens"],
            arrays["logprobs"],
            row["completion"],
            row["finish"],
            drawn_mask=arrays.get("sampled", ALL_DRAWN),
            sampling_mask=mask,
            transcript=Transcript(tuple(row.get("turns", ())), row.get("environment"), fault),
        )

    def _first(self, index: int) -> int:
        """Return the index of a completion's first token in the flat arrays."""
        return int(self.arrays["ends"][index - 1]) if index else 0

    def of_completion(self, index: int) -> dict[str, np.ndarray]:
        """Return the token-wise arrays of one completion, (T,) each."""
        ends = self.arrays["ends"]
        part = slice(self._first(index), int(ends[index]))
        # Only arrays with one number per completion token can be sliced so; prompts and kept ids have other
        # lengths.
        return {name: a[part] for name, a in self.arrays.items() if a.ndim == 1 and len(a) == ends[-1]}


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps whose completions a run has logged, in order."""
    rollouts = folder / "rollouts"
    names = (ROLLOUT.fullmatch(p.name) for p in rollouts.iterdir()) if rollouts.is_dir() else ()
    return sorted(int(match[1]) for match in names if match and match[2] == "jsonl")


def rollout_file(folder: Path, step: int) -> Path:
    """Return the path of the readable log of a step's completions."""
    return folder / "rollouts" / f"step_{step:06d}.jsonl"


def read_rollouts(folder: Path, step: int) -> RolloutLog:
    """Read the completions of a step.

    Raises ConfigError if there are none, CheckpointError for anything that is not as it was written, and
    OSError, with the file's name, if it cannot be read.
    """
    path = rollout_file(folder, step)
    # lexists: a dangling link is damage, not an absent step.
    if not os.path.lexists(path):
        logged = recorded_steps(folder)
        extent = f"it has {logged[0]} to {logged[-1]}" if logged else "it is empty"
        raise ConfigError(f"{folder}: no completions of step {step} in its rollout log; {extent}")
    rows: list[dict[str, object]] = []
    try:
        content = read_below(folder, f"rollouts/{path.name}", stream_bytes())
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_remedy(path)}") from None
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            row = unsealed_line(line)
            _Row.model_validate(row)
        except (ValueError, ValidationError):
            raise CheckpointError(f"{path}:{number}: damaged. {_remedy(path)}") from None
        if not _follows(row, rows[-1] if rows else None, step):
            raise CheckpointError(f"{path}:{number}: damaged: another line was written here. {_remedy(path)}")
        rows.append(row)
    if len(rows) != rows[0]["rows"]:
        raise CheckpointError(f"{path}: {len(rows)} of {rows[0]['rows']} lines are left. {_remedy(path)}")
    return RolloutLog(path, tuple(rows))


def _follows(row: Mapping[str, object], before: Mapping[str, Any] | None, step: int) -> bool:
    """Whether a row is the next one of its step: its place among the rows tells its part of the arrays."""
    if row["step"] != step:
        return False
    if before is None:
        return row["sample"] == 0
    if (row["arrays"], row["rows"]) != (before["arrays"], before["rows"]):
        return False
    if row["group"] == before["group"]:
        return row["sample"] == before["sample"] + 1
    return row["group"] > before["group"] and row["sample"] == 0


def read_arrays(content: bytes) -> dict[str, np.ndarray]:
    """Read the arrays of an npz that covey has written: plain ones, not compressed.

    Nothing is allocated that the bytes do not hold. Raises ValueError for any other archive.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            total = sum(member.file_size for member in members)
            # Sizes in the directory are claims of the file. Stored members cannot be larger than the file, so
            # nothing here can unpack into much memory.
            if any(m.compress_type != zipfile.ZIP_STORED for m in members) or total > len(content):
                raise ValueError("it has compressed parts, and covey writes none")
            return {m.filename.removesuffix(".npy"): _array(archive.read(m)) for m in members}
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(str(error)) from None


def _array(content: bytes) -> np.ndarray:
    file = io.BytesIO(content)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array of another version than covey writes")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
    # Object arrays would be unpickled, which runs code.
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError("an array that does not fill its place")
    flat = np.frombuffer(content, dtype, offset=file.tell()).copy()
    return flat.reshape(shape, order="F" if by_column else "C")


def _remedy(path: Path) -> str:
    return f"Put the file back, or move {path.name} elsewhere: this step is then left out"


# --- writing ----------------------------------------------------------------------------------------


def rollout_rows(
    step: int, groups: Sequence[Group], advantages: Sequence[np.ndarray], trained: int, arrays: bytes
) -> str:
    """Return one sealed line per completion; ``advantages`` are theirs, (T,) each.

    The first ``trained`` groups were trained on, the others filtered. Each line holds the number of lines and
    the sha256 of ``arrays``, the content of the npz, so that a mixture of two logs is noticed.
    """
    # Consumed inside the generator: groups and completions are visited in the order of the advantages.
    remaining = iter(advantages)
    count = len(advantages)
    digest = hashlib.sha256(arrays).hexdigest()
    rows = (
        {
            "step": step,
            "group": number,
            "sample": sample,
            "trained": number < trained,
            "dead": group.dead,
            **_row(group, sample),
            "advantage": _mean(next(remaining), completion),
            "rows": count,
            "arrays": digest,
        }
        for number, group in enumerate(groups)
        for sample, completion in enumerate(group.completions)
    )
    return "".join(map(sealed_line, rows))


def rollout_arrays(
    groups: Sequence[Group], advantages: Sequence[np.ndarray], per_token: Mapping[str, np.ndarray]
) -> bytes:
    """Return an npz archive of all completions' tokens, one after another, with their log-probs and more."""
    completions = [c for g in groups for c in g.completions]
    masks = [c.sampling_mask for c in completions if c.sampling_mask is not None]
    mask = SamplingMask.join(masks)
    by_token = any(c.provenance.versions is not None for c in completions)
    all_drawn = all(c.drawn_mask.all() for c in completions)
    return packed(
        prompt_tokens=np.concatenate([g.prompt for g in groups]),
        prompt_ends=np.cumsum([len(g.prompt) for g in groups]),
        tokens=np.concatenate([c.tokens for c in completions]),
        ends=np.cumsum([len(c.tokens) for c in completions]),
        logprobs=np.concatenate([c.logprobs for c in completions]),
        advantages=np.concatenate(advantages).astype(np.float32),
        **per_token,
        **({"kept_ids": mask.ids, "kept_ends": mask.ends} if masks else {}),
        **({"versions": np.concatenate([c.token_versions for c in completions])} if by_token else {}),
        **({} if all_drawn else {"sampled": np.concatenate([c.drawn_mask for c in completions])}),
    )


def or_null(value: object) -> object:
    """Return a value that JSON can hold: None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(advantage: np.ndarray, completion: Completion) -> float:
    return float(advantage[completion.drawn_mask].mean()) if completion.length else 0.0


def _row(group: Group, sample: int) -> dict[str, object]:
    """Return the log's fields for one completion."""
    completion = group.completions[sample]
    components = group.components
    scores = {name: component.scores[sample] for name, component in components.items()}
    extra = {name: dict(score.extra) for name, score in scores.items() if score.extra}
    inserted = len(completion.tokens) - completion.length
    return {
        "problem": group.problem.id,
        "prompt": group.problem.prompt,
        "completion": completion.text,
        **_transcript_fields(completion.transcript),
        "finish": completion.finish,
        "tokens": len(completion.tokens),
        **({"inserted": inserted} if inserted else {}),
        "version": completion.provenance.version,
        "reward": or_null(float(group.rewards[sample])),
        "components": {name: or_null(float(c.values[sample])) for name, c in components.items()},
        "weights": {name: c.weight for name, c in components.items()},
        "steps": {name: _steps(c.steps[sample]) for name, c in components.items() if c.steps},
        "greedy_reward": or_null(group.baselines.greedy_reward),
        **_for_estimators(group, sample),
        "status": {name: score.status for name, score in scores.items()},
        "extracted": {name: score.extracted for name, score in scores.items()},
        **({"extra": extra} if extra else {}),
    }


def _transcript_fields(transcript: Transcript) -> dict[str, object]:
    """Return the turns of a completion with tools, and the state or the fault of its environment."""
    fields: dict[str, object] = {}
    if transcript.turns:
        fields["turns"] = list(map(dict, transcript.turns))
    if transcript.environment is not None:
        fields["environment"] = dict(transcript.environment)
    if transcript.fault:
        fields["environment_fault"] = transcript.fault
    return fields


def _for_estimators(group: Group, sample: int) -> dict[str, object]:
    """Return the verdict, and the values with which some estimators compare a reward."""
    fields: dict[str, object] = {}
    baselines = group.baselines
    if group.has_verdict:
        fields["correct"] = bool(group.correct[sample])
    if baselines.running_mean is not None:
        fields["running_mean"] = float(baselines.running_mean[sample])
    if baselines.segments:
        segments = baselines.segments[sample]
        fields["segments"] = [[end, value] for end, value in zip(segments.ends, segments.values, strict=True)]
    return fields


def _steps(steps: StepRewards) -> list[list[float]]:
    """Return [first token, one after the last, reward] of each reasoning step."""
    # `ends` are inclusive; starts has one entry more than there are steps, hence strict=False.
    starts = (0, *(end + 1 for end in steps.ends))
    return [[a, end + 1, value] for a, end, value in zip(starts, steps.ends, steps.values, strict=False)]


def packed(**arrays: np.ndarray) -> bytes:
    """Return arrays as the bytes of an npz file, the same for the same arrays."""
    # numpy stamps the time into its archives; a fixed one keeps reruns identical byte for byte.
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), buffer.getvalue())
    return file.getvalue()

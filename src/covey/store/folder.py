"""A run's folder: configuration, metric stream, rollout log, checkpoints, final model.

config.yaml env.json metrics.jsonl timings.jsonl evals.jsonl events.jsonl
rollouts/step_000012.{jsonl,npz} checkpoints/step_000100/ final/
"""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from covey.endings import CheckpointError
from covey.store.commit import clear_leftovers, damage, discard, make_folder, sync, write_file
from covey.types import Group, SamplingMask

STREAMS = ("metrics.jsonl", "evals.jsonl", "timings.jsonl", "events.jsonl")


class FolderBusy(CheckpointError):
    """Another process works in this run folder."""


class RunFolder:
    """Reads and writes one run folder; holds its lock while open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        folders = (path, path / "rollouts", path / "checkpoints")
        for folder in folders:
            make_folder(folder)
        self._lock = (path / ".lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            self._lock.close()
            raise FolderBusy(f"{path}: {owner} works in this folder; wait for it or choose another") from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        self._lock.flush()
        for folder in folders:
            clear_leftovers(folder)

    def close(self) -> None:
        """Give the lock back."""
        self._lock.close()

    def append(self, stream: str, record: Mapping[str, Any]) -> None:
        """Add one JSON line to a stream. Non-finite numbers become null."""
        line = json.dumps({k: _plain(v) for k, v in record.items()}, ensure_ascii=False)
        with (self.path / stream).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def read(self, stream: str) -> list[dict[str, Any]]:
        """All records of a stream."""
        return read_stream(self.path, stream)

    def sync(self) -> dict[str, int]:
        """Make the streams survive a power loss. -> bytes of each: what a checkpoint remembers of them."""
        paths = [p for name in STREAMS if (p := self.path / name).exists()]
        for path in (*paths, self.path):
            sync(path)
        return {p.name: p.stat().st_size for p in paths}

    def rewind(self, sizes: Mapping[str, int], step: int) -> None:
        """Forget what was logged after a checkpoint: cut the streams, drop later rollouts.

        Raises CheckpointError if a stream lacks what was logged before it.
        """
        for name in STREAMS:
            path, size = self.path / name, sizes.get(name, 0)
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise CheckpointError(
                    f"{path} has {found:,} bytes and had {size:,} when the checkpoint of step {step} was "
                    "written. Put the file back, or remove the run folder to begin again"
                )
            if found:
                os.truncate(path, size)
        for path in (self.path / "rollouts").iterdir():
            number = path.stem.rpartition("_")[2]
            if number.isdecimal() and int(number) >= step:
                path.unlink()

    def write_rollouts(
        self,
        step: int,
        trained: Sequence[Group],
        advantages: Sequence[np.ndarray],
        rejected: Sequence[Group] = (),
    ) -> None:
        """Log a step's completions: text and rewards as JSONL, token arrays as npz.

        ``advantages`` holds one (T,) array per completion, in the order of the trained groups; those
        of rejected ones, which come after, are 0.
        """
        groups = [*trained, *rejected]
        if not groups:
            return
        name = self.path / "rollouts" / f"step_{step:06d}"
        completions = [c for g in groups for c in g.completions]
        advantages = [*advantages, *(np.zeros(len(c.tokens)) for g in rejected for c in g.completions)]
        places = [(number, sample) for number, g in enumerate(groups) for sample in range(len(g.completions))]
        lines = [
            {
                "step": step,
                "group": number,
                "sample": sample,
                "trained": number < len(trained),
                **_row(groups[number], sample),
                "advantage": float(advantage.mean()) if len(advantage) else 0.0,
            }
            for (number, sample), advantage in zip(places, advantages, strict=True)
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        masks = [c.sampling_mask for c in completions if c.sampling_mask is not None]
        kept = SamplingMask.join(masks)
        arrays = _npz(
            prompt_tokens=np.concatenate([g.prompt for g in groups]),
            prompt_ends=np.cumsum([len(g.prompt) for g in groups]),
            tokens=np.concatenate([c.tokens for c in completions]),
            ends=np.cumsum([len(c.tokens) for c in completions]),
            logprobs=np.concatenate([c.logprobs for c in completions]),
            advantages=np.concatenate(advantages).astype(np.float32),
            **({"kept_ids": kept.ids, "kept_ends": kept.ends} if masks else {}),
        )
        write_file(name.with_suffix(".npz"), arrays)
        write_file(name.with_suffix(".jsonl"), text)

    def checkpoints(self) -> list[Path]:
        """Committed checkpoints, oldest first."""
        return sorted(p for p in (self.path / "checkpoints").glob("step_*") if p.is_dir())

    def latest_checkpoint(self) -> tuple[Path | None, list[str]]:
        """The newest undamaged checkpoint, and what is wrong with those that had to be passed over."""
        complaints: list[str] = []
        for path in reversed(self.checkpoints()):
            problem = damage(path)
            if problem is None:
                return path, complaints
            complaints.append(problem)
        return None, complaints

    def rotate(self, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints."""
        for path in self.checkpoints()[:-keep]:
            discard(path)


def read_stream(folder: Path, stream: str) -> list[dict[str, Any]]:
    """What a run has logged so far; it may be at work, so a line may be half written."""
    path = folder / stream
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def _row(group: Group, sample: int) -> dict[str, Any]:
    """What the log says of one completion."""
    completion = group.completions[sample]
    return {
        "problem": group.problem.id,
        "prompt": group.problem.prompt,
        "completion": completion.text,
        "finish": completion.finish,
        "tokens": len(completion.tokens),
        "version": completion.version,
        "reward": _plain(float(group.rewards[sample])),
        "components": {k: _plain(float(v[sample])) for k, v in group.components.items()},
        "status": {k: v[sample].status for k, v in group.scores.items()},
        "extracted": {k: v[sample].extracted for k, v in group.scores.items()},
    }


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _npz(**arrays: np.ndarray) -> bytes:
    # numpy stamps the time into its archives; a fixed one keeps reruns identical byte for byte.
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), buffer.getvalue())
    return file.getvalue()

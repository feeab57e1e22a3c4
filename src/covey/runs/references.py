"""`reference.npz`: the log-probs of a run's examples under the model it began with, sealed."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np

from covey.runs.rollouts import read_arrays
from covey.system.opening import read_below, stream_bytes

REFERENCE = "reference.npz"
"""Computed once: no second model is kept."""


def packed_sums(sums: np.ndarray, examples: str) -> bytes:
    """(N,) log-probs, the sha256 of the examples they are of, and a sha256 of both."""
    file = io.BytesIO()
    np.savez(file, sums=sums, examples=np.array(examples), sha256=np.array(_seal(sums, examples)))
    return file.getvalue()


def read_sums(folder: Path) -> tuple[np.ndarray, str]:
    """The log-probs in a run's folder, and the sha256 of the examples they are of.

    Raises FileNotFoundError, CheckpointError and OSError as opening does, ValueError for damage.
    """
    found = read_arrays(read_below(folder, REFERENCE, stream_bytes()))
    if found.keys() != {"sums", "examples", "sha256"} or found["sums"].ndim != 1:
        raise ValueError("not as it was written")
    sums, examples = found["sums"], str(found["examples"])
    if str(found["sha256"]) != _seal(sums, examples):
        raise ValueError("not as it was written")
    return sums, examples


def _seal(sums: np.ndarray, examples: str) -> str:
    return hashlib.sha256(sums.tobytes() + examples.encode()).hexdigest()

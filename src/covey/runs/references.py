"""`reference.npz`, read and written: log-probs of a run's examples under its first model, with a seal."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np

from covey.runs.rollouts import read_arrays
from covey.system.opening import read_below, stream_bytes

REFERENCE = "reference.npz"
"""File of the log-probs. They are computed once, so no second model is kept in memory."""


def packed_sums(sums: np.ndarray, examples: str) -> bytes:
    """Return an npz of (N,) log-probs, the sha256 of their examples, and a sha256 of both."""
    file = io.BytesIO()
    np.savez(file, sums=sums, examples=np.array(examples), sha256=np.array(_seal(sums, examples)))
    return file.getvalue()


def read_sums(folder: Path) -> tuple[np.ndarray, str]:
    """Return the log-probs in a run's folder and the sha256 of their examples.

    Raises ValueError for damage, and FileNotFoundError, CheckpointError or OSError if it cannot be opened.
    """
    arrays = read_arrays(read_below(folder, REFERENCE, stream_bytes()))
    if arrays.keys() != {"sums", "examples", "sha256"} or arrays["sums"].ndim != 1:
        raise ValueError("not as it was written")
    sums = arrays["sums"]
    examples = str(arrays["examples"])
    if str(arrays["sha256"]) != _seal(sums, examples):
        raise ValueError("not as it was written")
    return sums, examples


def _seal(sums: np.ndarray, examples: str) -> str:
    return hashlib.sha256(sums.tobytes() + examples.encode()).hexdigest()

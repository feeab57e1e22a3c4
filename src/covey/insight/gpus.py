"""Whether the same run fits into the memory of a GPU that is not at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from covey.config.load import ResolvedConfig
from covey.learner.memory import (
    RunParts,
    Shape,
    count_float32_numbers,
    fitting_sizes,
    forecast,
    largest_step,
)
from covey.models.logprobs import GPU_CHUNK_LOGITS
from covey.system.plot import align_columns

PROGRAM = 500_000_000
"""Bytes that a GPU's context takes."""
GPUS = {"H200": 141, "H100": 80, "A100": 80, "L40S": 48, "RTX 4090": 24, "L4": 24}
"""GPU -> its memory in GiB."""


class Subject(NamedTuple):
    """The models of a run and the lengths of its prompts, in tokens."""

    shape: Shape
    prompts: Sequence[int]
    critic: int = 0
    """Parameters of a value network."""
    reward_models: int = 0
    """Bytes of the reward models."""


class GpuMemory(NamedTuple):
    """The memory of a run on one GPU."""

    gpu: str
    memory: int
    memory_available: int
    """Bytes of the GPU; ``memory`` is the run's peak."""

    @property
    def fits(self) -> bool:
        """Whether the GPU's memory is enough."""
        return self.memory <= self.memory_available

    def record(self) -> dict[str, object]:
        """Return the forecast as JSON."""
        return {**self._asdict(), "fits": self.fits}


def memory_on_gpus(subject: Subject, stage: ResolvedConfig) -> list[GpuMemory]:
    """Forecast the memory of the run on each GPU, with the largest micro-batch that fits."""
    config = stage.config
    # Bytes per number. covey's compiled operations, which keep activations in float32, run on a CPU only.
    bytes_each = 4 if config.dtype == "float32" else 2
    adapters = config.lora is not None
    shape = subject.shape._replace(
        bytes_each=bytes_each,
        compiled=False,
        chunk_logits=GPU_CHUNK_LOGITS,
        float32_numbers=count_float32_numbers(subject.shape.width, subject.shape.inner, bytes_each, adapters),
    )
    largest = largest_step(config, subject.prompts, (), stage.algorithm.whole_groups)
    # With adapters the frozen weights themselves are the reference.
    reference = stage.algorithm.needs_reference and not adapters
    parts = RunParts(PROGRAM, reference, subject.critic, subject.reward_models)
    expect = partial(forecast, shape, config, largest, parts=parts)
    rows = []
    for gpu, gib in GPUS.items():
        sizes = fitting_sizes(expect, config, largest, gib << 30)
        rows.append(GpuMemory(gpu, sum(expect(*sizes).values()), gib << 30))
    return rows


def gpu_lines(rows: Sequence[GpuMemory]) -> Iterator[str]:
    """Yield the table for people."""
    yield "estimated memory on one GPU"
    yield from align_columns([["GPU", "memory, GB"], *map(_cells, rows)])


def _cells(row: GpuMemory) -> list[str]:
    remark = "" if row.fits else ": does not fit"
    return [row.gpu, f"{row.memory / 1e9:,.1f} of {row.memory_available / 1e9:,.0f}{remark}"]

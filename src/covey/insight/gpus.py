"""Forecast of the same run on one GPU that is not available: seconds and memory from its data sheet.

Compute counts at the fraction of the peak that prime-rl reports for updates of 0.6B and 4B models on an H100,
bandwidth at half of its peak, and layers at what covey's took on an H100 (benchmarks/results/gpu.md). The
result is a lower bound: published runs took up to eight times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from covey.config.load import ResolvedConfig
from covey.insight.forecast import Forecast, Workload, seconds_text
from covey.learner.memory import Shape, count_float32_numbers, fitting_sizes, forecast, largest_step
from covey.models.logprobs import GPU_CHUNK_LOGITS
from covey.system.plot import table

BANDWIDTH = 0.5
"""Fraction of the peak bandwidth that decoding reaches."""
COMPUTE_SMALL = (0.6e9, 0.111)
COMPUTE_LARGE = (4e9, 0.217)
"""(parameters, fraction of the peak that an update reaches); other sizes follow a power law through both."""
COMPUTE_MOST = 0.4
DECODE_LAYER = 2.9e-4
"""Seconds of a layer's small kernels in a decode step, besides reading; measured with a 0.5B model."""
UPDATE_LAYER = 7e-3
"""Seconds in which the host starts a layer's kernels, forward and back; measured with adapters."""
BACKWARD = 3.0
"""Matrix products of an update (forward and backward) relative to a forward pass."""
PROGRAM = 500_000_000
"""Bytes that a GPU's context takes."""


class Gpu(NamedTuple):
    """The data sheet of a GPU: dense bfloat16 peak in TFLOP/s, bandwidth in TB/s, memory in GiB."""

    name: str
    teraflops: float
    terabytes: float
    gib: int


GPUS = (
    Gpu("H200", 989, 4.8, 141),
    Gpu("H100", 989, 3.35, 80),
    Gpu("A100", 312, 2.0, 80),
    Gpu("L40S", 362, 0.86, 48),
    Gpu("RTX 4090", 165, 1.0, 24),
    Gpu("L4", 121, 0.3, 24),
)


class Subject(NamedTuple):
    """The model and the lengths of its prompts, in tokens."""

    shape: Shape
    prompts: Sequence[int]

    @property
    def prompt(self) -> float:
        """Mean length of a prompt, in tokens."""
        return sum(self.prompts) / len(self.prompts)


class GpuForecast(NamedTuple):
    """The forecast of a run on one GPU."""

    gpu: str
    memory: int
    memory_available: int
    """Bytes of the GPU; ``memory`` is the run's peak."""
    step: float
    """Seconds of a step."""
    hours: float

    @property
    def fits(self) -> bool:
        """Whether the GPU's memory is enough."""
        return self.memory <= self.memory_available

    def record(self) -> dict[str, object]:
        """Return the forecast as JSON."""
        return {**self._asdict(), "fits": self.fits}


def share_of_compute(parameters: float) -> float:
    """Return the fraction of a GPU's peak that an update of a model reaches.

    >>> [round(share_of_compute(p), 3) for p in (0.6e9, 4e9, 8e9, 70e9)]
    [0.111, 0.217, 0.277, 0.4]
    """
    small, low = COMPUTE_SMALL
    large, high = COMPUTE_LARGE
    exponent = math.log(high / low) / math.log(large / small)
    return min(COMPUTE_MOST, low * (parameters / small) ** exponent)


def forward_seconds(gpu: Gpu, shape: Shape, completions: float, length: float, prompts: float) -> float:
    """Return the seconds of a forward pass over completions and ``prompts`` tokens of their prompts."""
    tokens = completions * length
    attended = tokens * (prompts / max(completions, 1) + length / 2)
    # Two operations per weight and token. Attention adds 2 for scores and 2 for values per layer, head
    # dimension and attended position: all of the prompt and on average half of the completion.
    products = 2 * shape.parameters * (tokens + prompts)
    products += 4 * shape.layers * shape.queries * shape.head * attended
    return products / (1e12 * gpu.teraflops * share_of_compute(shape.parameters))


def decode_seconds(
    gpu: Gpu, shape: Shape, completions: float, length: float, prompt: float, running: int, longest: float
) -> float:
    """Return the seconds for reading weights, keys and values in all decode steps.

    ``running`` completions are decoded at once; the ``longest`` is alone at the end.
    """
    tokens = completions * length
    # Every decode step reads all weights once for the whole batch; the caches of keys and values are read
    # once for each token.
    steps = tokens / max(min(completions, running), 1) + max(0.0, longest - length)
    cached = 2 * shape.layers * shape.keys * shape.head * tokens * (prompt + length / 2)
    bytes_read = shape.bytes_each * (steps * shape.parameters + cached)
    return bytes_read / (1e12 * gpu.terabytes * BANDWIDTH) + DECODE_LAYER * steps * shape.layers


def gpu_step_seconds(gpu: Gpu, subject: Subject, stage: ResolvedConfig, work: Workload) -> float:
    """Return the seconds of a training step."""
    rollout = stage.config.rollout
    train = stage.config.train
    shape = subject.shape
    sampling = decode_seconds(
        gpu, shape, work.completions, work.length, subject.prompt, rollout.max_running, rollout.max_tokens
    )
    prompts = work.completions / rollout.group_size * subject.prompt
    sampling += forward_seconds(gpu, shape, work.completions, work.length, prompts)
    # Further forward passes: by the reference, by the policy before several updates, and to recompute layers.
    updates = train.updates_per_rollout_batch
    further_passes = stage.algorithm.needs_reference + (updates > 1) + train.recompute_layers
    prompts = work.trained / rollout.group_size * subject.prompt
    update = (BACKWARD + further_passes) * forward_seconds(gpu, shape, work.trained, work.length, prompts)
    # A GPU that computes faster than the host can start its kernels waits for it.
    pieces = (work.trained * work.length + prompts) / train.tokens_per_micro_batch
    update = max(update, UPDATE_LAYER * shape.layers * max(pieces, updates))
    return sampling * work.tokens / (work.completions * work.length) + update


def memory_bytes(gpu: Gpu, subject: Subject, stage: ResolvedConfig) -> int:
    """Return the bytes at the peak of the run, with the largest micro-batch that fits."""
    config = stage.config
    shape = subject.shape
    largest = largest_step(config, subject.prompts, (), stage.algorithm.whole_groups)
    # With adapters the frozen weights themselves are the reference.
    reference = stage.algorithm.needs_reference and config.lora is None
    expect = partial(forecast, shape, config, largest, reference=reference, program=PROGRAM)
    sizes = fitting_sizes(expect, config, largest, gpu.gib << 30)
    return sum(expect(*sizes).values())


def on_gpus(subject: Subject, stage: ResolvedConfig, work: Workload, local: Forecast) -> list[GpuForecast]:
    """Forecast the run on each GPU; evaluations take longer or shorter there as steps do."""
    # Bytes per number. covey's compiled operations, which keep activations in float32, run on a CPU only.
    bytes_each = 4 if stage.config.dtype == "float32" else 2
    shape = subject.shape
    adapters = stage.config.lora is not None
    shape = shape._replace(
        bytes_each=bytes_each,
        compiled=False,
        chunk_logits=GPU_CHUNK_LOGITS,
        float32_numbers=count_float32_numbers(shape.width, shape.inner, bytes_each, adapters),
    )
    subject = subject._replace(shape=shape)
    rows = []
    for gpu in GPUS:
        step = gpu_step_seconds(gpu, subject, stage, work)
        hours = local.hours * step / local.step
        rows.append(GpuForecast(gpu.name, memory_bytes(gpu, subject, stage), gpu.gib << 30, step, hours))
    return rows


def gpu_lines(rows: Sequence[GpuForecast]) -> Iterator[str]:
    """Yield the table for people."""
    yield "on one GPU, computed from its data sheet: at least so long, and without the rewards"
    yield from table([["GPU", "memory, GB", "a step", "the run"], *map(_cells, rows)])


def _cells(row: GpuForecast) -> list[str]:
    remark = "" if row.fits else ": does not fit"
    memory = f"{row.memory / 1e9:,.1f} of {row.memory_available / 1e9:,.0f}{remark}"
    return [row.gpu, memory, seconds_text(row.step), seconds_text(3600 * row.hours)]

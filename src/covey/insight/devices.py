"""How fast a device is, in four numbers: measured by `benchmarks/cost.py`, or from its data sheet."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from covey.errors import ConfigError

SHARE_OF_COMPUTE, SHARE_OF_BANDWIDTH = 0.2, 0.5
"""Of a data sheet's peaks, what trainers and samplers of small models are reported to reach: 11 % and 22 % of
the compute in updates of 0.6B and 4B on an H100, 69 % of the bandwidth in decoding 7B on an A100."""
LAUNCH = 0.03
"""Seconds a thousand decode steps and layers take on a GPU beside the work, kernels captured in graphs."""
BACKWARD = 3.0
"""An update's products, forward and backward, over those of a forward pass."""


@dataclass(frozen=True)
class Device:
    """Seconds by unit of work, the units of ``covey.insight.plan.Demand``."""

    name: str
    memory: int
    """Bytes."""
    sampling: tuple[float, float, float, float, float]
    """A GFLOP of products, of attention, a billion logits, a thousand decode steps and layers, a GB read."""
    update: tuple[float, float, float]
    """A GFLOP of the forward's products, of its attention, a billion logits; forward and backward."""
    compiled: bool
    """Whether covey's own operations do the work, in float32; else bfloat16 through torch."""
    source: str


def _gpu(name: str, teraflops: float, terabytes: float, gib: int) -> Device:
    """From the dense bfloat16 peak and the bandwidth."""
    product, byte = 1e-3 / teraflops / SHARE_OF_COMPUTE, 1e-3 / terabytes / SHARE_OF_BANDWIDTH
    logits = 4 * byte  # written and read in bfloat16
    return Device(
        name,
        gib << 30,
        (product, product, logits, LAUNCH, byte),
        (BACKWARD * product, BACKWARD * product, 4 * logits),
        compiled=False,
        source=f"data sheet ({teraflops:g} TFLOP/s, {terabytes:g} TB/s) at {SHARE_OF_COMPUTE:.0%} and "
        f"{SHARE_OF_BANDWIDTH:.0%}: not measured with covey, expect a factor of two either way",
    )


DEVICES = {
    d.name: d
    for d in (
        Device(
            "epyc-2",
            8 << 30,
            (0.00264, 0.0320, 0.392, 0.131, 0.0),
            (0.00887, 0.0217, 3.72),
            compiled=True,
            source="two cores of an AMD EPYC with AVX2: measured, benchmarks/results/cost.md, within 8 %",
        ),
        _gpu("h200", 790, 4.3, 141),
        _gpu("h100", 790, 3.35, 80),
        _gpu("a100", 312, 2.0, 80),
        _gpu("l40s", 362, 0.86, 48),
        _gpu("rtx4090", 165, 1.0, 24),
        _gpu("l4", 121, 0.3, 24),
    )
}


def device_named(name: str) -> Device:
    """A device by its name, or of the file that `benchmarks/cost.py --rates` has written on it."""
    if name.endswith(".json"):
        try:
            read = json.loads(Path(name).read_text(encoding="utf-8"))
            return Device(**{**read, "sampling": tuple(read["sampling"]), "update": tuple(read["update"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"--device {name}: no rates of benchmarks/cost.py in it ({error})") from None
    if name not in DEVICES:
        raise ConfigError(
            f"--device {name}: known are {', '.join(DEVICES)}, and files that `python benchmarks/cost.py "
            "--rates FILE` writes on a device"
        )
    return DEVICES[name]

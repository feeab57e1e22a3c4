"""How fast a device is, in four numbers: measured by `benchmarks/cost.py`, or from its data sheet."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from covey_verify.errors import ConfigError

SHARE_OF_BANDWIDTH = 0.5
"""Of a data sheet's peak; 69 % are reported of decoding 7B on an A100."""
SHARE_OF_COMPUTE, MOST_OF_COMPUTE = (0.6e9, 0.111, 4e9, 0.217), 0.4
"""Of a data sheet's peak: what prime-rl reports of updates of 0.6B and 4B on an H100, a power of the size
between and beyond them, and what larger models do not go above."""
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
    node: int = 1
    """Devices of a node."""
    links: tuple[float, float] = (1.3, 1.0)
    """GB/s that a device sends to others of its node, and to other nodes."""

    by_size: bool = False
    """Whether its products are those of a model of 4B: others reach another part of its peak."""

    def for_size(self, parameters: int) -> Device:
        """With the products of a model of this size."""
        slower = share_of_compute(4e9) / share_of_compute(parameters) if self.by_size else 1.0
        (product, attention, logits, steps, read), (forward, over, head) = self.sampling, self.update
        return replace(
            self,
            sampling=(product * slower, attention * slower, logits, steps, read),
            update=(forward * slower, over * slower, head),
        )


def share_of_compute(parameters: float) -> float:
    """What an update of a model reaches of a GPU's peak.

    >>> [round(share_of_compute(p), 3) for p in (0.6e9, 4e9, 8e9, 70e9)]
    [0.111, 0.217, 0.277, 0.4]
    """
    small, low, large, high = SHARE_OF_COMPUTE
    exponent = math.log(high / low) / math.log(large / small)
    return min(MOST_OF_COMPUTE, low * (parameters / small) ** exponent)


def _gpu(
    name: str,
    teraflops: float,
    terabytes: float,
    gib: int,
    node: int = 8,
    links: tuple[float, float] = (12.0, 3.0),
) -> Device:
    """From the dense bfloat16 peak, the bandwidth, and the links in GB/s."""
    product, byte = 1e-3 / teraflops / share_of_compute(4e9), 1e-3 / terabytes / SHARE_OF_BANDWIDTH
    logits = 4 * byte  # written and read in bfloat16
    return Device(
        name,
        gib << 30,
        (product, product, logits, LAUNCH, byte),
        (BACKWARD * product, BACKWARD * product, 4 * logits),
        compiled=False,
        source=f"data sheet ({teraflops:g} TFLOP/s, {terabytes:g} TB/s) at 11 to {MOST_OF_COMPUTE:.0%} of "
        f"compute, by the model's size, and {SHARE_OF_BANDWIDTH:.0%} of bandwidth: not measured with covey, "
        "expect a factor of two either way",
        node=node,
        links=links,
        by_size=True,
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
        _gpu("h200", 989, 4.8, 141, 8, (360.0, 40.0)),
        _gpu("h100", 989, 3.35, 80, 8, (360.0, 40.0)),
        _gpu("a100", 312, 2.0, 80, 8, (240.0, 20.0)),
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
            listed = {name: tuple(value) for name, value in read.items() if isinstance(value, list)}
            return Device(**{**read, **listed})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"--device {name}: no rates of benchmarks/cost.py in it ({error})") from None
    if name not in DEVICES:
        raise ConfigError(
            f"--device {name}: known are {', '.join(DEVICES)}, and files that `python benchmarks/cost.py "
            "--rates FILE` writes on a device"
        )
    return DEVICES[name]

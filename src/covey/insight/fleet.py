"""A run on many devices, on paper: what each of them holds, what goes over their links, what waits for what.

Trainers hold a part of the weights each (FSDP2), gather them layer by layer, and keep a whole copy to sample
from and to save; samplers hold all of them, over several devices where one is too small. Nothing of this was
measured with covey on GPUs: benchmarks/results/plans.md holds it against what others have published.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from covey.insight.devices import Device
from covey.learner.memory import Shape, sampling_bytes
from covey_verify.errors import ConfigError

ROOM = 0.6
"""Of a sampler's memory, what weights may take; the rest is for keys and values."""
FILES = 2.2e-9
"""Seconds for a byte of new weights to be written to a file in memory and read from it: measured at 1 GB."""
REDUCED = 4
"""Bytes of a weight's gradient on the way to the process that owns it."""


@dataclass(frozen=True)
class Fleet:
    """Devices of one kind, and what they do."""

    trainers: int = 1
    samplers: int = 0
    """Devices that only sample; 0: the trainers sample, too."""

    def __post_init__(self) -> None:
        if self.trainers < 1 or self.samplers < 0:
            raise ConfigError(f"--devices {self.trainers} --samplers {self.samplers}: 1 and 0 at least")

    @property
    def devices(self) -> int:
        """All of them."""
        return self.trainers + self.samplers

    def copies(self, shape: Shape, device: Device) -> tuple[int, int]:
        """How many copies of the model sample, and over how many devices each. Raises ConfigError."""
        there = self.samplers or self.trainers
        weights = shape.parameters * shape.number
        each = 1 << max(0, math.ceil(math.log2(weights / (ROOM * device.memory))))
        if each > there > 1:
            raise ConfigError(
                f"--devices {self.trainers} --samplers {self.samplers}: {weights / 1e9:,.0f} GB of weights "
                f"need {each} devices of {device.memory / 1e9:,.0f} GB to sample from, there are {there}"
            )
        each = min(each, there)  # on one device the memory says that it does not fit
        return there // each, each

    def link(self, device: Device, devices: int) -> float:
        """Bytes a second that each of so many devices sends to the others."""
        inside, outside = device.links
        return 1e9 * (inside if devices <= device.node else outside)

    def exchange(self, shape: Shape, device: Device, micro_batches: float) -> float:
        """Seconds of an update for weights gathered twice and gradients added up, in every micro-batch."""
        n = self.trainers
        moved = (2 * shape.number * shape.parameters + REDUCED * shape.trained) * (n - 1) / n
        return micro_batches * moved / self.link(device, n)

    def sync(self, shape: Shape, device: Device) -> float:
        """Seconds until those who sample have new weights."""
        weights = shape.parameters * shape.number
        if self.samplers:
            return FILES * weights
        return weights * (self.trainers - 1) / self.trainers / self.link(device, self.trainers)

    def split(
        self, roles: Mapping[str, int], shape: Shape, device: Device, slots: int, prompt: int, completion: int
    ) -> dict[str, int]:
        """Bytes on the fullest trainer, from those of a run on one device.

        ``slots`` completions run at once in a copy of the model that samples.
        """
        n, (_, each) = self.trainers, self.copies(shape, device)
        if n == 1 and not self.samplers:
            return dict(roles)
        shared = ("weights", "reference", "critic", "gradient", "optimizer")
        held = {role: size // n if role in shared else size for role, size in roles.items()}
        inner = shape.parameters - shape.vocabulary * shape.width
        widest = max(2 * inner // max(shape.layers, 1), shape.vocabulary * shape.width)
        held["gathered"] = widest * (shape.number + REDUCED) if n > 1 else 0
        held["whole"] = shape.parameters * shape.number if n > 1 else 0
        cache = 0 if self.samplers else sampling_bytes(shape, slots, prompt, completion)
        held["sampling"] = cache // each
        return held


ALONE = Fleet()

"""Whose matrix products are taken, ours or torch's: measured once per processor, kept with the kernels.

Ours give the same bits for a token whatever is computed beside it, with any number of threads. Torch's do
not, so they are taken only where they are much faster; a run keeps the choice that it began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, TypeAdapter

NUMBERS = ("float32", "bfloat16", "mixed")
"""What products are tried with."""
PRODUCT_KINDS = ("decode", "forward", "inputs", "weights")
"""Products of few rows, of many rows, and the gradients of both factors."""
FEW_ROWS = 64
MUCH_FASTER = 1.5

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rates = Mapping[str, Mapping[str, tuple[Rate, Rate]]]
"""dtype -> kind -> GFLOP/s of one thread, ours and torch's."""


@dataclass(frozen=True)
class Trial:
    """What a child found that ran a library."""

    problem: str = ""
    rates: Rates = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    """dtype -> what sampling and training do not compute to the same bits; nothing where they do."""

    @property
    def works(self) -> bool:
        """Whether it may be used."""
        return not self.problem

    @property
    def rounding_gain(self) -> float:
        """How many times float32's rate rounded products have, in the kind that gains least."""
        full, mixed = self.rates.get("float32", {}), self.rates.get("mixed", {})
        return min((mixed[kind][0] / max(pair) for kind, pair in full.items() if kind in mixed), default=0.0)

    def choice(self) -> dict[str, list[str]]:
        """dtype -> the kinds that torch does: of those that it has."""
        return {
            dtype: [kind for kind, (ours, torchs) in kinds.items() if torchs > MUCH_FASTER * ours]
            for dtype, kinds in self.rates.items()
            if dtype != "mixed"
        }


def trial_of(record: object) -> Trial:
    """The trial that a record tells of: a problem, or all rates and bits.

    Raises ValueError for any other. A choice made from half a record would end a run later.
    """
    trial = _TRIAL.validate_python(record)
    measured = all(
        trial.rates.get(n, {}).keys() == set(PRODUCT_KINDS) and n in trial.differs for n in NUMBERS
    )
    if trial.works and not measured:
        raise ValueError("rates or bits are missing")
    return trial


_TRIAL = TypeAdapter(Trial)

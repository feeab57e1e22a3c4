"""The choice between the kernels' matrix products and torch's: measured once per processor, then kept.

Ours give a token the same bits in any batch and with any number of threads. Torch's do not, so they are taken
only where they are much faster. A run keeps the choice that it began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, TypeAdapter

NUMBERS = ("float32", "bfloat16", "mixed")
"""The numbers that products are tried with."""
PRODUCT_KINDS = ("decode", "forward", "inputs", "weights")
"""Products of few rows, of many rows, and the gradients of both factors."""
MAX_DECODING_ROWS = 64
"""Most rows of a product that counts as decoding."""
MIN_SPEEDUP = 1.5
"""Ratio of rates from which speed outweighs equal bits."""

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rates = Mapping[str, Mapping[str, tuple[Rate, Rate]]]
"""dtype -> kind -> GFLOP/s of one thread, ours and torch's."""


@dataclass(frozen=True)
class Trial:
    """The results of a child process that ran a library."""

    problem: str = ""
    """Reason why the library cannot be used; empty if it can."""
    rates: Rates = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    """dtype -> the first result whose bits differ between sampling and training; empty if none does."""

    @property
    def works(self) -> bool:
        """Whether the library can be used."""
        return not self.problem

    @property
    def rounding_gain(self) -> float:
        """Rate of rounded products over the best of float32, in the kind of product that gains least."""
        full = self.rates.get("float32", {})
        mixed = self.rates.get("mixed", {})
        gains = [mixed[kind][0] / max(pair) for kind, pair in full.items() if kind in mixed]
        return min(gains, default=0.0)

    def choice(self) -> dict[str, list[str]]:
        """Map each dtype to the kinds of products that torch does; torch has no mixed ones."""

        def kinds_of_torch(rates: Mapping[str, tuple[float, float]]) -> list[str]:
            return [kind for kind, (own, by_torch) in rates.items() if by_torch > MIN_SPEEDUP * own]

        return {dtype: kinds_of_torch(rates) for dtype, rates in self.rates.items() if dtype != "mixed"}


def trial_of(record: object) -> Trial:
    """The trial in a record, which has either a problem or all rates and bits.

    Raises ValueError for any other record: a choice made from half of one would stop a run later.
    """
    trial = _TRIAL.validate_python(record)
    is_complete = all(
        trial.rates.get(n, {}).keys() == set(PRODUCT_KINDS) and n in trial.differs for n in NUMBERS
    )
    if trial.works and not is_complete:
        raise ValueError("rates or bits are missing")
    return trial


_TRIAL = TypeAdapter(Trial)

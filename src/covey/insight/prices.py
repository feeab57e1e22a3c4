"""The cost of a run, by the price of an hour on each device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from covey.insight.forecast import Forecast
from covey.insight.gpus import GPUS, GpuForecast
from covey_verify.errors import ConfigError

HERE = "here"
"""Name of the device that the preview ran on."""
NO_PRICES: Mapping[str, float] = {}


def read_prices(texts: Sequence[str]) -> dict[str, float]:
    """Return the price of an hour by device, from texts such as `H100=2.5`.

    Raises ConfigError for a device that has no forecast, and for an amount that is no price.
    """
    devices = {name.lower(): name for name in (HERE, *(gpu.name for gpu in GPUS))}
    prices = {}
    for text in texts:
        name, _, amount = text.partition("=")
        device = devices.get(name.strip().lower())
        if device is None:
            raise ConfigError(
                f"--price {text}: no forecast for {name.strip()!r}; write DEVICE=AMOUNT, where DEVICE is "
                f"one of {', '.join(devices.values())}"
            )
        try:
            prices[device] = float(amount)
        except ValueError:
            prices[device] = math.nan
        if not 0 <= prices[device] < math.inf:
            raise ConfigError(f"--price {text}: {amount!r} is not the price of an hour, such as {device}=2.5")
    return prices


def costs(
    forecast: Forecast | None, gpus: Sequence[GpuForecast], prices: Mapping[str, float]
) -> dict[str, float]:
    """Return the cost of the whole run by device, in the currency of the prices.

    A GPU is left out if the run does not fit on it, and this device if the update was not timed.
    """
    hours = {HERE: forecast.hours} if forecast else {}
    hours |= {row.gpu: row.hours for row in gpus if row.fits}
    return {device: hours[device] * price for device, price in prices.items() if device in hours}


def cost_lines(
    forecast: Forecast | None, gpus: Sequence[GpuForecast], prices: Mapping[str, float]
) -> Iterator[str]:
    """Yield a line for people, if prices were given."""
    if not prices:
        return
    cost_of = costs(forecast, gpus, prices)
    words = []
    for device, cost in cost_of.items():
        decimals = 2 if cost >= 1 else 3
        device_words = "here" if device == HERE else f"on {device}"
        words.append(f"{cost:.{decimals}f} {device_words}")
    words += [f"unknown for {device}" for device in prices if device not in cost_of]
    yield f"cost of the run at your prices (a lower bound on a GPU): {', '.join(words)}"

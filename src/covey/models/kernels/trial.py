"""The trial of a kernel library in a process of its own: its answers, its bits and its speed.

`python -m covey.models.kernels.trial` prints the results for the library that COVEY_KERNELS names. A library
that crashes ends only this process.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from functools import partial

import torch

from covey.models.kernels.bits import first_difference
from covey.models.kernels.calls import DTYPES, Numbers, call, memory_of, name_of_numbers, packed_size
from covey.models.kernels.choice import PRODUCT_KINDS
from covey.models.kernels.known_answers import first_incorrect

SHAPES = {
    "decode": (32, 768, 256),
    "forward": (256, 1024, 256),
    "inputs": (256, 768, 256),
    "weights": (256, 768, 256),
}
"""Kind of product -> its rows, outputs and inputs."""
TURN_SECONDS = 0.02
"""Time of the four turns of one side, at least."""


def print_trial() -> None:
    """Print the results of the trial as JSON."""
    torch.set_num_threads(1)
    for numbers, name in DTYPES.items():
        operation = first_incorrect(call, packed_size, numbers)
        if operation is not None:
            print(json.dumps({"problem": f"{operation}_{name} computes incorrect values here"}))
            return
    with torch.no_grad():
        rates = {name_of_numbers(d): {k: measure_speed(k, d) for k in PRODUCT_KINDS} for d in DTYPES}
        differs = {name_of_numbers(d): first_difference(d) for d in DTYPES}
    print(json.dumps({"rates": rates, "differs": differs}))


def measure_speed(kind: str, dtype: Numbers) -> tuple[float, float]:
    """GFLOP/s of one thread, ours and torch's; torch has no mixed products and computes in float32."""
    # In turns, so that a change of the clock rate hits both; the best time is the least disturbed.
    pair = _products(kind, dtype)
    best = [float("inf")] * 2
    for _ in range(4):
        for index, work in enumerate(pair):
            best[index] = min(best[index], _seconds(work))
    operations = 2 * math.prod(SHAPES[kind])
    # Rounded, but never to 0, because one rate is divided by the other.
    own_rate, torch_rate = (max(0.1, round(1e-9 * operations / s, 1)) for s in best)
    return own_rate, torch_rate


def _products(kind: str, dtype: Numbers) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return our product of a kind and torch's, as functions to be timed."""
    m, n, k = SHAPES[kind]
    x, w, grad = (torch.randn(*shape).to(memory_of(dtype)) for shape in ((m, k), (n, k), (m, n)))
    run = partial(call, dtype=dtype)
    out = x.new_empty(m, n)
    if kind == "decode":
        panels = torch.empty(packed_size(n, k, dtype), dtype=torch.uint8)
        run("pack_weight", w, panels, n, k)
        return partial(run, "product", x, panels, None, out, m, n, k), lambda: x @ w.t()
    if kind == "forward":
        return partial(run, "product_once", x, w, 0, None, out, m, n, k), lambda: x @ w.t()
    if kind == "inputs":
        dx = x.new_empty(m, k)
        return partial(run, "product_once", grad, w, 1, None, dx, m, k, n), lambda: grad @ w
    into = torch.zeros(n, k)
    address = grad.data_ptr()  # the second function keeps ``grad`` alive
    return partial(run, "outer_sum", address, n, x, k, into, m, n, k), lambda: into.add_(grad.t() @ x)


def _seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call, which do not include the time of other programs."""
    work()  # the first call loads caches and pages
    began = time.thread_time()
    seconds = 0.0
    calls = 0
    while seconds < TURN_SECONDS / 4:
        work()
        calls += 1
        seconds = time.thread_time() - began
    return seconds / calls


if __name__ == "__main__":
    print_trial()

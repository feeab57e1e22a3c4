"""A recorder of the calls of a trainer's loss function, and of the factors of its terms in the gradient.

It needs only the trainer's functions. It finds a weight by following the graph of the loss, and reads a
term's factor off the gradient that comes back to it. torch is not imported.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat
from weakref import ref

from covey.audit.writers.recorder import FINGERPRINT_WEIGHTS, Recorder, numbers

if TYPE_CHECKING:
    from torch import Tensor

MAX_CALLS = 16
"""Most calls of a loss function that are recorded."""
FIRST_CALLS = MAX_CALLS // 4
"""First calls, which are always recorded; later ones only if the weights or the ratios have moved."""
MAX_NODES = 4096
"""Most operations of a graph that the search for a weight visits."""


class LossRecorder:
    """Writes the calls of a loss function into a record, with the terms that are added to the loss."""

    def __init__(self, file: Recorder) -> None:
        self.file = file
        self.count = 0
        self.recorded = 0
        self.inside = False
        """Whether the loss function is running; the means that it takes itself are not terms."""
        self._open = False
        self._weight: Tensor | None = None
        self._seen: Tensor | None = None
        self._gradient: Tensor | None = None
        """The weight's gradient after the last backward pass."""

    def call(self, loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the loss function."""
        self.inside = True
        try:
            return loss(*args, **kwargs)
        finally:
            self.inside = False

    def write(
        self,
        name: str,
        mask: Tensor,
        values: Mapping[str, Tensor | None],
        loss: Tensor,
        ranks: float,
        counts: Mapping[str, SupportsFloat | None],
    ) -> None:
        """Write a call, unless it shows nothing new.

        ``values``: of a `LossRow`, (N, T). ``counts``: the `tokens` and `completions` that it divides
        by, and then multiplies by ``ranks``, over which gradients are averaged.
        """
        self.count += 1
        tensors = {name: v.detach().expand(mask.shape) for name, v in values.items() if v is not None}
        apart = ((tensors["logprobs"] - tensors["old_logprobs"]).abs() * mask).max() > 1e-3
        moved = self._has_moved(loss)
        self._open = self.recorded < FIRST_CALLS or (self.recorded < MAX_CALLS and bool(apart or moved))
        if not self._open:
            return
        rows = []
        for n, bits in enumerate((mask != 0).int().tolist()):
            end = max((t + 1 for t, on in enumerate(bits) if on), default=0)
            rows.append({"mask": bits[:end], **{name: numbers(v[n, :end]) for name, v in tensors.items()}})
        divisors = {name: float(count) / ranks for name, count in counts.items() if count is not None}
        fields = {"step": self.count - 1, "name": name, "loss": float(loss.detach())}
        self.file.write(kind="loss", rows=rows, moved=moved, **fields, **divisors)
        self.recorded += 1
        self.watch(loss, "policy")

    def watch(self, value: Tensor, name: str, exchanged: bool | None = None) -> None:
        """Write a line for a term of the loss of the last call when the gradient comes back to it."""
        if self._open and value.requires_grad:
            line = {"kind": "term", "call": self.count - 1, "name": name, "exchanged": exchanged}
            value.register_hook(lambda factor: self.file.attempt(self._write_term, line, factor))

    def _write_term(self, line: Mapping[str, object], factor: Tensor) -> None:
        weight = self._weight
        gradient = None if weight is None else weight.grad
        gradient_values = None if gradient is None else _first_values(gradient)
        scale = _multiple(self._gradient, gradient_values)
        had_gradient = bool(gradient is not None and gradient.any())
        self.file.write(**line, factor=float(factor.sum()), gradient_kept=had_gradient, gradient_scaled=scale)

    def _has_moved(self, loss: Tensor) -> bool | None:
        """Return whether a weight that the loss was computed from has changed since the last call."""
        if self._weight is None:
            self._weight = _weight_behind(loss)
            if self._weight is not None:
                self._weight.register_post_accumulate_grad_hook(self._keep_gradient)
        weight_values = None if self._weight is None else _first_values(self._weight)
        before = self._seen
        self._seen = weight_values
        return None if weight_values is None or before is None else bool((weight_values != before).any())

    def _keep_gradient(self, weight: Tensor) -> None:
        """Keep the gradient after a backward pass, while calls are recorded."""
        gradient = weight.grad if self.recorded < MAX_CALLS else None
        self._gradient = None if gradient is None else self.file.attempt(_first_values, gradient)


def _multiple(earlier: Tensor | None, later: Tensor | None) -> float | None:
    """Return the number by which a gradient was multiplied; None if it is not a multiple of its old value."""
    if earlier is None or later is None or not earlier.any() or not later.any():
        return None
    scale = float((later.double() @ earlier.double()) / earlier.double().square().sum())
    close = (later - scale * earlier).norm() <= 1e-3 * later.norm()
    return float(f"{scale:.7g}") if close else None


def _weight_behind(value: Tensor) -> Tensor | None:
    """Return a weight from which a value was computed: the first one in a search of its graph."""
    queue = deque([value.grad_fn])
    visited = set[object]()
    while queue and len(visited) < MAX_NODES:
        node = queue.popleft()
        if node is None or node in visited:
            continue
        visited.add(node)
        weight: Tensor | None = getattr(node, "variable", None)
        if weight is not None:
            return weight
        queue.extend(following for following, _ in node.next_functions)
    return None


def _first_values(weight: Tensor) -> Tensor | None:
    """Return a copy of a weight's first values; None where this process does not hold it.

    A sharded weight is gathered only for the forward pass. Afterwards its memory may be freed, and asking for
    it would make this rank wait for the others.
    """
    is_in_memory = weight.untyped_storage().nbytes() >= weight.numel() * weight.element_size()
    if hasattr(weight, "to_local") or not is_in_memory:
        return None
    return weight.detach().flatten()[:FINGERPRINT_WEIGHTS].clone()


def watch_terms(calls: LossRecorder, penalty: Callable[..., Any], mean: Callable[..., Any]) -> None:
    """Watch the terms that are added to a policy loss: the results of ``mean`` outside the loss function.

    ``penalty`` computes a KL from log-probs of the policy and the reference, in this order.
    """
    last = _Penalty()

    def penalized(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = penalty(*args, **kwargs)
        policy, reference, *_ = _in_order(penalty, args, kwargs)
        if result.requires_grad:
            last.result = ref(result)
            last.exchanged = reference.requires_grad and not policy.requires_grad
        return result

    def meant(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = mean(*args, **kwargs)
        if not calls.inside:
            values = _in_order(mean, args, kwargs)[0]
            term = ("kl", last.exchanged) if values is last.result() else ("entropy", None)
            calls.file.attempt(calls.watch, result, *term)
        return result

    for inner, watched in ((penalty, penalized), (mean, meant)):
        replace_everywhere(inner, wraps(inner)(watched))


class _Penalty:
    """The last computed KL, held by a weak reference so that its graph can be freed."""

    result: Callable[[], Any] = staticmethod(lambda: None)
    exchanged = False


def _in_order(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments of a call in the order of the function's parameters."""
    return list(signature(function).bind(*args, **kwargs).arguments.values())


def replace_everywhere(inner: object, outer: object) -> None:
    """Replace a function in every module that has it, including those that imported it by name."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", {})
        names = [name for name, value in list(namespace.items()) if value is inner]
        for name in names:
            setattr(module, name, outer)


def record_worker(path: str | Path, framework: str, module: str, watch: Callable[[Recorder], None]) -> None:
    """Let ``watch`` record the losses that ``module`` computes in a worker's process; only rank 0 records."""
    if os.environ.get("RANK", "0") == "0":
        import_module(module)
        watch(Recorder(Path(path), framework=framework))

"""A recorder of how each step of an optimizer moves weights, and of how its formula would move them.

`Recorder.watch` hooks it to the optimizer's step. torch is imported late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

WATCHED_TENSORS = 16
"""Most tensors of a model that are watched."""
WATCHED_WEIGHTS = 4096
"""Most weights of each tensor that are watched."""


@dataclass
class _Watched:
    """Some weights of a tensor, and the moments of the gradients that their steps have had."""

    name: str
    parameter: Tensor
    moments: dict[str, Any] = field(default_factory=dict)
    start: Tensor | None = None
    """Before the step that runs, and after it until the next one."""
    gradient: Tensor | None = None
    outside: float | None = None

    def values(self) -> Tensor:
        return _part(self.parameter).clone()


def _part(tensor: Tensor) -> Tensor:
    """Return the watched weights of a tensor, evenly spaced, as rows such as tokens may not occur."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, -(-len(flat) // WATCHED_WEIGHTS))]


class MotionRecorder:
    """Watches some tensors of a model during the steps of its optimizer."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        import torch

        # accelerate wraps optimizers.
        self.optimizer: Optimizer = getattr(optimizer, "optimizer", optimizer)
        self.model = model
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        # The rounding of other dtypes may undo a step, and tensors of several processes are in parts.
        plain = [(n, p) for n, p in named if type(p.data) is torch.Tensor and p.dtype == torch.float32]
        # By chance, as a stride could meet only one of the two matrices of each adapter.
        places = sorted(Random(0).sample(range(len(plain)), min(len(plain), WATCHED_TENSORS)))
        chosen = [plain[place] for place in places]
        self.watched = [_Watched(name, parameter) for name, parameter in chosen]
        self.motions: list[dict[str, Any]] = []
        self.norm: float | None = None
        self.settings: dict[int, dict[str, Any]] = {}
        """Settings of the step that runs, by the id of a tensor."""

    def take(self) -> dict[str, Any]:
        """Return the fields of the update whose step ended last, or of weights that moved without one."""
        if not self.motions:
            for watched in self.watched:
                self._begin(watched)
            self.motions = [
                {"name": w.name, "outside": w.outside} for w in self.watched if w.outside is not None
            ]
        fields = {"motions": self.motions, "step_norm": self.norm}
        self.motions, self.norm = [], None
        return {name: value for name, value in fields.items() if value not in (None, [])}

    def before(self) -> None:
        """Keep the weights and gradients before a step."""
        self.norm = self._norm()
        for watched in self.watched:
            self._begin(watched)
            gradient = watched.parameter.grad
            watched.gradient = None if gradient is None else _part(gradient).clone()
            watched.moments = watched.moments or _held_moments(self.optimizer, watched.parameter)
        self.settings = {id(p): dict(g) for g in self.optimizer.param_groups for p in g["params"]}

    def _norm(self) -> float | None:
        """Return the norm of the gradient of all weights; None if other processes may have parts of it."""
        import torch.distributed as dist

        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients or not self.watched or (dist.is_available() and dist.is_initialized()):
            return None
        return math.sqrt(sum(float(g.detach().float().norm()) ** 2 for g in gradients))

    def _begin(self, watched: _Watched) -> None:
        present = watched.values()
        watched.outside = None if watched.start is None else float((present - watched.start).norm())
        watched.start = present

    def after(self) -> None:
        """Keep how far a step moved the weights, and how far its formula moves them."""
        motions = [self._motion(watched) for watched in self.watched]
        self.motions = [motion for motion in motions if motion is not None]

    def gradient_cosine(self, losses: Iterable[Tensor]) -> float | None:
        """Return the cosine between the gradient that weights have and that of a sum of losses.

        None if one of the two is 0, or if the weights have none.
        """
        import torch

        weights = [w.parameter for w in self.watched if w.parameter.grad is not None]
        due = [torch.zeros_like(p) for p in weights]
        hooks = [p._backward_hooks for p in weights]  # noqa: SLF001 - no public name
        # A hook that changes the gradient of the run must not change this one, too.
        for parameter in weights:
            parameter._backward_hooks = None  # noqa: SLF001 - no public name
        try:
            for loss in losses if weights else ():
                parts = torch.autograd.grad(loss, weights, allow_unused=True)
                due = [d if g is None else d + g for d, g in zip(due, parts, strict=True)]
        finally:
            for parameter, hook in zip(weights, hooks, strict=True):
                parameter._backward_hooks = hook  # noqa: SLF001 - no public name
        present = [p.grad for p in weights if p.grad is not None]
        dot = sum(float((a * b).sum()) for a, b in zip(present, due, strict=True))
        squares = [sum(float((g**2).sum()) for g in side) for side in (present, due)]
        return dot / math.sqrt(squares[0] * squares[1]) if all(squares) else None

    def _motion(self, watched: _Watched) -> dict[str, Any] | None:
        import torch

        start, gradient = watched.start, watched.gradient
        watched.start = watched.values()
        if start is None:
            return None
        change = watched.start - start
        motion = {"name": watched.name, "change": float(change.norm()), "outside": watched.outside}
        settings = self.settings.get(id(watched.parameter))
        # A tensor that the optimizer does not hold should move as the others do.
        settings = settings if settings is not None else dict(self.optimizer.param_groups[0])
        rule = _rule_of(self.optimizer, settings)
        if rule is None or gradient is None:
            return motion
        motion["gradient"] = float(gradient.norm())
        due = rule(settings, start, gradient, watched.moments) - start
        fresh = rule(settings, start, gradient, {}) - start
        # Two ways to add may round to neighbouring numbers.
        rounding = 2 * torch.finfo(start.dtype).eps * float(start.norm())
        distances = {"off": change - due, "fresh": change - fresh}
        beyond = {name: max(float(d.norm()) - rounding, 0.0) for name, d in distances.items()}
        return motion | {"due": float(due.norm())} | beyond


def _held_moments(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the moments that an optimizer has, as after a checkpoint; {} if it has none yet."""
    state = optimizer.state.get(parameter, {})
    names = {"m": ("exp_avg", "momentum_buffer"), "v": ("exp_avg_sq",)}
    held = {to: _part(state[n]).clone() for to, of in names.items() for n in of if state.get(n) is not None}
    return {**held, "count": float(state.get("step", 0))} if held else {}


def _adam(settings: Mapping[str, Any], start: Tensor, gradient: Tensor, moments: dict[str, Any]) -> Tensor:
    """Return the weights after a step of Adam or AdamW; ``moments`` are brought up to date."""
    rate, decay = float(settings["lr"]), float(settings.get("weight_decay", 0.0))
    first, second = map(float, settings["betas"])
    g = -gradient if settings.get("maximize") else gradient
    weights = start
    if decay and settings.get("decoupled_weight_decay", False):
        weights = weights * (1 - rate * decay)
    elif decay:
        g = g + decay * weights
    moments["count"] = moments.get("count", 0) + 1
    moments["m"] = first * moments.get("m", 0) + (1 - first) * g
    moments["v"] = second * moments.get("v", 0) + (1 - second) * g**2
    m = moments["m"] / (1 - first ** moments["count"])
    v = moments["v"] / (1 - second ** moments["count"])
    return weights - rate * m / (v.sqrt() + float(settings["eps"]))


def _sgd(settings: Mapping[str, Any], start: Tensor, gradient: Tensor, moments: dict[str, Any]) -> Tensor:
    """Return the weights after a step of SGD; ``moments`` are brought up to date."""
    rate, momentum = float(settings["lr"]), float(settings.get("momentum", 0.0))
    g = -gradient if settings.get("maximize") else gradient
    g = g + float(settings.get("weight_decay", 0.0)) * start
    if momentum:
        # The first buffer is the gradient itself.
        kept = 1 - float(settings.get("dampening", 0.0))
        moments["m"] = momentum * moments["m"] + kept * g if "m" in moments else g
        g = g + momentum * moments["m"] if settings.get("nesterov") else moments["m"]
    return start - rate * g


Rule = Callable[["Mapping[str, Any]", "Tensor", "Tensor", "dict[str, Any]"], "Tensor"]


def _rule_of(optimizer: Optimizer, settings: Mapping[str, Any]) -> Rule | None:
    """Return the formula of an optimizer; None for those that are watched without one."""
    import torch

    rules: dict[type, Rule] = {torch.optim.Adam: _adam, torch.optim.AdamW: _adam, torch.optim.SGD: _sgd}
    return None if settings.get("amsgrad") else rules.get(type(optimizer))

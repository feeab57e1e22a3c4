"""Guards: what ends a run before it does harm. Their memory is in the run's state, so that a resumed
run judges exactly as an uninterrupted one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from covey.batching import Batch
from covey.errors import GuardStop, OutOfRoom, out_of_memory
from covey.insight.explain import no_signal, settings_of

if TYPE_CHECKING:
    from covey.models.policy import Policy
    from covey.training.run import Run

P = ParamSpec("P")
T = TypeVar("T")
SKIPPED = "skipped"
"""Folder with the batches of skipped updates."""
RAISE = 1.5
"""Factor of `kl_action: raise_coef`."""


def update(run: Run, step: int, batch: Batch, losses: Sequence[float]) -> float:
    """Apply the accumulated gradient and return its norm.

    If it or the loss is not finite nothing is applied, the batch is kept for a look, and NaN is
    returned. Raises GuardStop after ``guards.bad_updates`` of these in a row.
    """
    if run.faults.hit("grad.nan"):
        run.optimizer.masters[0].grad = torch.full_like(run.optimizer.masters[0], math.nan)
    loss = math.nan if run.faults.hit("loss.nan") else math.fsum(losses)
    norm = run.optimizer.step(step) if math.isfinite(loss) else math.nan
    if run.faults.hit("weights.nan"):
        with torch.no_grad():
            run.optimizer.masters[0].view(-1)[0] = math.nan
    if math.isfinite(norm):
        run.state.bad_updates = 0
        run.state.updates += norm > 0
        run.sampler.version = run.state.updates
        return norm
    where = _keep(run, step, batch, loss)
    run.optimizer.clear()
    run.state.bad_updates += 1
    allowed = run.loaded.config.guards.bad_updates
    run.event(step, "update skipped", loss=loss, batch=where)
    if run.state.bad_updates >= allowed:
        raise GuardStop(
            f"step {step}: the loss or gradient of {allowed} updates in a row was not finite; the batches "
            f"are in {run.folder.path / SKIPPED}. Lower train.lr or train.grad_clip, or mend the rewards if "
            "their values are huge (guards.bad_updates)"
        )
    return math.nan


def _keep(run: Run, step: int, batch: Batch, loss: float) -> str:
    """Write a batch whose gradient is not finite, and which parameters it struck."""
    names = [n for n, p in run.policy.model.named_parameters() if p.requires_grad]
    struck = [
        n
        for n, m in zip(names, run.optimizer.masters, strict=True)
        if m.grad is not None and not m.grad.isfinite().all()
    ]
    folder = run.folder.path / SKIPPED
    folder.mkdir(exist_ok=True)
    name = f"step_{step:06d}_{run.state.bad_updates}"
    tensors = {k: v.clone() for k, v in vars(batch).items() if isinstance(v, Tensor)}
    for i, (prompt, tokens) in enumerate(zip(batch.prompts, batch.tokens, strict=True)):
        tensors[f"prompt.{i}"], tensors[f"tokens.{i}"] = torch.tensor(prompt), torch.tensor(tokens)
    for i, mask in enumerate(batch.sampling_masks or ()):
        tensors[f"kept_ids.{i}"], tensors[f"kept_ends.{i}"] = torch.tensor(mask.ids), torch.tensor(mask.ends)
    save_file(tensors, folder / f"{name}.safetensors")
    record = {"step": step, "loss": str(loss), "optimizer_step": run.state.updates, "parameters": struck}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1))
    return name


def watch(run: Run, batch: Batch, metrics: dict[str, float]) -> None:
    """Look at a step that has ended. Raises GuardStop."""
    _watch_signal(run, batch)
    _watch_kl(run, metrics.get("kl/completion_k1", math.nan))
    floor, entropy = run.loaded.config.guards.entropy_floor, metrics["entropy/sampled"]
    if entropy < floor:
        raise GuardStop(
            f"step {run.state.step - 1}: the entropy is {entropy:.3g} nats a token, below "
            f"guards.entropy_floor {floor:g}. Raise rollout.temperature, set algorithm.entropy, or lower "
            "train.lr"
        )


def _watch_signal(run: Run, batch: Batch) -> None:
    """Count steps without any advantage."""
    patience = run.loaded.config.guards.dead_steps
    run.state.dead_steps = 0 if batch.advantages.any() else run.state.dead_steps + 1
    if not patience or run.state.dead_steps < patience:
        return
    why = no_signal(run.folder.read("metrics.jsonl")[-patience:], settings_of(run.loaded))
    raise GuardStop(
        f"step {run.state.step - 1}: for {patience} steps no group had anything to teach: {why} "
        "(guards.dead_steps)"
    )


def _watch_kl(run: Run, kl: float) -> None:
    """Warn, act or stop by the distance from the reference, nats per completion (k1)."""
    guards, step = run.loaded.config.guards, run.state.step - 1
    bounds = (guards.kl_warn, guards.kl_act, guards.kl_stop)
    level = max((i for i, b in enumerate(bounds, start=1) if b is not None and kl > b), default=0)
    if level == 3 or (level == 2 and guards.kl_action == "stop"):
        raise GuardStop(
            f"step {step}: the policy is {kl:.1f} nats a completion away from the reference, more than "
            f"guards.{'kl_stop' if level == 3 else 'kl_act'} {bounds[level - 1]:g}. Lower train.lr, raise "
            "algorithm.kl.coef, or allow more if that is what you want"
        )
    if guards.kl_action == "raise_coef" and run.algorithm.kl is not None:
        coef, start = run.state.kl_coef, run.algorithm.kl.coef
        run.state.kl_coef = coef * RAISE if level == 2 else max(start, coef / RAISE)
        if run.state.kl_coef != coef:
            run.event(step, "KL coefficient moved", coef=run.state.kl_coef, kl=kl)
    if level > run.state.kl_level:
        run.console.say(
            f"step {step}: {kl:.1f} nats a completion away from the reference (guards.kl_stop ends the "
            f"run at {guards.kl_stop})",
            "yellow",
        )
        run.event(step, "far from the reference", kl=kl)
    run.state.kl_level = level


def check_weights(policy: Policy, what: str) -> None:
    """Raise GuardStop rather than let weights be written that are not finite."""
    for name, parameter in policy.model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise GuardStop(
                f"{what}: {name} is not finite, so nothing was written. Go on from the last checkpoint with "
                "a lower train.lr or train.grad_clip"
            )


def fitting(run: Run, work: Callable[Concatenate[Run, P], T], *arguments: P.args, **named: P.kwargs) -> T:
    """Do ``work``; while it runs out of memory, cut its micro-batches in half and begin it again.

    The totals of the optimizer step travel with every piece, so the gradient stays the same.
    """
    while True:
        try:
            return work(run, *arguments, **named)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
        # Outside the handler, where the traceback no longer holds the tensors.
        run.optimizer.clear()
        _halve(run)


def _halve(run: Run) -> None:
    tokens = run.micro_tokens
    if tokens <= 1:
        raise OutOfRoom(
            "out of memory even with one completion at a time. Lower rollout.max_tokens, take a smaller "
            "model, or train adapters (lora)"
        )
    run.state.micro_tokens = tokens // 2
    torch.cuda.empty_cache()
    run.console.say(f"out of memory: on with micro-batches of {tokens // 2} tokens", "yellow")
    run.event(run.state.step, "out of memory", tokens_per_micro_batch=tokens // 2)


def free_for_save(run: Run, free: int) -> None:
    """Raise OutOfRoom before a save that cannot fit, judged by the newest checkpoint."""
    newest: Any = next(reversed(run.folder.checkpoints()), None)
    needed = sum(p.stat().st_size for p in newest.rglob("*")) if newest is not None else 0
    if free < needed:
        raise OutOfRoom(
            f"{run.folder.path}: a checkpoint needs {needed:,} bytes and {free:,} are free. Free some space "
            "and run the same command again"
        )

"""`covey check`: proof on the user's own model and data that a training step is right.

A run is set up in a scratch folder, one batch is sampled, and each claim is measured on it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from covey.batching import Batch, micro_batches
from covey.config.load import Loaded
from covey.console import RunConsole
from covey.models.load import weights_hash
from covey.rollout import Rollouts
from covey.signals import StopSignal
from covey.training.rl import backward, prepare, score_batch, updates
from covey.training.run import Run
from covey.training.setup import caller_restored, set_up

SAME = 1e-4
"""Largest relative difference of gradients that rounding explains in float32."""
CLOSE = 1e-3
"""Largest difference of log-probs, in nats, between sampler and trainer in float32."""


@dataclass(frozen=True)
class Finding:
    """One claim, whether it holds, and the number that says so."""

    claim: str
    holds: bool
    evidence: str


def check(loaded: Loaded, console: RunConsole) -> list[Finding]:
    """Measure every claim on one batch of the config's model, data and rewards."""
    with tempfile.TemporaryDirectory() as folder, caller_restored():
        config = loaded.stages()[-1].config.model_copy(update={"output": Path(folder) / "check"})
        run = set_up(replace(loaded.stages()[-1], config=config), console, StopSignal())
        try:
            rollouts = Rollouts(
                run.train_set, run.sampler, run.rewards, config.rollout, run.algorithm, config.seed
            )
            console.doing("sampling one batch")
            sampled = rollouts.sample(0, run.on_sample)
            batch = prepare(run, sampled.groups or sampled.rejected, step=0)
            minibatch = next(updates(run, _with_signal(batch), step=0))
            console.doing("measuring")
            return list(_findings(run, minibatch))
        finally:
            run.folder.close()


def _with_signal(batch: Batch) -> Batch:
    """The batch, with alternating advantages where its rewards all tie, so that there is a gradient."""
    if batch.advantages.any():
        return batch
    signs = 1.0 - 2.0 * (torch.arange(len(batch)) % 2)
    return replace(batch, advantages=signs[:, None] * batch.mask)


def _findings(run: Run, batch: Batch) -> Iterator[Finding]:
    whole = _gradient(run, batch, tokens=1 << 30)
    single = _gradient(run, batch, tokens=1)
    difference = float((whole - single).norm() / whole.norm().clamp(min=1e-30))
    yield Finding(
        "the gradient is the same however the batch is cut into micro-batches",
        difference < _tolerance(run, SAME),
        f"relative difference {difference:.1e} between one piece and {len(batch)}",
    )
    alone, together = (score_batch(run, run.policy, batch, tokens)[0] for tokens in (1, 1 << 30))
    ratio = float((alone - together).where(batch.mask, 0.0).abs().max())
    yield Finding(
        "the importance ratio is 1 at the first inner step, whatever stands in the same micro-batch",
        ratio == 0.0 if run.policy.exact else ratio < _tolerance(run, CLOSE),
        f"largest |log ratio| {ratio:.1e}"
        + (", where every bit has to be the same" if run.policy.exact else ""),
    )
    gap = float((together - batch.sampler_logprobs).where(batch.mask, 0.0).abs().max())
    yield Finding(
        "sampler and trainer agree about the log-probs of the sampled tokens",
        gap == 0.0 if run.sampler.bit_exact else gap < _tolerance(run, CLOSE),
        f"largest difference {gap:.1e} nats"
        + (", where every bit has to be the same" if run.sampler.bit_exact else ""),
    )
    masked = replace(batch, mask=batch.mask & (torch.arange(batch.mask.shape[1]) % 2 == 0))
    garbage = replace(masked, advantages=masked.advantages.where(masked.mask, torch.nan))
    clean = replace(masked, advantages=masked.advantages.where(masked.mask, 0.0))
    leak = float((_gradient(run, garbage, 1 << 30) - _gradient(run, clean, 1 << 30)).abs().max())
    yield Finding(
        "tokens that are masked get no gradient, whatever stands there",
        leak == 0.0,
        f"largest change {leak:.1e} with NaN in every second token's advantage",
    )
    before = weights_hash(run.policy.model.state_dict())
    _gradient(run, batch, 1 << 30, keep=True)
    still = type(run.optimizer)(run.policy.parameters, run.loaded.config.train.model_copy(update={"lr": 0.0}))
    still.accumulate()
    still.step(0)
    after = weights_hash(run.policy.model.state_dict())
    yield Finding(
        "a learning rate of 0 leaves every bit of the weights",
        after == before,
        f"sha256 {before[:12]} before and {after[:12]} after a step",
    )


def _gradient(run: Run, batch: Batch, tokens: int, keep: bool = False) -> Tensor:
    """The gradient of an optimizer step on a batch, flat, computed in pieces of ``tokens``."""
    run.optimizer.clear()
    for micro in micro_batches(batch, tokens, run.loaded.config.rollout.max_tokens):
        backward(run, micro)
    gradients = [m.grad if m.grad is not None else torch.zeros_like(m) for m in run.optimizer.masters]
    flat = torch.cat([g.flatten().float() for g in gradients])
    if not keep:
        run.optimizer.clear()
    return flat


def _tolerance(run: Run, value: float) -> float:
    """bfloat16 rounds 2^16 times coarser than float32; measured gaps are about 100 times larger."""
    return value if run.policy.parameters[0].dtype == torch.float32 else 200 * value

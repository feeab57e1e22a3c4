"""`covey check`: measures on the user's model and data whether a training step is correct.

A run is set up in a scratch folder, one batch is sampled, and each claim is measured on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.config.load import ResolvedConfig
from covey.learner.advantage import off_centre
from covey.learner.batching import Batch, with_signal
from covey.learner.learner import Learner
from covey.learner.objectives import PolicyObjective
from covey.learner.old_logprobs import old_logprob_source
from covey.learner.process import restore_process_settings
from covey.models.hashes import weights_hash
from covey.models.policy import Policy
from covey.proof.direction import MAX_AGAINST, fraction_against, small_step, with_alternating_rewards
from covey.runs.reader import retry_with_newest
from covey.sampling.base import Sampler
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.system.text import percent
from covey.training.rl import prepare, step_minibatches
from covey.training.setup import scratch_run
from covey_verify.errors import ConfigError

GRADIENT_ROUNDING = 1e-4
"""Largest relative difference of gradients that rounding explains in float32."""
LOGPROB_ROUNDING = 1e-3
"""Largest difference of log-probs, in nats, between sampler and trainer in float32."""
WHOLE_BATCH = 1 << 30
"""Size of a micro-batch, in tokens, that holds the whole batch."""
WITHOUT_BASELINE = (
    "algorithm.advantage {}: the advantages of a group do not sum to 0, so it subtracts no baseline and "
    "reinforces every completion with a positive reward. Ignore this if that is what you want"
)
BITWISE = ", where every bit has to be the same"


@dataclass(frozen=True)
class Claim:
    """A property of a correct training step, and the evidence of whether it holds."""

    sentence: str
    holds: bool
    evidence: str


def check_config(resolved: ResolvedConfig, console: RunConsole) -> list[Claim]:
    """Measure every claim on one batch from the config's model, data and rewards."""
    return retry_with_newest(resolved, lambda newest: _check_stage(newest, console), console.say)


def _check_stage(resolved: ResolvedConfig, console: RunConsole) -> list[Claim]:
    method = resolved.stages()[-1].config.method
    if method != "rl":
        raise ConfigError(
            f"method: {method}: only reinforcement learning has a batch to measure; to repeat the first "
            "steps of a run of this method, give `covey check` its folder"
        )
    stage = resolved.stages()[-1]
    with restore_process_settings(), scratch_run(stage, console, StopSignal()) as run:
        config = run.resolved.config
        algorithm = run.resolved.algorithm
        console.show_work("sampling one batch")
        sampled = next(run.rollouts())
        old = old_logprob_source(algorithm, run.sampler, config.train.updates_per_rollout_batch)
        groups = sampled.groups or sampled.filtered
        batch = prepare(run, groups, old)
        if not batch.advantages.any():
            console.say("all completions got the same reward; for this check every second one gets 1 instead")
            # Without any advantage the gradient is 0, and every claim would hold, whatever the code computes.
            batch = with_signal(prepare(run, with_alternating_rewards(groups), old))
        # covey's own estimators leave out a baseline on purpose; a user's may have forgotten it.
        if algorithm.advantage.written_by_user and off_centre(batch, groups) is not None:
            console.say(WITHOUT_BASELINE.format(algorithm.advantage.name), "yellow")
        minibatch = next(step_minibatches(batch, run.resolved, old, step=0))
        console.show_work("measuring")
        objective = PolicyObjective.of(algorithm, config.rollout, run.state.coefficients)
        return list(measure_claims(run.learner, run.sampler, objective, minibatch))


def measure_claims(
    learner: Learner[Policy], sampler: Sampler, objective: PolicyObjective, batch: Batch
) -> Iterator[Claim]:
    """Measure each claim on a minibatch."""
    yield _split_claim(learner, objective, batch)
    yield from _logprob_claims(learner, sampler, objective, batch)
    yield _mask_claim(learner, objective, batch)
    yield from _direction_claims(learner, objective, batch)
    yield _idle_claim(learner, objective, batch)


def _split_claim(learner: Learner[Policy], objective: PolicyObjective, batch: Batch) -> Claim:
    whole, single = (_gradient(learner, objective, batch, tokens) for tokens in (WHOLE_BATCH, 1))
    difference = float((whole - single).norm() / whole.norm().clamp(min=1e-30))
    return Claim(
        "the gradient is the same however the batch is split into micro-batches",
        difference < _tolerance(learner, GRADIENT_ROUNDING),
        f"relative difference {difference:.1e} between one piece and {len(batch)}",
    )


def _logprob_claims(
    learner: Learner[Policy], sampler: Sampler, objective: PolicyObjective, batch: Batch
) -> Iterator[Claim]:
    alone, together = (_logprobs(learner, objective, batch, tokens) for tokens in (1, WHOLE_BATCH))
    exact = learner.network.bit_exact
    ratio = float((alone - together).where(batch.mask, 0.0).abs().max())
    yield Claim(
        "the importance ratio is 1 at the first inner step, whatever else is in the micro-batch",
        ratio == 0.0 if exact else ratio < _tolerance(learner, LOGPROB_ROUNDING),
        f"largest |log ratio| {ratio:.1e}" + (BITWISE if exact else ""),
    )
    gap = float((together - batch.sampler_logprobs).where(batch.mask, 0.0).abs().max())
    yield Claim(
        "sampler and trainer agree about the log-probs of the sampled tokens",
        gap == 0.0 if sampler.bit_exact else gap < _tolerance(learner, LOGPROB_ROUNDING),
        f"largest difference {gap:.1e} nats" + (BITWISE if sampler.bit_exact else ""),
    )


def _mask_claim(learner: Learner[Policy], objective: PolicyObjective, batch: Batch) -> Claim:
    # Every second token is masked and gets the advantage NaN. As 0 * NaN is NaN, it shows in the gradient
    # even if its weight is 0.
    masked = replace(batch, mask=batch.mask & (torch.arange(batch.mask.shape[1]) % 2 == 0))
    garbage = replace(masked, advantages=masked.advantages.where(masked.mask, torch.nan))
    clean = replace(masked, advantages=masked.advantages.where(masked.mask, 0.0))
    dirty, same = (_gradient(learner, objective, b, WHOLE_BATCH) for b in (garbage, clean))
    leak = float((dirty - same).abs().max())
    return Claim(
        "tokens that are masked get no gradient, whatever their values are",
        leak == 0.0,
        f"largest change {leak:.1e} with NaN in every second token's advantage",
    )


def _idle_claim(learner: Learner[Policy], objective: PolicyObjective, batch: Batch) -> Claim:
    before = weights_hash(learner.network.model.state_dict())
    learner.forward_backward(batch, objective)
    # AdamW's moments change, but weight decay is scaled by the learning rate, so no bit of a weight may.
    learner.step(lr=0.0)
    after = weights_hash(learner.network.model.state_dict())
    return Claim(
        "a learning rate of 0 leaves every bit of the weights",
        after == before,
        f"sha256 {before[:12]} before and {after[:12]} after a step",
    )


def _direction_claims(learner: Learner[Policy], objective: PolicyObjective, batch: Batch) -> Iterator[Claim]:
    """Measure whether the loss, and a small step along its gradient, go in the correct direction."""
    fraction = fraction_against(learner, objective, batch)
    yield Claim(
        "the loss pulls each token to the side of its advantage",
        fraction <= MAX_AGAINST,
        f"{percent(fraction)} of the tokens are pulled to the other side",
    )
    result = small_step(learner, objective, batch)
    if result is not None:
        change, rate = result
        yield Claim(
            "a small step makes what was paid above its group's mean more likely, against the rest",
            change > 0,
            f"{change:+.1e} nats per token after a step at {rate:.0e}",
        )


def _gradient(learner: Learner[Policy], objective: PolicyObjective, batch: Batch, tokens: int) -> Tensor:
    """Return the flat gradient of an optimizer step on a batch, with micro-batches of ``tokens``."""
    learner.clear()
    learner.micro_tokens = tokens
    learner.forward_backward(batch, objective)
    masters = learner.optimizer.masters
    # Zeros for weights without a gradient, so that the gradients of all splits have the same length.
    gradients = [m.grad if m.grad is not None else torch.zeros_like(m) for m in masters]
    flat = torch.cat([g.flatten().float() for g in gradients])
    learner.clear()
    return flat


def _logprobs(learner: Learner[Policy], objective: PolicyObjective, batch: Batch, tokens: int) -> Tensor:
    learner.micro_tokens = tokens
    return learner.token_outputs(batch, objective.temperature).logprobs


def _tolerance(learner: Learner[Policy], value: float) -> float:
    """Return the tolerance. bfloat16 rounds 2^16 times more coarsely; measured differences grow 100 times."""
    return 200 * value if learner.network.rounded else value

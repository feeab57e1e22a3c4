"""The reinforcement loop: sample groups, score them, compute advantages, update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from math import isfinite

import torch

from covey.config.load import ResolvedConfig
from covey.learner.advantage import with_advantages
from covey.learner.batching import Batch, OldDistribution, collate, minibatches, select_tokens
from covey.learner.learner import Learner
from covey.learner.old_logprobs import OldLogprobs, old_logprob_source
from covey.models.policy import Policy
from covey.objective.algorithms import Algorithm
from covey.objective.diagnostics import TokenStats
from covey.rng import key, permutation, uniforms
from covey.training.learners import learner_parts, policy_is_frozen, set_value_pull
from covey.training.memory import memory_measured
from covey.training.metrics import CompletedStep, StepUpdates, report_step, step_metrics
from covey.training.misattributed import misattributed_groups, report_misattributed
from covey.training.run import Run
from covey.training.updates import apply_update
from covey.types import Group


def train(run: Run) -> None:
    """Run the remaining steps. A stop request surfaces as Stopped between updates."""
    resolved = run.resolved
    journal = run.journal
    update_count = resolved.config.train.updates_per_rollout_batch
    old = old_logprob_source(resolved.algorithm, run.sampler, update_count)
    with closing(run.rollouts()) as rollouts:
        for step in range(run.state.step, resolved.config.train.steps):
            run.begin_step()
            with journal.clock("rollout"):
                rollout_batch = next(rollouts)
            journal.console.show_work("updating")
            with journal.clock("prepare"):
                batch = prepare(run, rollout_batch.groups, old)
            with journal.clock("update"):
                updates = update(run, batch, old, step)
            run.sampler.sync(run.learner)
            if finish_step(run, CompletedStep(step + 1, rollout_batch, batch, updates)):
                break


def finish_step(run: Run, step: CompletedStep) -> bool:
    """Log a step and act on its metrics; return True if the stage ends here. Raises GuardStop."""
    resolved = run.resolved
    number, rollout_batch, batch, updates = step
    run.advance(number, rollout_batch.position)
    metrics = {**step_metrics(step, resolved, run.state.coefficients), **run.drift_metrics(number - 1)}
    cases = misattributed_groups(rollout_batch.groups, updates.stats, updates.version_before)
    report_misattributed(run.journal, number, cases)
    report_step(run.journal, step, metrics, memory_measured(run), resolved)
    has_signal = bool(batch.advantages.any())
    run.state = run.supervisor.judge_step(run.state, number, metrics, rollout_batch.all_groups, has_signal)
    refresh_reference(run.learner, resolved.algorithm, updates.version_before)
    return run.end_step(metrics)


def update(run: Run, batch: Batch, old: OldLogprobs, step: int) -> StepUpdates:
    """Do the optimizer steps on a rollout batch; a separate critic learns from the same minibatches."""
    version_before = run.learner.version
    token_stats = list[TokenStats]()
    norms = list[float]()
    value_norms = list[float]()
    policy_frozen = policy_is_frozen(run, step)
    set_value_pull(run, policy_frozen)
    # Decided once for all updates of the step.
    parts = learner_parts(run, policy_frozen)
    for number, minibatch in enumerate(step_minibatches(batch, run.resolved, old, step)):
        for part in parts:
            # Forward and backward add up a gradient; ``apply_update`` applies it, unless it is not finite.
            stats = part.learner.forward_backward(minibatch, part.objective)
            norm = apply_update(run, part.learner, step, minibatch, [float(s.loss) for s in stats], number)
            (norms if part.trains_policy else value_norms).append(norm)
            if isfinite(norm):
                token_stats += [s for s in stats if isinstance(s, TokenStats)]
    return StepUpdates(version_before, token_stats, norms, value_norms)


def prepare(run: Run, groups: Sequence[Group], old: OldLogprobs) -> Batch:
    """Return the batch to train on, with advantages and all frozen values that the algorithm needs."""
    algorithm = run.resolved.algorithm
    rollout = run.resolved.config.rollout
    learner = run.learner
    # The log-probs that do not change during the step's updates are computed here, once.
    batch = collate(groups, rollout.mask_truncated)
    temperature = rollout.temperature
    values = None
    if algorithm.critic is not None:
        values = (run.critic or learner).token_outputs(batch, temperature).values
    if old is OldLogprobs.RECOMPUTED or algorithm.needs & {"old_entropy", "old_collision"}:
        outputs = learner.token_outputs(batch, temperature)
        distribution = OldDistribution(outputs.entropy, outputs.collision)
        # If the pass is only for the entropy, the sampler's log-probs take their place below.
        batch = replace(batch, old_logprobs=outputs.logprobs, old_distribution=distribution)
    if old in (OldLogprobs.RECORDED, OldLogprobs.SAMPLER):
        batch = replace(batch, old_logprobs=batch.sampler_logprobs)
    if learner.reference is not None and "ref_logprobs" in algorithm.needs:
        with learner.reference.active() as reference:
            batch = replace(
                batch, ref_logprobs=learner.token_outputs(batch, temperature, model=reference).logprobs
            )
    return with_advantages(batch, groups, algorithm, kl_coef=run.state.coefficients.kl, values=values)


def step_minibatches(batch: Batch, resolved: ResolvedConfig, old: OldLogprobs, step: int) -> Iterator[Batch]:
    """Yield the minibatches of a rollout batch, one per optimizer step, regrouped in every inner epoch."""
    config = resolved.config
    # Before the first update the current policy is the old policy, so every ratio is exactly 1: without old
    # log-probs the loss takes the current ones for them.
    starts_at_one = old.starts_at_one
    choose = resolved.algorithm.select_tokens
    noise = None
    if "noise" in resolved.algorithm.needs:
        draws = uniforms(key(config.seed, "noise", step), batch.mask.numel())
        noise = torch.from_numpy(draws).view(batch.mask.shape)
    for epoch in range(config.train.inner_epochs):
        order = permutation(key(config.seed, "minibatches", step, epoch), len(batch.group.unique()))
        for number, minibatch in enumerate(minibatches(batch, config.train.updates_per_batch, order)):
            ready = minibatch if choose is None else select_tokens(minibatch, choose, noise)
            is_first = epoch == 0 and number == 0
            yield replace(ready, old_logprobs=None) if is_first and starts_at_one else ready


def refresh_reference(learner: Learner[Policy], algorithm: Algorithm, before: int) -> None:
    """Move the reference to the policy if a step, begun after ``before`` updates, passed refresh_every."""
    kl = algorithm.kl
    reference = learner.reference
    if kl is None or kl.refresh_every is None or reference is None:
        return
    if learner.version // kl.refresh_every > before // kl.refresh_every:
        reference.refresh(learner.network, kl.refresh_mix)

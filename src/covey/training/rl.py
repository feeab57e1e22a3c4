"""The reinforcement loop: sample groups, score them, give advantages, update; again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from covey.advantage import with_advantages
from covey.batching import Batch, MicroBatch, collate, minibatches, select_tokens
from covey.config.contradictions import updates_of
from covey.config.schema import Config
from covey.learner.learner import Learner
from covey.learner.old_logprobs import OldLogprobs, old_logprob_source
from covey.metrics import report_step, step_metrics
from covey.models.logprobs import TokenScores
from covey.objective.algorithms import Algorithm
from covey.objective.controllers import Coefficients
from covey.objective.diagnostics import TokenStats, token_stats
from covey.objective.loss import policy_loss
from covey.rng import key, permutation, uniforms
from covey.rollout import Rollouts
from covey.training.run import Run
from covey.types import Group


def train(run: Run) -> None:
    """Do the steps that are left. A stop request surfaces as Stopped between updates."""
    config, algorithm, learner, journal = run.loaded.config, run.loaded.algorithm, run.learner, run.journal
    source = Rollouts(run.train_set, run.sampler, run.rewards, config.rollout, algorithm, config.seed)
    rollouts = source.after(run.state.step, run.state.position, run.on_sample)
    old = old_logprob_source(algorithm, run.sampler, updates_of(config))
    for step in range(run.state.step, config.train.steps):
        run.begin_step()
        with journal.clock("rollout"):
            rollout = next(rollouts)
        journal.console.doing("updating")
        now = run.state.coefficients
        with journal.clock("prepare"):
            batch = prepare(rollout.groups, learner, algorithm, config, old, now, step)
        objective = PolicyObjective(algorithm, config.rollout.temperature, config.rollout.max_tokens, now)
        stats, norms = list[TokenStats](), list[float]()
        with journal.clock("update"):
            for minibatch in updates(batch, algorithm, config, old, step):
                seen = learner.forward_backward(minibatch, objective)
                norms.append(run.update(step, minibatch, [float(s.loss) for s in seen]))
                stats += seen if isfinite(norms[-1]) else []
        run.sampler.sync(learner)
        run.advance(step + 1, rollout.position)
        metrics = step_metrics(step, rollout, batch, stats, norms, algorithm, now, config.train) | run.moved()
        report_step(journal, step, rollout, batch, stats, metrics, config, algorithm)
        run.follow(step, metrics, [*rollout.groups, *rollout.filtered], signal=bool(batch.advantages.any()))
        refresh(learner, algorithm, updates=sum(norm > 0 for norm in norms))
        if run.evaluate_and_save():
            break


@dataclass(frozen=True)
class PolicyObjective:
    """The algorithm's loss, with the coefficients of the step."""

    algorithm: Algorithm
    temperature: float
    max_tokens: int
    coefficients: Coefficients
    whole_groups: bool = False

    @property
    def skips_idle(self) -> bool:
        """Whether completions without an advantage have no gradient."""
        return self.algorithm.skips_idle

    @property
    def needs_reference(self) -> bool:
        """Whether the KL is exact, over the whole vocabulary."""
        return "full_kl" in self.algorithm.needs

    def __call__(self, micro: MicroBatch, scores: TokenScores) -> tuple[Tensor, TokenStats]:
        """A micro-batch's share of the loss, and its token statistics."""
        inputs, now = micro.loss_inputs(scores), self.coefficients
        loss = policy_loss(self.algorithm, inputs, kl_coef=now.kl, entropy_coef=now.entropy)
        return loss.total, replace(token_stats(self.algorithm, inputs, loss), origin=micro.rows.origin)


def prepare(
    groups: Sequence[Group],
    learner: Learner,
    algorithm: Algorithm,
    config: Config,
    old: OldLogprobs,
    coefficients: Coefficients,
    step: int,
) -> Batch:
    """Groups -> the batch to train on: advantages and every frozen log-prob the algorithm needs."""
    batch, temperature = collate(groups, config.rollout.mask_truncated), config.rollout.temperature
    if old is OldLogprobs.RECOMPUTED or algorithm.needs & {"old_entropy", "old_collision"}:
        scores = learner.score(batch, temperature)
        batch = replace(
            batch,
            old_logprobs=scores.logprobs,
            old_entropy=scores.entropy,
            old_collision=scores.collision,
        )
    if old in (OldLogprobs.RECORDED, OldLogprobs.SAMPLER):
        batch = replace(batch, old_logprobs=batch.sampler_logprobs)
    if learner.reference is not None and "ref_logprobs" in algorithm.needs:
        with learner.reference.active() as reference:
            batch = replace(batch, ref_logprobs=learner.score(batch, temperature, of=reference).logprobs)
    if "noise" in algorithm.needs:
        draws = uniforms(key(config.seed, "noise", step), batch.mask.numel())
        batch = replace(batch, noise=torch.from_numpy(draws).view(batch.mask.shape))
    return with_advantages(batch, groups, algorithm, kl_coef=coefficients.kl)


def updates(
    batch: Batch, algorithm: Algorithm, config: Config, old: OldLogprobs, step: int
) -> Iterator[Batch]:
    """The minibatches of a rollout batch, one per optimizer step, regrouped in every inner epoch."""
    # Before the first update the current policy is the old policy, so every ratio is exactly 1.
    unmoved, choose = old.starts_at_one, algorithm.select_tokens
    for epoch in range(config.train.inner_epochs):
        order = permutation(key(config.seed, "minibatches", step, epoch), len(batch.group.unique()))
        for minibatch in minibatches(batch, config.train.updates_per_batch, order):
            ready = minibatch if choose is None else select_tokens(minibatch, choose)
            yield replace(ready, old_logprobs=None) if unmoved else ready
            unmoved = False


def refresh(learner: Learner, algorithm: Algorithm, updates: int) -> None:
    """Move the reference to the policy when a multiple of ``kl.refresh_every`` updates has been passed."""
    kl, reference, done = algorithm.kl, learner.reference, learner.version
    if kl is None or kl.refresh_every is None or reference is None:
        return
    if done // kl.refresh_every > (done - updates) // kl.refresh_every:
        reference.refresh(learner.policy, kl.refresh_mix)

"""The reinforcement loop: sample groups, score them, give advantages, update; again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite, nan

import torch
from torch import Tensor

from covey.batching import Batch, MicroBatch, collate, marked, micro_batches, minibatches, with_advantages
from covey.models.policy import Policy
from covey.objective.controllers import adaptive_entropy, adaptive_kl
from covey.objective.diagnostics import Observation, observe
from covey.objective.loss import policy_loss
from covey.rng import key, permutation, uniforms
from covey.rollout import Rollouts
from covey.training.guards import fitting, update, watch
from covey.training.old_logprobs import OldLogprobs, old_logprob_source
from covey.training.report import report_step
from covey.training.run import Run
from covey.types import Group


def train(run: Run) -> None:
    """Do the steps that are left. A stop request surfaces as Stopped between updates."""
    config = run.loaded.config
    rollouts = Rollouts(run.train_set, run.sampler, run.rewards, config.rollout, run.algorithm, config.seed)
    rollouts.resume(run.state.cursor, run.state.difficulty)
    for step in range(run.state.step, config.train.steps):
        run.faults.at_step()
        with run.clock("rollout"):
            sampled = rollouts.sample(step, run.on_sample)
        run.console.doing("updating")
        with run.clock("prepare"):
            batch = fitting(run, prepare, sampled.groups, step)
        observed: list[Observation] = []
        norms: list[float] = []
        with run.clock("update"):
            for minibatch in updates(run, batch, step):
                seen = fitting(run, gradient, minibatch)
                norms.append(update(run, step, minibatch, [float(o["loss"]) for o in seen]))
                observed += seen if isfinite(norms[-1]) else []
        run.advance(step + 1, **rollouts.position())
        metrics = report_step(run, step, sampled, batch, observed, norms)
        watch(run, batch, metrics)
        steer(run, metrics, updates=sum(norm > 0 for norm in norms))
        if run.housekeeping():
            break


def prepare(run: Run, groups: Sequence[Group], step: int) -> Batch:
    """Groups -> the batch to train on: advantages and every frozen log-prob the algorithm needs."""
    config, algorithm = run.loaded.config, run.algorithm
    batch = collate(groups, config.rollout.mask_truncated)
    source = old_source(run)
    if source is OldLogprobs.RECOMPUTED or algorithm.needs & {"old_entropy", "old_collision"}:
        logprobs, entropy, collision = score_batch(run, run.policy, batch, run.micro_tokens)
        batch = replace(batch, old_logprobs=logprobs, old_entropy=entropy, old_collision=collision)
    if source in (OldLogprobs.RECORDED, OldLogprobs.SAMPLER):
        batch = replace(batch, old_logprobs=batch.sampler_logprobs)
    if run.reference is not None and "ref_logprobs" in algorithm.needs:
        with run.reference.active() as reference:
            batch = replace(batch, ref_logprobs=score_batch(run, reference, batch, run.micro_tokens)[0])
    if "noise" in algorithm.needs:
        draws = uniforms(key(config.seed, "noise", step), batch.mask.numel())
        batch = replace(batch, noise=torch.from_numpy(draws).view(batch.mask.shape))
    return with_advantages(batch, groups, algorithm, kl_coef=run.state.kl_coef)


def old_source(run: Run) -> OldLogprobs:
    """Where a rollout batch's old log-probs come from in this run."""
    train = run.loaded.config.train
    return old_logprob_source(run.algorithm, run.sampler, train.inner_epochs * train.updates_per_batch)


@torch.no_grad()
def score_batch(run: Run, policy: Policy, batch: Batch, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and collision probabilities under a policy, each (N, L), ``tokens`` at a time."""
    out = (torch.zeros(batch.mask.shape), torch.zeros(batch.mask.shape), torch.zeros(batch.mask.shape))
    start = 0
    for micro in micro_batches(batch, tokens, 1):
        run.on_micro_batch()
        scores = policy.score(micro.packed.to(policy.device), run.loaded.config.rollout.temperature)
        rows, columns = micro.packed.place.shape
        for store, values in zip(out, scores, strict=False):
            store[start : start + rows, :columns] = micro.packed.unpack(values.cpu())
        start += rows
    return out


def updates(run: Run, batch: Batch, step: int) -> Iterator[Batch]:
    """The minibatches of a rollout batch, one per optimizer step, regrouped in every inner epoch."""
    config, mark = run.loaded.config, run.algorithm.mark
    unmoved = old_source(run).starts_at_one
    for epoch in range(config.train.inner_epochs):
        order = permutation(key(config.seed, "minibatches", step, epoch), len(batch.group.unique()))
        for minibatch in minibatches(batch, config.train.updates_per_batch, order):
            ready = minibatch if mark is None else marked(minibatch, mark)
            # Until the first update the policy is its own old one, to the last bit.
            yield replace(ready, old_logprobs=None) if unmoved else ready
            unmoved = False


def pieces(run: Run, minibatch: Batch) -> Iterator[MicroBatch]:
    """The micro-batches of an optimizer step; completions without any gradient are left out."""
    longest = run.loaded.config.rollout.max_tokens
    return micro_batches(minibatch, run.micro_tokens, longest, skip_idle=run.algorithm.skips_idle)


def gradient(run: Run, minibatch: Batch) -> list[Observation]:
    """Accumulate the gradient of an optimizer step."""
    return [backward(run, micro) for micro in pieces(run, minibatch)]


def backward(run: Run, micro: MicroBatch) -> Observation:
    """Add a micro-batch's share of the step's gradient."""
    run.on_micro_batch()
    packed = micro.packed.to(run.policy.device)
    exact_kl = run.reference is not None and "full_kl" in run.algorithm.needs
    reference = run.reference.outputs(packed) if exact_kl and run.reference else None
    terms = micro.terms(run.policy.score(packed, run.loaded.config.rollout.temperature, reference))
    loss = policy_loss(run.algorithm, terms, kl_coef=run.state.kl_coef, entropy_coef=run.state.entropy_coef)
    loss.total.backward()
    run.optimizer.accumulate()
    return observe(run.algorithm, terms, loss)


def steer(run: Run, metrics: dict[str, float], updates: int) -> None:
    """Let the adaptive coefficients and the reference follow what the step and its updates have shown."""
    kl, entropy = run.algorithm.kl, run.algorithm.entropy
    if kl is not None and kl.refresh_every and run.reference:
        done = run.state.updates
        if done // kl.refresh_every > (done - updates) // kl.refresh_every:
            run.reference.refresh(run.policy, kl.refresh_mix)
    if kl is not None and kl.target is not None and "kl/completion_k1" in metrics:
        seen = int(metrics["groups/count"]) * run.loaded.config.rollout.group_size
        run.state.kl_coef = adaptive_kl(
            run.state.kl_coef, metrics["kl/completion_k1"], kl.target, seen, kl.horizon
        )
    if entropy is not None and entropy.target is not None and isfinite(metrics.get("entropy", nan)):
        run.state.entropy_coef = adaptive_entropy(run.state.entropy_coef, metrics["entropy"], entropy.target)

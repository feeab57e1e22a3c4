"""The table that every property runs over, and a made-up optimizer step to run it on.

The step is awkward on purpose: ragged groups and lengths, shared prefixes, a tied group, a completion
that nobody could judge, a reward component that does not apply, and log-probs far enough from the old
ones that every clip rule bites. All data of a completion hang on the unique id in its last token, so
that a test may cut, pack and permute as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from covey.learner.advantage import with_advantages
from covey.learner.batching import Batch, OldDistribution, collate, micro_batches, select_tokens
from covey.models.logprobs import TokenOutputs
from covey.objective import (
    advantages,
    corrections,
    credit,
    penalties,
    ratios,
    reductions,
    surrogates,
    token_weights,
)
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.axis_function import bind
from covey.objective.data import LossInputs
from covey.objective.loss import policy_loss
from covey.objective.penalties import KL, Entropy
from covey.objective.reductions import constant_length, token_mean
from covey.types import Baselines, Completion, Group, Problem
from covey_verify.types import StepRewards
from tests.fakes import component

PLAIN = replace(PRESETS["grpo"], kl=None)


def with_kl(estimator, **settings) -> Algorithm:
    return replace(PLAIN, kl=KL(bind(estimator), coef=0.1, **settings))


def with_weight(function, **settings) -> Algorithm:
    return replace(PLAIN, correction=(bind(function, **settings),))


VARIANTS: Mapping[str, Algorithm] = {
    "population_std": replace(PLAIN, advantage=bind(advantages.group_zscore, ddof=0, eps=1e-8)),
    "leave_one_out_z": replace(PLAIN, advantage=bind(advantages.leave_one_out_zscore)),
    "gdpo_by_token": replace(PRESETS["gdpo"], whiten=bind(advantages.token_zscore)),
    "gdpo_by_siblings": replace(
        PRESETS["gdpo"],
        advantage=bind(advantages.component_leave_one_out),
        whiten=bind(advantages.sample_zscore, eps=0.0),
    ),
    "batch_baseline": replace(PRESETS["reinforce"], whiten=bind(advantages.batch_centered)),
    "tempo": replace(PLAIN, advantage=bind(credit.prefix_tree, outcome=1.0)),
    "token_baseline": replace(PLAIN, advantage=bind(credit.optimal_token_baseline)),
    "best_of_two": replace(PLAIN, advantage=bind(advantages.pass_at_k, k=2)),
    "process_siblings": replace(PLAIN, advantage=bind(credit.process_leave_one_out, gamma=0.9)),
    "singles_kept": replace(PLAIN, advantage=bind(advantages.group_zscore, single="reward")),
    "short": replace(PLAIN, advantage=bind(advantages.length_penalized, weight=0.5)),
    "discounted": replace(PLAIN, advantage=bind(credit.discounted_return, gamma=0.9)),
    "rows_all": replace(PLAIN, reduce=bind(reductions.sequence_mean, rows="all", eps=1e-3)),
    "gpg_rewards": replace(PRESETS["gpg"], whiten=bind(advantages.valid_group_scale, of="rewards")),
    "rpp_floor": replace(
        PRESETS["reinforce_pp"], whiten=bind(advantages.token_zscore, ddof=0, eps=0.0, floor=0.5)
    ),
    "imitation": replace(PLAIN, nll=0.1),
    "real_sharp": replace(
        PLAIN,
        surrogate=bind(surrogates.group_classification, tau=0.1),
        reduce=bind(reductions.prompt_mean),
    ),
    "kl_score_bounded": with_kl(penalties.k3, gradient="score", bound=0.05),
    "kl_sampler": with_kl(penalties.k2, to="sampler"),
    "two_corrections": replace(
        PLAIN,
        correction=(
            bind(corrections.truncated, cap=1.2),
            bind(corrections.geometric_mask, low=0.9, high=1.15),
        ),
    ),
    "token_sum": replace(PLAIN, reduce=bind(reductions.token_sum)),
    "process_own_step": replace(PLAIN, advantage=bind(credit.process_zscore, credit="own_step")),
    "process_min_form": replace(PLAIN, advantage=bind(credit.process_zscore, credit="min_form")),
    "rpp_samples": replace(
        PRESETS["reinforce_pp_baseline"], whiten=bind(advantages.batch_std, of="advantages", eps=1e-8)
    ),
    "rpp_rewards": replace(PRESETS["reinforce_pp_baseline"], whiten=bind(advantages.batch_std)),
    "dppo_kl": replace(PRESETS["dppo"], surrogate=bind(surrogates.divergence_mask_kl, threshold=0.02)),
    "dppo_tight": replace(PRESETS["dppo"], surrogate=bind(surrogates.divergence_mask_tv, threshold=0.02)),
    "constant_1000": replace(PLAIN, reduce=bind(constant_length, length=1000)),
    "gspo_by_token": replace(PRESETS["gspo"], reduce=bind(token_mean)),
    "response_unclipped": replace(PLAIN, ratio=bind(ratios.completion), surrogate=bind(surrogates.unclipped)),
    "kl_k1": with_kl(penalties.k1),
    "kl_k2": with_kl(penalties.k2),
    "kl_absolute": with_kl(penalties.absolute),
    "kl_full": with_kl(penalties.full),
    "kl_k3_straight": with_kl(penalties.k3, gradient="straight_through"),
    "kl_k3_ratio": with_kl(penalties.k3, gradient="ratio"),
    "kl_k2_response": with_kl(penalties.k2, level="completion"),
    "kl_reward_tokens": with_kl(penalties.k1, place="reward"),
    "kl_reward_responses": with_kl(penalties.k2, place="reward", level="completion"),
    "entropy_bonus": replace(PLAIN, entropy=Entropy(coef=0.01)),
    "tis": with_weight(corrections.truncated, cap=1.2),
    "tis_sequence": with_weight(corrections.truncated, cap=1.2, level="sequence"),
    "icepop": with_weight(corrections.masked, low=0.8, high=1.3),
    "mis_sequence": with_weight(corrections.masked, low=0.7, high=1.5, level="sequence"),
    "geometric": with_weight(corrections.geometric_mask, low=0.9, high=1.15),
    "decoupled": with_weight(corrections.decoupled),
    "opsm": with_weight(corrections.off_policy_mask, delta=0.1),
    "clip_cov_wide": replace(
        PRESETS["clip_cov"],
        select_tokens=bind(token_weights.random_covariant, fraction=0.2, low=0.05, high=5.0),
    ),
    "kl_cov_wide": replace(PRESETS["kl_cov"], select_tokens=bind(token_weights.top_covariance, fraction=0.3)),
    "likely_masked": replace(PLAIN, token_weights=(bind(token_weights.unlikely_only, below=0.6),)),
}
ALGORITHMS: Mapping[str, Algorithm] = {**PRESETS, **VARIANTS}
NAMES = tuple(ALGORITHMS)
CRITIC = {name for name, a in ALGORITHMS.items() if "values" in a.needs}
CRITIC_FREE = tuple(n for n in NAMES if n not in CRITIC)

MOST, LONGEST = 24, 6
ID = 1000
REWARDS = (1.0, 0.0, math.nan, 0.25), (0.7, 0.7, 0.7), (0.0, 1.0, 1.0, 0.0, 0.5), (0.3, 0.9)


def made_groups(rewards: Sequence[Sequence[float]] = REWARDS, shift: float = 0.0) -> list[Group]:
    """Groups with the given rewards, all else always the same; ``shift`` is added to every reward."""
    rng = np.random.default_rng(7)
    groups, identity = [], ID
    for g, of_group in enumerate(rewards):
        completions, steps = [], []
        for _ in of_group:
            length = int(rng.integers(2, LONGEST + 1))
            tokens = np.append(rng.integers(1, 3, length - 1), identity)
            sampler = per_token("sampler_logprobs")[identity - ID, :length].float().numpy()
            completions.append(Completion(tokens, sampler, f"text {identity}", "stop"))
            steps.append(rng.normal(size=2 if length > 2 else 1).round(2) + shift)
            identity += 1
        values = np.array(of_group) + shift
        style = rng.normal(size=len(values)) + shift
        style[0] = math.nan
        tied = len(set(of_group)) == 1
        judged = tuple(
            StepRewards([shift] * len(s) if tied else s.tolist(), ends(len(c.tokens), len(s)))
            for s, c in zip(steps, completions, strict=True)
        )
        groups.append(
            Group(
                problem=Problem(f"p{g}", "?"),
                prompt=np.array([5, 6, 7 + g]),
                completions=tuple(completions),
                rewards=values,
                components={
                    "answer": component(values, 1.0, judged, verdict=True),
                    "style": component(np.full(len(values), shift) if tied else style, 0.5),
                },
                baselines=Baselines(
                    greedy_reward=(of_group[0] if tied else 0.5) + shift,
                    running_mean=np.full(len(values), (of_group[0] if tied else 0.5) + shift),
                    segments=tuple(
                        StepRewards([(of_group[0] if tied else 0.1 * (identity % 7)) + shift], [0])
                        for _ in completions
                    ),
                ),
            )
        )
    return groups


def ends(length: int, count: int) -> list[int]:
    """Two steps end at the second token and before the last one (which no step owns); one at the end."""
    return [1, length - 2] if count == 2 and length > 3 else [0, length - 1][-count:]


def identities(batch: Batch) -> list[int]:
    return [int(t[-1]) - ID for t in batch.tokens]


@cache
def per_token(name: str) -> Tensor:
    """(MOST, LONGEST) made-up values of every completion by its id; not to be written to."""
    draw = lambda seed: np.random.default_rng(seed).normal(size=(MOST, LONGEST))
    old = -np.exp(draw(1) * 0.8 - 0.6)
    chance = np.exp(old)
    values = {
        "old_logprobs": old,
        "logprobs": np.minimum(old + 0.6 * draw(2), -1e-3),
        "sampler_logprobs": np.minimum(old + 0.3 * draw(10), -1e-3),
        "ref_logprobs": old + 0.5 * draw(3),
        "old_entropy": np.abs(draw(4)),
        "old_collision": chance**2 + (1 - chance) ** 2 * (0.2 + 0.3 * np.tanh(draw(5)) ** 2),
        "noise": np.abs(draw(6)) % 1.0,
        "entropy": np.abs(draw(7)),
        "full_kl": np.abs(draw(8)),
        "values": draw(9),
    }
    return torch.from_numpy(values[name])


def made_batch(algorithm: Algorithm, groups: Sequence[Group], dtype: torch.dtype = torch.float64) -> Batch:
    """The groups as a training loop would prepare them for the algorithm, in the given precision."""
    batch = collate(groups)
    rows = identities(batch)
    old, ref, entropy, collision, noise, values = (
        per_token(name)[rows, : batch.mask.shape[1]]
        for name in ("old_logprobs", "ref_logprobs", "old_entropy", "old_collision", "noise", "values")
    )
    batch = replace(
        batch,
        sampler_logprobs=batch.sampler_logprobs.to(dtype),
        old_logprobs=batch.sampler_logprobs.to(dtype) if algorithm.old == "sampler" else old.to(dtype),
        old_distribution=OldDistribution(entropy.to(dtype), collision.to(dtype)),
        ref_logprobs=ref.to(dtype),
    )
    batch = with_advantages(batch, groups, algorithm, values=None if algorithm.critic is None else values)
    batch = replace(batch, advantages=batch.advantages.to(dtype))
    choose = algorithm.select_tokens
    return batch if choose is None else select_tokens(batch, choose, noise.to(dtype))


class Leaves(NamedTuple):
    """What carries gradient, by completion id."""

    logprobs: Tensor
    entropy: Tensor
    collision: Tensor
    full_kl: Tensor


def leaves(dtype: torch.dtype = torch.float64) -> Leaves:
    """What the policy being trained says of every token: the only things that carry gradient."""
    of = lambda name: per_token(name).to(dtype, copy=True).requires_grad_()
    return Leaves(of("logprobs"), of("entropy"), of("old_collision"), of("full_kl"))


def evaluated(
    algorithm: Algorithm, batch: Batch, budget: int = 10**9, skip_idle: bool = False
) -> tuple[Tensor, Leaves]:
    """Loss of an optimizer step on the batch, cut by ``budget``, and the gradient by completion id."""
    policy = leaves(batch.advantages.dtype)
    total = policy.logprobs.new_zeros(())
    computed = batch.has_gradient(skips_idle=True) if skip_idle else None
    whole_groups = algorithm.whole_groups
    for micro in micro_batches(batch, budget, LONGEST, computed=computed, whole_groups=whole_groups):
        place = micro.packed.place
        mine = identities(micro.rows)
        outputs = TokenOutputs(*(leaf[mine][:, : place.shape[1]][place] for leaf in policy))
        loss = policy_loss(algorithm, micro.loss_inputs(outputs)).total
        loss.backward()
        total += loss.detach()
    return total, gradient(policy)


def gradient(policy: Leaves) -> Leaves:
    return Leaves(*(torch.zeros_like(p) if p.grad is None else p.grad for p in policy))


def inputs_of(batch: Batch, policy: Leaves, **changes) -> LossInputs:
    """The whole batch as one micro-batch's inputs, some of them replaced."""
    rows, width = identities(batch), batch.mask.shape[1]
    given = {
        "logprobs": policy.logprobs[rows, :width],
        "mask": batch.mask,
        "advantages": batch.advantages,
        "old_logprobs": batch.old_logprobs,
        "totals": batch.totals(LONGEST),
        "group_tokens": batch.group_tokens,
        "sampler_logprobs": batch.sampler_logprobs,
        "ref_logprobs": batch.ref_logprobs,
        "entropy": policy.entropy[rows, :width],
        "full_kl": policy.full_kl[rows, :width],
        "selected": batch.selected,
        "correct": batch.correct,
        "group": batch.group,
    }
    return LossInputs(**{**given, **changes})

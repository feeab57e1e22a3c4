"""Would the tests notice? Makes realistic mistakes in a copy of the package, one at a time.

    python benchmarks/mutants.py                 # the table; exit code 1 if a mistake survives
    python benchmarks/mutants.py --only credit   # mistakes whose file or description contains the word
    python benchmarks/mutants.py --write         # and keep the table in benchmarks/results/mutants.md

A mistake is a text of the source that occurs once and what stands there instead.
"""

# ruff: noqa: E501  a mistake is a line

from __future__ import annotations

import argparse
import ast
import datetime as dt
import importlib
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from covey_verify.machine import available_cpus

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/mutants.md"
SOUND = "sound"
HEAVY = ("torch", "transformers.models.auto.modeling_auto", "transformers.modeling_utils", "hypothesis")
"""What the tests import beside covey; loaded once."""


class Mutant(NamedTuple):
    """One mistake."""

    file: str
    mistake: str
    old: str
    new: str

    @property
    def tests(self) -> list[str]:
        """Where it should be noticed: beside the file, or by the float64 trainer that repeats runs."""
        return NEAR[self.near]

    @property
    def near(self) -> str:
        """The longest beginning in ``NEAR`` that its file has."""
        return max((start for start in NEAR if self.file.startswith(start)), key=len)


MATHEMATICS = ["tests/objective", "tests/learner"]
PROOF = ["tests/proof/test_axes.py", "tests/proof/test_shadow.py"]
SEAMS = ["tests/training/test_seams.py"]
GIVEN = "tests/proof/test_given.py"
STAGES = "tests/training/test_stages.py::test_a_pipeline_of_every_kind_of_stage"
NEAR = {
    "learner/objectives": [
        "tests/proof/test_axes.py::test_a_critic_of_either_kind_is_trained_alike",
        "tests/learner/test_inserted.py::test_a_run_with_tools_is_recorded_read_back_and_proved[critic]",
    ],
    "models/load": SEAMS,
    "models/reward_model": [*SEAMS, "tests/training/test_reward_models.py", "tests/models/test_reward.py"],
    "models/reference": [
        "tests/proof/test_axes.py::test_adapters_are_trained_alike",
        "tests/proof/test_axes.py::test_the_kl_coefficient_and_the_reference_are_steered_alike",
    ],
    "models/value_head": ["tests/training/test_critic.py"],
    "models/pretrained": ["tests/training/test_critic.py", "tests/models/test_pretrained.py"],
    "rollouts/prefetch": ["tests/rollouts/test_ahead.py"],
    "rollouts/store": ["tests/rollouts/test_ahead.py"],
    "rollouts/segments": ["tests/rollouts/test_rollout.py"],
    "training/reward_model": [*SEAMS, "tests/training/test_reward_models.py"],
    "objective": MATHEMATICS,
    "learner/batching": [*MATHEMATICS, *PROOF],
    "models": ["tests/models", *MATHEMATICS],
    "sampling/tools/turns": ["tests/sampling/tools", "tests/proof/test_sampled_elsewhere.py"],
    "sampling/tools": ["tests/sampling/tools"],
    "rewards": ["tests/rewards/test_scorer.py"],
    "rollouts": [
        "tests/rollouts/test_rollout.py",
        "tests/rollouts/test_ahead.py",
        "tests/tasks/test_difficulty.py",
    ],
    "training/evaluation": ["tests/training/test_evaluate.py"],
    "runs/estimates": ["tests/training/test_evaluate.py"],
    "tasks/difficulty": ["tests/tasks/test_difficulty.py", "tests/rollouts/test_rollout.py"],
    "sampling": [
        "tests/sampling/test_draw.py",
        "tests/sampling/test_local.py",
        "tests/sampling/test_lagging.py",
    ],
    "runs/folder": ["tests/runs/test_atomic.py::test_streams_and_rollouts_rewind_to_a_checkpoint"],
    "runs/rollouts": ["tests/training/test_runs.py::test_rejected_groups_are_logged_and_marked"],
    "learner/advantage": [*MATHEMATICS, *PROOF],
    "learner/old_logprobs": ["tests/learner/test_old_logprobs.py", *PROOF],
    "learner/learner": [
        *SEAMS,
        "tests/learner/test_optimizer.py",
        "tests/training/test_guards.py",
        "tests/learner/test_old_logprobs.py",
        *PROOF,
    ],
    "learner": ["tests/learner/test_optimizer.py", *PROOF],
    "training/guards": ["tests/training/test_guards.py"],
    "training/supervisor": ["tests/training/test_guards.py", *PROOF],
    "training/updates": ["tests/training/test_guards.py", "tests/learner/test_old_logprobs.py", *PROOF],
    "training/examples_loop": ["tests/training/test_supervised.py", GIVEN],
    "training/preference": [*SEAMS, "tests/training/test_preferences.py", GIVEN],
    "training/stage_folders": [
        f"{GIVEN}::test_each_stage_of_a_pipeline_begins_with_what_the_one_before_has_left",
        STAGES,
    ],
    "models/chat": ["tests/sampling/tools/test_forms.py"],
    "sampling/prompts": ["tests/training/test_supervised.py", "tests/sampling/tools/test_forms.py"],
    "training/learners": [*PROOF, "tests/training/test_critic.py"],
    "training/rl": [*PROOF, "tests/training/test_critic.py"],
}
"""Beginning of a file's path -> the tests that should notice a mistake in it."""

NONE = Mutant("objective/__init__.py", "none", "No models, no files", "No models, no files")


class Outcome(NamedTuple):
    """What became of it."""

    mutant: Mutant
    caught_by: str
    """The first test that failed; empty where none did."""
    seconds: float


def of(file: str, *mistakes: tuple[str, str, str]) -> list[Mutant]:
    """Mistakes in one file: (what it is, old text, new text)."""
    return [Mutant(file, *mistake) for mistake in mistakes]


# fmt: off
MUTANTS = [
    *of(
        "objective/advantages.py",
        ("no test for equal rewards", "(rewards != rewards[..., :1]).any(-1, keepdim=True)", "rewards == rewards"),
        ("median for mean", "(rewards - rewards.mean(-1, keepdim=True))", "(rewards - rewards.median(-1, keepdim=True)[0])"),
        ("ddof ignored", "freedom = max(rewards.shape[-1] - ddof, 1)", "freedom = max(rewards.shape[-1] - 1, 1)"),
        ("every lone completion keeps its reward", 'return single == "reward" and rewards', "return rewards"),
        ("eps forgotten for a lone completion", "return rewards / (1 + eps)", "return rewards.clone()"),
        ("the running mean after the reward", "        before[i] = mean\n        mean = mean if math.isnan(reward) else decay * mean + (1 - decay) * reward\n", "        mean = mean if math.isnan(reward) else decay * mean + (1 - decay) * reward\n        before[i] = mean\n"),
        ("brevity counts whatever is solved", "rewards - weight * rewards.mean() * lengths", "rewards - weight * lengths"),
        ("a ceiling for the floor", ".clamp(min=floor)", ".clamp(max=floor)"),
        ("groups counted for rewards", 'if of == "rewards":\n        return', 'if of == "nothing":\n        return'),
        ("population std as the default", "def group_zscore(rewards: Tensor, *, ddof: Ddof = 1", "def group_zscore(rewards: Tensor, *, ddof: Ddof = 0"),
        ("variance for std", "keepdim=True) / freedom).sqrt()", "keepdim=True) / freedom)"),
        ("eps times std for eps plus std", "standard_deviation(rewards, ddof) + eps)", "standard_deviation(rewards, ddof) * (1 + eps))"),
        ("leave-one-out factor upside down", "(size / max(size - 1, 1))", "(max(size - 1, 1) / size)"),
        ("std of all for std of the siblings", "std = standard_deviation(siblings, 1)[:, 0]", "std = standard_deviation(rewards, 1)"),
        ("always divided by the siblings' std", ".where(std > 0, 1.0)\n", "\n"),
        ("lengths ignored in the optimal baseline", "(lengths * shifted).sum() / lengths.sum()", "shifted.sum() / lengths.sum()"),
        ("negative means divide too", "(mean > 0)", "(mean != 0)"),
        ("weights of the components forgotten", "total[applies] += weight * advantage(values[applies])", "total[applies] += advantage(values[applies])"),
        ("a component that does not apply counts as 0", "applies = ~values.isnan()", "values = values.nan_to_num(); applies = values == values"),
        ("std of the other quantity", 'rewards if of == "rewards" else', 'rewards if of != "rewards" else'),
        ("token statistics over the padding", "values = advantages[mask]", "values = advantages.flatten()"),
        ("eps outside the root", "(standard_deviation(values, ddof).square() + eps)", "(standard_deviation(values, ddof) + eps).square()"),
        ("dead groups counted as alive", "(per_group[group] != 0).sum()", "(per_group[group] == per_group[group]).sum()"),
        ("completion mean over the padded width", "/ mask.sum(-1).clamp(min=1)\n    return first", "/ mask.shape[-1]\n    return first"),
    ),
    *of(
        "objective/ratios.py",
        ("ratio upside down", "    return log_ratio.exp()\n", "    return (-log_ratio).exp()\n"),
        ("sum for mean in the sequence ratio", "log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)", "log_ratio.sum(-1, keepdim=True)"),
        ("padded length in the sequence ratio", "/ mask.sum(-1, keepdim=True).clamp(min=1)", "/ log_ratio.shape[-1]"),
        ("missing detach in GSPO-token", "sequence(log_ratio, mask).detach()", "sequence(log_ratio, mask)"),
        ("missing detach on-policy", "(logprobs - logprobs.detach()).exp()", "(logprobs - logprobs).exp()"),
        ("no bound on the response ratio", "return clamp_log_ratio(log_ratio.sum(-1, keepdim=True))", "return (log_ratio.sum(-1, keepdim=True))"),
        ("clip sides of GMPO swapped", "upper.where(advantages > 0, lower)", "lower.where(advantages > 0, upper)"),
        ("log-ratios not bounded", "return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)", "return log_ratio"),
    ),
    *of(
        "objective/surrogates.py",
        ("wrong sign of the loss", "    return -gain\n", "    return gain\n"),
        ("max for min in the clip", "(ratio * advantages).minimum(", "(ratio * advantages).maximum("),
        ("clip bounds swapped", "ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio.clamp(1 - clip_high, 1 + clip_low)"),
        ("classes pushed together", "(-sign * score)[among]", "(sign * score)[among]"),
        ("one class for two", "(2 * group + (sign < 0))", "(2 * group + (sign < 9))"),
        ("idle completions skipped under KL-Cov", "def kl_on_selected(", "@declare(\"proportional\")\ndef kl_on_selected("),
        ("idle completions skipped under REAL", "@declare(\"acts_at_ratio_one\")", "@declare(\"acts_at_ratio_one\", \"proportional\")"),
        ("idle completions counted", "among = sign != 0", "among = sign < 9"),
        ("clip_high ignored", "1 + clip_high) * advantages)", "1 + clip_low) * advantages)"),
        ("clip without the pessimistic bound", "(ratio * advantages).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)", "ratio.clamp(1 - clip_low, 1 + clip_high) * advantages"),
        ("dual clip on positive advantages", ".where(advantages < 0, gain)", ".where(advantages > 0, gain)"),
        ("missing detach in CISPO", "-ratio.detach().clamp(floor, cap)", "-ratio.clamp(floor, cap)"),
        ("CISPO caps from below", "clamp(floor, cap)", "clamp(min=cap)"),
        ("SAPO temperatures swapped", "new_tensor(tau_up).where(advantages > 0, tau_down)", "new_tensor(tau_down).where(advantages > 0, tau_up)"),
        ("SAPO without 4 / tau", "-(4 / tau) * ", "-"),
        ("VESPO weight not 1 on-policy", "lam * (1 - weight)", "-lam * weight"),
        ("missing detach in VESPO", "weight = ratio.detach()\n    # The weight is 1", "weight = ratio\n    # The weight is 1"),
        ("DPPO masks inward moves", "* advantages.sign()\n", "* -advantages.sign()\n"),
        ("DPPO masks by the ratio", "(logprobs.exp() - old_logprobs.exp()).detach()", "((logprobs - old_logprobs).exp() - 1).detach()"),
        ("DPPO weight without cap", "weight = (logprobs - old_logprobs).detach().exp().clamp(max=cap) *", "weight = (logprobs - old_logprobs).detach().exp() *"),
        ("forward for reverse binary KL", "distance = -p * log_ratio + (1 - p)", "distance = q * log_ratio + (1 - q)"),
        ("KL-Cov pulls every token", "log_ratio.abs() * selected", "log_ratio.abs()"),
    ),
    *of(
        "objective/reductions.py",
        ("token mean over completions", "totals.tokens).expand_as", "totals.completions).expand_as"),
        ("sequence mean without the length", "(lengths.clamp(min=1) + eps) * totals", "(lengths * 0 + 1 + eps) * totals"),
        ("local for global completions", "(lengths.clamp(min=1) + eps) * totals.count(rows)", "(lengths.clamp(min=1) + eps) * len(lengths)"),
        ("rows that are not trained never counted", 'self.completions if rows == "trained" else self.rows', "self.completions"),
        ("eps beside the inverse", "return 1 / (counts.clamp(min=1) + eps)", "return 1 / counts.clamp(min=1) + eps"),
        ("longest completion for the constant", "(length or totals.max_tokens)", "(length or float(lengths.max()))"),
        ("prompts not averaged", "_inverse(group_tokens * totals.prompts)", "_inverse(group_tokens)"),
    ),
    *of(
        "objective/penalties.py",
        ("policy and reference swapped in k3", "(-d).expm1() + d", "d.expm1() - d"),
        ("k2 without the half", "ref_log_ratio.square() / 2", "ref_log_ratio.square()"),
        ("k3 ends at 20 nats on both sides", "ref_log_ratio.clamp(min=-LOG_RATIO_LIMIT)", "ref_log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)"),
        ("completion level ignored", 'if level == "completion" else ref_log_ratio', 'if level == "never" else ref_log_ratio'),
        ("straight-through keeps its own gradient", "bounded_value(value, bound).detach() + gradient", "bounded_value(value, bound) + gradient"),
        ("ratio detached in the weighted KL", "value = value * ratio\n", "value = value * ratio.detach()\n"),
        ("the score's gradient detached", "(ref_log_ratio - ref_log_ratio.detach()).exp()", "(ref_log_ratio - ref_log_ratio).exp()"),
        ("bounded from above only", "value.clamp(-bound, bound)", "value.clamp(max=bound)"),
        ("the straight-through value unbounded", "return bounded_value(value, bound).detach()", "return value.detach()"),
    ),
    *of(
        "objective/corrections.py",
        ("sampler over trainer", "_at_level(mismatch, level).exp().clamp(max=cap)", "(-_at_level(mismatch, level)).exp().clamp(max=cap)"),
        ("truncated from below", ".exp().clamp(max=cap)", ".exp().clamp(min=cap)"),
        ("mask keeps what lies outside", "weight * ((weight >= low) & (weight <= high))", "weight * ((weight < low) | (weight > high))"),
        ("mask without its lower bound", "weight * ((weight >= low) & (weight <= high))", "weight * (weight <= high)"),
        ("sum for mean in the geometric mask", "weight = sequence(mismatch, mask)", "weight = mismatch.sum(-1, keepdim=True).exp().expand_as(mismatch)"),
        ("off-policy mask on positives", "advantages.sum(-1, keepdim=True) < 0", "advantages.sum(-1, keepdim=True) > 0"),
        ("drift with the wrong sign", "drift = -(mismatch", "drift = (mismatch"),
        ("sequence level by token", 'if level == "sequence":', 'if level == "completion":'),
    ),
    *of(
        "objective/token_weights.py",
        ("lowest for highest", "candidates.topk(count).values[-1]", "candidates.topk(count, largest=False).values[-1]"),
        ("threshold excludes itself", "(values >= candidates.topk", "(values > candidates.topk"),
        ("share of the band for share of all", "fraction, total=int(mask.sum()))", "fraction)"),
        ("covariance not centred", "exact - exact[mask].mean()", "exact"),
        ("selection reversed", "return selected.float()", "return (~selected).float()"),
        ("likely for unlikely", "(old_logprobs.exp() < below)", "(old_logprobs.exp() >= below)"),
        ("influence of the past", "range(values.shape[-1] - 2, -1, -1)", "range(values.shape[-1] - 1, 0, -1)"),
        ("half-life as a discount", "0.5 ** (1 / half_life)", "1 - 1 / half_life"),
        ("outliers kept", "mask & (log_ratio.exp() <= outlier)", "mask"),
        ("safety for positives", "risky = (advantages < 0)", "risky = (advantages > 0)"),
        ("missing detach in the influence", "    log_ratio = log_ratio.detach()\n    # An outlier", "    # An outlier"),
    ),
    *of(
        "objective/credit.py",
        ("step starts one token late", "+= value\n        start = end + 1", "+= value\n        start = end + 2"),
        ("a segment that begins where the last one ended", "+= value\n        start = end + 1", "+= value\n        start = end"),
        ("no value before the first segment", "values = (mean, *parts", "values = (mean * 0, *parts"),
        ("a return that is not discounted", "mask, gamma=gamma, lam=1.0)", "mask, gamma=1.0, lam=gamma * 0 + 1.0)"),
        ("step ends before its last token", "row[start : end + 1] += value\n", "row[start:end] += value\n"),
        ("weights of rewards by step forgotten", "scores = weight * group_zscore", "scores = group_zscore"),
        ("values of one reward normalised with another's", "group_zscore(values[applies],", "group_zscore(components[0][applies],"),
        ("rewards so far for rewards to go", "    return scores.flip(0).cumsum(0).flip(0)\n", "    return scores.cumsum(0)\n"),
        ("best for worst step", "return scores.min() *", "return scores.max() *"),
        ("raw rewards in the tree", "values = prefix_values(shifted, tokens)", "values = prefix_values(rewards, tokens)"),
        ("value one token too early", "values[:, t + 1] = together", "values[:, t] = together"),
        ("together again after parting", "together &= tokens", "together = tokens"),
        ("energy not accumulated", ".where(mask, 0.0).cumsum(-1) * mask", ".where(mask, 0.0) * mask"),
        ("energy may be negative", ".clamp(min=0).where(mask", ".where(mask"),
        ("lone tail is its own baseline", "mask.sum(0) > 1", "mask.sum(0) > 0"),
    ),
    *of(
        "objective/value.py",
        ("next value through the gap", "next_value = values[:, t].where(on, next_value)", "next_value = values[:, t]"),
        ("undiscounted next value", "token_rewards[:, t] + gamma * next_value", "token_rewards[:, t] + next_value"),
        ("lambda forgotten", "(delta + gamma * decay * running)", "(delta + gamma * running)"),
        ("value loss takes the smaller", "loss.maximum((near", "loss.minimum((near"),
    ),
    *of(
        "objective/dialects.py",
        ("another eps of verl", "group_zscore, ddof=1, eps=1e-6", "group_zscore, ddof=1, eps=1e-5"),
        ("verl without its dual clip", "bind(surrogates.clip, dual_clip=3.0)", "bind(surrogates.clip)"),
        ("OpenRLHF's variance of a sample", "token_zscore, ddof=0, eps=0.0, floor=1e-8)\n_OPEN", "token_zscore, ddof=1, eps=0.0, floor=1e-8)\n_OPEN"),
        ("NeMo-RL's KL without its score", 'coef=0.01, gradient="score"', "coef=0.01"),
        ("TRL's rows not counted", 'bind(reductions.sequence_mean, rows="all"),\n            bind(reductions.sequence_sum', "bind(reductions.sequence_mean),\n            bind(reductions.sequence_sum"),
    ),
    *of(
        "objective/preference.py",
        ("chosen and rejected swapped", "return (chosen - ref_chosen) - (rejected - ref_rejected)", "return (rejected - ref_rejected) - (chosen - ref_chosen)"),
        ("the flipped pairs of robust DPO added", "log_sigmoid(pull) + label_smoothing", "log_sigmoid(pull) - label_smoothing"),
        ("the hinge's margin forgotten", "(1 - beta * margin(", "(-beta * margin("),
        ("IPO's target without the 2", "1 / (2 * tau)", "1 / tau"),
        ("reference point carries gradient", "reference_point.detach()", "reference_point"),
        ("KTO's sides swapped", "log_ratio.new_ones(()).where(desirable, -1.0)", "log_ratio.new_ones(()).where(~desirable, -1.0)"),
        ("odds without 1 - p", "(up - down) - (_log1mexp(up) - _log1mexp(down))", "(up - down)"),
        ("margin added", "rejected / rejected_lengths) - gamma)", "rejected / rejected_lengths) + gamma)"),
    ),
    *of(
        "objective/controllers.py",
        ("error unclipped", "min(max(kl / target - 1, -0.2), 0.2)", "kl / target - 1"),
        ("entropy steered away", "step if entropy < target else -step", "step if entropy > target else -step"),
        ("KL steered by token", 'adaptive_kl(coef, metrics["kl/completion_k1"]', 'adaptive_kl(coef, metrics["kl/token_k1"]'),
    ),
    *of(
        "objective/filters.py",
        ("keeps the tied groups", "return not dead", "return dead"),
        ("band open", "low <= rate <= high", "low < rate < high"),
    ),
    *of(
        "objective/data.py",
        ("OPO's lengths count untrained tokens", "return self.mask.sum(-1).double()", "return self.mask.new_full((len(self.mask),), self.mask.shape[1], dtype=self.rewards.dtype)"),
        ("padding not removed", "value.where(self.mask, value.new_zeros(()))", "value"),
        ("old log-probs carry gradient", "value if name in _CARRY_GRADIENT else value.detach()", "value"),
        ("trainer and sampler swapped", "clamp_log_ratio(self.old_logprobs - self.sampler_logprobs)", "clamp_log_ratio(self.sampler_logprobs - self.old_logprobs)"),
        ("reference and policy swapped", "self.logprobs - self.ref_logprobs", "self.ref_logprobs - self.logprobs"),
    ),
    *of(
        "objective/loss.py",
        ("mask dropped from the reduction", "row_weight[:, None] * inputs.mask", "row_weight[:, None]"),
        ("token weights carry gradient", "by_token, by_completion).detach()\n    return", "by_token, by_completion)\n    return"),
        ("adaptive KL coefficient ignored", "algorithm.kl.coef if kl_coef is None else kl_coef", "algorithm.kl.coef"),
        ("penalty subtracted", "total + coef * kl\n", "total - coef * kl\n"),
        ("incorrect answers imitated", "inputs.mask & inputs.correct[:, None]", "inputs.mask & ~inputs.correct[:, None]"),
        ("imitation by the micro-batch", "/ max(inputs.totals.correct_tokens, 1)", "/ chosen.sum().clamp(min=1)"),
        ("a pull to the reference for one to the sampler", 'kl.to == "sampler"', 'kl.to == "nobody"'),
        ("entropy punished", "total = total - coef * entropy", "total = total + coef * entropy"),
        ("penalty in the reward is in the loss too", 'algorithm.kl is not None and algorithm.kl.place == "loss"', "algorithm.kl is not None"),
    ),
    *of(
        "objective/algorithms.py",
        ("idle completions skipped under a KL", "return not (pulls or self.values_on_policy) and has", "return has"),
    ),
    *of(
        "objective/diagnostics.py",
        ("clip shares of the wrong sign", "(low & (advantage < 0))", "(low & (advantage > 0))"),
        ("token ratio for the algorithm's", 'ratio=host(loss.tokens.ratio)', 'ratio=host(inputs.log_ratio.exp())'),
    ),
    *of(
        "learner/batching.py",
        ("rewards in float32", "for r in g.rewards.tolist()], dtype=torch.float64)", "for r in g.rewards.tolist()], dtype=torch.float32).double()"),
        ("whitening per micro-batch's totals", "yield _micro(batch, pieces[0 if repeated else number], totals, group_tokens, repeated)", "yield _micro(batch, pieces[number], batch.select(pieces[number]).totals(max_tokens), group_tokens, repeated)"),
        ("group tokens of the micro-batch", "totals, group_tokens[rows], rows, repeated)", "totals, part.group_tokens, rows, repeated)"),
        ("masked tokens counted", "tokens=int(self.mask.sum())", "tokens=self.mask.numel()"),
        ("prompts counted as completions", "prompts=len(self.group[trained].unique())", "prompts=int(trained.sum())"),
        ("a group split over minibatches", "[batch.select(part_rows) for part_rows in rows_of_parts]", "[batch.select(p.tolist()) for p in np.array_split(np.arange(len(batch)), len(parts))]"),
        ("busy completions skipped", "self.mask & self.advantages.bool() if skips_idle", "~(self.mask & self.advantages.bool()) if skips_idle"),
        ("masked completions are no rows", "rows=len(self),", "rows=int(trained.sum()),"),
        ("scored over the whole vocabulary", "sampling_masks=masks or None", "sampling_masks=None"),
        ("ratio is always 1", "old_logprobs=logprobs.detach() if old is None else old", "old_logprobs=logprobs.detach()"),
        ("advantages of other rows after select", "values[index, :longest]", "values[index.sort().values, :longest]"),
        ("tokens of other rows after select", "tuple(values[i] for i in rows)", "tuple(values[i] for i in sorted(rows))"),
        ("mask one short", "_pad([c.drawn_mask for", "_pad([np.append(c.drawn_mask[:-1], False) for"),
        ("kept sets of the neighbour", "SamplingMask.join(part.sampling_masks)", "SamplingMask.join(part.sampling_masks[1:] + part.sampling_masks[:1])"),
        ("truncated completions trained although masked", "    if mask_truncated:\n", "    if False:\n"),
        ("totals of the micro-batch", "totals = batch.totals(max_tokens)\n", "totals = batch.select([0]).totals(max_tokens)\n"),
    ),
    *of(
        "rewards/groups.py",
        ("a failed reward counts as 0", "np.where(unknown, np.nan, combine(values, weights))", "combine(values, weights)"),
        ("a failure without weight loses the completion", "    if reward.weight == 0:\n        return False\n", ""),
        ("a failed gate is closed", 'if reward.gate is not None and scores[reward.gate.reward][sample].status == "infra_error":\n        return True', "if False:\n        return True"),
        ("a failure behind a closed gate loses the completion", "return failed and _is_paid(reward, scores, sample)", "return failed"),
    ),
    *of(
        "rewards/reward_checks.py",
        ("scores that failed hide behind sound ones", "count = sum(len(g.completions) for g in groups)", "count = sum(len(g.completions) * len(g.components) for g in groups)"),
        ("a window that is not full stops a run", "often = len(recent) == window and failed", "often = failed"),
    ),
    *of(
        "learner/advantage.py",
        ("neighbour's advantages", "advantages[rows, :length] = estimated", "advantages[rows.flip(0), :length] = estimated"),
        ("unscorable rewards count", "scorable = group.scorable\n    # ``rows``", "scorable = group.scorable | True\n    # ``rows``"),
        ("cost so far for cost to go", "penalty.token.flip(-1).cumsum(-1).flip(-1)", "penalty.token.cumsum(-1)"),
        ("values of critics bootstrapped into their returns", "targets = value_targets(token_rewards, values.double(), mask, gamma=gamma, lam=algorithm.critic.lam)", "targets = value_targets(token_rewards, values.double(), mask, gamma=gamma)"),
        ("rewards by step paid twice", "remainder[row] -= step_reward", "pass"),
        ("reward paid at the first token", "token_rewards[row, _trained_at(mask[row], mask.shape[1])] += value", "token_rewards[row, 0] += value"),
        ("penalty rewarded", "costs = -coef *", "costs = coef *"),
        ("old for adaptive coefficient", "coef = kl.coef if coef is None else coef", "coef = kl.coef"),
        ("untrained completions in the batch statistics", "trained = torch.nonzero(batch.mask.any(-1))[:, 0]", "trained = torch.nonzero(~batch.rewards.isnan())[:, 0]"),
        ("padding looks like a token", "padding_value=-1)", "padding_value=0)"),
        ("KL of the first group in every reward", "penalty.completion[rows]", "penalty.completion[: len(rows)]"),
        ("KL of untrained completions in the reward", ".where(batch.mask, 0.0).double()", ".double()"),
    ),
    *of(
        "learner/learner.py",
        ("log-probs at temperature 1", "network.token_outputs(micro.packed.to(network.device), temperature)", "network.token_outputs(micro.packed.to(network.device), 1.0)"),
        ("policy scored at temperature 1", "self.network.token_outputs(micro.packed, requires.temperature, compared)", "self.network.token_outputs(micro.packed, 1.0, compared)"),
        ("reference scored with the policy's weights", "model or self.network", "self.network"),
        ("longest completion for max_tokens", "requires.max_tokens,", "batch.mask.shape[1],"),
        ("idle completions never pull", "batch.has_gradient(requires.skips_idle)", "batch.has_gradient(skips_idle=True)"),
        ("gradients of the last micro-batch alone", "            counted = loss if statistics", "            self.clear()\n            counted = loss if statistics"),
        ("half a gradient kept when memory ran out", "            self.clear()\n            self._halve()\n", "            self._halve()\n"),
        ("an update of nothing counted", "self.version += self.optimizer.moved", "self.version += 1"),
        ("an update by what AdamW remembers not counted", "self.version += self.optimizer.moved", "self.version += norm > 0"),
    ),
    *of(
        "training/rl.py",
        ("minibatches alike in every step", '"minibatches", step, epoch)', '"minibatches", 0, epoch)'),
        ("minibatches alike in every epoch", '"minibatches", step, epoch)', '"minibatches", step, 0)'),
        ("noise alike in every step", '"noise", step)', '"noise", 0)'),
        ("every update starts at ratio 1", "if is_first and starts_at_one else", "if starts_at_one else"),
        ("reference refreshed one step late", "if learner.version // kl.refresh_every > before // kl.refresh_every", "if before // kl.refresh_every > (2 * before - learner.version) // kl.refresh_every"),
        ("inner epochs forgotten", "range(config.train.inner_epochs)", "range(1)"),
        ("steered KL coefficient not in the reward", "algorithm, kl_coef=run.state.coefficients.kl, values=values)", "algorithm, values=values)"),
        ("reference copied where it should be mixed", "refresh(learner.network, kl.refresh_mix)", "refresh(learner.network, 1.0)"),
        ("controllers see the last update alone", "token_stats += [s for", "token_stats = [s for"),
        ("first minibatch selected by the whole batch", "else select_tokens(minibatch, choose, noise)", "else replace(minibatch, selected=select_tokens(batch, choose, noise).selected[: len(minibatch), : minibatch.mask.shape[1]])"),
    ),
    *of(
        "learner/objectives.py",
        ("steered KL coefficient not in the loss", "kl_coef=coefficients.kl, entropy_coef", "kl_coef=None, entropy_coef"),
        ("steered entropy coefficient not in the loss", "entropy_coef=coefficients.entropy)", "entropy_coef=None)"),
        ("a head's loss forgotten", "loss.total + self.values(micro, outputs)[0]", "loss.total"),
    ),
    *of(
        "training/updates.py",
        ("learning rate of the next step", "learning_rate(step, learner.train, number)", "learning_rate(step + 1, learner.train, number)"),
        ("a bad gradient kept for the next update", "    learner.clear()\n", ""),
        ("an update whose loss is not finite applied", " if math.isfinite(loss) else math.nan\n", "\n"),
    ),
    *of(
        "training/learners.py",
        ("a critic's warm-up is a step too long", "step < critic.warmup", "step <= critic.warmup"),
        ("a frozen policy is pulled by its critic", "head.pull = 0.0 if policy_frozen else critic.pull", "head.pull = critic.pull"),
    ),
    *of(
        "training/supervisor.py",
        ("groups counted for completions", 'int(metrics["groups/count"]) * config.rollout.group_size', 'int(metrics["groups/count"])'),
    ),
    *of(
        "training/guards.py",
        ("bad updates counted over the whole run", "bad = 0 if finite else memory.bad_updates + 1", "bad = memory.bad_updates + (not finite)"),
    ),
    *of(
        "learner/old_logprobs.py",
        ("another engine's log-probs taken for exact", "OldLogprobs.RECORDED if sampler.bit_exact else OldLogprobs.RECOMPUTED", "OldLogprobs.RECORDED"),
        ("ratio to the sampler forced to 1", "self is not OldLogprobs.SAMPLER", "self is not None"),
        ("several updates without old log-probs", "if updates == 1 and not algorithm.needs_old", "if not algorithm.needs_old"),
    ),
    *of(
        "learner/optimizer.py",
        ("a micro-batch's gradient replaces the last one's", "gradient if master.grad is None else master.grad.add_(gradient)", "gradient"),
        ("betas swapped", "betas=train.betas)", "betas=train.betas[::-1])"),
        ("weights decayed twice", "(matrices, train.weight_decay)", "(matrices, 2 * train.weight_decay)"),
        ("norms decayed too", "(norms_and_biases, 0.0)", "(norms_and_biases, train.weight_decay)"),
        ("gradient not clipped", "clip_grad_norm_(part, clip)", "clip_grad_norm_(part, math.inf)"),
        ("gradient clipped after the update", "        self.adam.step()\n", "        for m in self.masters:\n            m.grad.mul_(max(norms[0] / self.train.grad_clip, 1.0))\n        self.adam.step()\n"),
        ("masters not copied back", "for master, parameter in self._copies():\n                parameter.copy_(master)\n        for", "for master, parameter in ():\n                parameter.copy_(master)\n        for"),
        ("resume forgets AdamW's step count", "is_count = value.dtype == torch.int64", 'is_count = value.dtype == torch.int64\n                value = value * 0 if key == "step" else value'),
        ("resume forgets the masters", "                copy_into(master, value)\n", "                pass\n"),
    ),
    *of(
        "learner/schedule.py",
        ("warm-up from 0", "train.lr * (step + 1) / train.warmup_steps", "train.lr * step / train.warmup_steps"),
        ("schedule ends at 0", "(floor + (1 - floor) * factors[name])", "factors[name]"),
        ("schedule ignores the warm-up", "(position - train.warmup_steps) / max(train.steps - train.warmup_steps, 1)", "position / train.steps"),
        ("schedule stands still within a step", "step + number / train.updates_per_rollout_batch", "step"),
    ),
    *of(
        "models/chat.py",
        ("the end of the last message for that of the first", "if is_prefix else next_start", "if is_prefix else len(conversation)"),
        ("a rewritten message without its end", "AssistantSpan(number, start, end + 1,", "AssistantSpan(number, start, end,"),
    ),
    *of(
        "sampling/prompts.py",
        ("no end token", "words, after_prompt=True), end]", "words, after_prompt=True)]"),
    ),
    *of(
        "training/preference.py",
        ("mean over the micro-batch", "micro.totals.prompts", "len(micro.rows) // 2"),
        ("reference of the policy as it is now", "torch.cat([sums[i] for i in rows])", "torch.cat([sums[0] for i in rows])"),
        ("chosen and rejected swapped", "chosen=sums[0::2]", "chosen=sums[1::2]"),
    ),
    *of(
        "training/examples_loop.py",
        ("mean over the micro-batch", "micro.totals.tokens", "len(outputs.logprobs)"),
        ("overlapping rows", "range(step * size, (step + 1) * size)", "range(step, step + size)"),
        ("rows in one order", 'key(seed, "order", epoch)', 'key(seed, "order")'),
    ),
    *of(
        "learner/objectives.py",
        ("value loss a mean over the micro-batch", "losses.where(mask, 0.0).sum() / micro.totals.tokens", "losses.where(mask, 0.0).sum() / mask.sum()"),
        ("value loss on what is not trained", "losses.where(mask, 0.0).sum()", "losses.sum()"),
        ("a critic is never clipped", "clip_value=self.critic.clip", "clip_value=None"),
        ("a head on the policy learns nothing", "if self.values is not None:", "if self.values is not None and not self:"),
    ),
    *of(
        "learner/optimizer.py",
        ("a head learns at the policy's rate", 'group["lr"] = lr * group["relative_lr"]', 'group["lr"] = lr'),
    ),
    *of(
        "learner/learner.py",
        ("a piece that keeps counts equal has a gradient", "counted.backward()", "loss.backward()"),
        ("a piece that keeps counts equal is counted", "yield loss, None if piece.repeated else statistics", "yield loss, statistics"),
    ),
    *of(
        "training/rl.py",
        ("values of the policy's own trunk", "values = (run.critic or learner).token_outputs(batch, temperature).values", "values = torch.zeros_like(batch.mask, dtype=torch.float32)"),
    ),
    *of(
        "learner/batching.py",
        ("incorrect completions are imitated", "[c for g in groups for c in g.correct.tolist()]", "[not c for g in groups for c in g.correct.tolist()]"),
    ),
    *of(
        "training/preference.py",
        ("KTO's reference point with the wrong sign", "(answer_log_probs(run.learner, batch) - mismatched_sums).mean()", "(mismatched_sums - answer_log_probs(run.learner, batch)).mean()"),
        ("KTO's reference point from the answers themselves", "mismatched_rows = [len(examples) + i for i in rows]", "mismatched_rows = list(rows)"),
        ("answers to the same prompt for others'", "if not np.array_equal(e.tokens, example.tokens)", "if np.array_equal(e.tokens, example.tokens)"),
        ("ORPO's prompt is not trained", "np.full(len(rest), chosen)", "np.full(len(rest), False)"),
    ),
    *of(
        "training/reward_model.py",
        ("labels upside down", "torch.where(good, values, -values)", "torch.where(good, -values, values)"),
        ("a text is judged one token early", "[len(tokens) - shared], [label]", "[len(tokens) - shared - 1], [label]"),
        ("a step is judged one token early", "[end + 1 - len(first) for end in ends]", "[end - len(first) for end in ends]"),
        ("chosen and rejected swapped", "chosen_scores=chosen, rejected_scores=rejected", "chosen_scores=rejected, rejected_scores=chosen"),
    ),
    *of(
        "models/reward_model.py",
        ("only the second output is trained", "values[..., 1] - values[..., 0]", "values[..., 1]"),
        ("the last padding is read", "while ids and ids[-1] == tokenizer.pad_token_id:", "while not ids:"),
        ("a step ends behind its separator", "ends.append(len(ids) - 1)", "ends.append(len(ids))"),
    ),
    *of(
        "models/load.py",
        ("alpha is the rank", "lora_alpha=lora.alpha", "lora_alpha=lora.rank"),
        ("the rank is another", "LoraConfig(r=lora.rank,", "LoraConfig(r=lora.rank + 1,"),
    ),
    *of(
        "models/reference.py",
        ("the reference has the adapter on", "off = self._adapter.disable_adapter() if self._adapter is not None else nullcontext()", "off = nullcontext()"),
        ("a refresh takes all of the policy", "lerp_(local_part(target), mix)", "lerp_(local_part(target), 1.0)"),
    ),
    *of(
        "models/value_head.py",
        ("a critic's own head is forgotten", "value_model.head.weight.copy_(head.weight)", "value_model.head.weight.copy_(0 * head.weight)"),
    ),
    *of(
        "models/pretrained.py",
        ("a critic begins with a random head", "parameter.zero_()", "parameter.detach()"),
    ),
    *of(
        "rollouts/prefetch.py",
        ("groups are taken as they end", "[self._ready.pop(t) for t in tickets]", "[self._ready.pop(t) for t in list(self._ready)[: len(tickets)]]"),
    ),
    *of(
        "rollouts/store.py",
        ("an earlier process' completions take another's place", "sample=missing[answer.sample]", "sample=answer.sample"),
        ("what is missing is drawn by others' keys", "[requests[n].streams[s] for s in missing]", "requests[n].streams[: len(missing)]"),
        ("finished completions are not kept", "        store.add(tickets[number], requests[number], params, renumbered)\n", ""),
    ),
    *of(
        "rollouts/sources.py",
        ("one step more is begun ahead", "self._steps_ahead(sampling_round.step) * self", "(self._steps_ahead(sampling_round.step) + 1) * self"),
        ("siblings share a seed", "key(*identity, sample)", "key(*identity)"),
        ("draws alike in every epoch", "prompted.problem.id, choice.occasion)", "prompted.problem.id)"),
    ),
    *of(
        "rollouts/segments.py",
        ("a continuation begins one token early", "tokens[: cut.end + 1]", "tokens[: cut.end]"),
        ("all continuations of a cut are one", "[stream(cut, n) for n in range", "[stream(cut, 0) for n in range"),
        ("the unjudged count as 0", "float(group.rewards[group.scorable].mean())", "float(np.nan_to_num(group.rewards).mean())"),
    ),
    *of(
        "runs/folder.py",
        ("rollouts of the step after a checkpoint kept", "if number > step:", "if number > step + 1:"),
        ("streams not cut", "                os.truncate(path, size)\n", "                pass\n"),
    ),
    *of(
        "runs/rollouts.py",
        ("rejected groups logged as trained", '"trained": number < trained', '"trained": True'),
    ),
    *of(
        "rollouts/groups.py",
        ("a sampled greedy baseline", '"greedy")], greedy=True)', '"greedy")])'),
    ),
    *of(
        "rollouts/choose.py",
        ("retired problems drawn", "if not retired[choice.problem]:", "if True:"),
        ("the frontier draws a problem twice in a step", "excluded = {*earlier, *map(int, np.flatnonzero(retired))}", "excluded = {*map(int, np.flatnonzero(retired))}"),
        ("one order for all epochs", 'key(seed, "order", epoch)', 'key(seed, "order")'),
    ),
    *of(
        "rollouts/finish.py",
        ("the group's own reward for the greedy one's", "greedy_reward=float(greedy.rewards[0])", "greedy_reward=float(group.rewards[0])"),
        ("what groups drawn ahead took is not counted", "        scorer.include(group_scorer.stats)\n", "        pass\n"),
        ("running means forgotten between steps", "new_means = dict(means)", "new_means = dict[str, float]()"),
        ("filter sees what could not be judged", "values[scored]) for values in (group.rewards, group.correct)", "values) for values in (group.rewards, group.correct)"),
    ),
    *of(
        "rollouts/loop.py",
        ("a resumed run measures every problem again", "self.position == BEGINNING:", "step >= 0:"),
        ("a cursor that forgets resampling", "position.cursor + sampled.used,", "position.cursor + min(sampled.used, self.rollout.prompts_per_step),"),
        ("continuations share a seed", '"continue", cut.end, number)', '"continue", cut.end)'),
        ("rejected groups trained", "(sampled.kept if passes else sampled.filtered)", "(sampled.kept if passes or sampled.rounds else sampled.filtered)"),
        ("rejected problems not remembered", "                sampled.numbered.append((choice.problem, group))\n                passes = passes_filter(group, self.algorithm)\n", "                passes = passes_filter(group, self.algorithm)\n                if passes:\n                    sampled.numbered.append((choice.problem, group))\n"),
        ("one refill too many", "sampled.rounds <= self.rollout.max_resampling_rounds", "sampled.rounds <= self.rollout.max_resampling_rounds + 1"),
    ),
    *of(
        "sampling/local.py",
        ("an end token at the last position counts as truncated", 'slot: "stop" if stop else "length"', 'slot: "length" if reached_limit[slot] else "stop"'),
        ("a stop string counts as truncated", 'slot: "stop" if stop else "length"', 'slot: "stop" if int(self.slots.latest[slot]) in self.end_ids.tolist() else "length"'),
        ("one uniform for all tokens", "self.slots.uniforms.view(-1)[index]", "self.slots.uniforms[: self.count, 0]"),
        ("greedy completions drawn beside others", "for request in own_requests]] = GREEDY", "for request in own_requests]] = 0.5"),
        ("kept sets stay when others leave", "self.drawable = compaction.apply(self.drawable)", "self.drawable = self.drawable[: len(self.owners)]"),
        ("uniforms stay when others leave", "vars(self).values()", "[v for k, v in vars(self).items() if k != 'uniforms']"),
        ("a limit stays when others leave", "vars(self).values()", "[v for k, v in vars(self).items() if k != 'limits']"),
        ("the latest token stays when others leave", "vars(self).values()", "[v for k, v in vars(self).items() if k != 'latest']"),
        ("log-prob of the next place", "self.slots.logprobs[slot, :length]", "self.slots.logprobs[slot, 1 : length + 1]"),
    ),
    *of(
        "sampling/tools/turns.py",
        ("what a tool said is trained", "drawn_mask=zeros > 0", "drawn_mask=zeros == 0"),
        ("draws of a turn begin anew", "prefix_tokens=request.prefix_tokens + length", "prefix_tokens=request.prefix_tokens"),
        ("a turn may be as long as the completion", "max_tokens=params.max_tokens - length", "max_tokens=params.max_tokens"),
        ("calls without a limit", "answer_count >= tools.max_calls", "answer_count < 0"),
        ("the prompt is forgotten", "np.concatenate([request.prompt, completion.tokens])", "completion.tokens"),
        ("a call in plain text does not end a turn", "stop=(*params.stop, CLOSE_CALL)", "stop=params.stop"),
    ),
    *of(
        "sampling/tools/inserted.py",
        ("the turn's end twice", "ends[-1] + closed", "ends[-1]"),
        ("the template's words in a result", 'words.remove_from(text.encode("utf-8", "replace").decode())', 'text.encode("utf-8", "replace").decode()'),
        ("a long result whole", "if len(ids) <= limit", "if True"),
    ),
    *of(
        "sampling/draw.py",
        ("greedy rows drawn", "torch.where(uniform == GREEDY, logits.argmax(-1), count_below)", "count_below"),
        ("nucleus at temperature 1", "kept_tokens(logits.float() / params.temperature, params)", "kept_tokens(logits.float(), params)"),
        ("nucleus without the token that crosses", "(sorted_probs.cumsum(-1) - sorted_probs < top_p)", "(sorted_probs.cumsum(-1) < top_p)"),
        ("nucleus of all tokens after top-k", "logits.masked_fill(~drawable, EXCLUDED).softmax(-1)", "logits.softmax(-1)"),
        ("k + 1 tokens kept", "min(params.top_k, logits.shape[-1])", "min(params.top_k + 1, logits.shape[-1])"),
        ("temperature multiplied", "inverse = 1.0 / temperature if temperature else 0.0", "inverse = temperature"),
    ),
    *of(
        "training/evaluation.py",
        ("a sampled greedy accuracy", "streams=r.streams[:1], greedy=True)", "streams=r.streams[:1])"),
        ("problems share their luck", 'key(seed, "eval", p.problem.id, s)', 'key(seed, "eval", s)'),
        ("least frequent answer", "most_common(1)[0][0]", "most_common()[-1][0]"),
        ("any right sample for the majority", "group.correct[answers.index(winner)]", "group.correct.any()"),
    ),
    *of(
        "runs/estimates.py",
        ("pass@k with replacement", "1 - math.comb(samples - int(c), k) / math.comb(samples, k)", "1 - (1 - int(c) / samples) ** k"),
    ),
    *of(
        "tasks/difficulty.py",
        ("first pass rate half believed", "NEWEST_WEIGHT if self.tried[index] else 1.0", "NEWEST_WEIGHT"),
        ("easy problems preferred", "4 * self.rates * (1 - self.rates)", "self.rates"),
        ("resume forgets what was tried", "self.tried[index] = tried", "self.tried[index] = 0"),
        ("resume forgets what was solved", "self.solved[index] = solved", "self.solved[index] = 0"),
        ("solved now and then for in a row", "self.solved[index] + 1 if pass_rate >= SOLVED_PASS_RATE else 0", "self.solved[index] + (pass_rate >= SOLVED_PASS_RATE)"),
        ("all retired for good", "return mastered & ~mastered.all()", "return mastered"),
        ("problems drawn twice in a step", "        order[list(without)] = -np.inf\n", ""),
    ),
    *of(
        "models/compiled.py",
        ("backward pass over the whole vocabulary", "exclude(raw, ctx.mask, rows.start, ctx.drawable_ids)", "exclude(raw, None, rows.start, ctx.drawable_ids)"),
    ),
    *of(
        "models/logprobs.py",
        ("temperature multiplied", "exclude(logits.float() / temperature", "exclude(logits.float() * temperature"),
        ("entropy with the wrong sign", "entropy = -(probs", "entropy = (probs"),
        ("forward for reverse exact KL", "full_kl = (probs * (all_logprobs - reference))", "full_kl = (reference.exp() * (reference - all_logprobs))"),
        ("log-prob of the token before", "gather(1, targets[:, None])", "gather(1, targets.roll(1)[:, None])"),
        ("collision of log-probs", "probs.square().sum(-1)", "all_logprobs.square().sum(-1)"),
        ("chunks of the targets unshuffled", "for x in (hidden, ref_hidden, targets))", "for x in (hidden, ref_hidden, targets.flip(0)))"),
        ("sampling mask of the first chunk for all", "ref_head, mask, start, drawable_ids)", "ref_head, mask, 0, drawable_ids)"),
        ("reference at temperature 1", "log_softmax(ref_head(ref_hidden))", "log_softmax(ref_head(ref_hidden) * temperature)"),
    ),
    *of(
        "models/packing.py",
        ("predicted from its own position", "np.append(prompt + prompt_length - 1, np.arange(start, start + length))", "np.arange(start, start + length + 1).clip(max=start + length - 1)"),
        ("shifted by one", "np.append(prompt + prompt_length - 1", "np.append(prompt + prompt_length - 2"),
        ("positions start anew after the prompt", "np.arange(prompt, prompt + length)", "np.arange(length)"),
        ("the prompt's last token unseen", "spans.append((*prefix, flat, length))", "spans.append((prefix[0], prefix[1] - 1, flat, length))"),
    ),
    *of(
        "models/ops.py",
        ("sees the future", "(positions[:, None] >= positions)", "(positions[:, None] <= positions)"),
        ("sees itself not", "(positions[:, None] >= positions)", "(positions[:, None] > positions)"),
    ),
    *of(
        "training/examples_loop.py",
        ("an epoch's order goes on in the next", "if not rows or index == 0:", "if not rows:"),
        ("what tools say in an answer is learned", "-logprobs[mask].sum()", "-logprobs.sum()"),
    ),
    *of(
        "training/preference.py",
        ("lengths with the prompt", "answered.sum(-1).to(logprobs)", "batch.mask.sum(-1).to(logprobs)"),
        ("ORPO's tokens are those of the rejected answers", "float(batch.mask[0::2].sum())", "float(batch.mask[1::2].sum())"),
        ("the answer to the prompt behind", "(examples[n - k] for k", "(examples[n + k - len(examples)] for k"),
        ("the reference point of all examples", "mismatched_rows = [len(examples) + i for i in rows]", "mismatched_rows = [len(examples) + i for i in range(len(examples))]"),
        ("an answer's log-prob a mean", "(learner.token_outputs(batch, 1.0).logprobs * batch.mask).sum(-1)", "(learner.token_outputs(batch, 1.0).logprobs * batch.mask).mean(-1)"),
    ),
    *of(
        "training/stage_folders.py",
        ("a stage begins from the base model", 'changes["model"] = str((start / "final").resolve())', 'changes["model"] = config.model'),
        ("a stage begins from the first one's model", "(policies[-1] if policies else None)", "(policies[0] if policies else None)"),
        ("a stage reads no earlier one's examples", "resolved_folders.get(str(path), path)", "path"),
    ),
    *of(
        "sampling/tools/turns.py",
        ("answered siblings continue in another order", "for dialogue, completion in continued", "for dialogue, completion in reversed(continued)"),
        ("answered siblings draw alike", "streams=[request.streams[sample]]", "streams=[request.streams[0]]"),
    ),
]
# fmt: on


def main() -> int:
    """Try every mistake; 1 if one survives, 2 if the tests fail without any or one cannot be made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--workers", type=int, default=min(2, available_cpus()))
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in f"{m.file} {m.mistake}"]
    for mutant in chosen:
        reason = unfit(mutant)
        if reason:
            print(f"{mutant.file}, {mutant.mistake}: {reason}")
            return 2
    started = time.perf_counter()
    for module in HEAVY:
        importlib.import_module(module)
    every = dict.fromkeys(test for mutant in chosen for test in mutant.tests)
    (sound,) = outcomes_of([NONE], 1, list(every))
    if sound.caught_by:
        print(f"without any mistake fails {sound.caught_by}")
        return 2
    outcomes = list(outcomes_of(chosen, options.workers))
    survivors = [o for o in outcomes if not o.caught_by]
    minutes = (time.perf_counter() - started) / 60
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} caught in {minutes:.1f} minutes")
    if options.write:
        RESULT.write_text(table(outcomes, minutes), encoding="utf-8")
    return bool(survivors)


def unfit(mutant: Mutant) -> str:
    """Why a mistake is none that tests could notice; empty: it is one."""
    source = (ROOT / "src/covey" / mutant.file).read_text(encoding="utf-8")
    found = source.count(mutant.old)
    if found != 1:
        return f"{found} times in the source: {mutant.old!r}"
    try:
        ast.parse(source.replace(mutant.old, mutant.new))
    except SyntaxError as error:
        return f"no Python, so that every import notices: {error}"
    return ""


def outcomes_of(mutants: Sequence[Mutant], workers: int, tests: Sequence[str] = ()) -> Iterator[Outcome]:
    """Try mistakes side by side; outcomes in the order of the mistakes, printed as they are known.

    Each is shown to its own tests, or to ``tests``.

    Every try is a fork of this process, which has the heavy libraries loaded and no part of covey.
    """
    fork = multiprocessing.get_context("fork")
    waiting, running, done = list(enumerate(mutants)), dict[int, Any](), dict[int, Outcome]()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder) / SOUND, ignore=shutil.ignore_patterns("__pycache__"))
        while waiting or running:
            while waiting and len(running) < workers:
                number, mutant = waiting.pop(0)
                place = Path(folder) / str(number)
                process = fork.Process(target=attempt, args=(mutant, place, tests or mutant.tests))
                process.start()
                running[process.sentinel] = (process, number, mutant, place, time.perf_counter())
            for sentinel in multiprocessing.connection.wait(list(running)):
                process, number, mutant, place, started = running.pop(sentinel)
                process.join()
                output = (place / "output").read_text(encoding="utf-8", errors="replace")
                caught = first_failure(output, process.exitcode)
                done[number] = Outcome(mutant, caught, time.perf_counter() - started)
                shutil.rmtree(place)
                print(f"{mutant.file:28} {mutant.mistake:46} {caught or 'SURVIVED'}", flush=True)
    yield from (done[number] for number in range(len(mutants)))


def attempt(mutant: Mutant, place: Path, tests: Sequence[str]) -> None:
    """In a process of its own: spoil a copy of the package and run the tests against it."""
    shutil.copytree(place.parent / SOUND, place)
    path = place / "covey" / mutant.file
    source = path.read_text(encoding="utf-8")
    with (place / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    os.chdir(ROOT)
    for name in [n for n in sys.modules if n.partition(".")[0] == "covey"]:
        del sys.modules[name]  # what this process has loaded of covey is the sound one
    sys.path[:0] = [str(place), str(ROOT)]
    sys.dont_write_bytecode = True
    quiet = ["-x", "-q", "--tb=no", "--assert=plain", "--hypothesis-seed=0", "-p", "no:cacheprovider"]
    code = pytest.main([*quiet, *tests])
    sys.stdout.flush()
    os._exit(int(code))


def first_failure(output: str, code: int) -> str:
    """The test that noticed; empty if none did."""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, flags=re.MULTILINE)
    return found[1] if found else "" if code == 0 else f"exit code {code}"


def table(outcomes: list[Outcome], minutes: float) -> str:
    """The result as Markdown."""
    survivors = sum(not o.caught_by for o in outcomes)
    rows = [
        f"| `{o.mutant.file}` | {o.mutant.mistake} | {f'`{o.caught_by}`' if o.caught_by else '**SURVIVED**'} |"
        for o in outcomes
    ]
    caught, today = len(outcomes) - survivors, dt.datetime.now(tz=dt.UTC).date()
    summary = (
        f"{today}, `make mutants`: {len(outcomes)} mistakes, one at a time; {caught} caught, {survivors} "
        f"survived; {minutes:.1f} minutes on two shared cores."
    )
    head = ["| file | mistake | first test that failed |", "|---|---|---|"]
    return "\n".join(["# Mistakes made on purpose", "", summary, "", *head, *rows, ""])


if __name__ == "__main__":
    sys.exit(main())

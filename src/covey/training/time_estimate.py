"""Estimate of a run's duration before its first sample, from the measured rates of matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from covey.config.methods import EXAMPLE_SAMPLERS
from covey.insight.forecast import Workload, evaluations_of
from covey.learner.memory import shape_of
from covey.models.kernels.build import tested_kernels
from covey.sampling.prompts import EncodedProblem
from covey.system.processes import world_size
from covey.system.text import duration
from covey.training.run import Run

SAMPLING_EFFICIENCY = 0.6
UPDATE_EFFICIENCY = 0.55
"""Fractions of the rate of products alone that sampling and updates reach with a model of 135M parameters."""
MIN_PRINTED_SECONDS = 60.0
"""Seconds below which no estimate is printed. With tiny models other work takes longer than products."""


class TokenCost(NamedTuple):
    """Seconds that all threads together take for one token, on a machine that does nothing else."""

    prompt: float
    """A token that is read while sampling."""
    sampled: float
    trained: float
    """A token of an update, forward and backward."""


def token_cost(run: Run) -> TokenCost | None:
    """Return what a token costs by the measured rates of products; None where other code computes it."""
    policy = run.learner.network.unsharded
    library = tested_kernels() if policy.decoder is not None and policy.decoder.all_compiled else None
    if library is None or not library.trial.rates:
        return None
    shape = shape_of(policy)
    threads = torch.get_num_threads() * world_size()
    # kind of product -> GFLOP/s of one thread, ours and torch's.
    rates = library.trial.rates["mixed" if policy.rounds else str(policy.model.dtype).removeprefix("torch.")]
    # A product of a token with all weights takes two operations a weight.
    seconds = {kind: 2e-9 * shape.parameters / own_rate / threads for kind, (own_rate, _) in rates.items()}
    gradient = seconds["weights"] * shape.trained / shape.parameters
    return TokenCost(
        seconds["forward"] / SAMPLING_EFFICIENCY,
        seconds["decode"] / SAMPLING_EFFICIENCY,
        (seconds["forward"] + seconds["inputs"] + gradient) / UPDATE_EFFICIENCY,
    )


def step_seconds(run: Run, cost: TokenCost) -> float:
    """Return the seconds of a training step in which no completion ends before ``rollout.max_tokens``."""
    config = run.resolved.config
    prompt_tokens = mean_tokens(run.train_set)
    if config.method != "rl" and config.method not in EXAMPLE_SAMPLERS:
        return config.train.batch_size * prompt_tokens * cost.trained
    longest = config.rollout.max_tokens
    work = Workload.of(config, run.resolved.algorithm, 0.0, longest)
    prompts = work.completions / config.rollout.group_size * prompt_tokens
    sampling = prompts * cost.prompt + work.completions * longest * cost.sampled
    updating = (prompts + work.trained * longest) * cost.trained if config.method == "rl" else 0.0
    return sampling + updating


def hours_line(run: Run) -> str:
    """Return a line on the longest time that the remaining steps and evaluations take; empty if unknown.

    It is known where compiled operations do the work, for a machine that does nothing else.
    """
    cost = token_cost(run)
    if cost is None:
        return ""
    config = run.resolved.config
    step = step_seconds(run, cost)
    done_steps = run.state.step
    remaining = config.train.steps - done_steps
    problems = run.test_set if run.evaluates else []
    evaluations, completions = evaluations_of(config, len(problems))
    # A resumed run has made some of the evaluations already.
    if done_steps and evaluations:
        evaluations -= 1 + (done_steps // config.eval.every if config.eval.every else 0)
    # Each problem is read twice: for its samples, and for its greedy completion.
    read = 2 * completions / (config.eval.samples + 1) * mean_tokens(problems)
    evaluation = read * cost.prompt + completions * config.rollout.max_tokens * cost.sampled
    total = remaining * step + evaluations * evaluation
    if total < MIN_PRINTED_SECONDS:
        return ""
    besides = f" and {evaluations} evaluations{_each(evaluation)}" if evaluations else ""
    return (
        f"estimated time: at most about {duration(total)}: {remaining} steps{_each(step)}{besides}, on a "
        "machine that does nothing else"
    )


def _each(seconds: float) -> str:
    """Return the duration of one of them in words, if that is at least a second."""
    return f" of {duration(seconds)}" if seconds >= 1 else ""


def mean_tokens(rows: Sequence[EncodedProblem]) -> float:
    """Return the mean tokens of a row, its answers included; 0 without rows."""
    tokens = sum(len(r.tokens) + sum(len(a.tokens) for a in r.answers) for r in rows)
    return tokens / max(len(rows), 1)

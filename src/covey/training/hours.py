"""How long a run will take, said before its first sample: from the measured rates of matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from covey.config.methods import COLLECTS
from covey.insight.forecast import Workload, evaluations_of
from covey.learner.memory import shape_of
from covey.models.kernels.build import tested_kernels
from covey.sampling.prompts import Prompted
from covey.system.console import duration
from covey.system.processes import size
from covey.training.run import Run

SAMPLING, UPDATING = 0.6, 0.55
"""Shares of the rate of products alone that sampling and updates reach with a model of 135M parameters."""
WORTH_A_LINE = 60.0
"""Seconds below which nothing is said. With tiny models other work takes longer than products."""


def hours_line(run: Run) -> str:
    """Say how long the remaining steps and evaluations take at most; empty where that is not known.

    It is known where compiled operations do the work, for a machine that does nothing else. No completion is
    taken to end before ``rollout.max_tokens``.
    """
    config, policy = run.loaded.config, run.learner.policy.whole
    library = tested_kernels() if policy.decoder is not None and policy.decoder.all_compiled else None
    if library is None or not library.trial.rates:
        return ""
    shape = shape_of(policy)
    numbers = "mixed" if policy.rounds else str(policy.model.dtype).removeprefix("torch.")
    # kind -> GFLOP/s of one thread, ours and torch's.
    rates = library.trial.rates[numbers]
    threads = torch.get_num_threads() * size()
    # Seconds for the products of one token with all weights, by kind.
    a_token = {kind: 2e-9 * shape.parameters / ours / threads for kind, (ours, _) in rates.items()}
    longest = config.rollout.max_tokens

    def sampling(prompts: float, completions: float) -> float:
        return (prompts * a_token["forward"] + completions * longest * a_token["decode"]) / SAMPLING

    gradient = a_token["weights"] * shape.trained / shape.parameters
    learning = (a_token["forward"] + a_token["inputs"] + gradient) / UPDATING
    own = mean_tokens(run.train_set)
    if config.method == "rl" or config.method in COLLECTS:
        work = Workload.of(config, run.loaded.algorithm, 0.0, longest)
        groups = work.completions / config.rollout.group_size
        step = sampling(groups * own, work.completions)
        if config.method == "rl":
            step += (groups * own + work.trained * longest) * learning
    else:
        step = config.train.batch_size * own * learning
    left, now = config.train.steps - run.state.step, run.state.step
    evaluations, completions = evaluations_of(config, len(run.test_set))
    if now and evaluations:
        evaluations -= 1 + (now // config.eval.every if config.eval.every else 0)
    problems = completions / (config.eval.samples + 1)
    # Each is prefilled twice: once for its samples, once for its greedy completion.
    evaluation = sampling(2 * problems * mean_tokens(run.test_set), completions)
    total = left * step + evaluations * evaluation
    if total < WORTH_A_LINE:
        return ""
    besides = f" and {evaluations} evaluations{_each(evaluation)}" if evaluations else ""
    return (
        f"estimated time: at most about {duration(total)}: {left} steps{_each(step)}{besides}, on a "
        "machine that does nothing else"
    )


def _each(seconds: float) -> str:
    """Say how long one of them takes, if that is a second at least."""
    return f" of {duration(seconds)}" if seconds >= 1 else ""


def mean_tokens(rows: Sequence[Prompted]) -> float:
    """Return the mean tokens of a row, its answers included; 0 without rows."""
    tokens = sum(len(r.tokens) + sum(len(a.tokens) for a in r.answers) for r in rows)
    return tokens / max(len(rows), 1)

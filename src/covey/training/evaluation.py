"""Evaluation: held-out accuracy and reward, of greedy and of sampled completions."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np

from covey.config.load import ResolvedConfig
from covey.rewards.contract import Reward
from covey.rewards.groups import sums_steps, with_credit
from covey.rewards.reading import ReplyReader
from covey.rewards.scorer import Rewards, Scorer
from covey.rng import key
from covey.rollouts.groups import OnProgress, sampling_params, score_all
from covey.rollouts.learned import is_learned, weights_identity
from covey.runs.estimates import Basis, Evaluation
from covey.runs.journal import Journal
from covey.runs.sources import code_of
from covey.sampling.base import Sampler, SamplingParams
from covey.sampling.prompts import EncodedProblem
from covey.system.processes import on_rank_zero
from covey.types import Completion, Credit, Group, Problem
from covey_verify.extract import Rule, extract


@dataclass(frozen=True)
class Evaluator:
    """Measures a run's policy. The same problems are taken each time, so that two evaluations compare."""

    resolved: ResolvedConfig
    test_set: Sequence[EncodedProblem]
    sampler: Sampler
    rewards: Rewards
    journal: Journal
    on_sample: Callable[..., None]
    """Called with the numbers of finished and of all completions, and with ``what`` is being done."""

    @property
    def spare_problems(self) -> Sequence[EncodedProblem]:
        """Held-out problems that no evaluation during training uses, as many as one evaluation has."""
        count = self.resolved.config.eval.problems
        return self.test_set[count : 2 * count]

    def measure(self, problems: Sequence[EncodedProblem]) -> Evaluation:
        """Measure accuracy on some problems now."""
        self.journal.console.show_work("evaluating")
        with self.journal.clock("eval"):
            progress = partial(self.on_sample, what="evaluating")
            return evaluate_by(self.resolved, problems, self.sampler, self.rewards, progress)

    def at(self, step: int) -> Evaluation:
        """Return held-out accuracy at this step, measured and logged now or read from the log."""
        for record in on_rank_zero(lambda: self.journal.folder.read("evals.jsonl")):
            if record["step"] == step:
                return Evaluation.from_record(record)
        evaluation = self.measure(self.test_set[: self.resolved.config.eval.problems])
        self.journal.log_evaluation(step, evaluation)
        return evaluation


def evaluate_by(
    resolved: ResolvedConfig,
    problems: Sequence[EncodedProblem],
    sampler: Sampler,
    rewards: Rewards,
    progress: OnProgress,
) -> Evaluation:
    """Sample and score problems by a config's settings."""
    config = resolved.config
    return evaluate(
        problems,
        sampler,
        rewards,
        sampling_params(config.rollout),
        samples=config.eval.samples,
        seed=config.seed,
        progress=progress,
        credit=resolved.credit,
    )


def evaluate(
    problems: Sequence[EncodedProblem],
    sampler: Sampler,
    rewards: Rewards,
    params: SamplingParams,
    samples: int,
    seed: int,
    progress: OnProgress,
    credit: Credit = "completion",
) -> Evaluation:
    """Sample each problem greedily and ``samples`` times. The verdict above 1/2 means correct.

    ``credit``: the unit that is trained on, so that a reward here is what training calls one. The draws are
    keyed by seed and problem alone, so two policies get the same random numbers.
    """
    verdict = rewards.verdict
    requests = [p.request([key(seed, "eval", p.problem.id, s) for s in range(samples)]) for p in problems]
    # One stream, hence one completion; greedy decoding draws nothing from it.
    greedy_requests = [replace(r, streams=r.streams[:1], greedy=True) for r in requests]
    # All in one call, so that the sampler stays full, and side by side, so that it reads each prompt once.
    pairs = [request for pair in zip(requests, greedy_requests, strict=True) for request in pair]
    groups = score_all(pairs, sampler, params, Scorer(rewards), progress)
    sampled = [with_credit(group, credit) for group in groups[::2]]
    greedy = groups[1::2]
    return Evaluation(
        greedy=np.array([bool(g.correct[0]) for g in greedy]),
        correct=np.array([int(g.correct.sum()) for g in sampled]),
        majority=np.array([majority(g, rewards) for g in sampled]),
        reward=np.array([g.rewards[g.scorable].mean() if g.scorable.any() else np.nan for g in sampled]),
        samples=samples,
        verdict=verdict.name,
        basis=basis_of(problems, rewards, any(sums_steps(group, credit) for group in sampled)),
    )


def basis_of(problems: Sequence[EncodedProblem], rewards: Rewards, by_steps: bool = False) -> Basis:
    """Return hashes of verdict, rewards and problems: equal if two evaluations measure the same.

    ``by_steps``: a reward is the sum of its steps.
    """
    weighed = sorted((_identity(r), r.weight, r.gated_by or "") for r in rewards)
    rewarded = [weighed, "by steps"] if by_steps else weighed
    contents = [[p.problem.prompt, {k: str(v) for k, v in p.problem.columns.items()}] for p in problems]
    hashes = tuple(_hash(content)[:8] for content in contents)
    return Basis(_identity(rewards.verdict), _hash(rewarded), hashes)


def _identity(reward: Reward) -> str:
    """Hash what defines a reward: its name, its settings, a user's source code, a model's weights."""
    settings = reward.plain_settings
    if is_learned(reward):
        settings["model"] = weights_identity(reward)
    folder = Path(reward.origin.folder) if reward.origin else Path()
    return _hash([reward.name, settings, code_of(reward.function, folder)])


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def majority(group: Group, rewards: Rewards) -> bool:
    """Whether the most frequent answer is correct. Ties go to the answer that was given first."""
    parameter = rewards.verdict.parameters.get("rule")
    rule = rewards.verdict.settings.get("rule", parameter.default if parameter else None)
    answers = [_answer(c, group.problem, rule, rewards.reader) for c in group.completions]
    votes = Counter(a for a in answers if a is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    # Completions with the same answer usually have the same verdict; that of the first one counts.
    return bool(group.correct[answers.index(winner)])


def _answer(completion: Completion, problem: Problem, rule: object, reader: ReplyReader) -> str | None:
    """Return a completion's vote: its answer by the verdict's rule, else all text after its thoughts.

    None if there is no answer, as when the thoughts never end. Thoughts are found by the template's own
    marks, and are open from the first token on if the prompt opens them.
    """
    reply = reader.read(problem, completion)
    # A verdict of the user's own may have a setting of that name with other values.
    chosen: Rule = next((known for known in get_args(Rule) if known == rule), "whole")
    return extract(reply.tagged.text, chosen, reply.tagged_turns)

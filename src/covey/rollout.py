"""Problems -> scored groups: what to sample next, in which order, and which groups to keep.

The position in the data is one number, the cursor; the order of every epoch and every random draw
follow from the seed, so a run that resumes at a cursor continues exactly as it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count

import numpy as np
import torch

from covey.config.schema import Rollout
from covey.continuations import Cut, with_segments
from covey.errors import DataError
from covey.objective.advantages import running_means
from covey.objective.algorithms import Algorithm
from covey.objective.bound import setting_defaults
from covey.objective.credit import segment_difference
from covey.objective.data import FilterData
from covey.processes import by_first, first, gather, interleaved, mine, shared, size
from covey.prompts import Prompted
from covey.rewards.audit import ask_canaries, count_failures, paid_elsewhere
from covey.rewards.base import Rewards
from covey.rewards.groups import credited, with_label_noise
from covey.rewards.scorer import GroupScoring, Scorer, ScoringStats
from covey.rng import key, permutation
from covey.sampling.base import Request, Sampler, SamplingParams
from covey.tasks.difficulty import Difficulty, Memory, allocate
from covey.types import Group, Problem

Progress = Callable[[int, int], None]
"""Told (completions done, completions asked for); may raise to stop."""


@dataclass(frozen=True)
class Position:
    """Where the data is after a batch, and what was counted up to it. A checkpoint holds it as JSON."""

    cursor: int = 0
    """Problems taken from the data, epoch after epoch."""
    difficulty: Memory = field(default_factory=dict)
    """``Difficulty.state``, where sampling follows it."""
    unjudged: Sequence[tuple[int, int]] = ()
    """Failures and scores of the last steps."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """How often in a row a reward has refused a correct canary."""
    means: Mapping[str, float] = field(default_factory=dict)
    """Running means of rewards, by role, for an estimator whose baseline they are."""


@dataclass(frozen=True)
class RolloutBatch:
    """The groups of one training step, and all that sampling them has changed."""

    groups: list[Group]
    """To be trained on."""
    filtered: list[Group]
    """Sampled and scored, but left out by the algorithm's filter."""
    position: Position
    """Where the data is after this batch: what ``Rollouts.after`` continues from."""
    version: int
    """Optimizer steps that the sampling policy had seen."""
    scoring: ScoringStats
    """What the reward functions took and logged."""
    metrics: Mapping[str, float]
    """What was counted on the way."""


def sampling_params(rollout: Rollout) -> SamplingParams:
    """How the config wants completions drawn."""
    return SamplingParams(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.stop)


class Rollouts:
    """Samples and scores groups from a list of problems, epoch after epoch."""

    def __init__(
        self,
        problems: Sequence[Prompted],
        sampler: Sampler,
        rewards: Rewards,
        rollout: Rollout,
        algorithm: Algorithm,
        seed: int,
    ) -> None:
        self.problems, self.sampler, self.rewards = problems, sampler, rewards
        self.rollout, self.algorithm, self.seed = rollout, algorithm, seed
        self._order = lru_cache(2)(lambda epoch: permutation(key(seed, "order", epoch), len(problems)))

    @property
    def _remembers(self) -> bool:
        """Whether what is sampled follows from how hard problems were."""
        rollout = self.rollout
        return rollout.curriculum != "off" or rollout.adapt_group_size or rollout.retire_after > 0

    def after(self, step: int, position: Position, progress: Progress) -> Iterator[RolloutBatch]:
        """The batches of this step and the later ones; ``position`` is that of the batch before.

        A batch that is not finished leaves no trace: what it would have changed travels with it.
        """
        difficulty = Difficulty(len(self.problems))
        difficulty.load(position.difficulty)
        if self.rollout.prepass and position == Position():
            self._measure(difficulty, progress)
        for number in count(step):
            batch = self._sample(number, position, difficulty, progress)
            position = batch.position
            yield batch

    def _measure(self, difficulty: Difficulty, progress: Progress) -> None:
        """Sample every problem before the first step, so that its pass rate is known."""
        scorer, params = Scorer(self.rewards), sampling_params(self.rollout)
        requests = [
            Request(
                p.tokens, [key(self.seed, "prepass", p.problem.id, n) for n in range(self.rollout.prepass)]
            )
            for p in self.problems
        ]
        groups = score_all(self.problems, requests, self.sampler, params, scorer, progress)
        for index, group in enumerate(groups):
            difficulty.update(index, group.pass_rate)

    def _sample(
        self, step: int, position: Position, difficulty: Difficulty, progress: Progress
    ) -> RolloutBatch:
        """The groups of a step. Filtered ones are replaced in at most ``max_resampling_rounds`` rounds."""
        wanted, cursor = self.rollout.prompts_per_step, position.cursor
        scorer = Scorer(self.rewards, step)
        seen: dict[int, Group] = {}
        kept: list[Group] = []
        filtered: list[Group] = []
        used, refills = 0, -1
        while len(kept) < wanted and refills < self.rollout.max_resampling_rounds:
            left = wanted - len(kept)
            chosen, passed = self._choose(step, cursor, used, left, list(seen), difficulty)
            groups = self._round(step, chosen, difficulty, scorer, progress)
            used, refills = used + passed, refills + 1
            for (index, _), group in zip(chosen, groups, strict=True):
                seen[index] = group
                (kept if self._wanted(group) else filtered).append(group)
        kept, means = self._with_running_means(kept, position.means)
        groups = [*kept, *filtered]
        asked = partial(ask_canaries, scorer, groups[step % len(groups)].problem, position.refused)
        refused = by_first(asked)
        elsewhere = by_first(partial(paid_elsewhere, scorer, groups))
        stats = ScoringStats.summed(gather(scorer.stats))
        unjudged = count_failures(position.unjudged, groups, self.rewards.max_infra)
        for index, group in seen.items():
            difficulty.update(index, group.pass_rate)
        metrics = {
            "rollout/resampling_rounds": float(refills),
            "rollout/filtered": float(len(filtered)),
            "rollout/reward_calls": float(stats.calls),
            "rollout/scored": float(stats.completions),
            **_kept_tokens(groups),
            **elsewhere,
            **(difficulty.metrics() if self._remembers else {}),
        }
        remembered = difficulty.state() if self._remembers else {}
        after = Position(cursor + used, remembered, unjudged, refused, means)
        return RolloutBatch(kept, filtered, after, self.sampler.version, stats, metrics)

    def _choose(
        self, step: int, cursor: int, used: int, wanted: int, seen: Sequence[int], difficulty: Difficulty
    ) -> tuple[list[tuple[int, int]], int]:
        """The next problems, (number, epoch) each, and how many were passed with those that are retired.

        In the epoch's order, or drawn with pass rates near 1/2.
        """
        retired = difficulty.retired(self.rollout.retire_after)
        if self.rollout.curriculum == "frontier":
            stream = key(self.seed, "frontier", step, used)
            without = {*seen, *map(int, np.flatnonzero(retired))}
            drawn = difficulty.choose(stream, wanted, without=list(without))
            return [(index, step) for index in drawn], len(drawn)
        chosen: list[tuple[int, int]] = []
        passed = 0
        while len(chosen) < wanted:
            epoch, place = divmod(cursor + used + passed, len(self.problems))
            index = int(self._order(epoch)[place])
            chosen += [] if retired[index] else [(index, epoch)]
            passed += 1
        return chosen, passed

    def _with_running_means(
        self, groups: list[Group], means: Mapping[str, float]
    ) -> tuple[list[Group], Mapping[str, float]]:
        """Groups with the running mean before each completion, where the estimator's baseline it is."""
        if "running_mean" not in self.algorithm.needs:
            return groups, means
        settings = self.algorithm.advantage.all_settings
        decay, by = settings.get("decay", 0.95), settings.get("by")
        now, found = dict(means), []
        for group in groups:
            if by is not None and by not in group.problem.columns:
                raise DataError(
                    f"{group.problem.id}: no column {by!r}, which algorithm.advantage.by names; write "
                    f"data.columns: {{{by}: ...}} or leave it out"
                )
            role = "" if by is None else str(group.problem.columns[by])
            before, now[role] = running_means(torch.from_numpy(group.rewards), now.get(role, 0.0), decay)
            found.append(replace(group, running_mean=before.numpy()))
        return found, now

    def _wanted(self, group: Group) -> bool:
        known = group.scorable
        if not known.any():
            return False
        rewards, correct = (torch.from_numpy(values[known]) for values in (group.rewards, group.correct))
        view = FilterData(rewards, correct, group.dead)
        return self.algorithm.filter is None or self.algorithm.filter(view)

    def _sizes(self, indices: list[int], difficulty: Difficulty) -> list[int]:
        size = self.rollout.group_size
        if not self.rollout.adapt_group_size:
            return [size] * len(indices)
        return allocate(difficulty.rates[indices].tolist(), size * len(indices), most=8 * size)

    def _round(
        self,
        step: int,
        chosen: Sequence[tuple[int, int]],
        difficulty: Difficulty,
        scorer: Scorer,
        progress: Progress,
    ) -> list[Group]:
        """Sample and score some problems, (number, epoch) each."""
        problems, requests = [], []
        sizes = self._sizes([index for index, _ in chosen], difficulty)
        for (index, epoch), samples in zip(chosen, sizes, strict=True):
            prompted = self.problems[index]
            identity = (self.seed, "rollout", step, prompted.problem.id, epoch)
            problems.append(prompted)
            requests.append(Request(prompted.tokens, [key(*identity, sample) for sample in range(samples)]))
        params = sampling_params(self.rollout)
        groups = self._scored(problems, requests, params, scorer, progress)
        if "greedy_reward" in self.algorithm.needs:
            alone = [replace(r, streams=[key(r.streams[0], "greedy")]) for r in requests]
            greedy = self._scored(problems, alone, replace(params, temperature=0.0), scorer, progress)
            groups = [
                replace(g, greedy_reward=float(b.rewards[0])) for g, b in zip(groups, greedy, strict=True)
            ]
        if "segments" in self.algorithm.needs:

            def stream(cut: Cut, number: int) -> int:
                return key(requests[cut.group].streams[cut.sample], "continue", cut.end, number)

            score = partial(score_all, scorer=scorer, progress=progress)
            settings = {**setting_defaults(segment_difference), **self.algorithm.advantage.all_settings}
            decode = self.rewards.decode
            groups = with_segments(groups, settings, self.sampler, params, decode, stream, score)
        return groups

    def _scored(
        self,
        problems: Sequence[Prompted],
        requests: Sequence[Request],
        params: SamplingParams,
        scorer: Scorer,
        progress: Progress,
    ) -> list[Group]:
        groups = score_all(problems, requests, self.sampler, params, scorer, progress)
        noise, rewards = self.rewards.noise, self.rewards.rewards
        if noise:
            pairs = zip(groups, requests, strict=True)
            groups = [with_label_noise(group, rewards, noise, request.streams) for group, request in pairs]
        return [credited(group, self.algorithm.credit) for group in groups]


def _kept_tokens(groups: Sequence[Group]) -> dict[str, float]:
    """How many tokens could be drawn on average, where top_p or top_k left some out."""
    masked = [
        (c.sampling_mask, c.drawn) for g in groups for c in g.completions if c.sampling_mask is not None
    ]
    kept = [np.diff(mask.ends, prepend=0)[drawn] for mask, drawn in masked]
    places = sum(map(len, kept))
    return {"rollout/kept_tokens": sum(int(k.sum()) for k in kept) / places} if places else {}


def score_all(
    problems: Sequence[Prompted],
    requests: Sequence[Request],
    sampler: Sampler,
    params: SamplingParams,
    scorer: Scorer,
    progress: Progress,
) -> list[Group]:
    """Sample all requests; judge each completion as soon as it ends, while others are generated.

    Results are in the order of the requests, in whatever order completions end. Each of several processes
    samples and judges its share, and gets the groups of the others.
    """
    everybody = size() == 1 or sampler.shares
    numbers = mine(len(requests)) if everybody else range(len(requests) if first() else 0)

    def ours() -> list[Group]:
        asked = [(problems[n], requests[n]) for n in numbers]
        own_problems, own_requests = [p for p, _ in asked], [r for _, r in asked]
        whole = dict(score_each(own_problems, own_requests, sampler, params, scorer, progress))
        groups = [whole[number].result() for number in range(len(asked))]
        return groups if size() == 1 else [replace(g, problem=NO_PROBLEM) for g in groups]

    found = interleaved(shared(ours))
    return [replace(g, problem=p.problem, prompt=p.tokens) for g, p in zip(found, problems, strict=True)]


NO_PROBLEM = Problem("", "")
"""Stands for a group's problem on its way to other processes, which have it."""


def score_each(
    problems: Sequence[Prompted],
    requests: Sequence[Request],
    sampler: Sampler,
    params: SamplingParams,
    scorer: Scorer,
    progress: Progress,
) -> Iterator[tuple[int, GroupScoring]]:
    """``score_all``, each group with its number as soon as its last completion has ended."""
    sizes = [len(request.streams) for request in requests]
    groups = [scorer.group(p.problem, p.tokens, n) for p, n in zip(problems, sizes, strict=True)]
    if not requests:
        return
    for done, (number, sample, completion) in enumerate(sampler.sample(requests, params), start=1):
        progress(done, sum(sizes))
        groups[number].add(sample, completion)
        if len(groups[number].completions) == sizes[number]:
            yield number, groups[number]

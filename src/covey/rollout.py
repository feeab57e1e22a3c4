"""Problems -> scored groups: what to sample next, in which order, and which groups to keep.

The position in the data is one number, the cursor; the order of every epoch and every random draw
follow from the seed, so a run that resumes at a cursor continues exactly as it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch

from covey.ahead import Ahead, Keeps, kept_or_sampled
from covey.calling.metrics import tool_metrics
from covey.calling.turns import seconds_waited
from covey.config.sampling import Rollout
from covey.continuations import Cut, cutting_of, with_segments
from covey.gathering import Progress, gathered, of_all, score_all, share
from covey.objective.advantages import running_baseline, running_means
from covey.objective.algorithms import Algorithm
from covey.objective.bound import setting_defaults
from covey.objective.data import FilterData
from covey.processes import by_first, gather
from covey.prompts import Prompted
from covey.rewards.audit import ask_canaries, count_failures, paid_elsewhere
from covey.rewards.base import Rewards
from covey.rewards.groups import credited, with_label_noise
from covey.rewards.scorer import GroupScoring, Scorer, ScoringStats
from covey.rng import key, permutation
from covey.sampling.base import Request, Sampler, SamplingParams
from covey.tasks.difficulty import Difficulty, Memory, allocate
from covey.types import Group
from covey_verify.errors import CoveyError, DataError


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
    tool_seconds: float | None = None
    """For which tools were waited for while nothing was sampled, where there are any."""


def sampling_params(rollout: Rollout) -> SamplingParams:
    """How the config wants completions drawn."""
    return SamplingParams(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.stop)


class Begun(NamedTuple):
    """A group whose completions have been drawn; some of them may still be scored."""

    scoring: GroupScoring
    request: Request
    greedy: Begun | None = None
    """The greedy completion of the same problem, for estimators whose baseline it is."""


class Rollouts:
    """Samples and scores groups from a list of problems, epoch after epoch.

    Under ``rollout.staleness`` a thread begins groups before their step: those that a step is certain to take
    at most so many steps later. Which groups a step takes is the same as without: the next ones of the data.
    """

    def __init__(
        self,
        problems: Sequence[Prompted],
        sampler: Sampler,
        rewards: Rewards,
        rollout: Rollout,
        algorithm: Algorithm,
        seed: int,
        steps: int | None = None,
        keeps: Keeps | None = None,
    ) -> None:
        """``steps``: of the whole run, so that nothing is begun for later ones."""
        self.steps, self.keeps = steps, keeps
        self.problems, self.sampler, self.rewards = problems, sampler, rewards
        self.rollout, self.algorithm, self.seed = rollout, algorithm, seed
        self._waited = seconds_waited(sampler)
        self._order = lru_cache(2)(lambda epoch: permutation(key(seed, "order", epoch), len(problems)))

    @property
    def _remembers(self) -> bool:
        """Whether what is sampled follows from how hard problems were."""
        rollout = self.rollout
        return rollout.curriculum != "off" or rollout.adapt_group_size or rollout.retire_after > 0

    def after(self, step: int, position: Position, progress: Progress) -> Generator[RolloutBatch, None, None]:
        """The batches of this step and the later ones; ``position`` is that of the batch before.

        A batch that is not finished leaves no trace: what it would have changed travels with it.
        """
        difficulty = Difficulty(len(self.problems))
        difficulty.load(position.difficulty)
        if self.rollout.prepass and position == Position():
            self._measure(difficulty, progress)
        ahead = Ahead(self._begin_tickets, position.cursor) if self.rollout.staleness else None
        try:
            for number in count(step):
                batch = self._sample(number, position, difficulty, progress, ahead)
                position = batch.position
                yield batch
        finally:
            if ahead is not None:
                ahead.close()

    def _measure(self, difficulty: Difficulty, progress: Progress) -> None:
        """Sample every problem before the first step, so that its pass rate is known."""
        scorer, params = Scorer(self.rewards), sampling_params(self.rollout)
        keys = range(self.rollout.prepass)
        requests = [
            p.request([key(self.seed, "prepass", p.problem.id, n) for n in keys]) for p in self.problems
        ]
        groups = score_all(self.problems, requests, self.sampler, params, scorer, progress)
        for index, group in enumerate(groups):
            difficulty.update(index, group.pass_rate)

    def _sample(
        self,
        step: int,
        position: Position,
        difficulty: Difficulty,
        progress: Progress,
        ahead: Ahead[Begun] | None,
    ) -> RolloutBatch:
        """The groups of a step. Filtered ones are replaced in at most ``max_resampling_rounds`` rounds."""
        self._now = (step, position.cursor)
        if self.keeps is not None:
            self.keeps.passed(*self._now)
        wanted, cursor = self.rollout.prompts_per_step, position.cursor
        scorer = Scorer(self.rewards, step)
        seen: dict[int, Group] = {}
        kept: list[Group] = []
        filtered: list[Group] = []
        used, refills = 0, -1
        while len(kept) < wanted and refills < self.rollout.max_resampling_rounds:
            left = wanted - len(kept)
            chosen, passed = self._choose(step, cursor, used, left, list(seen), difficulty)
            if ahead is None:
                begin = partial(self._round, step, chosen, difficulty, scorer, progress)
            else:
                tickets = range(cursor + used, cursor + used + left)
                until = tickets.stop + self._certain(step) * wanted
                begin = partial(self._taken, ahead, tickets, until, progress)
            groups = self._of_all([self.problems[index] for index, _ in chosen], begin, scorer)
            if (cutting := cutting_of(self.algorithm)) is not None:
                groups = self._with_segments(step, chosen, groups, cutting, scorer, progress)
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
            **_continued(groups),
            **(tool_metrics(groups) if self.rollout.tools is not None else {}),
            **elsewhere,
            **(difficulty.metrics() if self._remembers else {}),
            **(_staleness(kept, self.sampler.version) if ahead is not None else {}),
        }
        self._waited, before = seconds_waited(self.sampler), self._waited
        tool_seconds = self._waited - before if self.rollout.tools is not None else None
        remembered = difficulty.state() if self._remembers else {}
        after = Position(cursor + used, remembered, unjudged, refused, means)
        return RolloutBatch(kept, filtered, after, self.sampler.version, stats, metrics, tool_seconds)

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
            [(index, epoch)] = self._in_order([cursor + used + passed])
            chosen += [] if retired[index] else [(index, epoch)]
            passed += 1
        return chosen, passed

    def _with_running_means(
        self, groups: list[Group], means: Mapping[str, float]
    ) -> tuple[list[Group], Mapping[str, float]]:
        """Groups with the running mean before each completion, where the estimator's baseline it is."""
        if "running_mean" not in self.algorithm.needs:
            return groups, means
        settings = {**setting_defaults(running_baseline), **self.algorithm.advantage.all_settings}
        decay, by = settings["decay"], settings["by"]
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

    def _in_order(self, tickets: Sequence[int]) -> list[tuple[int, int]]:
        """(number, epoch) of the problems at these positions of the data."""
        turns = [divmod(ticket, len(self.problems)) for ticket in tickets]
        return [(int(self._order(epoch)[place]), epoch) for epoch, place in turns]

    def _certain(self, step: int) -> int:
        """For how many steps after this one groups may be begun: each takes ``prompts_per_step`` at least."""
        later = self.rollout.staleness if self.steps is None else self.steps - step - 1
        return max(0, min(self.rollout.staleness, later))

    def _wanted(self, group: Group) -> bool:
        known = group.scorable
        if not known.any():
            return False
        rewards, correct = (torch.from_numpy(values[known]) for values in (group.rewards, group.correct))
        view = FilterData(rewards, correct, group.dead)
        if self.algorithm.filter is None:
            return True
        wanted: object = self.algorithm.filter(view)
        if not isinstance(wanted, bool | np.bool_ | torch.Tensor) or np.asarray(wanted).size != 1:
            raise CoveyError(
                f"algorithm.filter {self.algorithm.filter.name} returns {type(wanted).__name__} "
                f"{str(wanted)[:60]}, not True or False; problem {group.problem.id}"
            )
        return bool(wanted)

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
    ) -> dict[int, Begun]:
        """Sample this process' share of some problems, (number, epoch) each."""
        sizes = self._sizes([index for index, _ in chosen], difficulty)
        asked = share(len(chosen), self.sampler)
        requests = [self._request(chosen[n][0], sizes[n], step, chosen[n][1]) for n in asked]
        problems = [self.problems[chosen[n][0]] for n in asked]
        begun = dict(self._begun(problems, requests, [scorer] * len(asked), progress))
        return {number: begun[place] for place, number in enumerate(asked)}

    def _with_segments(
        self,
        step: int,
        chosen: Sequence[tuple[int, int]],
        groups: Sequence[Group],
        cutting: Mapping[str, Any],
        scorer: Scorer,
        progress: Progress,
    ) -> list[Group]:
        """Groups with what their completions are worth on the way, where the estimator asks for it."""
        pairs = zip(chosen, groups, strict=True)
        requests = [self._request(index, len(g.completions), step, epoch) for (index, epoch), g in pairs]

        def stream(cut: Cut, number: int) -> int:
            return key(requests[cut.group].streams[cut.sample], "continue", cut.end, number)

        score = partial(score_all, scorer=scorer, progress=progress)
        params, decode = sampling_params(self.rollout), self.rewards.decode
        return with_segments(groups, cutting, self.sampler, params, decode, stream, score)

    def _taken(self, ahead: Ahead[Begun], tickets: range, until: int, progress: Progress) -> dict[int, Begun]:
        """The same of those that were begun ahead."""
        own = self._own(tickets)
        begun = zip(own, ahead.take(own, until, progress), strict=True)
        return {ticket - tickets.start: b for ticket, b in begun}

    def _own(self, tickets: range) -> list[int]:
        """Those that this process samples."""
        asked = set(share(tickets.stop, self.sampler))
        return [ticket for ticket in tickets if ticket in asked]

    def _of_all(
        self, problems: Sequence[Prompted], begin: Callable[[], Mapping[int, Begun]], scorer: Scorer
    ) -> list[Group]:
        """The groups of a round, scored; each of several processes has begun some."""
        return of_all(problems, lambda: {n: self._finished(b, scorer) for n, b in begin().items()})

    def _begin_tickets(self, tickets: range, ended: Callable[[], None]) -> Iterator[tuple[int, Begun]]:
        """The same ahead of their step, in the sampling thread: the draws are keyed by problem and epoch."""
        torch.set_num_threads(torch.get_num_threads())  # OpenMP counts for each thread on its own
        (step, cursor), samples, own = self._now, self.rollout.group_size, self._own(tickets)
        chosen = self._in_order(own)
        requests = [self._request(index, samples, epoch) for index, epoch in chosen]
        problems = [self.problems[index] for index, _ in chosen]
        likely = (step + (ticket - cursor) // self.rollout.prompts_per_step for ticket in own)
        scorers = [Scorer(self.rewards, s) for s in likely]
        for number, begun in self._begun(problems, requests, scorers, lambda *_: ended(), own):
            yield own[number], begun

    def _request(self, index: int, samples: int, *when: int) -> Request:
        prompted = self.problems[index]
        *step, epoch = when
        identity: tuple[int | str, ...] = (self.seed, "rollout", *step, prompted.problem.id, epoch)
        return prompted.request([key(*identity, sample) for sample in range(samples)])

    def _begun(
        self,
        problems: Sequence[Prompted],
        requests: Sequence[Request],
        scorers: Sequence[Scorer],
        progress: Progress,
        tickets: Sequence[int] = (),
    ) -> Iterator[tuple[int, Begun]]:
        """Each group with its number once its completions are drawn, and on their way to the rewards."""
        asked, count = list(requests), len(requests)
        if "greedy_reward" in self.algorithm.needs:
            asked += [replace(r, streams=[key(r.streams[0], "greedy")], greedy=True) for r in requests]
            problems, scorers, tickets = [*problems, *problems], [*scorers, *scorers], [*tickets, *tickets]
        rows = zip(scorers, problems, asked, strict=True)
        groups = [scorer.group(p.problem, p.tokens, len(request.streams)) for scorer, p, request in rows]
        params = sampling_params(self.rollout)
        if self.keeps is None or not tickets:
            drawn = self.sampler.sample(asked, params)
        else:
            drawn = kept_or_sampled(self.sampler, self.keeps, tickets, asked, params)
        whole = gathered(groups, drawn, progress)
        if len(asked) == count:
            yield from ((number, Begun(group, asked[number])) for number, group in whole)
            return
        found = dict(whole)
        for n, request in enumerate(requests):
            yield n, Begun(found[n], request, Begun(found[count + n], asked[count + n]))

    def _finished(self, begun: Begun, scorer: Scorer) -> Group:
        """The group with all its scores; what they took is counted in ``scorer``."""
        group, noise = begun.scoring.result(), self.rewards.noise
        baseline = None if begun.greedy is None else self._finished(begun.greedy, begun.scoring.scorer)
        if begun.scoring.scorer is not scorer:
            scorer.include(begun.scoring.scorer.stats)
        if noise:
            group = with_label_noise(group, self.rewards.rewards, noise, begun.request.streams)
        if baseline is not None:
            group = replace(group, greedy_reward=float(baseline.rewards[0]))
        return credited(group, self.algorithm.credit)


def _staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """By how many optimizer steps the weights that drew the tokens are older than those that are trained."""
    completions = [c for g in groups for c in g.completions]
    if not completions:
        return {}
    versions = [c.token_versions[c.drawn] for c in completions]
    behind = version - np.concatenate(versions)
    return {
        "staleness/mean": float(behind.mean()) if len(behind) else 0.0,
        "staleness/max": float(behind.max()) if len(behind) else 0.0,
        "staleness/continued": sum(len(set(v.tolist())) > 1 for v in versions) / len(versions),
    }


def _continued(groups: Sequence[Group]) -> dict[str, float]:
    """How many tokens went into the values of segments, where an estimator asks for these."""
    return {"rollout/continued_tokens": float(sum(g.continued for g in groups))} if groups[0].segments else {}


def _kept_tokens(groups: Sequence[Group]) -> dict[str, float]:
    """How many tokens could be drawn on average, where top_p or top_k left some out."""
    masked = [
        (c.sampling_mask, c.drawn) for g in groups for c in g.completions if c.sampling_mask is not None
    ]
    kept = [np.diff(mask.ends, prepend=0)[drawn] for mask, drawn in masked]
    places = sum(map(len, kept))
    return {"rollout/kept_tokens": sum(int(k.sum()) for k in kept) / places} if places else {}

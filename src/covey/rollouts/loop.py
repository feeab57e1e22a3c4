"""The iterator of rollout batches: choose problems, sample their groups, finish them, and choose again.

The position in the data is one number, the cursor; the order of every epoch and every random draw
follow from the seed, so a run that resumes at a cursor continues exactly as it would have.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from covey.config.sampling import Rollout
from covey.objective.algorithms import Algorithm
from covey.rewards.reward_checks import ask_canaries, count_failures, paid_elsewhere
from covey.rewards.scorer import Rewards, Scorer, ScoringStats
from covey.rng import key
from covey.rollouts.batch import BEGINNING, Position, RolloutBatch
from covey.rollouts.choose import Chooser, ProblemChoice
from covey.rollouts.finish import finish_group, passes_filter, with_running_means
from covey.rollouts.groups import (
    GroupSampler,
    OnProgress,
    gather_groups,
    sampling_params,
    score_all,
    with_greedy_twins,
)
from covey.rollouts.metrics import drawable_tokens, staleness, tool_metrics
from covey.rollouts.segments import Cut, SegmentSettings, with_segments
from covey.rollouts.sources import AheadSource, GroupSource, RequestMaker, SamplingRound, StepSource
from covey.rollouts.store import CompletionStore
from covey.sampling.base import Sampler
from covey.sampling.prompts import EncodedProblem
from covey.sampling.tools.turns import seconds_waited
from covey.system.processes import gather, on_rank_zero
from covey.tasks.difficulty import Difficulty, Memory
from covey.types import Group


@dataclass
class StepGroups:
    """The groups of a step, as its rounds of sampling bring them."""

    kept: list[Group] = field(default_factory=list)
    filtered: list[Group] = field(default_factory=list)
    numbered: list[tuple[int, Group]] = field(default_factory=list)
    """All groups with the numbers of their problems; a step may sample a problem several times."""
    used: int = 0
    """Places of the data that the step has used."""
    rounds: int = 0
    continued_tokens: int = 0
    """Tokens of continuations, which give segments their values."""


class Rollouts:
    """Samples and scores groups from a list of problems, epoch after epoch.

    Under ``rollout.staleness`` a thread samples groups ahead of their step (``sources.py:AheadSource``).
    """

    def __init__(
        self,
        problems: Sequence[EncodedProblem],
        sampler: Sampler,
        rewards: Rewards,
        rollout: Rollout,
        algorithm: Algorithm,
        seed: int,
        steps: int | None = None,
        store: CompletionStore | None = None,
        *,
        first_step: int = 0,
        position: Position = BEGINNING,
        progress: OnProgress = lambda *_: None,
    ) -> None:
        """``steps``: number of steps of the run, beyond which nothing is sampled.

        ``first_step``: the step of the first batch. ``position``: that of the batch before it.
        """
        self.problems = problems
        self.sampler = sampler
        self.rewards = rewards
        self.rollout = rollout
        self.algorithm = algorithm
        self.seed = seed
        self.store = store
        self.chooser = Chooser(len(problems), rollout, seed)
        self.params = sampling_params(rollout)
        group_sampler = GroupSampler(sampler, self.params, store)
        is_twinned = "greedy_reward" in algorithm.needs
        sample_groups = with_greedy_twins(group_sampler) if is_twinned else group_sampler
        self.segments = SegmentSettings.of(algorithm)
        self.progress = progress
        self.position = position
        self.first_step = first_step
        self.difficulty = Difficulty(len(problems))
        self.difficulty.load(position.difficulty)
        self.maker = RequestMaker(problems, seed)
        self.source: GroupSource = StepSource(self.maker, sampler, sample_groups, progress)
        if rollout.staleness:
            self.source = AheadSource(
                self.maker,
                sampler,
                sample_groups,
                progress,
                chooser=self.chooser,
                rewards=rewards,
                rollout=rollout,
                steps=steps,
                cursor=position.cursor,
            )
        self._waited_for_tools = seconds_waited(sampler)

    def batches(self) -> Generator[RolloutBatch, None, None]:
        """Yield the batches of the first step and later ones, once.

        An unfinished batch leaves no trace: all changes are part of the batch.
        """
        # Only a run that begins measures; a resumed one has the rates in its position.
        if self.rollout.prepass and self.position == BEGINNING:
            self._measure()
        try:
            for step in count(self.first_step):
                batch = self._sample(step, self.position)
                self.position = batch.position
                yield batch
        finally:
            self.source.close()

    def _measure(self) -> None:
        """Sample every problem before the first step, so that its pass rate is known."""
        numbers = range(self.rollout.prepass)
        requests = [
            p.request([key(self.seed, "prepass", p.problem.id, n) for n in numbers]) for p in self.problems
        ]
        scorer = Scorer(self.rewards)
        groups = score_all(requests, self.sampler, self.params, scorer, self.progress)
        self._remember(enumerate(groups))

    def _remember(self, groups: Iterable[tuple[int, Group]]) -> None:
        """Record the pass rate of each group with verdicts under the number of its problem."""
        for problem, group in groups:
            if group.verdict_mask.any():
                self.difficulty.update(problem, group.pass_rate)

    def _sample(self, step: int, position: Position) -> RolloutBatch:
        """Sample the batch of a step: its groups, the checks of its rewards and the next position."""
        if self.store is not None:
            self.store.begin_step(step, position.cursor)
        scorer = Scorer(self.rewards, step)
        sampled = self._sample_in_rounds(step, position.cursor, scorer)
        kept, means = with_running_means(sampled.kept, position.means, self.algorithm)
        groups = [*kept, *sampled.filtered]
        # Canaries are made of one problem per step, in turn.
        problem = groups[step % len(groups)].problem
        refused = on_rank_zero(partial(ask_canaries, scorer, problem, position.refused))
        elsewhere = on_rank_zero(partial(paid_elsewhere, scorer, groups))
        # Each process has counted only the groups that it scored.
        stats = ScoringStats.sum_over(gather(scorer.stats))
        unjudged = count_failures(position.unjudged, groups, self.rewards.max_infra)
        # After all rounds: a step's own results do not change its choice of problems.
        self._remember(sampled.numbered)
        metrics = {**self._metrics(sampled, kept, groups, stats), **elsewhere}
        remembered: Memory = {}
        if self.chooser.remembers:
            metrics |= self.difficulty.metrics()
            remembered = self.difficulty.state()
        return RolloutBatch(
            groups=kept,
            filtered=sampled.filtered,
            position=Position(
                cursor=position.cursor + sampled.used,
                difficulty=remembered,
                unjudged=unjudged,
                refused=refused,
                means=means,
            ),
            version=self.sampler.version,
            scoring=stats,
            metrics=metrics,
            tool_seconds=self._tool_seconds(),
        )

    def _metrics(
        self, sampled: StepGroups, kept: Sequence[Group], groups: Sequence[Group], stats: ScoringStats
    ) -> dict[str, float]:
        """Return the metrics of a step's sampling; some exist only with the features that they count."""
        metrics = {
            "rollout/resampling_rounds": float(sampled.rounds - 1),
            "rollout/filtered": float(len(sampled.filtered)),
            "rollout/reward_calls": float(stats.calls),
            "rollout/scored": float(stats.completions),
            **drawable_tokens(groups),
        }
        if "segments" in self.algorithm.needs:
            metrics["rollout/continued_tokens"] = float(sampled.continued_tokens)
        if self.rollout.tools is not None:
            metrics |= tool_metrics(groups)
        if self.rollout.staleness:
            metrics |= staleness(kept, self.sampler.version)
        return metrics

    def _sample_in_rounds(self, step: int, cursor: int, scorer: Scorer) -> StepGroups:
        """Sample until enough groups pass the filter, in at most ``max_resampling_rounds`` more rounds."""
        sampled = StepGroups()
        needed = self.rollout.prompts_per_step
        while len(sampled.kept) < needed and sampled.rounds <= self.rollout.max_resampling_rounds:
            # Only as many as are missing, so that no more groups are sampled than needed.
            missing = needed - len(sampled.kept)
            earlier = {problem for problem, _ in sampled.numbered}
            chosen = self.chooser.choose(step, cursor, sampled.used, missing, earlier, self.difficulty)
            sizes = self.chooser.sizes(chosen.choices, self.difficulty)
            sampling_round = SamplingRound(step, cursor, cursor + sampled.used, chosen.choices, sizes, scorer)
            prompted = [self.problems[choice.problem] for choice in chosen.choices]
            groups = gather_groups(prompted, partial(self._draw_and_score, sampling_round))
            if self.segments is not None:
                groups, tokens = self._with_segments(step, chosen.choices, groups, self.segments, scorer)
                sampled.continued_tokens += tokens
            for choice, group in zip(chosen.choices, groups, strict=True):
                sampled.numbered.append((choice.problem, group))
                passes = passes_filter(group, self.algorithm)
                (sampled.kept if passes else sampled.filtered).append(group)
            sampled.used += chosen.passed
            sampled.rounds += 1
        return sampled

    def _draw_and_score(self, sampling_round: SamplingRound) -> dict[int, Group]:
        """Return this process' groups of a round with their scores, by number in the round."""
        credit = self.algorithm.credit
        return {
            n: finish_group(group, sampling_round.scorer, credit)
            for n, group in self.source.draw(sampling_round).items()
        }

    def _with_segments(
        self,
        step: int,
        choices: Sequence[ProblemChoice],
        groups: Sequence[Group],
        settings: SegmentSettings,
        scorer: Scorer,
    ) -> tuple[list[Group], int]:
        """Return groups with the value of each segment of their completions, and the tokens it took."""
        pairs = zip(choices, groups, strict=True)
        requests = [self.maker.request(choice, len(group.completions), step) for choice, group in pairs]

        def stream(cut: Cut, number: int) -> int:
            return key(requests[cut.group].streams[cut.sample], "continue", cut.end, number)

        score = partial(score_all, scorer=scorer, progress=self.progress)
        return with_segments(
            groups, settings, self.sampler, self.params, self.rewards.reader.decode, stream, score
        )

    def _tool_seconds(self) -> float | None:
        """Return the seconds of waiting for tools since the last step; None without tools."""
        before = self._waited_for_tools
        self._waited_for_tools = seconds_waited(self.sampler)
        return self._waited_for_tools - before if self.rollout.tools is not None else None

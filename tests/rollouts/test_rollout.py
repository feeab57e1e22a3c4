"""Rollouts: order of problems, refills, scoring as results come in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tests.fakes import ScriptedSampler, completion, prompted
from tests.rollouts.small_rollouts import rollouts

from covey.config.algorithm import build_algorithm
from covey.config.load import load_config
from covey.config.sampling import Rollout
from covey.rewards.contract import Reward
from covey.rewards.loading import load_rewards
from covey.rewards.reading import ReplyReader
from covey.rewards.reward_checks import MAX_REFUSALS
from covey.rewards.scorer import Rewards
from covey.rollouts.batch import Position, RolloutBatch
from covey.rollouts.loop import Rollouts
from covey.rollouts.metrics import staleness
from covey.rollouts.segments import Cut, PrefixSampler, SegmentSettings, with_segments
from covey.sampling.base import Request, SampledCompletion, SamplingParams
from covey.tasks.difficulty import Difficulty
from covey.types import Completion, Group, Problem, Provenance
from covey_verify.contract import reward as declared
from covey_verify.errors import ConfigError, CoveyError, DataError, RewardError


def first(source: Rollouts) -> RolloutBatch:
    return next(source.batches())


def half_right(prompt: np.ndarray, stream: int) -> str:
    return str(prompt[0] - 1) if stream % 2 else "wrong"


def test_every_problem_is_used_once_per_epoch_in_a_new_order() -> None:
    source = rollouts(ScriptedSampler(half_right), prompted(6), algorithm="grpo")
    ids = [g.problem.id for batch in islice(source.batches(), 4) for g in batch.groups]
    assert sorted(ids[:6]) == sorted(ids[6:]) == [f"p{i}" for i in range(6)]
    assert ids[:6] != ids[6:]


def test_a_batch_carries_the_position_that_the_next_one_continues_from() -> None:
    sampler, problems = ScriptedSampler(half_right), prompted(5)
    *_, third, then = islice(rollouts(sampler, problems).batches(), 4)
    again = next(rollouts(sampler, problems, first_step=3, position=third.position).batches())
    assert [g.problem.id for g in then.groups] == [g.problem.id for g in again.groups]
    assert then.position == again.position
    for a, b in zip(then.groups, again.groups, strict=True):
        np.testing.assert_array_equal(a.rewards, b.rewards)


def test_keys_of_draws_never_repeat() -> None:
    sampler = ScriptedSampler(lambda *_: "wrong")
    source = rollouts(sampler, prompted(2), prompts_per_step=5, max_resampling_rounds=2)
    list(islice(source.batches(), 4))
    assert len(set(sampler.streams)) == len(sampler.streams) > 100


def test_dead_groups_are_replaced_in_bounded_rounds() -> None:
    # Problems 0..4 are never solved, 5..9 half of the time.
    def answer(prompt: np.ndarray, stream: int) -> str:
        return half_right(prompt, stream) if prompt[0] > 5 else "wrong"

    batch = first(rollouts(ScriptedSampler(answer), prompted(10), group_size=16, max_resampling_rounds=8))
    assert len(batch.groups) == 3
    assert not any(g.dead for g in batch.groups)
    assert all(g.dead for g in batch.filtered)
    hopeless = first(rollouts(ScriptedSampler(lambda *_: "wrong"), prompted(10), max_resampling_rounds=2))
    assert hopeless.groups == []
    assert hopeless.metrics["rollout/resampling_rounds"] == 2
    assert len(hopeless.filtered) == 9


def test_without_a_filter_dead_groups_are_kept() -> None:
    batch = first(rollouts(ScriptedSampler(lambda *_: "wrong"), prompted(4), algorithm="grpo"))
    assert len(batch.groups) == 3
    assert batch.metrics["rollout/resampling_rounds"] == 0


def test_a_stop_in_the_middle_leaves_no_trace() -> None:
    requests = [2]

    def stop(done: int, total: int) -> None:
        if done in requests:
            requests.clear()
            raise KeyboardInterrupt

    source = rollouts(ScriptedSampler(half_right), prompted(5), progress=stop)
    other = rollouts(ScriptedSampler(half_right), prompted(5))
    with pytest.raises(KeyboardInterrupt):
        next(source.batches())
    batches = (next(r.batches()) for r in (source, other))
    first, fresh = ([g.problem.id for g in batch.groups] for batch in batches)
    assert first == fresh


def test_remax_scores_a_greedy_completion_too() -> None:
    source = rollouts(ScriptedSampler(lambda p, _: str(p[0] - 1)), prompted(3), algorithm="remax")
    batch = first(source)
    assert [g.baselines.greedy_reward for g in batch.groups] == [1.0, 1.0, 1.0]


def test_the_greedy_baseline_is_drawn_greedily_and_once_per_problem() -> None:
    sampler = ScriptedSampler(lambda p, _: str(p[0] - 1) if sampler.greedy else "wrong")
    batch = first(rollouts(sampler, prompted(3), algorithm="remax"))
    assert [g.baselines.greedy_reward for g in batch.groups] == [1.0, 1.0, 1.0]
    assert [g.rewards.tolist() for g in batch.groups] == [[0.0] * 4] * 3
    assert len(sampler.streams) == 3 * 4 + 3


def test_the_cursor_counts_problems_that_replaced_others() -> None:
    # Every other problem is never solved, so every step takes more problems than it keeps.
    def answer(prompt: np.ndarray, stream: int) -> str:
        return half_right(prompt, stream) if prompt[0] % 2 else "wrong"

    source = rollouts(ScriptedSampler(answer), prompted(12), group_size=16, max_resampling_rounds=8)
    taken: list[str] = []
    for batch in islice(source.batches(), 2):
        taken += [g.problem.id for g in (*batch.groups, *batch.filtered)]
        assert batch.position.cursor == len(taken)
    assert batch.filtered
    assert len(set(taken[:12])) == min(len(taken), 12)


@pytest.mark.parametrize(
    ("name", "paid"), [("informative", 0.0), ({"name": "pass_rate_band", "low": 0.2, "high": 0.8}, 1.0)]
)
def test_a_filter_does_not_see_what_could_not_be_judged(name: object, paid: float) -> None:
    """All that was judged got the same; what was not is no other reward."""

    def judged(completion: str) -> float | None:
        return None if completion == "unclear" else paid

    answer = ScriptedSampler(lambda _, stream: "unclear" if stream % 2 else "wrong")
    config = Rollout(group_size=8, prompts_per_step=3, max_tokens=8, max_resampling_rounds=0)
    rewards, algorithm = load_rewards([judged], None), build_algorithm({"name": "grpo", "filter": name})
    batch = first(Rollouts(prompted(3), answer, rewards, config, algorithm, 0))
    assert any(0 < g.scorable.sum() < 8 for g in batch.filtered)
    assert batch.groups == []


@pytest.mark.parametrize("answer", [lambda rewards: rewards > 0, lambda rewards: "no", lambda rewards: None])
def test_a_filter_that_does_not_say_yes_or_no_is_named(answer) -> None:
    rewards, algorithm = (
        load_rewards(["exact_answer"], None),
        build_algorithm({"name": "grpo", "filter": answer}),
    )
    config = Rollout(group_size=4, prompts_per_step=2, max_tokens=8)
    source = Rollouts(prompted(3), ScriptedSampler(half_right), rewards, config, algorithm, 0)
    with pytest.raises(CoveyError, match=r"algorithm\.filter .*not True or False; problem p"):
        first(source)


def test_problems_that_were_rejected_are_remembered_as_hard() -> None:
    source = rollouts(
        ScriptedSampler(lambda *_: "wrong"), prompted(3), curriculum="frontier", max_resampling_rounds=0
    )
    batch = first(source)
    assert len(batch.filtered) == 3
    memory = Difficulty(3)
    memory.load(batch.position.difficulty)
    assert memory.rates.tolist() == [0.0, 0.0, 0.0]


def test_every_group_of_a_problem_is_remembered_also_if_a_step_samples_it_again() -> None:
    """Two problems and three groups a step: one is sampled twice, and each of these groups counts."""
    source = rollouts(ScriptedSampler(half_right), prompted(2), "grpo", adapt_group_size=True)
    batch = first(source)
    tried = [times for _, times, _ in batch.position.difficulty.values()]
    assert sorted(tried) == [1, 2]
    expected = Difficulty(2)
    for group in batch.groups:
        expected.update(int(group.problem.id[1:]), group.pass_rate)
    assert batch.position.difficulty == expected.state()


def test_a_group_that_could_not_be_judged_says_nothing_about_its_problem() -> None:
    config = Rollout(group_size=4, prompts_per_step=3, max_tokens=8, retire_after=1, max_resampling_rounds=0)
    rewards = load_rewards([lambda completion, answer: None if answer == "1" else 1.0], None)
    source = Rollouts(prompted(3), ScriptedSampler(half_right), rewards, config, build_algorithm("grpo"), 0)
    assert first(source).position.difficulty == {"0": (1.0, 1, 1), "2": (1.0, 1, 1)}


def test_completions_without_a_verdict_say_nothing_about_their_problem() -> None:
    """Another reward pays them, so their groups train; a judge that was away has not found them incorrect."""

    def judged(completion: str, answer: str) -> float | None:
        return None if answer == "1" or completion == "unclear" else 1.0

    config = Rollout(group_size=8, prompts_per_step=3, max_tokens=8, retire_after=1, max_resampling_rounds=0)

    def size(completion: str) -> float:
        return float(len(completion))

    rewards = load_rewards([{judged: {"verdict": True}}, size], None)
    answer = ScriptedSampler(lambda _, stream: "unclear" if stream % 2 else "fine")
    batch = first(Rollouts(prompted(3), answer, rewards, config, build_algorithm("grpo"), 0))
    assert all(g.scorable.all() for g in batch.groups)
    assert any(0 < g.verdict_mask.sum() < 8 for g in batch.groups)
    assert batch.position.difficulty == {"0": (1.0, 1, 1), "2": (1.0, 1, 1)}


def test_problems_solved_often_enough_are_not_drawn_again() -> None:
    """Of six, p0 and p1 are always solved: retired after two times in a row; position and order resume."""

    def answer(prompt: np.ndarray, stream: int) -> str:
        return str(prompt[0] - 1) if prompt[0] <= 2 else half_right(prompt, stream)

    make = partial(rollouts, ScriptedSampler(answer), prompted(6), "grpo", retire_after=2, group_size=8)
    batches = list(islice(make().batches(), 8))
    drawn = [[g.problem.id for g in batch.groups] for batch in batches]
    assert sorted(drawn[0] + drawn[1]) == sorted(drawn[2] + drawn[3]) == [f"p{i}" for i in range(6)]
    late = {name for of_step in drawn[4:] for name in of_step}
    assert late == {"p2", "p3", "p4", "p5"}
    assert batches[-1].metrics["difficulty/solved"] == pytest.approx(2 / 6)
    again = next(make(first_step=5, position=batches[4].position).batches())
    assert [g.problem.id for g in again.groups] == drawn[5]


def test_the_frontier_does_not_draw_what_is_retired() -> None:
    """Eight times right is solved; p2 to p5 are solved half of the time, and two problems a step suffice."""

    def answer(prompt: np.ndarray, stream: int) -> str:
        return str(prompt[0] - 1) if prompt[0] <= 2 else half_right(prompt, stream)

    source = rollouts(
        ScriptedSampler(answer),
        prompted(6),
        "grpo",
        retire_after=1,
        group_size=8,
        prompts_per_step=4,
        curriculum="frontier",
    )
    solved: set[str] = set()
    for batch in islice(source.batches(), 12):
        assert not solved & {g.problem.id for g in batch.groups}
        solved |= {g.problem.id for g in batch.groups} & {"p0", "p1"}
    assert solved == {"p0", "p1"}


def test_a_reward_that_refuses_correct_answers_is_found_over_the_steps() -> None:
    """One step's refusal may be the row's fault, so they are counted from step to step, through a resume."""
    refuses = declared(example=lambda row: row["answer"])(lambda completion, answer: 0.5)
    rewards = Rewards([Reward("refuses", refuses)])
    config = Rollout(group_size=4, prompts_per_step=3, max_tokens=8)
    make = partial(
        Rollouts, prompted(6), ScriptedSampler(half_right), rewards, config, build_algorithm("grpo"), seed=0
    )
    steps = make().batches()
    counts = [dict(next(steps).position.refused) for _ in range(MAX_REFUSALS - 1)]
    assert counts == [{"refuses": times} for times in range(1, MAX_REFUSALS)]
    with pytest.raises(RewardError, match="known to be correct"):
        next(steps)
    with pytest.raises(RewardError, match="known to be correct"):
        next(make(first_step=MAX_REFUSALS - 1, position=Position(refused=counts[-1])).batches())


def test_where_all_are_solved_all_are_drawn_again() -> None:
    right = ScriptedSampler(lambda prompt, _: str(prompt[0] - 1))
    source = rollouts(right, prompted(3), "grpo", retire_after=1)
    for batch in islice(source.batches(), 3):
        assert len(batch.groups) == 3


def test_running_means_follow_the_samples_and_travel_with_the_position() -> None:
    problems = [replace(p, problem=replace(p.problem, columns={**p.problem.columns, "role": "ab"[i % 2]}))
                for i, p in enumerate(prompted(4))]  # fmt: skip
    spec = {"name": "rae", "advantage": {"decay": 0.5, "by": "role"}}
    make = partial(rollouts, ScriptedSampler(half_right), problems, spec, prompts_per_step=2)
    one, two = islice(make().batches(), 2)
    means = {"a": 0.0, "b": 0.0}
    for group in [*one.groups, *two.groups]:
        role = str(group.problem.columns["role"])
        for reward, before in zip(group.rewards, group.baselines.running_mean, strict=True):
            assert before == pytest.approx(means[role])
            means[role] = 0.5 * means[role] + 0.5 * reward
    assert two.position.means == pytest.approx(means)
    again = next(make(first_step=1, position=one.position).batches())
    kept, computed = (batch.groups[0].baselines.running_mean for batch in (two, again))
    np.testing.assert_array_equal(computed, kept)
    with pytest.raises(DataError, match="no column 'rule'"):
        first(rollouts(ScriptedSampler(half_right), problems, {**spec, "advantage": {"by": "rule"}}))


def test_a_function_of_the_users_that_asks_for_a_running_mean_says_which(tmp_path: Path) -> None:
    """The settings of `rae` held unsaid for any function that asked for such a mean."""
    (tmp_path / "mine.py").write_text(
        "def above(rewards, running_mean):\n    return rewards - running_mean\n"
        "def slow(rewards, running_mean, *, decay=0.99, by=None):\n    return rewards - running_mean\n"
    )
    values = {"data": {"task": "sums"}, "algorithm": {"advantage": f"{tmp_path}/mine.py:above"}}
    with pytest.raises(ConfigError, match="needs running_mean, but has no setting decay and by"):
        load_config(values=values)
    spec = {"name": "grpo", "advantage": f"{tmp_path}/mine.py:slow"}
    batch = next(rollouts(ScriptedSampler(half_right), prompted(1), spec).batches())
    rewards = np.concatenate([group.rewards for group in batch.groups])[::-1]
    assert batch.position.means[""] == pytest.approx(sum(0.01 * r * 0.99**n for n, r in enumerate(rewards)))


def test_continuations_from_cuts_give_values() -> None:
    """A completion of three tokens, two a segment: one cut after the second, from which half succeed."""
    asked: list[int] = []

    def answer(prompt: np.ndarray, stream: int) -> str:
        asked.append(len(prompt))
        return half_right(prompt, stream)

    spec = {
        "name": "vine_ppo",
        "advantage": {"continuations": 40, "split_by": "tokens", "most": 4},
    }
    sampler = ScriptedSampler(answer)

    def batch_of() -> RolloutBatch:
        source = rollouts(sampler, prompted(3), spec)
        source.rewards = replace(
            source.rewards, reader=ReplyReader(lambda tokens: "0")
        )  # of every whole completion
        return first(source)

    batch = batch_of()
    assert len(set(sampler.streams)) == len(sampler.streams) == 3 * 4 * 41
    assert asked.count(1) == 3 * 4
    assert asked.count(3) == 3 * 4 * 40  # the prompt's token and the two that were kept
    by_id = {g.problem.id: g for g in batch.groups}
    for name, group in by_id.items():
        assert [list(s.ends) for s in group.baselines.segments] == [[1]] * 4
        assert [list(s.values) for s in group.baselines.segments] == [[float(name == "p0")]] * 4
    assert batch.metrics["rollout/scored"] == 3 * 4 * 41
    assert batch.metrics["rollout/continued_tokens"] == 3 * 4 * 40 * 3  # each of three tokens
    assert [g.problem.id for g in batch_of().groups] == [g.problem.id for g in batch.groups]


def test_continuations_that_nobody_could_judge_do_not_count() -> None:
    """Three cuts after one token each: of two continuations one is judged, or none, or both."""
    nan = float("nan")
    judged = {1: [1.0, nan], 2: [nan, nan], 3: [1.0, 0.0]}

    def score(requests: Sequence[Request], *_: object) -> list[Group]:
        return [
            Group(r.problem, r.prompt, (completion(),) * 2, np.array(judged[len(r.prompt) - 1]))
            for r in requests
        ]

    whole = Group(Problem("p", "?"), np.array([7]), (completion(length=4),), np.ones(1))
    settings = SegmentSettings(continuations=2, split_by="tokens", most=4)
    limit, sampler = SamplingParams(max_tokens=4), ScriptedSampler(half_right)

    def stream(cut: Cut, number: int) -> int:
        return 10 * cut.end + number

    (found,), tokens = with_segments([whole], settings, sampler, limit, str, stream, score)
    (segments,) = found.baselines.segments
    assert dict(zip(segments.ends, segments.values, strict=True)) == {0: 1.0, 2: 0.5}
    assert tokens == 2 * 2 + 2 * 1, "without the tokens that each continues"


def test_a_continuation_ends_at_a_stop_string_that_its_prefix_begins() -> None:
    """Tokens are letters: the prefix ends with the first half of the stop string."""

    def letters(tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    class Writes(ScriptedSampler):
        def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[SampledCompletion]:
            for number in range(len(requests)):
                ids = np.array(list(map(ord, "D, and more")))
                yield SampledCompletion(
                    number, 0, Completion(ids, np.zeros(len(ids), np.float32), "", "length")
                )

    kept = np.array(list(map(ord, "so EN")))
    whole = Completion(kept, np.zeros(len(kept), np.float32), "so EN", "length")
    sampler = PrefixSampler(Writes(half_right), {7: (whole, 4)}, letters)
    (found,) = sampler.sample([Request(kept, [7])], SamplingParams(20, stop=("END",)))
    assert (found.completion.text, found.completion.finish) == ("so END", "stop")
    assert letters(found.completion.tokens.tolist()) == "so END"
    (other,) = sampler.sample([Request(kept, [7])], SamplingParams(20, stop=("NOT",)))
    assert (other.completion.text, other.completion.finish) == ("so END, and more", "length")


def test_staleness_is_that_of_the_tokens_that_were_drawn() -> None:
    """What a tool said has no weights that drew it."""
    tokens = np.arange(4)
    sampled = np.array([True, False, False, True])
    drawn_by = Provenance(3, np.array([3, 0, 0, 5]))
    one = Completion(tokens, np.zeros(4, np.float32), "", "stop", drawn_by, sampled)
    group = Group(Problem("p", "?"), tokens, (one,), np.zeros(1))
    assert staleness([group], 7) == {"staleness/mean": 3.0, "staleness/max": 4.0, "staleness/continued": 1.0}

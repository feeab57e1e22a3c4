"""Reward functions as users write them."""

from __future__ import annotations

import asyncio
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import completion

from covey.config.schema import Data
from covey.rewards.contract import Reward
from covey.rewards.groups import combine
from covey.rewards.loading import load_rewards
from covey.rewards.reward_checks import check_columns
from covey.rewards.scorer import Scorer
from covey.tasks.files import read_problems
from covey.types import Problem
from covey_verify.contract import reward
from covey_verify.errors import ConfigError, DataError, RewardError
from covey_verify.types import Score, StepRewards

PROBLEM = Problem("p1", "2+2=", {"answer": "4", "completion": "the worked answer"})
COMPLETIONS = [completion("4"), completion("5")]


def judged(*functions):
    rewards = load_rewards(functions, Path())
    return rewards.score_group(PROBLEM, np.array([1]), COMPLETIONS, strict=True)


def test_what_a_partial_has_bound_no_column_replaces() -> None:
    def judge(completion, answer, strict=True):
        return float(completion == answer)

    group = judged(partial(judge, answer="5"))
    assert group.rewards.tolist() == [0.0, 1.0]


def test_both_forms_get_what_their_signature_asks_for() -> None:
    def batch(prompts, completions, completion_ids, answer, **rest):
        assert prompts == ["2+2="] * 2
        assert completion_ids == [c.tokens.tolist() for c in COMPLETIONS]
        assert rest.pop("completion") == ["the worked answer"] * 2
        assert sorted(rest) == ["log_extra", "log_metric", "trainer_state"]
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    def single(completion, answer):
        return completion == answer

    group = judged(batch, {single: 0.5})
    assert group.rewards.tolist() == [1.5, 0.0]
    assert group.components["single"].values.tolist() == [1.0, 0.0]
    assert {name: c.weight for name, c in group.components.items()} == {"batch": 1.0, "single": 0.5}


def test_the_sampled_completion_wins_over_a_column_of_that_name() -> None:
    def seen(completion):
        return float(completion == "the worked answer")

    assert judged(seen).rewards.tolist() == [0.0, 0.0]


def test_async_rewards_run_together() -> None:
    running = []

    async def slow(completions):
        running.append(1)
        await asyncio.sleep(0.01)
        assert len(running) == 3
        return [1.0] * len(completions)

    async def also_slow(completion):
        running.append(1)
        await asyncio.sleep(0.05)
        return 1.0

    assert judged(slow, also_slow).rewards.tolist() == [2.0, 2.0]


def test_none_means_not_applicable() -> None:
    def sometimes(completion):
        return 1.0 if completion == "4" else None

    def never(completions):
        return [None, None]

    group = judged(sometimes, {never: 3.0})
    assert group.rewards[0] == 1.0
    assert math.isnan(group.rewards[1])
    assert group.dead


def test_step_rewards_are_kept_and_summed() -> None:
    def steps(completion):
        return StepRewards([0.5, 0.25], [0, 2])

    group = judged(steps)
    assert group.rewards.tolist() == [0.75, 0.75]
    assert group.components["steps"].steps == (StepRewards([0.5, 0.25], [0, 2]),) * 2


def test_numpy_and_torch_scalars_count_as_numbers() -> None:
    def scalars(completions):
        return [np.float32(0.5), np.array(1)]

    assert judged(scalars).rewards.tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: [1.0], "returned 1 values for 2 completions"),
        (lambda: "ab", "a list with one number per completion"),
        (lambda: 1.0, "a list with one number per completion"),
        (lambda: [1.0, math.inf], "a finite number or None"),
        (lambda: [1.0, "1"], "a finite number or None"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_broken_contract_names_the_function_and_the_problem(value, says) -> None:
    def bad(completions):
        return value()

    with pytest.raises(RewardError, match="reward bad on problem p1") as caught:
        judged(bad)
    assert says in str(caught.value)


def test_verls_signature_is_taken_as_it_is() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, extra_info) == ("p1", {})
        return {"score": float(solution_str == ground_truth), "acc": True}

    def bare(data_source, solution_str, ground_truth, extra_info):
        return solution_str == ground_truth

    assert judged(compute_score, {bare: 1.0}).rewards.tolist() == [2.0, 0.0]


def test_only_what_a_strict_signature_accepts_is_passed() -> None:
    def strict(completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    def trl(completions, log_metric, log_extra, trainer_state):
        log_metric("seen", 2.0)
        log_extra("column", ["a"])
        return [float(trainer_state.global_step)] * 2

    rewards = load_rewards([strict, trl], Path())
    scorer = Scorer(rewards)
    group = scorer.begin_group(PROBLEM, np.array([1]), 2)
    for sample, one in enumerate(COMPLETIONS):
        group.add(sample, one)
    assert group.result().rewards.tolist() == [1.0, 0.0]
    assert scorer.stats.logged == {"seen": [2.0]}


def test_completions_have_the_form_of_their_prompt() -> None:
    def chat(completions, completion_ids):
        assert completions[0] == [{"role": "assistant", "content": "4"}]
        return [1.0, 0.0]

    problem = Problem("p", [{"role": "user", "content": "2+2="}])
    group = load_rewards([chat], Path()).score_group(problem, np.array([1]), COMPLETIONS, strict=True)
    assert group.rewards.tolist() == [1.0, 0.0]


def test_a_prompt_in_text_has_completions_in_text_also_in_a_chat(tmp_path: Path) -> None:
    def exact(completion, answer):
        return float(completion == answer)

    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    (problem,) = read_problems(tmp_path / "rows.jsonl", Data(chat=True))
    assert problem.prompt == [{"role": "user", "content": "2+2="}]
    group = load_rewards([exact], Path()).score_group(problem, np.array([1]), COMPLETIONS, strict=True)
    assert group.rewards.tolist() == [1.0, 0.0]


def test_scores_carry_status_extraction_and_parts() -> None:
    def rich(completion):
        return (
            Score(0.0, "no_answer", None, {"effort": 0.5}) if completion == "5" else Score(1.0, extracted="4")
        )

    group = judged(rich)
    assert [s.status for s in group.components["rich"].scores] == ["ok", "no_answer"]
    assert group.components["rich"].scores[0].extracted == "4"
    assert group.components["rich"].scores[1].metrics == {"effort": 0.5}


def test_half_a_surrogate_pair_in_a_score_is_spelled_out() -> None:
    """No file takes it, and `json.loads` makes one of a completion's escape."""
    group = judged(lambda completion: Score(1.0, extracted="\ud83d", metrics={"\ud83d": 1.0}))
    (first, *_) = next(iter(group.components.values())).scores
    assert (first.extracted, first.metrics) == (r"\ud83d", {r"\ud83d": 1.0})


def test_score_steps_become_step_rewards() -> None:
    def process(completion):
        return Score(0.75, steps=((0, 1, 0.5), (1, 3, 0.25)))

    assert judged(process).components["process"].steps == (StepRewards([0.5, 0.25], [0, 2]),) * 2


@pytest.mark.parametrize("value", [True, np.bool_(True), np.float64(1), 1])
def test_true_and_numpy_numbers_are_valid_rewards(value) -> None:
    def one(completion):
        return value

    assert judged(one).rewards.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, -math.inf, "1", [1.0], np.zeros(2), Score(math.nan)])
def test_a_reward_that_is_no_finite_number_is_an_error(value) -> None:
    def bad(completion):
        return value

    with pytest.raises(RewardError, match="not a finite number or None"):
        judged(bad)


@pytest.mark.parametrize("name", ["mean", "agreement", "infra_error"])
def test_a_number_called_as_one_that_the_log_has_already_is_an_error(name: str) -> None:
    with pytest.raises(
        RewardError, match=f"reward bad on problem p1: returned a metric with the name '{name}'"
    ):
        judged_returning(Score(1.0, metrics={"length": 3.0, name: 3.0}))


def test_a_status_that_there_is_not_is_an_error() -> None:
    with pytest.raises(
        RewardError, match=r"reward bad on problem p1: returned the status 'whatever', which is not one of"
    ):
        judged_returning(Score(1.0, "whatever"))


@pytest.mark.parametrize(
    "value",
    [
        lambda: 10**400,
        lambda: -(10**5000),
        lambda: Score(1.0, metrics={"a": "b"}),
        lambda: Score(1.0, steps=((0, 1),)),
        lambda: StepRewards([10**400], [0]),
        lambda: StepRewards([math.inf, -math.inf], [0, 1]),
    ],
)
def test_a_number_that_is_none_is_an_error(value) -> None:
    with pytest.raises(RewardError, match="reward bad on problem p1: returned"):
        judged_returning(value())


def judged_returning(value):
    def bad(completion):
        return value

    return judged(bad)


def test_a_weighted_sum_beyond_what_a_number_holds_is_an_error() -> None:
    def huge(completion):
        return -1e308

    with pytest.raises(RewardError, match="rewards huge on problem p1: a value times its weight"):
        judged({huge: 10.0})


def test_a_vector_of_torch_counts_as_a_list() -> None:
    torch = pytest.importorskip("torch")

    def vector(completions):
        return torch.tensor([0.5, 1.0])

    assert judged(vector).rewards.tolist() == [0.5, 1.0]


def test_each_call_has_a_row_of_its_own() -> None:
    problem = Problem("p", [{"role": "user", "content": "?"}], {"answer": ["a", {"b": [1]}]})

    def spoils(completions, prompts, answer, **columns):
        prompts[0][0]["content"] = "!"
        for own in answer:
            own[1]["b"].append(2)
            own.pop(0)
        return [1.0] * len(completions)

    def sees(completion, prompt, answer, *, kept=None):
        kept.append(1)
        return float(answer == ["a", {"b": [1]}] and prompt[0]["content"] == "?" and len(kept) == 1)

    rewards = load_rewards([spoils, {sees: {"kept": []}}], Path())
    assert rewards.score_group(problem, np.array([1]), COMPLETIONS, strict=True).rewards.tolist() == [
        2.0,
        2.0,
    ]
    assert problem.columns["answer"] == ["a", {"b": [1]}]


def test_a_function_of_a_file_has_the_name_that_the_config_says(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("a = lambda completion: 1.0\nb = lambda completion: 0.0\n")
    rewards = load_rewards(["mine.py:a", {"mine.py:b": {"gated_by": "a"}}], tmp_path)
    assert [r.name for r in rewards] == ["a", "b"]


def test_an_object_is_named_by_its_class() -> None:
    class Brief:
        def __call__(self, completion):
            return 1.0

    assert load_rewards([Brief()], Path())[0].name == "Brief"


def test_objects_and_async_objects_are_functions_too() -> None:
    class Length:
        def __call__(self, completion):
            return float(len(completion))

    class Later:
        async def __call__(self, completion):
            await asyncio.sleep(0)
            return 1.0

    length, later = Length(), Later()
    rewards = [Reward("length", length), Reward("later", later)]
    loaded = load_rewards(rewards, Path())
    assert loaded.score_group(PROBLEM, np.array([1]), COMPLETIONS, strict=True).rewards.tolist() == [
        2.0,
        2.0,
    ]


def right(completion):
    return Score(float(completion == "4"), "ok" if completion in "45" else "no_answer")


def bonus(completion):
    return 1.0


@pytest.mark.parametrize(
    ("gate", "expected"),
    [("right", [1, 1, 0]), ("right:correct", [1, 0, 0]), ("right:incorrect", [0, 1, 1]), (None, [1, 1, 1])],
)
def test_a_gate_opens_for_an_answer_a_right_or_a_wrong_one(gate, expected) -> None:
    rewards = load_rewards([right, {bonus: {"weight": 0.5, "gated_by": gate}}], Path())
    completions = [completion(t) for t in ("4", "5", "nothing")]
    group = rewards.score_group(PROBLEM, np.array([1]), completions, strict=True)
    assert group.components["bonus"].values.tolist() == expected


def test_a_gate_stays_closed_where_nobody_can_know() -> None:
    def unknown(completion):
        return None

    for gate in ("unknown", "unknown:correct", "unknown:incorrect"):
        rewards = load_rewards([unknown, {bonus: {"gated_by": gate}}], Path())
        assert rewards.score_group(PROBLEM, np.array([1]), COMPLETIONS, strict=True).rewards.tolist() == [
            0.0,
            0.0,
        ]


def test_a_function_used_twice_needs_two_names() -> None:
    with pytest.raises(ConfigError, match="give one a `name:`"):
        load_rewards([bonus, bonus], Path())
    rewards = load_rewards([bonus, {bonus: {"name": "again", "weight": 2.0}}], Path())
    assert judged(*rewards).rewards.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("math_anwser", "did you mean math_answer"),
        ({"math_answer": {"rul": "boxed"}}, "did you mean rule"),
        ({"math_answer": "high"}, "must be a number"),
        ({"math_answer": {"rule": "box"}}, "rewards: math_answer.rule: 'box'"),
        ({"math_answer": {"percent": True}}, "rewards: math_answer.percent: True"),
        ({"code_tests": {"seconds": -1}}, "rewards: code_tests.seconds: -1"),
        ({"code_tests": {"total_seconds": 900.0}}, "rewards: code_tests.total_seconds: 900"),
        ({"code_tests": {"memory_mb": 0}}, "rewards: code_tests.memory_mb: 0"),
        ({"proves": {"seconds": 0}}, "rewards: proves.seconds: 0"),
        ({"regex_match": {"pattern": "("}}, "missing ), unterminated subpattern"),
        ({"json_schema": {"schema": {"type": "thing"}}}, "'thing' is not valid"),
        ({"tool_calls": {"compare": {"days": "numeral"}}}, "rewards: tool_calls.compare"),
        ({"code_tests": {"mode": "func"}}, "rewards: code_tests.mode: 'func'"),
        ({"math_answer": None, "rule": "boxed"}, "an entry must be one reward"),
        ({"math_answer": True}, "must be a number"),
        ({"math_answer": math.nan}, "must be a number"),
        ({"think_format": {"gated_by": "nobody"}}, "gated_by 'nobody'"),
        ({"think_format": {"gated_by": "think_format:maybe"}}, "name:correct or name:incorrect"),
        (lambda text: 1.0, "neither `completions` (all of a group) nor `completion` (one); it takes text"),
        (lambda completion, answer=None, /: 1.0, "takes completion, answer by position only"),
        (lambda completion, completions: 1.0, "takes both `completion` (one) and `completions`"),
    ],
)
def test_mistakes_in_a_config_are_explained(spec, says) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_rewards([spec], Path())


def test_a_column_is_no_setting_of_a_built_in_reward() -> None:
    row = {"answer": "50", "percent": "hundredths", "rule": "addition", "points": 500.0}
    rewards = load_rewards(["math_answer"], Path())
    problem = Problem("p1", "half of 100=", row)
    group = rewards.score_group(problem, np.array([1]), [completion("\\boxed{50\\%}")], strict=True)
    assert group.components["math_answer"].scores[0].value == 1.0


def test_a_missing_column_or_module_is_found_before_training() -> None:
    @reward(requires=("no_such_module",))
    def needs_a_module(completion):
        return 1.0

    @reward(columns=("unit",))
    def needs_a_column(completions, **columns):
        return [1.0] * len(completions)

    def needs_an_argument(completion, rubric):
        return 1.0

    for function, says in (
        (needs_a_module, "module 'no_such_module'"),
        (needs_a_column, "column 'unit'"),
        (needs_an_argument, "column 'rubric'"),
    ):
        with pytest.raises(DataError, match=says):
            check_columns([PROBLEM], load_rewards([function], Path()))


@given(st.lists(st.none() | st.floats(-2, 2), min_size=1, max_size=6), st.floats(-2, 2))
def test_the_total_is_the_weighted_sum_of_what_applies(values, weight) -> None:
    found = combine(
        {"a": np.array([np.nan if v is None else v for v in values]), "b": np.ones(len(values))},
        {"a": weight, "b": 0.5},
    )
    assert found == pytest.approx([0.5 + (0.0 if v is None else weight * v) for v in values])


@pytest.mark.parametrize(
    "declared",
    ["isolate='proces'", "timeout=-1", "columns='answer'", "verdict='perhaps'", "check_references='rows'"],
)
def test_what_a_function_declares_of_itself_is_checked(tmp_path: Path, declared: str) -> None:
    lines = ["import covey", f"@covey.reward({declared})", "def mine(completion): return 1.0"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=f"@reward of mine.py:mine: {declared.partition('=')[0]} "):
        load_rewards(["mine.py:mine"], tmp_path)


@pytest.mark.parametrize("gate", [3, "", ["math_answer"], True])
def test_a_gate_is_a_name(gate: object) -> None:
    with pytest.raises(ConfigError, match="gated_by"):
        load_rewards(["math_answer", {"think_format": {"gated_by": gate}}], Path())


@pytest.mark.parametrize(
    ("values", "ends", "said"),
    [
        ((1.0, 2.0, 3.0), (1, 2), "3 values but 2 ends"),
        ((1.0, 2.0), (3, 1), r"ends \[3, 1\] do not increase at position 2"),
        ((1.0, 2.0), (2, 2), "do not increase at position 2"),
        ((1.0,), (-1,), "do not increase at position 1"),
    ],
)
def test_step_rewards_whose_steps_are_none_are_refused(values, ends, said: str) -> None:
    def steps(completion):
        return StepRewards(values, ends)

    with pytest.raises(RewardError, match=rf"reward steps on problem p1.*{said}"):
        judged(steps)


def test_step_rewards_become_steps() -> None:
    def steps(completion):
        return StepRewards((1.0, -1.0), (0, 4)) if completion == "4" else StepRewards((), ())

    first, second = judged(steps).components["steps"].scores
    assert first.steps == ((0, 1, 1.0), (1, 5, -1.0))
    assert second.steps == ()

"""The step verifiers that built-in tasks bring."""

from __future__ import annotations

import random

import pytest

from covey.tasks import TASKS
from covey.tasks.countdown import equations
from covey.tasks.generated import GeneratedTask
from covey.tasks.ordering import choices
from covey.tasks.sums import partial_sums


@pytest.mark.parametrize(
    ("steps", "values"),
    [
        ("<think>7+8=5 5+9=4</think><answer>4</answer>", [1, 1, 1]),
        ("<think>7+8=6 6+9=5</think><answer>5</answer>", [-1, 1, 1]),
        ("<think>7+8=5 1+1=2</think><answer>5</answer>", [1, -1, -1]),
        ("<think>7+8=5 5+9=4 4+0=4</think><answer>4</answer>", [1, 1, -1, -1]),
        ("<answer>4</answer>", [-1]),
        ("well", [-1]),
    ],
)
def test_partial_sums_are_judged_one_by_one(steps: str, values: list[float]) -> None:
    ends = list(range(1, len(steps) + 1))
    assert [v for *_, v in partial_sums(steps, "7+8+9=", ends, modulus=10).steps] == values


@pytest.mark.parametrize(
    ("steps", "values"),
    [
        ("1:32 2:3", [1, 1]),
        ("2:31 1:3", [-1, 1]),
        ("1:33 3:3", [-1, 1]),
        ("1:32 3:2", [1, -1]),
        ("1:32 2:3 3:1", [1, 1, -1]),
        ("none", []),
    ],
)
def test_choices_are_judged_one_by_one(steps: str, values: list[float]) -> None:
    ends = list(range(1, len(steps) + 1))
    assert [v for *_, v in choices(steps, "sort 321=", ends).steps] == values


@pytest.mark.parametrize(
    ("steps", "values"),
    [
        ("3+4=7 7*2=14", [1, 1]),
        ("3+4=8 8*2=16", [-1, 1]),
        ("3+3=6 6*2=12", [-1, 1]),
        ("2-4=-2 -2*3=-6", [1, 1]),
        ("3+4=7 3*2=6", [1, -1]),
        ("none", []),
    ],
)
def test_equations_are_judged_one_by_one(steps: str, values: list[float]) -> None:
    ends = list(range(1, len(steps) + 1))
    assert [v for *_, v in equations(steps, [2, 3, 4], ends).steps] == values


@pytest.mark.parametrize("task", [t for t in TASKS.values() if t.steps], ids=lambda task: task.name)
def test_every_worked_answer_of_a_task_has_correct_steps_only(task: GeneratedTask) -> None:
    (verifier,) = task.steps
    function, settings = next(iter(verifier.items())) if isinstance(verifier, dict) else (verifier, {})
    for seed in range(100):
        row = task.generate(random.Random(seed))
        available = {**row, "token_ends": list(range(1, len(row["completion"]) + 1)), **settings}
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        score = function(**{n: available[n] for n in (*names, *settings)})
        assert [v for *_, v in score.steps] == [1.0] * len(score.steps)
        assert len(score.steps) > 1

"""Error rates: what findings say of runs that are well, of runs that are not, and of a guard's last word."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.config.schema import Guards
from covey.insight.conclusion import conclusion_word
from covey.insight.evidence import RATE, errors_needed, noise
from covey.insight.findings.finding import Finding
from covey.insight.findings.settings import unknown
from covey.insight.findings.table import RULES, explain, gravest, no_signal
from covey.insight.findings.view import WINDOW, RunView, mean_of
from covey.objective.diagnostics import standard_error
from covey.objective.texts import answers_inside
from covey.runs.checkpoint import GuardMemory
from covey.runs.estimates import Evaluation
from covey.training.guards import Stop, apply_guards
from covey.types import Problem
from tests.fakes import group

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
ALARMS = importlib.import_module("alarms")
WORLDS = (*ALARMS.IDLE, *ALARMS.SLOW)
SHORT = [world for world in WORLDS if world.steps <= 40]


@pytest.mark.parametrize("world", SHORT)
def test_hardly_a_run_in_which_nothing_happens_is_told_that_it_is_gravely_ill(world: ALARMS.World) -> None:
    fraction, counts = ALARMS.severe_fraction(world, 12)
    assert fraction == 0, counts
    assert not counts["farmed"] + counts["leaps"] + counts["flat"] + counts["dead_weight"], counts


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_at_most_one_run_in_a_hundred_is_gravely_ill_by_chance(world: ALARMS.World) -> None:
    fraction, counts = ALARMS.severe_fraction(world, 300)
    assert fraction <= 0.01, counts
    assert counts["dead_weight"] <= 3, counts
    if world in ALARMS.SLOW:
        assert counts["flat"] + counts["too_hard"] <= 3, counts


def test_minimal_records_of_a_weak_model_whose_form_is_right_are_not_farmed() -> None:
    generator = np.random.default_rng(0)
    (farmed,) = (rule for rule in RULES if rule.name == "farmed")
    for _ in range(40):
        drawn = generator.binomial(128, [0.08, 0.97], (25, 2)) / 128
        records = [{"step": n, "accuracy": a, "reward/math_answer/mean": a, "reward/answer_format/mean": f}
                   for n, (a, f) in enumerate(drawn.tolist())]  # fmt: skip
        assert not any(farmed.predicate(RunView(records[:n], (), unknown)) for n in range(10, 26))


def test_what_is_lost_while_a_form_stays_is_found_within_the_noise_of_small_steps() -> None:
    falls = ALARMS.World(0.5, 0.05, 60)
    said = [[f.id for f in ALARMS.said_of(falls, seed)] for seed in range(8)]
    assert all("farmed" in own for own in said), said


def test_a_form_that_falls_is_not_farmed() -> None:
    falls = replace(ALARMS.World(0.5, 0.05, 60), form=0.96)
    generator = np.random.default_rng(0)
    records = [ALARMS.step_record(falls, n, generator) for n in range(60)]
    for n, record in enumerate(records):
        record["reward/form/mean"] = 0.97 - 0.0005 * n
    said = [f.id for f in explain(records, [], {}.get)]
    assert "worse" in said
    assert "farmed" not in said


def test_all_looks_of_a_run_share_one_error_rate() -> None:
    """The largest of many looks at a mean of independent steps stays below what is needed."""
    generator = np.random.default_rng(1)
    needed = np.array([errors_needed(np.inf, n) for n in range(1, 101)])
    steps = generator.normal(size=(2000, 100))
    looks = steps.cumsum(1) / np.sqrt(np.arange(1, 101))
    assert (looks > needed).any(1).mean() < 2 * RATE
    assert errors_needed(4.0, 10) > 2 * errors_needed(200.0, 10), "few steps say little of their noise"
    assert errors_needed(0.0, 1) == np.inf


def test_looks_at_overlapping_windows_are_counted_as_windows_and_err_no_more_often() -> None:
    """The last steps less the first ones, of independent steps, looked at after every step."""
    generator, runs, often = np.random.default_rng(2), 8000, 0.02
    steps = generator.normal(size=(runs, 60))
    ever = np.zeros(runs, bool)
    for n in range(WINDOW + 1, 61):
        width = max(WINDOW, n // 5)
        change = steps[:, n - width : n].mean(1) - steps[:, :width].mean(1)
        ever |= change > errors_needed(np.inf, 1 + n / WINDOW, often) * np.sqrt(2 / width)
    assert 0.3 * often < ever.mean() < often, "as often as is allowed, and not a tenth of it"


def test_data_that_is_uneven_is_told_from_small_groups_that_are_dead_by_luck() -> None:
    generator = np.random.default_rng(3)
    for size, uneven in ((8, True), (4, True), (4, False), (2, False)):
        records = []
        for n in range(40):
            chances = generator.choice([0, 0, 0.5, 1, 1] if uneven else [0.4, 0.6], 12)
            solved = generator.random((12, size)) < chances[:, None]
            right, wrong = solved.all(1).mean(), (~solved.any(1)).mean()
            records.append({
                "step": n, "accuracy": solved.mean(), "groups/count": 12.0, "groups/dead": right + wrong,
                "groups/dead_correct": right, "groups/dead_incorrect": wrong, "groups/collapsed": 0.0,
            })  # fmt: skip
        said = [f.id for f in explain(records, [], {"rollout.group_size": size}.get)]
        assert ("dead_weight" in said) is uneven, (size, uneven, said)


def test_what_every_group_was_so_far_is_not_certain() -> None:
    """A fraction of the groups is as sure as their number makes it."""
    few, many = ([{"groups/dead": 1.0, "groups/count": n}] * 5 for n in (2.0, 200.0))
    unsure, sure = (noise([records], "groups/dead").error(5) for records in (few, many))
    assert 0 < 20 * sure < unsure


def test_an_answer_that_is_lost_in_training_is_not_a_form_that_was_never_known() -> None:
    rates = [0.35, 0.4, 0.35, 0.55, 0.7, 0.7, 0.65, 0.65, 0.8, 0.8, 0.8, 0.85]
    (rule,) = (rule for rule in RULES if rule.name == "unparsable")

    def said(rates: list[float]) -> str | None:
        records = [{"step": n, "reward/answer/no_answer": rate} for n, rate in enumerate(rates)]
        return rule.predicate(RunView(records, (), unknown))

    assert said([0.8] * 12)
    assert not said(rates), "what came in training is paid for by something, which has a name soon"
    assert said(rates + [0.85] * 10)


def test_standard_errors_are_clustered_by_group_and_without_them_steps_are_compared() -> None:
    alike = [np.full(8, float(n % 2)) for n in range(16)]
    assert standard_error(alike) == pytest.approx(0.5 / np.sqrt(15)), "sixteen problems, not 128 answers"
    assert np.isnan(standard_error(alike[:1]))
    slow = [{"accuracy": 0.01 * n} for n in range(20)]
    assert noise([slow], "accuracy").variance < 1e-4, "a course is no noise"


@pytest.mark.parametrize(("before", "after", "word"), [(30, 26, "cannot tell"), (30, 10, "got worse")])
def test_a_fall_that_may_be_chance_is_not_called_worse(before: int, after: int, word: str) -> None:
    first, last = (
        Evaluation(right, right.astype(int), right, right.astype(float), 1, "answer")
        for right in (np.arange(60) < before, np.roll(np.arange(60) < after, 3))
    )
    assert conclusion_word(first, last) == word


def drawn_evaluation(chances: np.ndarray, generator: np.random.Generator) -> Evaluation:
    greedy, correct = generator.random(len(chances)) < chances, generator.binomial(4, chances)
    return Evaluation(greedy, correct, greedy, correct / 4, 4, "answer")


def test_greedy_and_sampled_accuracy_are_one_claim_of_one_error_rate() -> None:
    generator, words = np.random.default_rng(2), list[str]()
    for _ in range(600):
        chances = generator.random(128)
        words.append(conclusion_word(*(drawn_evaluation(chances, generator) for _ in range(2))))
    assert sum(word in ("learned", "got worse") for word in words) / len(words) < 0.06


def test_the_last_word_of_a_guard_is_what_was_found() -> None:
    fooled = Finding("fooled", 3, "severe", "the verdict can be fooled", "rewards: [exact_answer]")
    hard = {"groups/dead": 1.0, "groups/dead_incorrect": 1.0, "groups/cliff": 1.0, "accuracy": 0.0}
    assert "every answer is incorrect" in no_signal([hard] * 20, unknown)
    assert no_signal([hard] * 20, unknown, [fooled]).endswith("Try: rewards: [exact_answer]")
    far = {"kl/completion_k1": 30.0, "entropy/sampled": 1.0}
    (stop,) = apply_guards(5, far, True, GuardMemory(), Guards(), str, lambda: "As was said: the scale")[1]
    assert isinstance(stop, Stop)
    assert stop.why.endswith("kl_stop (20). As was said: the scale")
    assert "Lower train.lr" in apply_guards(5, far, True, GuardMemory(), Guards(), str, str)[1][0].why


def test_a_note_is_not_the_likely_reason() -> None:
    note, grave = Finding("other_problems", 1, "note", "a"), Finding("worse", 9, "severe", "b")
    assert gravest([note, grave]) is grave
    assert gravest([note]) is note
    assert gravest([]) is None


def solved(generator: np.random.Generator, known: float) -> dict[str, Any]:
    """The record of a step of a model that adds two numbers modulo 7 at a rate of ``known``, or guesses."""
    groups = []
    right = []
    for n in range(32):
        first, *others = generator.integers(0, 7, 5).tolist()
        plain = group([0] * 8)
        written = []
        for completion in plain.completions:
            total, said = first, ""
            for term in others:
                after = (total + term) % 7 if generator.random() < known else int(generator.integers(7))
                said += f"{total}+{term}={after} "
                total = after
            written.append(replace(completion, text=f"{said} The answer: {total}"))
            right.append(total == (first + sum(others)) % 7)
        columns = {"answer": str((first + sum(others)) % 7)}
        groups.append(replace(plain, completions=tuple(written), problem=Problem(str(n), "", columns)))
    return {"accuracy": float(np.mean(right)), "groups/count": 32.0, **answers_inside(groups)}


@pytest.mark.parametrize("known", [0.6, 0.8])
def test_a_model_that_solves_a_part_is_not_at_chance_where_texts_have_nearly_every_answer(
    known: float,
) -> None:
    """Worked sums of digits modulo 7 contain three of four answers by chance: the demo's task."""
    (chance,) = (rule for rule in RULES if rule.name == "answers_by_chance")
    generator = np.random.default_rng(0)
    records = [solved(generator, known) for _ in range(10)]
    assert mean_of(records, "accuracy") > 0.2
    assert mean_of(records, "text/reference_elsewhere") > 0.6
    assert not chance.predicate(RunView(records, (), unknown))


def test_the_answer_that_stands_in_a_text_is_counted_whatever_the_verdict_reads() -> None:
    texts = ("It is 42.", "420 or 4.2", "The answer: 7!", "-42")
    plain = group([0, 0, 0, 0])
    written = tuple(replace(c, text=text) for c, text in zip(plain.completions, texts, strict=True))
    groups = [
        replace(plain, completions=written, problem=Problem(str(n), "", {"answer": answer}))
        for n, answer in enumerate(("42", "#### 7"))
    ]
    assert answers_inside(groups) == {
        "text/reference": 0.25,
        "text/reference_elsewhere": 0.25,
        "text/reference_number": 1.0,
    }
    assert answers_inside(groups[:1]) == {}, "nothing to compare with"

"""Findings: each cause is named first, with the line that mends it; a healthy run is left alone."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from covey.cli import main
from covey.config.load import load_config, resolved_yaml
from covey.config.sources import options
from covey.insight.findings.finding import Finding
from covey.insight.findings.remedies import with_tested_verifier
from covey.insight.findings.rule import Rule, find
from covey.insight.findings.settings import SettingOf, settings_of, unknown
from covey.insight.findings.table import RULES, explain, no_signal
from covey.insight.findings.view import WIDEST, RunView
from covey.insight.findings.watch import Watch
from covey.runs.estimates import Evaluation
from covey.runs.folder import RunFolder
from tests.docs.logged_metrics import logged
from tests.fakes import as_stream

DOCS = Path(__file__).parents[2] / "docs"
BY_NAME = {rule.name: rule for rule in RULES}
HEALTHY: dict[str, float] = {
    "reward/mean": 0.5,
    "reward/std": 0.45,
    "reward/unscored": 0.0,
    "reward/answer/mean": 0.5,
    "reward/answer/no_answer": 0.1,
    "reward/form/mean": 0.5,
    "reward/inconsistent": 0.0,
    "reward/paid_elsewhere": 0.1,
    "reward/correlation/answer/form": 0.2,
    "accuracy": 0.5,
    "groups/dead": 0.3,
    "groups/dead_incorrect": 0.15,
    "groups/dead_correct": 0.15,
    "groups/dead_unscored": 0.0,
    "groups/collapsed": 0.05,
    "groups/cliff": 0.1,
    "groups/near_ties": 0.0,
    "groups/one_against_all": 0.3,
    "gradient_share/overweight": 0.05,
    "gradient_share/shared_prefix": 0.5,
    "length/correct": 20.0,
    "length/incorrect": 22.0,
    "length/truncated": 0.02,
    "length/truncated_done": 0.0,
    "length/ended_q90": 30.0,
    "entropy/sampled": 0.4,
    "text/duplicates": 0.3,
    "text/mixed_scripts": 0.0,
    "text/repetition": 0.05,
    "ratio/q99": 1.1,
    "clip/low": 0.03,
    "clip/high": 0.03,
    "mismatch/mean": 1e-4,
    "kl/start": 2.0,
    "kl/completion_k1": 1.0,
    "optimizer/grad_norm": 1.0,
    "optimizer/updates": 4.0,
    "optimizer/lr": 1e-4,
}
RISES = {
    "reward/mean": 0.8,
    "reward/answer/mean": 0.8,
    "accuracy": 0.8,
    "groups/dead_correct": 0.6,
    "groups/dead": 0.65,
}


def run_of(start: dict[str, float], end: dict[str, float], steps: int = 40) -> list[dict[str, Any]]:
    """Metrics that go from one to the other; they improve as a healthy run's do unless said otherwise."""
    a = {**HEALTHY, "reward/mean": 0.2, "reward/answer/mean": 0.2, "accuracy": 0.2, **start}
    b = {**HEALTHY, **RISES, **start, **end}
    return [
        {"step": s + 1, **{k: a[k] + (b[k] - a[k]) * s / (steps - 1) for k in b if k in a}}
        for s in range(steps)
    ]


def flat(**metrics: float) -> dict[str, float]:
    """A run that does not learn."""
    paid = {"reward/mean": 0.5, "reward/answer/mean": 0.5, "accuracy": 0.5}
    return paid | {"groups/dead": 0.3, "groups/dead_correct": 0.15} | metrics


def held_out(*accuracies: float, reward: float | None = None, steps: int = 40) -> list[dict[str, Any]]:
    """Evaluations of 400 problems with one sample each; ``reward`` is the last one's."""
    found = []
    for number, accuracy in enumerate(accuracies):
        right = np.arange(400) < 400 * accuracy
        last = reward is not None and number == len(accuracies) - 1
        paid = np.full(400, reward) if last else right.astype(float)
        evaluation = Evaluation(right, right.astype(int), right, paid, samples=1, verdict="answer")
        at = steps * number // max(1, len(accuracies) - 1)
        found.append({"step": at, **evaluation.record()})
    return found


def run_with(tmp_path: Path, text: str) -> SettingOf:
    (tmp_path / "run.yaml").write_text(f"model: tiny\n{text}")
    return settings_of(load_config(tmp_path / "run.yaml"))


LIKE: dict[str, dict[str, float]] = {
    "flat": flat(),
    "dead": flat(**{"groups/dead": 0.9, "groups/dead_incorrect": 0.9, "groups/dead_correct": 0.0,
                    "groups/cliff": 0.9, "accuracy": 0.02, "reward/mean": 0.02,
                    "reward/answer/mean": 0.02}),
    "cold": flat(**{"groups/dead": 0.9, "groups/dead_incorrect": 0.45, "groups/dead_correct": 0.45,
                    "groups/cliff": 0.0, "groups/collapsed": 0.45, "text/duplicates": 0.85}),
    "solved": flat(**{"groups/dead": 0.9, "groups/dead_correct": 0.9, "groups/dead_incorrect": 0.0,
                      "accuracy": 0.98, "reward/answer/mean": 0.98}),
    "constant": flat(**{"groups/dead": 1.0, "groups/dead_incorrect": 1.0, "groups/dead_correct": 0.0,
                        "reward/std": 0.0, "reward/mean": 0.0, "reward/answer/mean": 0.0, "accuracy": 0.0}),
}  # fmt: skip
CASES = yaml.safe_load((Path(__file__).parent / "findings.yaml").read_text(encoding="utf-8"))


def metrics_of(given: dict[str, Any]) -> dict[str, float]:
    return LIKE.get(given.get("like", ""), {}) | {k: v for k, v in given.items() if k != "like"}


@pytest.mark.parametrize("case", CASES, ids=[c["cause"] for c in CASES])
def test_the_true_cause_is_said_first_with_a_line_that_loads(tmp_path: Path, case: dict[str, Any]) -> None:
    config, remedy = case["config"], case["remedy"]
    given = config if "rewards" in config else f"{config}\nrewards: [math_answer]"
    (tmp_path / "mine.py").write_text("def pays(completion):\n    return 1.0\n")
    metrics = run_of(metrics_of(case["first"]), metrics_of(case["last"]), case.get("steps", 40))
    first, *_ = explain(metrics, held_out(*case.get("held_out", ())), run_with(tmp_path, given))
    assert (first.id, first.remedy[: len(remedy)]) == (case["cause"], remedy)
    assert re.search(r"\d", first.sentence + str(first.evidence)), "the numbers are in it"
    assert first.evidence["step"] == first.step
    key, _, value = first.remedy.partition(": ")
    mended = load_config(tmp_path / "run.yaml", [f"--{key}", value])
    assert settings_of(mended)(key) != settings_of(load_config(tmp_path / "run.yaml"))(key)
    needed = {
        "algorithm.critic.lr": "algorithm.name: ppo\n",
        "rollout.tools.max_calls": "rollout.tools.functions: python\n",
    }
    (tmp_path / "pasted.yaml").write_text(f"model: tiny\n{needed.get(key, '')}{first.remedy}\n")
    load_config(tmp_path / "pasted.yaml")  # as a line of a file too


def test_a_verdict_that_reads_numbers_is_proposed_only_for_answers_that_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def pays(completion):\n    return 1.0\n")
    (case,) = (c for c in CASES if c["cause"] == "unread")
    words = {**metrics_of(case["last"]), "text/reference_number": 0.9}
    first, *_ = explain(run_of(words, words, 40), held_out(), run_with(tmp_path, case["config"]))
    assert (first.id, first.remedy) == ("unread", "")


@pytest.mark.parametrize("rewards", ["[{code_tests: {mode: check, form: continue}}]", "['mine.py:pays']"])
def test_a_tag_ends_completions_only_where_a_reward_reads_tags(tmp_path: Path, rewards: str) -> None:
    (tmp_path / "mine.py").write_text("def pays(completion):\n    return 1.0\n")
    (case,) = (c for c in CASES if c["cause"] == "end_token")
    metrics = run_of(metrics_of(case["first"]), metrics_of(case["last"]), 40)
    first, *_ = explain(metrics, held_out(), run_with(tmp_path, f"rewards: {rewards}"))
    assert (first.id, first.remedy) == ("end_token", "")
    assert "rollout.stop with the text that follows an answer" in str(first)
    assert "</answer>" not in str(first)


def test_every_rule_has_a_case_a_reason_and_a_remedy() -> None:
    assert {c["cause"] for c in CASES} == set(BY_NAME)
    for rule in RULES:
        assert rule.condition.endswith("."), rule.name
        assert rule.reason.endswith("."), rule.name
        assert rule.remedies, rule.name
        assert set(rule.silences) <= set(BY_NAME), rule.name


def test_a_rule_is_found_by_its_name_in_a_traceback_and_in_a_profile() -> None:
    names = [rule.predicate.__name__ for rule in RULES]
    assert len(set(names)) == len(names) == len(BY_NAME)
    assert all(re.fullmatch(r"[a-z]\w+_\w+", name) for name in names), names
    families = {rule.family: rule.predicate.__module__ for rule in RULES}
    for family, module in families.items():
        assert (
            tuple(rule for rule in RULES if rule.family == family) == importlib.import_module(module).RULES
        ), "a predicate is in the file of its record"


@pytest.mark.parametrize(
    "config", ["algorithm: grpo", "algorithm: dapo", "algorithm: dr_grpo", "algorithm: {name: grpo, kl: 0.1}"]
)
@pytest.mark.parametrize("steps", [5, 10, 40, 200])
def test_nothing_is_said_of_a_healthy_run(tmp_path: Path, config: str, steps: int) -> None:
    setting = run_with(tmp_path, f"{config}\nrewards: [math_answer, {{answer_format: 0.1}}]")
    assert explain(run_of({}, {}, steps), held_out(0.3, 0.7, steps=steps), setting) == []


def test_nothing_is_said_of_runs_that_solve_their_task_or_begin_without_the_form() -> None:
    solved = {"entropy/sampled": 0.01, "accuracy": 1.0, "groups/dead": 0.95, "groups/dead_correct": 0.95,
              "text/duplicates": 0.9, "kl/start": 12.0}  # fmt: skip
    assert explain(run_of({}, solved), held_out(0.2, 0.98), unknown) == []
    base = {
        "reward/answer/no_answer": 0.9,
        "accuracy": 0.02,
        "reward/form/mean": 0.1,
        "length/truncated": 0.05,
    }
    learns = {"reward/answer/no_answer": 0.0, "reward/form/mean": 1.0, "accuracy": 0.8}
    assert explain(run_of(base, learns, 20)[1:], held_out(0.0, 0.8, steps=20), unknown) == []


@pytest.mark.parametrize(("newest", "names"), [(0.95, {"truncated"}), (0.1, set())])
def test_five_steps_in_which_completions_learn_to_end_are_not_truncated(
    newest: float, names: set[str]
) -> None:
    """The mean of the first five steps says nothing of where they lead."""
    metrics = run_of(flat(), flat(), 5)
    for step, part in zip(metrics, (0.95, 0.9, 0.8, 0.6, newest), strict=True):
        step["length/truncated"] = part
    assert {f.id for f in explain(metrics, [], unknown)} & {"truncated"} == names


def test_an_only_reward_that_grades_is_learned_though_nothing_is_ever_correct(tmp_path: Path) -> None:
    setting = run_with(tmp_path, "rewards: [mine.py:closeness]")
    far = {"accuracy": 0.0, "kl/start": 12.0, "reward/std": 0.4}
    first, last = ({**far, "reward/mean": r, "reward/answer/mean": r} for r in (-1.9, -0.3))

    def said(end: dict[str, float], evals: list[dict[str, Any]]) -> set[str]:
        metrics = [{n: v for n, v in m.items() if "/form" not in n} for m in run_of(first, end)]
        return {f.id for f in explain(metrics, evals, setting)} & {"kl_growth", "held_out_flat"}

    assert said(last, held_out(0.0, 0.0, reward=1.6)) == said(last, []) == set()
    assert said(last, held_out(0.0, 0.0)) == {"kl_growth"}, "held-out problems earn as little as before"
    assert said(first, []) == {"kl_growth"}


@pytest.mark.parametrize(("correct", "farmed"), [(0.92, False), (0.7, True), (0.05, True)])
def test_a_form_that_was_always_right_is_farmed_only_where_many_answers_are_lost(
    tmp_path: Path, correct: float, farmed: bool
) -> None:
    setting = run_with(tmp_path, "rewards: [math_answer, {answer_format: 0.1}]")
    first = {"accuracy": 0.95, "reward/answer/mean": 0.95, "reward/form/mean": 0.99, "reward/mean": 1.05}
    last = first | {"accuracy": correct, "reward/answer/mean": correct, "reward/mean": correct + 0.1}
    said = [f.sentence for f in explain(run_of(first, last), [], setting) if f.id == "farmed"]
    assert bool(said) == farmed
    assert not any(sentence.startswith("answer") for sentence in said), "the verdict's own fall is no farming"


def test_a_reward_that_says_nothing_of_many_is_named_and_not_given_more_time(tmp_path: Path) -> None:
    silent = {"reward/unscored": 0.4, "reward/own/not_applicable": 0.4}
    first, *_ = explain(run_of(silent, {}), [], run_with(tmp_path, "algorithm: grpo"))
    assert first.id == "scores_fail"
    assert "40 % of the completions could not be scored: own says nothing about 40 %" in first.sentence
    assert first.remedy == "", "neither more time nor an earlier end is of use"


def test_an_own_reward_that_all_have_earned_is_no_constant_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def pays(completion):\n    return 1.0\n")
    config = run_with(tmp_path, "rewards: ['mine.py:pays']")

    def said(first: float, last: float) -> set[str]:
        solved = {"groups/dead_correct": float(last == 1), "groups/dead_incorrect": float(last < 1)}
        end = {**LIKE["constant"], **solved, "reward/mean": last, "accuracy": float(last == 1)}
        course = [HEALTHY | ({"reward/mean": first} if n < 20 else end) for n in range(40)]
        return {f.id for f in explain([{"step": n, **m} for n, m in enumerate(course)], [], config)}

    assert "constant_reward" not in said(0.4, 1.0)
    assert "constant_reward" in said(0.4, 0.3), "a judge that no longer judges"


def test_several_rewards_that_grade_are_learned_though_nothing_is_ever_correct(tmp_path: Path) -> None:
    setting = run_with(tmp_path, "rewards: ['mine.py:close', 'mine.py:brief']")
    far = {"accuracy": 0.0, "kl/start": 12.0, "reward/std": 0.2, "reward/form/mean": 0.1}

    def said(answer: float, form: float, evals: list[dict[str, Any]]) -> set[str]:
        first = far | {"reward/mean": 0.3, "reward/answer/mean": 0.2}
        last = far | {"reward/mean": answer + form, "reward/answer/mean": answer, "reward/form/mean": form}
        found = {f.id for f in explain(run_of(first, last), evals, setting)}
        return found & {"kl_growth", "held_out_flat", "farmed"}

    assert said(0.4, 0.4, held_out(0.0, 0.0, reward=0.5)) == said(0.4, 0.4, []) == set()
    assert said(0.4, 0.4, held_out(0.0, 0.0)), "held-out problems earn as little as before"
    assert "farmed" in said(0.1, 0.9, held_out(0.0, 0.0, reward=0.5)), "what says what is correct pays less"
    assert said(0.2, 0.1, []) == {"kl_growth"}


@pytest.mark.parametrize(
    ("temperature", "greedy", "sampled", "said"),
    [(1.5, 0.4, 0.1, True), (1.5, 0.4, 0.3, False), (1.0, 0.4, 0.1, False), (1.5, 0.02, 0.0, False)],
)
def test_a_temperature_is_too_high_where_most_of_what_is_known_is_lost_in_noise(
    tmp_path: Path, temperature: float, greedy: float, sampled: float, said: bool
) -> None:
    known, drawn = (np.arange(100) < 100 * share for share in (greedy, sampled))
    evaluation = Evaluation(known, drawn.astype(int), drawn, drawn.astype(float), 1, "answer")
    setting = run_with(tmp_path, f"rollout: {{temperature: {temperature}}}\nrewards: [math_answer]")
    found = explain(run_of(flat(), flat(), 4), [{"step": 0, **evaluation.record()}], setting)
    assert [f.id for f in found if f.id != "other_problems"] == ["too_hot"] * said


def test_a_policy_is_worse_where_two_evaluations_say_so_and_not_where_one_of_many_does() -> None:
    """Of twenty looks at a policy that stays as it is, one in three runs has one outside of its interval."""
    still = run_of(flat(), flat())
    assert "worse" not in {f.id for f in explain(still, held_out(0.5, 0.5, 0.4, 0.5, 0.5), unknown)}
    assert "worse" in {f.id for f in explain(still, held_out(0.5, 0.5, 0.4, 0.4, 0.5), unknown)}
    assert "worse" in {f.id for f in explain(still, held_out(0.5, 0.4), unknown)}


def test_what_is_paid_more_while_held_out_answers_get_worse_is_farmed(tmp_path: Path) -> None:
    setting = run_with(tmp_path, "rewards: [math_answer, {answer_format: 5.0}]")
    metrics = run_of({"reward/form/mean": 0.4}, flat(**{"reward/form/mean": 0.46}))
    metrics = [{**m, "accuracy": 0.5, "reward/answer/mean": 0.5} for m in metrics]
    (first, *_) = explain(metrics, held_out(0.5, 0.3, reward=3.0), setting)
    assert first.id == "farmed"
    assert first.sentence.startswith("form went from 0.41 to 0.45 and held-out answers 50 % -> 30 % [")
    (first, *_) = explain(metrics, held_out(0.5, 0.3), setting)
    assert first.id == "worse", "nothing is paid more"


def test_an_update_that_breaks_the_policy_is_why_later_steps_have_no_signal(tmp_path: Path) -> None:
    setting = run_with(tmp_path, "train: {lr: 0.03}\nrewards: [math_answer]")
    first, *_ = said = explain(
        [
            {"step": 0, **HEALTHY, "optimizer/updates": 4.0, "kl/start": math.nan, "optimizer/lr": 0.03},
            {"step": 1, **HEALTHY, **ALL, "reward/mean": 0.0, "accuracy": 0.0, "kl/start": 83.2},
        ],
        [],
        setting,
    )
    assert [f.id for f in said] == ["leaps"]
    moved = "an update moves the policy by 20.8 nats per completion, the reward fell from 0.5 to 0"
    assert first.sentence == f"{moved}: the learning rate, 3.0e-02 by now, is far too high", (
        "83.2 after 4 updates"
    )
    cut = [{"step": n, "accuracy": 0.0, **ALL, **LONG} for n in range(2, 22)]
    assert "rollout.max_tokens" in no_signal(cut, setting)
    assert no_signal(cut, setting, said).endswith("is far too high. Try: train.lr: 0.003")


def test_a_stage_that_only_collects_is_not_said_to_give_every_answer_0() -> None:
    untrained = [{k: v for k, v in step.items() if not k.startswith("optimizer/")} for step in run_of({}, {})]
    assert "zero_advantage" not in {f.id for f in explain(untrained, [], unknown)}


def test_an_empty_run_and_one_without_metrics_say_nothing() -> None:
    assert explain([], [], unknown) == []
    assert explain([{"step": 0, "loss": 2.0, "reward/mean": None, "accuracy": math.nan}], [], unknown) == []


def test_a_finding_is_said_once_and_what_it_explains_not_at_all() -> None:
    found = explain(
        run_of(LIKE["cold"], LIKE["cold"]), [], lambda key: {"rollout.temperature": 0.05}.get(key, 0)
    )
    assert [f.id for f in found] == ["temperature"]


@pytest.mark.parametrize("resumed_at", [0, 90])
def test_a_watch_holds_the_steps_that_rules_look_at_and_no_more(tmp_path: Path, resumed_at: int) -> None:
    """A list of all steps took 9 KiB of each, for ever."""
    every = [{"step": n, "reward/mean": float(n % 7), "loss": -float(n)} for n in range(130)]
    folder = RunFolder(tmp_path / "run")
    for record in every[:resumed_at]:
        folder.append("metrics.jsonl", record)
    watch = Watch(folder, unknown)
    if not resumed_at:
        folder.append("metrics.jsonl", every[0])
    watch.record_findings(resumed_at)
    for record in every[max(resumed_at, 1) :]:
        watch.record_findings(int(record["step"]), {k: v for k, v in record.items() if k != "step"})
        count = int(record["step"]) + 1
        whole, held = RunView(every[:count]), RunView(watch.metrics, steps=watch.steps)
        assert (whole.first, whole.last, whole.steps) == (held.first, held.last, held.steps)
    assert len(watch.metrics) == 2 * WIDEST
    folder.close()


def test_a_run_that_resumes_says_what_one_that_did_not_says(tmp_path: Path) -> None:
    metrics = run_of(LIKE["dead"], {**LIKE["dead"], "ratio/q99": 9.0})
    whole = explain(metrics, [], unknown)
    assert len(whole) > 1
    for cut in range(len(metrics)):
        before = explain(metrics[:cut], [], unknown)
        said = [f.id for f in before]
        later = []
        for n in range(cut + 1, len(metrics) + 1):
            later += find(
                RULES, RunView(json.loads(json.dumps(metrics[:n]))), [*said, *(f.id for f in later)], n
            )
        assert [f.record() for f in [*before, *later]] == [f.record() for f in whole]


def test_an_own_estimator_is_named_where_the_policy_got_worse(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def bold(rewards):\n    return rewards + 1\n")
    setting = run_with(tmp_path, "algorithm: {name: grpo, advantage: 'mine.py:bold'}")
    fell = {"accuracy": 0.1, "reward/mean": 0.1, "reward/answer/mean": 0.1}
    first, *_ = explain(run_of({"accuracy": 0.5}, fell), held_out(0.4, 0.1), setting)
    assert first.sentence.endswith("with your own estimator mine.py:bold")


def test_only_the_own_function_that_says_what_is_correct_gives_way_to_the_tested_one() -> None:
    ours = {"math_answer": {"rule": "answer_tag"}}
    assert with_tested_verifier(["mine.py:right", {"mine.py:style": 0.5}]) == [ours, {"mine.py:style": 0.5}]
    declared = [{"mine.py:style": 0.5}, {"mine.py:right": {"verdict": True}}]
    assert with_tested_verifier(declared) == [
        declared[0],
        {"math_answer": {"rule": "answer_tag", "verdict": True}},
    ]
    tested = [{"mine.py:style": 0.5}, {"exact_answer": {"verdict": True}}]
    assert with_tested_verifier(tested) == tested


ALL = {
    "groups/dead": 1.0,
    "groups/dead_correct": 0.0,
    "groups/dead_incorrect": 0.0,
    "groups/dead_unscored": 0.0,
}
STILL = {"groups/dead": 0.0, "optimizer/grad_norm": 0.0, "optimizer/skipped": 0.0}
LEFT_OUT = {**STILL, "groups/count": 8.0, "rollout/filtered": 8.0}
UNSCORED = {"groups/dead_unscored": 1.0, "reward/unscored": 1.0}
LONG = {"groups/dead_incorrect": 1.0, "length/truncated": 0.9}
CUT = {"length/truncated": 1.0}
FOOLED = {"accuracy": 0.5, "reward/paid_elsewhere": 1.0}
COPIES = {"groups/dead_incorrect": 1.0, "text/duplicates": 0.9}


@pytest.mark.parametrize(
    ("config", "metrics", "says"),
    [
        ("algorithm: grpo", {"groups/dead_correct": 1.0}, "these problems are solved"),
        ("algorithm: grpo", {"groups/dead_incorrect": 1.0}, "every answer is incorrect"),
        ("rollout: {max_tokens: 64}", LONG, "at rollout.max_tokens. Try: rollout.max_tokens: 128"),
        ("algorithm: grpo", UNSCORED, "100 % of the completions could not be scored"),
        ("algorithm: grpo", {}, "only some of their answers are correct"),
        ("algorithm: grpo", STILL, "it is algorithm.advantage that gives"),
        ("algorithm: ppo", {**STILL, "reward/std": 0.0}, "what should the rewards have told apart?"),
        ("algorithm: {name: grpo, filter: informative}", LEFT_OUT, "algorithm.filter leaves every group out"),
        ("rollout: {mask_truncated: true, max_tokens: 9}", {**STILL, **LONG}, "rollout.max_tokens: 18"),
        ("rollout: {mask_truncated: true, max_tokens: 9}", {**STILL, **CUT, **FOOLED}, "max_tokens: 18"),
        ("rollout: {temperature: 0.05}", COPIES, "little choice. Try: rollout.temperature: 1.0"),
    ],
)
def test_why_there_was_no_signal(tmp_path: Path, config: str, metrics: dict[str, float], says: str) -> None:
    assert (
        says.lower() in no_signal([{"accuracy": 0.1, **ALL, **metrics}], run_with(tmp_path, config)).lower()
    )


def test_rules_speak_of_metrics_that_are_logged() -> None:
    folder = Path(__file__).parents[2] / "src/covey/insight/findings"
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    names = set(re.findall(r'"((?:\w+/)+\w+)"', source))
    assert len(names) > 20
    assert names <= logged()


def markdown(rules: Sequence[Rule]) -> Iterator[str]:
    """Yield the rules as sections of docs/findings.md, one for each family."""
    for family, members in groupby(rules, key=lambda rule: rule.family):
        yield from (f"### {family.capitalize()}", "")
        yield "| finding | condition | reason | silences |"
        yield "|---|---|---|---|"
        for r in members:
            yield f"| `{r.name}` ({r.severity}) | {r.condition} | {r.reason} | {', '.join(r.silences)} |"
        yield ""


def test_the_page_has_the_table_of_the_rules() -> None:
    page = (DOCS / "findings.md").read_text(encoding="utf-8")
    assert "\n".join(markdown(RULES)) in page, "print(*markdown(RULES), sep='\\n') prints it"


def test_a_run_is_explained_at_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = tmp_path / "2-rl"
    stage.mkdir()
    resolved = load_config(values={"model": "tiny", "rewards": ["math_answer"]})
    (stage / "config.yaml").write_text(resolved_yaml(resolved))
    metrics = run_of(flat(), flat(**{"length/truncated": 0.5}))
    lines = as_stream(metrics)
    (stage / "metrics.jsonl").write_text(lines + '{"step": 40, "half')
    assert main(["explain", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "are truncated at rollout.max_tokens; 90 % of the ended ones" in said
    assert "Try: rollout.max_tokens: 640" in said
    assert main(["explain", str(tmp_path), "--json"]) == 0
    (finding, *_) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["id"] == "truncated"
    (stage / "findings.jsonl").write_text(as_stream([Finding("worse", 3, "severe", "as recorded").record()]))
    assert main(["explain", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed == f"step 3: as recorded\nto try what would help: covey diagnose {tmp_path}\n"
    assert main(["explain", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    "line",
    ['{"step": 3, "id": "x"}', '{"step": 3, "id": "x", "severity": "loud", "sentence": "s"}', "{not json"],
)
def test_a_damaged_finding_is_said_and_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    (tmp_path / "config.yaml").write_text(resolved_yaml(load_config(values={"model": "tiny"})))
    (tmp_path / "metrics.jsonl").write_text(as_stream(run_of({}, {}, 2)[:1]))
    whole = Finding("worse", 3, "severe", "as recorded", evidence={"step": 3, "group": 1})
    (tmp_path / "findings.jsonl").write_text(f"{as_stream([whole.record()])}{line}\n")
    for command in (["explain"], ["show"], ["report", "-o", str(tmp_path / "r.html")]):
        assert main([command[0], str(tmp_path), *command[1:]]) == 0
    said = capsys.readouterr().out
    assert said.count("as recorded") == 2
    assert said.count("findings.jsonl: damaged, 1 of its lines cannot be read") == 2
    assert "as recorded" in (tmp_path / "r.html").read_text()


def test_remedies_are_options_too() -> None:
    (setting,) = options(["--rewards", "[math_answer, {answer_format: 0.1}]"])
    assert setting.value == ["math_answer", {"answer_format": 0.1}]

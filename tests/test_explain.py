"""`covey explain`: a run's metrics in words, the setting to change; and what a setting does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.cli import main
from covey.cli.settings import settings
from covey.config.algorithm import algorithm_keys, algorithm_settings
from covey.config.effects import AXES_IN_WORDS, EFFECTS, USUAL, effect
from covey.config.load import load_config, resolved_yaml
from covey.config.sources import key_paths
from covey.estimates import Evaluation
from covey.insight.explain import RULES, Setting, explain, no_signal, settings_of
from tests.docs.test_algorithm_pages import logged

HEALTHY: dict[str, float] = {
    "reward/mean": 0.5,
    "reward/std": 0.4,
    "reward/unscored": 0.0,
    "accuracy": 0.5,
    "groups/dead": 0.2,
    "groups/dead_incorrect": 0.1,
    "groups/dead_correct": 0.1,
    "groups/dead_unscored": 0.0,
    "length/correct": 20.0,
    "length/incorrect": 22.0,
    "length/truncated": 0.02,
    "entropy/sampled": 0.4,
    "text/duplicates": 0.1,
    "ratio/q99": 1.1,
    "clip/low": 0.03,
    "clip/high": 0.03,
    "mismatch/mean": 1e-4,
    "kl/completion_k1": 1.0,
    "text/repetition": 0.05,
    "reward/correlation/answer/format": 0.2,
    "reward/reward_model/agreement": 0.85,
    "reward/reward_model/mean": 1.0,
}


def run_of(start: dict[str, float], end: dict[str, float], steps: int = 10) -> list[dict[str, Any]]:
    """Metrics that go from one to the other, the reward rising unless said otherwise."""
    a, b = {**HEALTHY, "reward/mean": 0.2, **start}, {**HEALTHY, **start, "reward/mean": 0.8, **end}
    return [{"step": s, **{k: a[k] + (b[k] - a[k]) * s / (steps - 1) for k in a}} for s in range(steps)]


def held_out(*accuracies: float, reward: float | None = None) -> list[dict[str, Any]]:
    """Evaluations of 100 problems with one sample each; ``reward`` is the last one's."""
    found = []
    for step, accuracy in enumerate(accuracies):
        right = np.arange(100) < 100 * accuracy
        last = reward is not None and step == len(accuracies) - 1
        paid = np.full(100, reward) if last else right.astype(float)
        evaluation = Evaluation(right, right.astype(int), right, paid, samples=1, verdict="answer")
        found.append({"step": step, **evaluation.record()})
    return found


@pytest.mark.parametrize(
    ("start", "end", "evals", "says", "remedy"),
    [
        ({}, {"reward/unscored": 0.3}, (), "could not be scored", "covey score"),
        ({"groups/dead_incorrect": 0.9}, {}, (), "every answer is incorrect", "cold start"),
        (
            {},
            {"groups/dead_correct": 0.9},
            (),
            "% of the groups tie because every answer is correct",
            "harder problems",
        ),
        ({}, {"length/truncated": 0.5}, (), "truncated at rollout.max_tokens", "a larger rollout.max_tokens"),
        ({"entropy/sampled": 0.5}, {"entropy/sampled": 0.01}, (), "entropy fell to", "smaller train.lr"),
        ({}, {}, (0.4, 0.4), "held-out accuracy changed by +0 points", "covey stress"),
        ({}, {"reward/correlation/answer/format": -0.8}, (), "answer and format pull apart", "gated_by"),
        (
            {},
            {"reward/reward_model/agreement": 0.5, "reward/reward_model/mean": 3.0},
            (),
            "reward_model is over-optimised: it gives +1.8 more than at the start, and ranks",
            "covey pairs",
        ),
        ({}, {"length/incorrect": 60.0}, (), "incorrect answers grew", "dr_grpo"),
        ({}, {"ratio/q99": 5.0}, (), "moves far within a batch", "updates_per_batch"),
        ({}, {"clip/low": 0.3}, (), "tokens are clipped", "clip_high"),
        (
            {},
            {"mismatch/mean": 0.1},
            (),
            "sampler and trainer disagree",
            "algorithm.correction: truncated",
        ),
        ({}, {"kl/completion_k1": 30.0}, (), "drifted far from the reference", "kl.coef"),
        ({}, {"text/repetition": 0.9}, (), "repeats itself", "algorithm.kl"),
        ({}, {"reward/mean": 0.2}, (), "the reward has not moved", "three times"),
    ],
)
def test_a_pathology_is_named_with_its_remedy(
    start: dict[str, float], end: dict[str, float], evals: tuple[float, ...], says: str, remedy: str
) -> None:
    (remark,) = explain(run_of(start, end), held_out(*evals))
    assert says in remark.finding
    assert remedy in remark.remedy


def run_with(tmp_path: Path, text: str) -> Setting:
    (tmp_path / "run.yaml").write_text(f"model: tiny\n{text}")
    return settings_of(load_config(tmp_path / "run.yaml"))


DEAD = {"groups/dead": 0.9, "groups/dead_incorrect": 0.9, "text/duplicates": 0.85}
SURE = {"groups/dead": 1.0, "groups/dead_correct": 1.0, "text/duplicates": 0.85, "accuracy": 1.0}
FELL = {"reward/mean": 0.1, "groups/dead_incorrect": 0.75, "accuracy": 0.1}


@pytest.mark.parametrize(
    ("config", "metrics", "evals", "says", "never"),
    [
        ("rollout: {temperature: 0.05}", DEAD, (), "rollout.temperature 0.05 leaves", "easier|cold start"),
        ("rollout: {top_k: 2}", DEAD, (), "rollout.top_k 2 leaves", "easier|temperature"),
        ("rollout: {top_p: 0.1, temperature: 0.1}", DEAD, (), "0.1 and rollout.top_p 0.1", "easier"),
        ("rollout: {temperature: 1.0}", DEAD, (), "every answer is incorrect", "temperature"),
        ("rollout: {temperature: 0.05}", SURE, (), "harder problems", "temperature"),
        ("algorithm: dapo", SURE, (), "harder problems", "easier|filter"),
        ("algorithm: grpo", SURE, (), "algorithm.filter: informative", "easier"),
        ("rollout: {curriculum: frontier}", SURE, (), "harder problems", "frontier|easier"),
        ("algorithm: grpo", FELL, (0.4, 0.1), "made the policy worse: 40 % -> 10 %", "easier|hard"),
        ("algorithm: grpo", FELL, (), "worse: from 48 % correct in training", "easier|hard|three times"),
        ("train: {updates_per_batch: 1}", FELL, (0.4, 0.1), "a smaller train.lr", "fewer train|larger train"),
        ("train: {updates_per_batch: 2}", FELL, (0.4, 0.1), "fewer train.updates_per_batch", "easier"),
        ("algorithm: {name: grpo, kl: null}", FELL, (0.4, 0.1), "algorithm.kl, a pull", "easier"),
        ("algorithm: {name: grpo, kl: 0.1}", FELL, (0.4, 0.1), "a smaller train.lr", "a pull"),
        ("algorithm: grpo", {"length/truncated": 0.5}, (), "soft_overlong", "easier"),
        ("rewards: [math_answer, {soft_overlong: {limit: 9, buffer: 2}}]", {"length/truncated": 0.5}, (),
         "max_tokens", "soft_overlong"),
        ("algorithm: dapo", {"entropy/sampled": 0.001}, (), "a smaller train.lr", "clip_high"),
        ("dtype: float32", {"mismatch/mean": 0.1}, (), "algorithm.correction", "dtype|top_p|top_k"),
        ("algorithm: dr_grpo", {"length/incorrect": 60.0}, (), "incorrect answers grew", "Try|dr_grpo"),
        ("algorithm: grpo", {"length/incorrect": 60.0}, (), "dr_grpo", "easier"),
        ("algorithm: grpo",
         {"groups/dead": 0.9, "groups/dead_correct": 0.0, "groups/dead_incorrect": 0.0}, (),
         "though only some answers are correct", "easier"),
    ],
)  # fmt: skip
def test_advice_follows_what_was_seen_and_what_is_set(
    tmp_path: Path, config: str, metrics: dict[str, float], evals: tuple[float, ...], says: str, never: str
) -> None:
    remarks = explain(run_of({}, metrics), held_out(*evals), run_with(tmp_path, config))
    said = "\n".join(map(str, remarks))
    assert says in said
    assert not re.search(never, said), said


def test_a_reward_that_falls_is_no_hard_task(tmp_path: Path) -> None:
    evals = held_out(0.4, 0.4, reward=-1.0)
    (remark,) = explain(run_of({}, {**FELL, "accuracy": 0.5}), evals, run_with(tmp_path, "algorithm: grpo"))
    assert "reward 0.4 -> -1" in remark.finding


def test_an_own_estimator_is_named_where_the_policy_got_worse(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def bold(rewards):\n    return rewards + 1\n")
    setting = run_with(tmp_path, "algorithm: {name: grpo, advantage: 'mine.py:bold'}")
    remark, *_ = explain(run_of({}, FELL), held_out(0.4, 0.1), setting)
    assert remark.finding.endswith("with your own estimator mine.py:bold")


@pytest.mark.parametrize(
    ("config", "metrics", "says"),
    [
        ("algorithm: grpo", {"groups/dead": 1, "groups/dead_correct": 1}, "too easy: take harder ones"),
        ("algorithm: grpo", {"groups/dead": 1, "groups/dead_incorrect": 1}, "The problems are too hard"),
        ("algorithm: grpo", {"groups/dead": 1, "groups/dead_incorrect": 1, "length/truncated": 0.9},
         "Most are truncated before they give an answer"),
        ("algorithm: grpo", {"groups/dead": 1, "groups/dead_unscored": 1}, "The rewards give no scores"),
        ("algorithm: grpo", {"groups/dead": 1}, "look at the weights of the rewards"),
        ("algorithm: grpo", {"groups/dead": 0}, "it is algorithm.advantage that gives"),
        ("rollout: {mask_truncated: true}", {"groups/dead": 0, "length/truncated": 1},
         "raise rollout.max_tokens"),
        ("rollout: {temperature: 0.05}",
         {"groups/dead": 1, "groups/dead_incorrect": 1, "text/duplicates": 0.9},
         "rollout.temperature 0.05 leaves little to choose: raise it"),
    ],
)  # fmt: skip
def test_why_there_was_no_signal(tmp_path: Path, config: str, metrics: dict[str, float], says: str) -> None:
    assert says in no_signal([{"accuracy": 0.1, **metrics}], run_with(tmp_path, config))


def test_a_healthy_run_and_an_empty_one_have_no_remarks() -> None:
    assert explain(run_of({}, {}), held_out(0.3, 0.7)) == []
    assert explain([]) == []
    assert explain([{"step": 0, "loss": 2.0, "reward/mean": None}]) == []


def test_low_entropy_of_a_task_that_is_solved_is_no_collapse() -> None:
    assert explain(run_of({"entropy/sampled": 0.5}, {"entropy/sampled": 0.01, "accuracy": 1.5})) == []


def test_rules_speak_of_metrics_that_are_logged_and_of_settings_there_are() -> None:
    source = Path(explain.__code__.co_filename).read_text(encoding="utf-8")
    names = set(re.findall(r'"((?:\w+/)+\w+)"', source))
    assert len(names) > 10
    assert names <= logged()
    remedies = " ".join(t.what for rule in RULES for t in rule.remedies)
    for name in re.findall(r"\b(?:train|rollout)\.\w+", remedies):
        assert name in key_paths(), name


def test_a_run_is_explained_at_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = tmp_path / "2-rl"
    stage.mkdir()
    loaded = load_config(values={"model": "tiny", "rewards": ["math_answer"]})
    (stage / "config.yaml").write_text(resolved_yaml(loaded))
    lines = "".join(json.dumps(m) + "\n" for m in run_of({}, {"length/truncated": 0.5}))
    (stage / "metrics.jsonl").write_text(lines + '{"step": 10, "half')
    assert main(["explain", str(tmp_path)]) == 0
    assert "were truncated at rollout.max_tokens. Try: a larger rollout.max_tokens" in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "--json"]) == 0
    assert "finding" in json.loads(capsys.readouterr().out)[0]
    assert main(["explain", str(tmp_path / "none")]) == 2


def test_settings_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "rollout.group_size"]) == 0
    says = "rollout.group_size (default 8, >= 1 <= 65536, usual 4 to 64; 8 or 16 in most papers, "
    says += "TRL num_generations)"
    assert capsys.readouterr().out.startswith(f"{says}: Completions per prompt")
    assert main(["explain", "--json"]) == 0
    assert [s["setting"] for s in json.loads(capsys.readouterr().out)] == key_paths()
    assert main(["explain", "loss.beta"]) == 0
    assert "loss.beta (of dpo, default 0.1, > 0): How much a margin counts" in capsys.readouterr().out
    assert main(["explain", "train.lrr"]) == 2
    assert "did you mean train.lr" in capsys.readouterr().err


@pytest.mark.parametrize("key", algorithm_keys())
def test_every_key_of_the_algorithm_is_explained(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", key]) == 0
    assert capsys.readouterr().out.startswith(f"{key} (")


def test_there_is_an_effect_for_every_setting_of_the_algorithm_and_for_no_other() -> None:
    settings = {(function, p.name) for _, function, p in algorithm_settings()}
    assert all(effect(function, name) for function, name in settings)
    assert {e for e in EFFECTS if "." in e} <= {f"{function}.{name}" for function, name in settings}
    assert set(USUAL) <= {*key_paths(), *algorithm_keys()}
    assert set(AXES_IN_WORDS) == {k.split(".")[1] for k in algorithm_keys() if k.count(".") == 1} - {
        "estimator"
    }


def test_names_of_remedies_are_explained() -> None:
    for what in (t.what for rule in RULES for t in rule.remedies):
        for key in re.findall(r"\b(?:algorithm|train|rollout)\.[\w.]+\w", what):
            assert settings(key), key


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("beta", "algorithm.kl.coef (of kl"),
        ("epsilon", "algorithm.surrogate.clip_low (of clip"),
        ("num_generations", "rollout.group_size ("),
        ("use_vllm", "completions are sampled by covey itself"),
        ("num_train_epochs", "write train.steps"),
        ("kl", "algorithm.kl ("),
        ("clip_high", "algorithm.surrogate.clip_high (of clip"),
        ("algorithm", "every ratio is 1: no setting of ratio or surrogate"),
    ],
)
def test_names_of_trl_and_short_names_are_explained(
    name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", name]) == 0
    assert says in capsys.readouterr().out

"""Benchmarks: configs are valid, table and picture say what the curves say, no GPU is no benchmark of it."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from covey.config.load import load_config
from covey.estimates import Evaluation
from covey.rewards.base import load_rewards
from tests.fakes import as_stream, group

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
BENCH, PATHOLOGIES, ORDERS = map(importlib.import_module, ("presets", "pathologies", "curriculum"))
STARTS, CREDIT = map(importlib.import_module, ("starts", "credit"))


@pytest.mark.parametrize("name", BENCH.PRESETS)
def test_every_preset_has_a_valid_config_with_as_many_completions(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BENCH.config_of(name, 1, 50, tmp_path)))
    config = load_config(tmp_path / "run.yaml").config
    algorithm = config.algorithm if isinstance(config.algorithm, str) else config.algorithm["name"]
    assert (algorithm, config.seed, config.train.steps) == (name, 1, 50)
    assert config.rollout.group_size * config.rollout.prompts_per_step == 256
    assert (config.train.warmup_steps, config.eval.every) == (5, 10)


def test_the_table_says_what_the_curves_say() -> None:
    fast = BENCH.Curve([0, 10, 20], [0.5, 0.8, 0.95], [0.3, 0.6, 0.9], [0, 1280, 2560])
    slow = BENCH.Curve([0, 10, 20], [0.5, 0.7, 0.85], [0.3, 0.6, 0.7], [0, 1280, 2560])
    rows = BENCH.table({"grpo": [fast, slow], "dapo": [slow]}).splitlines()
    assert rows[2].startswith(
        "| grpo | 15 (10 to 20) | 20 (20 to 20), 1 missed | 2 (1 to 3) | 90 (85 to 95) |"
    )
    assert rows[3].startswith(
        "| dapo | 20 (20 to 20) | not reached | 3 (3 to 3) | 85 (85 to 85) | 70 (70 to 70) |"
    )
    drawn = BENCH.picture({"grpo": [fast, slow], "dapo": [slow]})
    assert drawn.count("<polyline") == drawn.count("<polygon") == 3  # a line and its interval a seed
    assert "0.0,55.0 95.0,22.0 190.0,5.5" in drawn  # 50, 80 and 95 % of an axis of 190 by 110


def test_a_gpu_is_measured_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(__file__).parents[1] / "benchmarks" / "speed"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["speed", "--gpu"])
    speed = runpy.run_path(str(folder / "__main__.py"))
    with pytest.raises(SystemExit):
        speed["main"]()
    assert "--gpu measures on a GPU, and torch finds none here" in capsys.readouterr().err
    sizes = {size: speed["subject"].matrix_parameters(size) for size in ("0.5B", "1.5B")}
    assert sizes == pytest.approx({"0.5B": 0.494e9, "1.5B": 1.544e9}, rel=1e-3)


def test_a_peer_that_is_not_installed_is_said_once_below_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks" / "speed"))
    quick = importlib.import_module("quick")
    sample = {"cpu": 1.0, "tokens": 10}
    quick.compare(lambda cell, lengths, peer: None if peer == "trl" else [[sample], [sample]], "here")
    said = capsys.readouterr().out
    assert said.count("pip install 'covey[bench]'") == 1
    assert said.index("update, ragged") < said.index("trl is not installed: pip install")
    quick.compare(lambda *_: [[sample], [sample]], "here")
    assert "pip install" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "arm"), [(c, a) for c, case in PATHOLOGIES.CASES.items() for a in case.arms]
)
def test_every_arm_of_a_pathology_has_a_valid_config(tmp_path: Path, case: str, arm: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(PATHOLOGIES.config_of_arm(case, arm, 1, 5, tmp_path)))
    config = load_config(tmp_path / "run.yaml").config
    assert config.train.steps == 5
    assert config.rollout.group_size * config.rollout.prompts_per_step == 256
    rewards = load_rewards(config.rewards, tmp_path)
    assert rewards.verdict.name == "math_answer", "the verdict judges, whatever else does"


def accurate(share: float) -> Evaluation:
    right = np.arange(10) < 10 * share
    return Evaluation(right, right.astype(int), right, right.astype(float), samples=1)


def test_a_case_is_told_by_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [{"step": s, "accuracy": 0.4, "reward/std": 0.5 if s < 5 else 0.3} for s in range(10)]
    steps = [{**r, "length/truncated": 0.6} for r in steps]
    evals = [{"step": s, **accurate(share).record()} for s, share in ((0, 0.3), (10, 0.5))]
    for name, records in (("metrics", steps), ("evals", evals)):
        (tmp_path / f"{name}.jsonl").write_text(as_stream(records))
    monkeypatch.setattr(PATHOLOGIES, "cold_start", lambda *_: tmp_path)
    monkeypatch.setattr(PATHOLOGIES, "trained", lambda *_: tmp_path)
    section, panel = PATHOLOGIES.run_case("noise", 1, 10)
    assert "| 10 % wrong | 0.4 to 0.4 | 0.5 to 0.3 | 30 to 50 |" in section
    assert "- 10 % wrong: 60 % of the completions are truncated" in section
    assert (panel.lines[0].x, panel.lines[0].y) == ([0, 10], [0.3, 0.5])


@pytest.mark.parametrize("arm", dict.fromkeys([*ORDERS.ORDERS, *ORDERS.CREDIT]))
def test_every_order_and_credit_has_a_valid_config(tmp_path: Path, arm: str) -> None:
    """Nothing in it that its method does not read; as many completions a step but where groups are halved."""
    loaded = load_config(values=ORDERS.config_of(arm, 1, tmp_path))
    assert not any("not read" in note or "no stage" in note for note in loaded.notes)
    rollout = loaded.config.rollout
    assert rollout.group_size * rollout.prompts_per_step == (64 if arm == "vine_ppo" else 128)
    assert sum(s.config.train.steps for s in loaded.stages()) in (15, 30)
    assert {s.algorithm.kl for s in loaded.stages()} == {None}


def learned(steps: int, right: float, tokens: float) -> Any:
    """A run that gets that share of its problems right at every evaluation but the first, after 10 steps."""
    problems = np.arange(200) < 200 * right
    first, then = (
        Evaluation(own, own.astype(int), own, own.astype(float), samples=1)
        for own in (problems & False, problems)
    )
    at = list(range(0, steps + 1, 10))
    spent = [128.0 * n for n in at]
    return ORDERS.Curve(
        at, spent, [tokens * s for s in spent], [first, *[then] * (len(at) - 1)], [0.25] * steps
    )


def test_orders_are_compared_at_equal_completions_and_credit_at_equal_tokens() -> None:
    """Twice the tokens for a completion: of 30 steps the 15th ends the budget, and 10 is nearest."""
    found = {"shuffled": [learned(30, 0.5, 8.0)] * 3, "vine_ppo": [learned(30, 0.3, 24.0)] * 3}
    arms = {name: ({}, "it") for name in found}
    rows = ORDERS.table(arms, found, "tokens", {}).splitlines()
    assert rows[2].startswith("| cold start | 0 [")
    assert "| 10, 10, 10 | 10,240, 10,240, 10,240 | 25% | it |" in rows[3]
    assert "| never, never, never | never, never, never | 25% | it |" in rows[4]
    assert "-20 points" in rows[4]
    assert found["vine_ppo"][0].near(30 * 128 * 8, "tokens") == 1
    drawn = ORDERS.picture(found)
    assert drawn.count("<polyline") == 6


def test_a_runs_curve_counts_its_stages_its_prepass_and_continuations(tmp_path: Path) -> None:
    """Two stages of two steps, two groups of 4 with 10 tokens each: 8 completions and 80 tokens a step."""
    step = {"groups/count": 2, "length/mean": 10.0, "groups/dead": 0.5, "rollout/continued_tokens": 20.0}
    for stage in ("1-rl", "2-rl"):
        (tmp_path / stage).mkdir()
        evals = [{"step": s, **accurate(0.5).record()} for s in (0, 2)]
        for name, records in (("metrics", [step] * 2), ("evals", evals)):
            (tmp_path / stage / f"{name}.jsonl").write_text(as_stream(records))
    found = ORDERS.curve(tmp_path, group=4, before=5)
    assert found.steps == [0, 2, 2, 4]
    assert found.completions == [5, 21, 21, 37]
    assert found.tokens == [50, 250, 250, 450]


@pytest.mark.parametrize("rate", STARTS.RATES)
@pytest.mark.parametrize("arm", STARTS.ARMS)
def test_every_start_has_the_same_reinforcement(tmp_path: Path, arm: str, rate: str) -> None:
    """Only the folder differs with the model, and nothing in the config is not read."""
    own, first = (STARTS.config_of(name, rate, 1, tmp_path) for name in (arm, "base"))
    loaded = load_config(values=own)
    assert not any("not read" in note for note in loaded.notes)
    assert {**own, "output": ""} == {**first, "output": ""}
    assert f"{loaded.config.train.lr:.0e}".replace("-0", "-") in rate


def test_a_run_that_nothing_was_paid_in_ends_with_the_weights_it_had(tmp_path: Path) -> None:
    """It is stopped with two evaluations of three steps; the last one is what it would have found."""
    step = {"groups/count": 8, "groups/dead": 1.0}
    evals = [{"step": s, **accurate(0.0).record()} for s in (0, 2)]
    for name, lines in (("metrics", [step] * 3), ("evals", evals)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    found = STARTS.curve(tmp_path)
    assert (found.completions, found.paid) == ([0.0, 128.0, 192.0], [0.0] * 3)


def test_a_base_model_reads_plain_texts_and_few_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STARTS, "FOLDER", tmp_path)
    STARTS.write_rows(tmp_path, STARTS.sum_row)
    rows = [json.loads(line) for line in STARTS.write_texts().read_text().splitlines()]
    assert 0.02 <= np.mean(["<answer>" in row["completion"] for row in rows]) <= 0.09
    assert all(str(row["answer"]) in row["completion"] for row in rows)


def test_a_start_is_compared_with_the_base_on_the_same_problems() -> None:
    runs = {
        name: [STARTS.Curve([0.0, 64.0], [accurate(0.1), accurate(right)], [0.5] * 20)] * 3
        for name, right in (("base", 0.4), ("base, then supervised", 0.9))
    }
    rows = STARTS.table(runs).splitlines()
    assert rows[2].startswith("| base | 10 [") and "| 50%, 50% |" in rows[2]
    assert rows[3].startswith("| base, then supervised | 10 [") and "+50 points" in rows[3]
    assert STARTS.picture({"lr 1, no KL": runs}).count("<polyline") == 6


def test_a_tokens_true_gain_is_what_it_adds_to_its_beginning() -> None:
    """Worth by the bytes of a beginning, by two halves of the continuations; the second is asked for."""
    own = group([1.0, 0.0], [2, 1])
    starts = [c.tokens for c in own.completions]
    worth = {(0, b""): np.array([0.0, 0.5]), (0, starts[0][:1].tobytes()): np.array([0.0, 0.75])}
    assert CREDIT.true_gains(own, 0, worth, 1).tolist() == [[0.25, 0.25], [-0.5, 0.0]]
    assert CREDIT.in_steps(np.array([0.5, 0.25, -0.25]), [1, 2], adds_up=True).tolist() == [0.75, -0.25]
    assert CREDIT.in_steps(np.array([0.5, 0.5, -0.25]), [1, 2], adds_up=False).tolist() == [0.5, -0.25]


def test_fidelity_is_one_with_the_truth_and_lost_where_it_is_shuffled() -> None:
    truth = [np.random.default_rng(n).normal(size=50) for n in range(4)]
    same = CREDIT.fidelity(truth, truth, seed=0)
    assert (same["correlation"], same["within"], same["error"]) == (pytest.approx(1), pytest.approx(1), 0)
    assert abs(same["shuffled"]) < 0.05 and same["shuffled_error"] > 1
    whole = [np.full(50, own.sum()) for own in truth]  # one number a completion says nothing within it
    assert np.isnan(CREDIT.fidelity(truth, whole, seed=0)["within"])


def test_shuffled_credit_keeps_each_completions_sum_and_nothing_off_its_tokens() -> None:
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 5, -1], [1, 6, -1, -1]])
    rewards, mask = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), tokens >= 0
    true, mixed = CREDIT.prefix_tree(rewards, tokens, mask), CREDIT.shuffled_tree(rewards, tokens, mask)
    torch.testing.assert_close(mixed.sum(1), true.sum(1))
    assert not mixed[~mask].any() and not torch.equal(mixed, true)


def test_training_is_compared_with_the_outcomes_on_the_same_problems() -> None:
    def run(after: float) -> dict[str, Any]:
        return {"before": np.full(20, 0.2), "after": np.full(20, after), "tokens": 1234}

    rows = CREDIT.trained_table({"outcome": [run(0.4)] * 3, "oracle": [run(0.5)] * 3}).splitlines()
    assert rows[2].startswith("| cold start | 20 [") and "| 1,234 | one advantage" in rows[3]
    assert rows[4].startswith("| oracle | 50 [") and "| +10 [" in rows[4]


def test_the_table_of_credit_has_intervals_over_seeds_and_no_error_of_zscores() -> None:
    known = {"within": 0.5, "shuffled": 0.0, "error": 0.01, "shuffled_error": 0.03, "cost": 12.0}
    known |= {"learned": 0.0}
    by_name = [
        {
            "nothing": {"error": 0.02},
            "GRPO": {**known, "correlation": c, "in_units": True},
            "process rewards": {**known, "correlation": c, "in_units": False},
        }
        for c in (0.4, 0.5, 0.6)
    ]
    rows = CREDIT.table([{"tokens": own} for own in by_name], "tokens").splitlines()
    assert rows[3].startswith("| GRPO | 0.50 [0.25, 0.75] | 0.50 [0.50, 0.50] | ")
    assert " 10 [10, 10] " in rows[3] and " 10 [" not in rows[4]


def test_every_mistake_has_its_place_in_the_source() -> None:
    """A mutant whose text is gone would be an error only when somebody runs all of them."""
    mutants = importlib.import_module("mutants")
    reasons = {(m.file, m.mistake): mutants.unfit(m) for m in mutants.MUTANTS}
    assert {name: why for name, why in reasons.items() if why} == {}
    (first, *_) = mutants.MUTANTS
    assert "no Python" in mutants.unfit(first._replace(new="("))
    assert "0 times" in mutants.unfit(first._replace(old="never written"))

"""The audit of loops of no framework, of verl's dumps and of logs: what a fourth stranger planted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.audit.checks.check import apply
from covey.audit.checks.returns import returns_of
from covey.audit.readers.sources import open_run
from covey.audit.table import CHECKS
from tests.audit.lines import (
    WORDS,
    found,
    own,
    report_of,
    retrain,
    rollouts,
    rows,
    samples,
    sound,
    updates,
)


def test_a_loop_that_names_no_algorithm_is_told_what_to_name(tmp_path: Path) -> None:
    report = report_of(own(sound()), tmp_path)
    assert [str(f) for f in report.findings] == []
    assert {"std_missing", "advantages_differ", "loss_differs"} <= set(report.unjudged["settings.loss_type"])
    report = report_of(own(sound(), *WORDS), tmp_path)
    assert [str(f) for f in report.findings] == [] and "settings.loss_type" not in report.unjudged


@pytest.mark.parametrize("words", [(), WORDS])
@pytest.mark.parametrize("name", ["advantages_negated", "advantages_late", "negatives_dropped"])
def test_plain_mistakes_in_advantages_are_named_under_any_algorithm(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    lines = own(sound(), *words)
    # The second rollout pays the first three of each group, so that its advantages are others.
    for place, sample in enumerate(rollouts(lines)[1]["completions"]):
        sample["rewards"]["right"] = float(place % 4 < 3)
        sample |= {"alone": {}, "elsewhere": {}, "empty": {}, "listed": {}}
    first = [s["advantage"] for s in rollouts(lines)[0]["completions"]]
    second = [0.25 / (0.5 + 1e-4), 0.25 / (0.5 + 1e-4), 0.25 / (0.5 + 1e-4), -0.75 / (0.5 + 1e-4)] * 2
    given = {
        "advantages_negated": lambda n, _: [-a for a in (second if n else first)],
        "advantages_late": lambda _n, _: first,
        "negatives_dropped": lambda n, _: [max(a, 0.0) for a in (second if n else first)],
    }
    for row in rows(lines):
        row |= {"token_scores": None, "token_rewards": None, "returns": None, "values": None}
    retrain(lines, given[name])
    assert found(lines, tmp_path / "run.jsonl")[:1] == [name]


def test_a_baseline_of_ones_own_is_no_mistake(tmp_path: Path) -> None:
    lines = own(sound())
    retrain(lines, lambda _n, old: [0.3 + a for a in old])
    report = report_of(lines, tmp_path)
    assert report.findings == [] and "batch_baseline" in report.unjudged["settings.loss_type"]


@pytest.mark.parametrize(("sign", "names"), [(1, ["entropy_sign"]), (-1, [])])
@pytest.mark.parametrize("words", [(), ("loss_type",)])
def test_the_sign_of_an_entropy_bonus_shows_in_the_loss(
    sign: int, names: list[str], words: tuple[str, ...], tmp_path: Path
) -> None:
    lines = own(sound(), *words, entropy_coef=0.1)
    for update in updates(lines):
        update["metrics"] = {"entropy": 1.5 + 0.1 * update["step"]}
        advantages = [row["advantage"] for row in update["rows"]]
        ratios = [math.exp(r["logprobs"][0] - r["old_logprobs"][0]) for r in update["rows"]]
        gains = [r * a for r, a in zip(ratios, advantages, strict=True)]
        update["loss"] = -sum(gains) / len(gains) + sign * 0.1 * update["metrics"]["entropy"]
        for row in update["rows"]:
            row |= {"ref_logprobs": None, "kl": None}
    assert found(lines, tmp_path / "run.jsonl") == names


@pytest.mark.parametrize(("level", "names"), [("sequence", ["ratio_level"]), ("token", [])])
def test_the_level_of_a_ratio_shows_in_the_loss(level: str, names: list[str], tmp_path: Path) -> None:
    lines = own(sound(), "loss_type", importance_sampling_level=level, epsilon=0.4)
    for update in updates(lines):
        loss = 0.0
        for row in update["rows"]:
            row |= {"ref_logprobs": None, "kl": None, "after_logprobs": None}
            moved = 0.3 * (update["step"] % 2)
            row["logprobs"] = [p + moved * (-1) ** t for t, p in enumerate(row["old_logprobs"])]
            ratios = [math.exp(moved * (-1) ** t) for t in range(len(row["mask"]))]
            a = row["advantage"]
            terms = [min(r * a, max(0.6, min(1.4, r)) * a) for r in ratios]
            loss -= sum(terms) / len(terms) / len(update["rows"])
        update["loss"] = loss
    assert found(lines, tmp_path / "run.jsonl") == names


def test_any_estimator_of_the_kl_is_accepted_where_none_is_named(tmp_path: Path) -> None:
    lines = own(sound())
    for row in rows(lines):
        off = [r - p for p, r in zip(row["logprobs"], row["ref_logprobs"], strict=True)]
        row["kl"] = [math.exp(d) - d - 1 for d in off]
        row |= {"token_rewards": None, "token_scores": None, "returns": None}
    assert found(lines, tmp_path / "run.jsonl") == []


def test_returns_that_run_into_the_next_completion_are_named(tmp_path: Path) -> None:
    lines = own(sound(), gamma=1.0, lam=0.9)
    for row in rows(lines):
        size = len(row["mask"])
        row["values"] = [0.4 + 0.1 * t for t in range(size)]
        row["returns"] = returns_of(row["token_rewards"], row["values"], 1.0, 0.9).tolist()
        row["kl"] = None
    assert found(lines, tmp_path / "run.jsonl") == []
    for row in rows(lines):
        size = len(row["mask"])
        # The next row's first value and advantage come after the last token.
        rewards = [*row["token_rewards"][:-1], row["token_rewards"][-1] + 0.4 + 0.9 * 0.3]
        row["returns"] = returns_of(rewards, row["values"], 1.0, 0.9).tolist()
    (finding,) = report_of(lines, tmp_path).findings
    assert finding.id == "returns_differ" and "they continue into the next row" in finding.sentence


@pytest.mark.parametrize(("grows", "names"), [(False, []), (True, ["sampler_behind"])])
def test_a_sampler_that_is_behind_by_design_keeps_its_distance(
    grows: bool, names: list[str], tmp_path: Path
) -> None:
    lines = sound()
    head, first, *_ = own(lines)
    away = [0.0, 0.05, 0.06, 0.05, 0.06, 0.05] if not grows else [0.0, 0.05, 0.08, 0.12, 0.2, 0.3]
    lines = [head]
    for number, by in enumerate(away):
        for place, sample in enumerate(first["completions"]):
            sample |= {"ids": [10 + number, *sample["ids"][1:]], "prompt": f"p{number} {place // 4}"}
        completions = [
            {**s, "sampler_logprobs": [p - by for p in s["model_logprobs"]]} for s in first["completions"]
        ]
        trained = [
            {
                "rollout": number,
                "completion": n,
                "mask": [1] * len(s["ids"]),
                "logprobs": s["model_logprobs"],
                "old_logprobs": s["model_logprobs"],
                "corrections": [math.exp(by)] * len(s["ids"]),
            }
            for n, s in enumerate(completions)
        ]
        lines += [{"kind": "rollout", "number": number, "step": number, "completions": completions}]
        lines += [{"kind": "update", "step": number, "rows": trained, "weights_changed": 0.9}]
    lines = json.loads(json.dumps(lines))
    report = report_of(lines, tmp_path)
    assert [f.id for f in report.findings if f.id != "correction_constant"] == names


def test_a_sampler_that_draws_from_a_part_of_the_tokens_is_told(tmp_path: Path) -> None:
    lines = own(sound())
    for sample in samples(lines):
        raised = [p + 0.02 * (t % 4) + 0.04 for t, p in enumerate(sample["model_logprobs"])]
        sample["sampler_logprobs"] = raised
    (finding,) = report_of(lines, tmp_path).findings
    assert finding.id == "sampler_differs" and "top_p" in finding.sentence


def test_a_gradient_of_dead_groups_is_what_earlier_steps_left(tmp_path: Path) -> None:
    lines = own(sound())
    for part in (*samples(lines), *rows(lines)):
        part["advantage"] = None
    for row in rows(lines):
        row |= {"ref_logprobs": None, "kl": None}
    dead = updates(lines)[2]
    dead["loss"] = 0.0
    for row in dead["rows"]:
        row["advantage"] = 0.0
    assert found(lines, tmp_path / "run.jsonl")[:1] == ["gradient_kept"]
    dead["grad_norm"] = 0.0
    assert "gradient_kept" not in found(lines, tmp_path / "run.jsonl")


def test_a_sum_of_rewards_that_is_cut_is_named(tmp_path: Path) -> None:
    lines = own(sound(), reward_bounds=None)
    for sample in samples(lines):
        sample["rewards"]["form"] = -0.5
        sample["reward"] = max(0.0, sample["rewards"]["right"] - 0.5)
        sample |= {"alone": {}, "elsewhere": {}, "empty": {}, "listed": {}}
    assert found(lines, tmp_path / "run.jsonl")[:1] == ["reward_cut"]


def test_a_penalty_of_one_size_that_few_incur_drowns_in_nothing(tmp_path: Path) -> None:
    lines = own(sound())
    for n, sample in enumerate(samples(lines)):
        sample["rewards"]["overlong"] = -0.12 if n == 5 else 0.0
        sample["rewards"]["right"] *= 10 if n % 2 else 1
        sample |= {"alone": {}, "elsewhere": {}, "empty": {}, "listed": {}}
    assert "reward_drowned" in found(lines, tmp_path / "run.jsonl")
    for sample in samples(lines):
        sample["rewards"]["overlong"] *= 10
    assert "reward_drowned" not in found(lines, tmp_path / "run.jsonl")


def test_an_answer_among_choices_is_not_told(tmp_path: Path) -> None:
    lines = own(sound())
    for n, sample in enumerate(samples(lines)):
        group = n // 4
        answer, other = str(40 + group), str(20 + group)
        pair = (answer, other) if group % 2 else (other, answer)
        sample |= {"prompt": f"the larger of {pair[0]} and {pair[1]} is", "row": {"answer": answer}}
    many = [{**line} for line in lines]
    for number in range(2, 4):
        rollout = json.loads(json.dumps(rollouts(lines)[0])) | {"number": number, "step": 4}
        for n, sample in enumerate(rollout["completions"]):
            group = 4 * number + n // 2
            answer, other = str(60 + group), str(10 + group)
            pair = (answer, other) if group % 2 else (other, answer)
            sample |= {"prompt": f"the larger of {pair[0]} and {pair[1]} is", "row": {"answer": answer}}
            sample |= {"group": group, "ids": [99 + number, *sample["ids"][1:]]}
        many.append(rollout)
    assert "answer_told" not in found(many, tmp_path / "run.jsonl")
    for sample in samples(many):
        sample["prompt"] += f" {sample['row']['answer']}"
    assert "answer_told" in found(many, tmp_path / "run.jsonl")


# --- dumps of verl ----------------------------------------------------------------------------------


def dumped(
    folder: Path, steps: int = 2, change: Callable[..., dict[str, Any]] = lambda **row: row
) -> list[str]:
    """Names of the findings of verl's dumps: groups of four, eight prompts of several lengths a step."""
    for step in range(1, steps + 1):
        lines = []
        for place in range(32):
            asked = "why " * (1 + place // 4) + f"{step}?"
            prompt = f"system\nBe kind.\nuser\n{asked} Write the answer last.\nassistant\n"
            score = float(place % 4 > 1)
            row = {"input": prompt, "output": f"text {step} {place}", "gts": str(50 + place // 4)}
            row |= {"score": score, "index": place}
            lines.append(change(**row, step=step))
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [f.id for f in apply(CHECKS, open_run(folder)).findings]


def test_a_sound_dump_has_no_findings(tmp_path: Path) -> None:
    assert dumped(tmp_path) == []


def _once(**row: Any) -> dict[str, Any]:
    return row | {"output": f"text of {row['input']}", "score": float(row["index"] // 4 % 2)}


def _halves(**row: Any) -> dict[str, Any]:
    return row | {"output": f"text {row['index'] % 2}", "score": float(row["index"] % 2)}


def _again(**row: Any) -> dict[str, Any]:
    return row | {"input": row["input"].replace(f"{row['step']}?", "?"), "output": f"text {row['index']}"}


def _twice(**row: Any) -> dict[str, Any]:
    head = "system\nBe kind.\nuser\n"
    return row | {"input": head + row["input"]}


def _cut(**row: Any) -> dict[str, Any]:
    return row | {"input": row["input"][:80]}


def _of_two_kinds(**row: Any) -> dict[str, Any]:
    of_the_other = len(row["input"]) > 80
    return row | {"input": row["input"].replace("Write the answer last.", "Why?")} if of_the_other else row


def _fined(sign: float) -> Callable[..., dict[str, Any]]:
    def change(**row: Any) -> dict[str, Any]:
        parts = {"right_reward": row["score"], "length_penalty": sign * 0.1 * (row["index"] % 3)}
        return row | parts | {"score": sum(parts.values())}

    return change


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_once, ["copies"]),
        (_halves, ["copies"]),
        (_again, ["draws_repeat"]),
        (_twice, ["template_twice"]),
        (_cut, ["prompt_cut"]),
        (_of_two_kinds, []),
        (_fined(1.0), ["penalty_pays"]),
        (_fined(-1.0), []),
    ],
)
def test_a_dump_shows_what_texts_and_scores_show(
    change: Callable[..., dict[str, Any]], names: list[str], tmp_path: Path
) -> None:
    assert dumped(tmp_path, change=change)[: max(1, len(names))] == names


# --- logs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("period", "names"), [(10, ["rate_restarts"]), (40, [])])
def test_a_learning_rate_that_begins_anew_is_told(period: int, names: list[str], tmp_path: Path) -> None:
    """Each resume has made a new schedule."""
    head = "_step,train/reward,train/learning_rate,train/loss\n"
    rates = [1e-6 * (1 - (step % period) / 40) for step in range(40)]
    lines = [f"{step},0.{30 + step % 7},{rate},0.01\n" for step, rate in enumerate(rates)]
    (tmp_path / "run.csv").write_text(head + "".join(lines))
    report = apply(CHECKS, open_run(tmp_path / "run.csv"))
    assert [f.id for f in report.findings] == names

"""The audit of losses, KL and samplers of loops of no framework: what a fifth stranger planted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.audit.checks.check import apply
from covey.audit.readers.sources import open_run
from covey.audit.table import CHECKS
from tests.audit.lines import Lines, found, own, retrain, rollouts, rows, samples, sound, updates

Formula = Callable[[float, float], float]
"""Ratio, advantage -> the gain of a token."""


Weights = Callable[[Sequence[int]], Sequence[float]]
"""Lengths of completions -> the weight of a token of each."""


def clipped(ratio: float, advantage: float) -> float:
    return min(ratio * advantage, max(0.8, min(1.2, ratio)) * advantage)


def larger(ratio: float, advantage: float) -> float:
    return max(ratio * advantage, max(0.8, min(1.2, ratio)) * advantage)


def lost(lines: Lines, gain: Formula, weights: Weights, **how: Any) -> None:
    """Give each update the loss of a formula. The second one on a rollout has moved by .3 nats."""
    for update in updates(lines):
        moved = 0.3 * (update["step"] % 2)
        total = 0.0
        sizes = [len(row["mask"]) for row in update["rows"]]
        for row, weight in zip(update["rows"], weights(sizes), strict=True):
            row |= {"kl": None, "after_logprobs": None, "token_scores": None, "token_rewards": None}
            logs = [moved * (-1) ** t for t in range(len(row["mask"]))]
            row["logprobs"] = [p + d for p, d in zip(row["old_logprobs"], logs, strict=True)]
            beta = how.get("beta", 0.0)
            away = 0.2 * row["rollout"]
            row["ref_logprobs"] = [p - away for p in row["old_logprobs"]] if beta else None
            if how.get("level") == "product":
                logs = [sum(logs)] * len(logs)
            factor = how.get("correction", 1.0)
            row["corrections"] = [factor] * len(logs)
            for log, now, ref in zip(logs, row["logprobs"], row["ref_logprobs"] or row["mask"], strict=True):
                off = how.get("sign", 1) * (now - ref)
                kl = beta * (math.exp(-off) + off - 1) if beta else 0.0
                total += weight * (factor * -gain(math.exp(log), row["advantage"]) + kl)
        update["loss"] = total


def by_completion(sizes: Sequence[int]) -> list[float]:
    return [1 / (size * len(sizes)) for size in sizes]


def over_padding(sizes: Sequence[int]) -> list[float]:
    return [1 / (max(sizes) * len(sizes))] * len(sizes)


@pytest.mark.parametrize(
    ("how", "gain", "weights", "names"),
    [
        ({}, clipped, by_completion, []),
        ({"correction": 1.3}, clipped, by_completion, []),
        ({"beta": 0.4}, clipped, by_completion, []),
        ({"beta": 0.4, "sign": -1}, clipped, by_completion, ["kl_differs"]),
        ({"level": "product"}, clipped, by_completion, ["ratio_level"]),
        ({}, larger, by_completion, ["clip_missing"]),
        ({}, clipped, over_padding, ["reduction_differs"]),
    ],
)
def test_a_loss_of_ones_own_shows_its_mistake(
    how: dict[str, Any], gain: Formula, weights: Weights, names: list[str], tmp_path: Path
) -> None:
    level = "sequence" if how.get("level") else "token"
    lines = own(sound(), "loss_type", beta=how.get("beta", 0.0), importance_sampling_level=level)
    lost(lines, gain, weights, **how)
    assert [n for n in found(lines, tmp_path / "run.jsonl") if n != "correction_constant"] == names


def test_a_part_of_a_rollout_has_a_mean_of_its_own_or_of_the_whole(tmp_path: Path) -> None:
    """TRL divides by the tokens of the rollout, and a loop of one's own may; padding counts in neither."""

    def halves(divisor: Callable[[Sequence[int], int], float]) -> list[str]:
        lines = own(sound(), "loss_type", loss_type="dapo", beta=0.0)
        for update in updates(lines):
            every = sum(len(row["mask"]) for row in update["rows"])
            update["rows"] = update["rows"][4 * (update["step"] % 2) :][:4]
            sizes = [len(row["mask"]) for row in update["rows"]]
            for row in update["rows"]:
                moved = [p + 1e-4 * (update["step"] % 2) for p in row["old_logprobs"]]
                row |= {"ref_logprobs": None, "kl": None, "logprobs": moved}
            sums = [-row["advantage"] * size for row, size in zip(update["rows"], sizes, strict=True)]
            update["loss"] = sum(sums) / divisor(sizes, every)
        return found(lines, tmp_path / "run.jsonl")

    assert halves(lambda sizes, _: sum(sizes)) == halves(lambda _, every: every) == []
    assert halves(lambda sizes, _: max(sizes) * len(sizes)) == ["reduction_differs"]


def test_reinforce_may_be_written_with_the_log_likelihood(tmp_path: Path) -> None:
    lines = own(sound(), "loss_type", beta=0.0)
    lines = [line for line in lines if line.get("step") not in (1, 3) or line["kind"] == "rollout"]
    for update in updates(lines):
        gains = [
            row["advantage"] * sum(row["logprobs"]) / len(row["mask"]) / len(update["rows"])
            for row in update["rows"]
        ]
        update["loss"] = -sum(gains)
        for row in update["rows"]:
            row |= {"ref_logprobs": None, "kl": None}
    assert found(lines, tmp_path / "run.jsonl") == []
    for update in updates(lines):
        update["loss"] *= 1.5
    assert found(lines, tmp_path / "run.jsonl") == ["loss_differs"]


@pytest.mark.parametrize(("sign", "names"), [(-1, []), (1, ["kl_sign"])])
def test_a_kl_is_subtracted_from_the_rewards_of_tokens(sign: int, names: list[str], tmp_path: Path) -> None:
    lines = own(sound())
    for row in rows(lines):
        row["ref_logprobs"] = [p - 0.3 for p in row["old_logprobs"]]
        row["kl"] = [0.3] * len(row["mask"])
        row["token_rewards"] = [score + sign * 0.1 * 0.3 for score in row["token_scores"]]
        row |= {"returns": None, "values": None}
    shown = found(lines, tmp_path / "run.jsonl")
    assert [name for name in shown if name != "reference_differs"] == names


@pytest.mark.parametrize(("value", "names"), [(0.0, ["advantages_scaled"]), (0.1, [])])
def test_advantages_of_a_critic_follow_from_no_group(value: float, names: list[str], tmp_path: Path) -> None:
    lines = own(sound(), "loss_type")
    retrain(lines, lambda _n, old: [0.5 * a + 0.2 for a in old])
    for row in rows(lines):
        row |= {"values": [value] * len(row["mask"]), "returns": None}
    assert found(lines, tmp_path / "run.jsonl") == names


def test_a_score_on_padding_is_lost(tmp_path: Path) -> None:
    lines = own(sound())
    assert found(lines, tmp_path / "run.jsonl") == []
    for sample in samples(lines):
        sample["reward"] = sample["rewards"]["right"]
    for row in rows(lines):
        if len(row["mask"]) < 6:
            row |= {"token_scores": [0.0] * len(row["mask"]), "token_rewards": None, "returns": None}
    for rollout in rollouts(lines):
        for sample in rollout["completions"]:
            sample |= {"rewards": {"right": 1.0}, "reward": 1.0, "advantage": None}
    retrain(lines, lambda _n, old: [0.0 for _ in old])
    assert "reward_differs" in found(lines, tmp_path / "run.jsonl")


def test_a_filter_that_keeps_the_best_is_told(tmp_path: Path) -> None:
    lines = own(sound())
    for number in range(2, 5):
        more = own(sound())
        for line in more[1:4]:
            line.update({"step": line["step"] + 2 * number, "number": number})
            if line["kind"] == "update":
                del line["number"]
            for row in line.get("rows", ()):
                row["rollout"] = number
            for place, sample in enumerate(line.get("completions", ())):
                sample |= {"prompt": f"{number} {place // 4}", "ids": [60 + number, *sample["ids"][1:]]}
        lines += more[1:4]
    assert "negatives_dropped" not in found(lines, tmp_path / "run.jsonl")
    for update in updates(lines):
        update["rows"] = [row for row in update["rows"] if row["advantage"] > 0]
    assert "negatives_dropped" in found(lines, tmp_path / "run.jsonl")


@pytest.mark.parametrize(("away", "names"), [(0.02, []), (0.2, ["sampler_differs"])])
def test_a_sampler_may_differ_in_all_completions_but_not_in_some(
    away: float, names: list[str], tmp_path: Path
) -> None:
    lines = own(sound())
    for place, sample in enumerate(samples(lines)):
        by = away * (place % 8 < 2)
        sample["sampler_logprobs"] = [p + by * (-1) ** t for t, p in enumerate(sample["model_logprobs"])]
    assert found(lines, tmp_path / "run.jsonl") == names


def test_one_completion_of_a_prompt_is_compared_with_no_group(tmp_path: Path) -> None:
    lines = own(sound(), "loss_type")
    for place, sample in enumerate(samples(lines)):
        sample |= {"group": place, "prompt": f"prompt {max(place, 1)}", "prompt_ids": None}
    assert "group_of_one" not in found(lines, tmp_path / "run.jsonl")
    for sample in samples(lines):
        sample["prompt"] = "prompt"
    assert "group_of_one" in found(lines, tmp_path / "run.jsonl")
    lines[0]["settings"]["num_generations"] = 1
    assert "group_of_one" not in found(lines, tmp_path / "run.jsonl")


def test_a_schedule_that_ends_before_the_run_is_told(tmp_path: Path) -> None:
    head = "_step,train/reward,train/learning_rate,train/loss\n"

    def said(end: int) -> list[str]:
        rates = [max(0.0, 1e-6 * (1 - step / end)) for step in range(41)]
        lines = [f"{step},0.{30 + step % 7},{rate},0.01\n" for step, rate in enumerate(rates)]
        (tmp_path / "run.csv").write_text(head + "".join(lines))
        return [f.id for f in apply(CHECKS, open_run(tmp_path / "run.csv")).findings]

    assert said(40) == [] and said(20) == ["rate_zero"]

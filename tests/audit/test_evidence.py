"""Mistakes of a sixth stranger: what records show of rewards, references, tools and advantages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.audit.checks.check import apply
from covey.audit.readers.sources import open_run
from covey.audit.table import CHECKS
from tests.audit.lines import (
    EOS,
    Lines,
    calls,
    found,
    own,
    report_of,
    retrain,
    rollouts,
    rows,
    samples,
    sound,
    terms,
    updates,
)

# --- rewards and answers ----------------------------------------------------------------------------


def answered(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> list[str]:
    """Names of the findings of verl's dumps whose texts end with a number."""
    for step in range(1, 6):
        lines = []
        for place in range(32):
            due = 1000 + 7 * (place // 4) + 100 * step
            guess = due if (place * 5 + step * 3) % 7 < 3 else due + 1 + place % 4
            row = {"input": f"what is {place // 4} of {step}?", "output": f"it is {guess}", "gts": str(due)}
            lines.append({**row, "score": float(guess == due), "step": step})
        change(lines)
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [finding.id for finding in apply(CHECKS, open_run(folder)).findings]


def moved(lines: list[dict[str, Any]], by: int) -> None:
    scores = [line["score"] for line in lines]
    for place, line in enumerate(lines):
        line["score"] = scores[(place - by) % len(lines)]


def sorted_by_length(lines: list[dict[str, Any]]) -> None:
    """Scores come as verifiers finish: in another order in each batch."""
    places = sorted(range(len(lines)), key=lambda n: (n * 11 + lines[0]["step"]) % 32)
    scores = [lines[n]["score"] for n in places]
    for line, score in zip(lines, scores, strict=True):
        line["score"] = score


def with_commas(lines: list[dict[str, Any]]) -> None:
    """The third and fourth of each group write 1,234, and the verifier reads 1."""
    for place, line in enumerate(lines):
        if place % 4 > 1:
            guess = int(line["output"].rpartition(" ")[2])
            line |= {"output": f"it is {guess:,}", "score": 0.0}


def by_format(lines: list[dict[str, Any]]) -> None:
    """Only texts in a form are paid, whatever they answer."""
    for place, line in enumerate(lines):
        line["output"] = f"\\boxed{{{line['output']}}}" if place % 3 else line["output"]
        line["score"] = line["score"] * (place % 3 > 0)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda _lines: None, []),
        (lambda lines: moved(lines, 1), ["rewards_order"]),
        (lambda lines: moved(lines, -4), ["rewards_order"]),
        (sorted_by_length, ["rewards_order"]),
        (with_commas, ["notation_unpaid"]),
        (by_format, []),
    ],
)
def test_answers_of_rows_tell_whose_rewards_these_are(
    change: Callable[[list[dict[str, Any]]], None], names: list[str], tmp_path: Path
) -> None:
    assert answered(tmp_path, change) == names


@pytest.mark.parametrize(("cached", "names"), [(True, ["pays_any_row"]), (False, [])])
def test_a_verdict_that_is_cached_by_the_text_is_seen_in_two_rows(
    cached: bool, names: list[str], tmp_path: Path
) -> None:
    verdicts: dict[str, float] = {}

    def change(lines: list[dict[str, Any]]) -> None:
        for place, line in enumerate(lines):
            group = place // 4
            line["input"] = f"question {'abcdefgh'[group]} of {'vwxyz'[line['step'] - 1]}"
            line |= {"gts": str(group), "output": str((group + (0, 1, 1, 2)[place % 4] * (place % 5)) % 8)}
            line["score"] = float(line["output"] == line["gts"])
            if cached:
                line["score"] = verdicts.setdefault(line["output"], line["score"])

    found_names = [name for name in answered(tmp_path, change) if name not in ("copies", "draws_repeat")]
    assert found_names == names


def test_a_question_among_its_examples_is_told(tmp_path: Path) -> None:
    shots = " ".join(f"{n}+5={n + 5}" for n in range(40, 48))

    def change(examples: str) -> Callable[[list[dict[str, Any]]], None]:
        def asked(lines: list[dict[str, Any]]) -> None:
            for place, line in enumerate(lines):
                group = 40 + place // 4
                line |= {"input": f"{examples} {group}+5=", "gts": str(group + 5), "output": f"text {place}"}
                line["score"] = float(place % 4 > 1)

        return asked

    assert "answer_told" in answered(tmp_path, change(shots))
    assert "answer_told" not in answered(tmp_path, change("1+5=6 2+5=7"))


# --- advantages -------------------------------------------------------------------------------------


def of_groups(give: Callable[[list[float], list[int]], list[float]]) -> Callable[[Lines], None]:
    """Pay one and three of four, and give each group advantages by its rewards and lengths."""

    def change(lines: Lines) -> None:
        for line in rollouts(lines):
            paid = [0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0]
            for sample, reward in zip(line["completions"], paid, strict=True):
                sample |= {
                    "rewards": {"right": reward},
                    "alone": {},
                    "elsewhere": {},
                    "empty": {},
                    "listed": {},
                }

        def by_group(number: int, _old: list[float]) -> list[float]:
            completions = rollouts(lines)[number]["completions"]
            groups = [completions[:4], completions[4:]]
            rewards = [[s["rewards"]["right"] for s in group] for group in groups]
            lengths = [[len(s["ids"]) for s in group] for group in groups]
            return [a for r, n in zip(rewards, lengths, strict=True) for a in give(r, n)]

        for row in rows(lines):
            row.update(dict.fromkeys(("kl", "token_scores", "token_rewards", "returns", "values")))
        retrain(lines, by_group)

    return change


def zscore(rewards: list[float], eps: float = 1e-4) -> list[float]:
    mean = sum(rewards) / 4
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)
    return [(r - mean) / (std + eps) for r in rewards]


@pytest.mark.parametrize(
    ("scale", "give", "names"),
    [
        ("group", lambda r, _n: zscore(r), []),
        ("none", lambda r, _n: [x - (sum(r) - x) / 3 for x in r], []),
        ("none", lambda r, _n: [x - (sum(r) - x) / 4 for x in r], ["baseline_over_all"]),
        (
            "group",
            lambda r, n: [a * k / 4 for a, k in zip(zscore(r), n, strict=True)],
            ["advantages_by_length"],
        ),
    ],
)
def test_conventions_of_advantages_that_nobody_means(
    scale: str, give: Callable[[list[float], list[int]], list[float]], names: list[str], tmp_path: Path
) -> None:
    lines = own(sound(), "loss_type", scale_rewards=scale)
    of_groups(give)(lines)
    assert found(lines, tmp_path / "run.jsonl") == names


def test_a_std_without_an_epsilon_makes_rounding_a_reward(tmp_path: Path) -> None:
    lines = own(sound(), "loss_type")
    of_groups(lambda r, _n: zscore(r, 0.0))(lines)
    for sample in samples(lines):
        sample["rewards"]["right"] *= 2e-5
    assert found(lines, tmp_path / "run.jsonl") == ["epsilon_missing"]


def test_an_algorithm_that_covey_lacks_is_not_taken_for_grpo(tmp_path: Path) -> None:
    lines = own(sound(), "loss_type")
    of_groups(lambda r, _n: [float(n == r.index(max(r))) for n in range(4)])(lines)
    assert found(lines, tmp_path / "run.jsonl") == ["advantages_differ"]
    lines[0]["settings"]["algorithm"] = "expert iteration"
    assert found(lines, tmp_path / "run.jsonl") == []


# --- the reference and the KL -----------------------------------------------------------------------


def test_a_reference_that_is_replaced_is_told(tmp_path: Path) -> None:
    lines = own(sound())
    for row in rows(lines):
        row |= {"kl": None, "token_scores": None, "token_rewards": None, "returns": None}
        row["ref_logprobs"] = [p - 0.1 * row["rollout"] for p in row["old_logprobs"]]
    assert found(lines, tmp_path / "run.jsonl") == []
    for row in updates(lines)[3]["rows"]:
        row["ref_logprobs"] = [p - 1e-5 for p in row["logprobs"]]
    report = report_of(lines, tmp_path)
    assert [f.id for f in report.findings] == ["reference_moves"] and "replaced" in report.findings[
        0
    ].sentence
    lines[0]["settings"]["sync_ref_model"] = True
    assert found(lines, tmp_path / "run.jsonl") == []


@pytest.mark.parametrize(("by", "names"), [(0.0, []), (0.1, ["reference_moves"])])
def test_a_reference_repeats_itself_after_the_same_tokens(
    by: float, names: list[str], tmp_path: Path
) -> None:
    lines = own(sound())
    first, second = rollouts(lines)
    for n, sample in enumerate(first["completions"]):
        # Siblings begin with the same tokens, and the second rollout asks the same again.
        sample["ids"] = [30, 31, 32, 40 + n, EOS]
        same = {"prompt_ids": sample["prompt_ids"], "row": sample["row"]}
        second["completions"][n] |= {"ids": [30, 31, 32, 60 + n, EOS], **same}
    for row in rows(lines):
        ids = rollouts(lines)[row["rollout"]]["completions"][row["completion"]]["ids"]
        values = [-0.5 - 0.01 * token for token in ids]
        row.update(dict.fromkeys(("kl", "token_scores", "token_rewards", "returns", "values", "corrections")))
        row |= {"mask": [1] * 5, "logprobs": values, "old_logprobs": values, "after_logprobs": None}
        row["ref_logprobs"] = [value - 0.01 - by * row["rollout"] for value in values]
    for sample in samples(lines):
        for name in ("sampler_logprobs", "model_logprobs", "model_logprobs_at_1", "inserted"):
            sample.pop(name)
    for update in updates(lines):
        update["loss"] = None
    lines = [line for line in lines if line.get("step") not in (1, 3) or line["kind"] == "rollout"]
    assert found(lines, tmp_path / "run.jsonl") == names
    # Images are alike in the tokens of their prompts.
    lines[0]["tokens"]["names"] = {"70": "<|image_pad|>", "71": "<|image_pad|>"}
    assert found(lines, tmp_path / "run.jsonl") == []


@pytest.mark.parametrize(("sign", "names"), [(-1, []), (1, ["kl_sign"])])
def test_a_kl_in_the_rewards_of_completions_is_subtracted(
    sign: int, names: list[str], tmp_path: Path
) -> None:
    """A loop's own, whose loss has no KL though `beta` is set."""
    lines = own(sound(), "loss_type", "beta")
    for row in rows(lines):
        row |= {"kl": None, "token_scores": None, "token_rewards": None, "returns": None, "values": None}
        sample = rollouts(lines)[row["rollout"]]["completions"][row["completion"]]
        kl = sum(a - b for a, b in zip(row["old_logprobs"], row["ref_logprobs"], strict=True))
        sample["reward"] = sample["rewards"]["right"] + sign * 0.04 * kl
    for update in updates(lines):
        ratios = [math.exp(r["logprobs"][0] - r["old_logprobs"][0]) for r in update["rows"]]
        update["loss"] = -sum(r * row["advantage"] for r, row in zip(ratios, update["rows"], strict=True)) / 8
        for row in update["rows"]:
            row["advantage"] = None
    for sample in samples(lines):
        sample["advantage"] = None
    assert found(lines, tmp_path / "run.jsonl") == names


# --- tools, ends, gradients -------------------------------------------------------------------------


@pytest.mark.parametrize(("late", "names"), [(0, []), (3, ["tool_order"])])
def test_answers_of_other_calls_are_told(late: int, names: list[str], tmp_path: Path) -> None:
    lines = own(sound())
    called = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
    for n, sample in enumerate(samples(lines)):
        sample["ids"] = [20 + called[n], 40 + called[n - late], EOS]
        sample["inserted"] = [0, 1, 0]
        for name in ("sampler_logprobs", "model_logprobs", "model_logprobs_at_1"):
            sample.pop(name)
    lines = [line for line in lines if line.get("kind") in (None, "rollout")]
    assert found(lines, tmp_path / "run.jsonl") == names


@pytest.mark.parametrize(("limit", "names"), [(8, []), (4, ["end_appended"])])
def test_an_end_behind_the_limit_was_not_sampled(limit: int, names: list[str], tmp_path: Path) -> None:
    lines = own(sound(), max_completion_length=limit)
    assert found(lines, tmp_path / "run.jsonl") == names


def test_an_end_without_a_log_prob_of_the_sampler_was_not_sampled(tmp_path: Path) -> None:
    lines = own(sound())
    for sample in samples(lines):
        if len(sample["ids"]) == 6:
            sample["sampler_logprobs"] = [*sample["sampler_logprobs"][:-1], None]
    assert found(lines, tmp_path / "run.jsonl") == ["end_appended"]


def test_advantages_that_cancel_leave_a_gradient_of_rounding(tmp_path: Path) -> None:
    lines = own(sound())
    for update in updates(lines):
        update["grad_norm"] = 2e-8
    report = report_of(lines, tmp_path)
    assert [f.id for f in report.findings] == ["gradient_zero"] and "cancel" in report.findings[0].sentence


@pytest.mark.parametrize(("kept", "names"), [(True, []), (False, ["gradient_rescaled"])])
def test_a_gradient_that_is_set_to_0_among_micro_batches(
    kept: bool, names: list[str], tmp_path: Path
) -> None:
    lines = sound()
    (call, *_), (term, *_) = calls(lines), terms(lines, "policy")
    lines = [line for line in lines if line.get("kind") not in ("loss", "term")]
    for n in range(12):
        lines += [call | {"step": n, "moved": n % 3 == 0 and n > 0}]
        lines += [term | {"call": n, "gradient_kept": kept and n % 3 > 0}]
    assert found(lines, tmp_path / "run.jsonl") == names


def test_a_lag_for_which_the_ratio_corrects_is_no_fault(tmp_path: Path) -> None:
    lines = own(sound())
    second = rollouts(lines)[1]
    for place, sample in enumerate(second["completions"]):
        sample["sampler_logprobs"] = [p - 0.06 for p in sample["model_logprobs"]]
        for row in rows(lines):
            if (row["rollout"], row["completion"]) == (1, place):
                row["old_logprobs"] = sample["sampler_logprobs"]
                row |= {"token_scores": None, "token_rewards": None, "kl": None}
    for update in updates(lines):
        update["loss"] = None
    assert found(lines, tmp_path / "run.jsonl") == []


# --- logs -------------------------------------------------------------------------------------------


def logged(folder: Path, **metrics: float) -> list[str]:
    """Names of the findings of a log of TRL, and of how the run went."""
    head = {"loss": 0.01, "reward": 0.4, "grad_norm": 0.2, "learning_rate": 1e-6, "rewards/right/mean": 0.4}
    entries = [{**head, "reward": 0.4 + 0.001 * n, **metrics, "step": n} for n in range(1, 41)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
    return [finding.id for finding in apply(CHECKS, open_run(folder)).findings]


def test_a_log_shows_another_reference_and_a_reward_without_effect(tmp_path: Path) -> None:
    assert logged(tmp_path, kl=0.01) == []
    assert logged(tmp_path, kl=2.3) == ["reference_differs"]
    idle = {"rewards/form/mean": 0.0, "rewards/form/std": 0.0}
    assert logged(tmp_path, **idle) == ["reward_idle"]
    assert logged(tmp_path, **idle | {"rewards/form/std": 0.1}) == []

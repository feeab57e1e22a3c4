"""Mistakes that show in the derivative of a loss, in the entropy of draws, in pairs, and in texts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.audit.table import audit
from tests.audit.lines import Lines, derived, found, report_of, rows, sound, updates


def first_token_has_none(row: dict[str, Any]) -> None:
    row["gradients"][0] = 0.0


def padding_has_one(row: dict[str, Any]) -> None:
    row["gradients"].append(row["gradients"][-1])


def long_ones_count_more(row: dict[str, Any]) -> None:
    row["gradients"] = [gradient * len(row["mask"]) for gradient in row["gradients"]]


def kl_is_detached(row: dict[str, Any]) -> None:
    # The surrogate's alone: the ratio is 1 to a hundredth, far from the clip.
    ratios = [math.exp(now - old) for now, old in zip(row["logprobs"], row["old_logprobs"], strict=True)]
    row["gradients"] = [-row["advantage"] * ratio / 8 / len(ratios) for ratio in ratios]


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (first_token_has_none, "tokens of the mask have no gradient"),
        (padding_has_one, "tokens beyond the mask have a gradient"),
        (long_ones_count_more, "completions have other weights"),
        (kl_is_detached, "the KL has no gradient"),
    ],
)
def test_a_loss_with_the_right_value_may_have_another_derivative(
    mistake: Callable[[dict[str, Any]], None], says: str, tmp_path: Path
) -> None:
    # The KL of a large coefficient shows in a derivative; its terms are a record's that has none.
    beta = 8.0 if mistake is kl_is_detached else 0.04
    lines = [line for line in derived(sound(), beta) if line.get("kind") != "term"]
    assert found(lines, tmp_path / "sound.jsonl") == []
    for row in rows(lines):
        mistake(row)
    path = tmp_path / "run.jsonl"
    assert found(lines, path) == ["gradient_differs"]
    assert says in _sentence(lines, path)


def _sentence(lines: Lines, path: Path) -> str:
    return report_of(lines, path.parent).findings[0].sentence


def test_a_sign_shows_where_the_loss_is_0(tmp_path: Path) -> None:
    lines = [line for line in derived(sound(), 0.0) if line.get("kind") != "term"]
    for row in rows(lines):
        row["gradients"] = [-gradient for gradient in row["gradients"]]
    for update in updates(lines):
        update["loss"] *= -1
    assert "loss_negated" in found(lines, tmp_path / "run.jsonl")


@pytest.mark.parametrize(
    ("entropy", "names"), [(1.0, []), (1.4, ["drawn_otherwise"]), (0.6, ["drawn_otherwise"])]
)
def test_draws_have_the_entropy_of_their_distribution(
    entropy: float, names: list[str], tmp_path: Path
) -> None:
    """Tokens of a distribution whose entropy is 1: half of them at -.5, the others at -1.5."""
    logprobs = [-0.5, -1.5] * 8
    completions = [
        {"prompt": f"prompt {n}", "ids": [10 + n, 11 + t, *range(20, 34)], "group": n}
        for n in range(2)
        for t in range(16)
    ]
    row = {"mask": [1] * 16, "logprobs": logprobs, "entropies": [entropy] * 16}
    lines: Lines = [
        {"format": "covey-audit", "version": 2, "framework": "mine"},
        {"kind": "rollout", "number": 0, "step": 0, "completions": completions},
        {"kind": "update", "step": 0, "rows": [{**row, "rollout": 0, "completion": n} for n in range(32)]},
    ]
    assert found(lines, tmp_path / "run.jsonl") == names


def pairs_of(margins: list[float], loss: Callable[[float, int], float]) -> Lines:
    """A record of DPO, a pair in each update. ``loss``: its value, of the margin and the update."""
    lines: Lines = [{"format": "covey-audit", "version": 2, "settings": {"algorithm": "dpo", "beta": 0.2}}]
    for n, margin in enumerate(margins):
        completions = [
            {"prompt": f"prompt {n % 2}", "ids": [10 + n % 2, 3 + t, 2], "group": 0, "reward": float(t == 0)}
            for t in range(2)
        ]
        lines.append({"kind": "rollout", "number": n, "step": n, "completions": completions})
        logprobs = ([-1.0 + margin, -1.0, -1.0], [-1.0, -1.0, -1.0])
        of = {"rollout": n, "mask": [1, 1, 1], "ref_logprobs": [-1.0, -1.0, -1.0]}
        row = [{**of, "completion": t, "logprobs": logprobs[t]} for t in range(2)]
        lines.append({"kind": "update", "step": n, "rows": row, "loss": loss(margin, n)})
    return lines


def test_the_loss_of_pairs_has_the_settings_of_the_run(tmp_path: Path) -> None:
    """Conservative DPO: with a label smoothing of .1, a tenth of the loss is that of the exchanged pair."""

    def smoothed(margin: float, _: int) -> float:
        return 0.9 * math.log1p(math.exp(-0.2 * margin)) + 0.1 * math.log1p(math.exp(0.2 * margin))

    lines = pairs_of([0.4 * n for n in range(10)], smoothed)
    lines[0]["settings"]["label_smoothing"] = 0.1
    assert found(lines, tmp_path / "run.jsonl") == []


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda margin, _: math.log1p(math.exp(-0.2 * margin)), ""),
        (lambda margin, _: math.log1p(math.exp(0.2 * margin)), "chosen and rejected are exchanged"),
        (lambda margin, _: math.log1p(math.exp(-0.2 * margin / 3)), "means over tokens and not sums"),
        (lambda margin, _: 0.2 * math.log1p(math.exp(-margin)), "beta multiplies the loss"),
        (lambda margin, _: 0.1 + math.log1p(math.exp(-0.2 * margin)), ""),  # with a term of its own
    ],
)
def test_the_loss_of_pairs_is_computed_again(
    loss: Callable[[float, int], float], says: str, tmp_path: Path
) -> None:
    lines = pairs_of([0.4 * n for n in range(10)], loss)
    names = found(lines, tmp_path / "run.jsonl")
    assert names == (["preference_differs"] if says else [])
    assert not says or says in _sentence(lines, tmp_path / "run.jsonl")


@pytest.mark.parametrize(
    ("chosen", "margin", "says"),
    [(0.3, 0.1, ""), (0.0, 0.0, "the reference is the policy itself"), (0.3, 0.0, "the same text")],
)
def test_a_margin_of_dpo_that_stays_0_is_named(
    chosen: float, margin: float, says: str, tmp_path: Path
) -> None:
    steps = [
        {
            "step": n,
            "loss": 0.6931,
            "grad_norm": 1.0,
            "learning_rate": 1e-5,
            "rewards/chosen": chosen,
            "rewards/margins": margin,
        }
        for n in range(1, 11)
    ]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 10, "log_history": steps}))
    sentences = [finding.sentence for finding in audit(path)[1].findings]
    assert all(says in sentence for sentence in sentences) and bool(sentences) == bool(says)


@pytest.mark.parametrize(
    ("verdict", "names"),
    [
        (lambda text, answer, prompt: text.split()[-1] == answer, []),
        (lambda text, answer, prompt: text.split()[0] == answer, ["verdict_elsewhere"]),
        (lambda text, answer, prompt: answer in prompt + text, ["verdict_elsewhere"]),
        (lambda text, answer, prompt: text.split()[-1][:1] == answer[:1], ["pays_incorrect"]),
    ],
)
def test_a_verifier_reads_the_answer_of_the_text(
    verdict: Callable[[str, str, str], bool], names: list[str], tmp_path: Path
) -> None:
    """Each second problem has its answer in the prompt; of four texts, two end with the answer."""
    completions = []
    for n in range(24):
        answer = str(120 + 7 * n)
        prompt = f"problem {n}, {answer}" if n % 2 else f"problem {n}"
        texts = [f"{answer} I say {answer}", f"5 6 {answer}", "7 9 8", f"8 9 7 {answer[0]}77"]
        completions += [
            {
                "prompt": prompt,
                "text": text,
                "group": n,
                "row": {"answer": answer},
                "rewards": {"right": float(verdict(text, answer, prompt))},
            }
            for text in texts
        ]
    lines: Lines = [
        {"format": "covey-audit", "version": 2},
        {"kind": "rollout", "number": 0, "step": 0, "completions": completions},
    ]
    assert found(lines, tmp_path / "run.jsonl") == names

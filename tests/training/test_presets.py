"""What algorithms do in the loop beside the gradient, which tests/proof repeats for every preset."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.training.runs import alike, fingerprint, interrupted, metrics_of, start, varied

from covey.config.load import load_config
from covey.sampling.base import SampledCompletion
from covey.sampling.local import LocalSampler
from covey.system.console import RunConsole
from covey_verify.errors import ConfigError
from covey_verify.types import Score


def coin(completion: str) -> float:
    """Right or wrong, about as often."""
    return float(varied(completion) % 2)


def test_completions_without_a_step_teach_nothing_and_end_nothing(tmp_path: Path) -> None:
    def graded(prompt: str, completion: str) -> Score:
        kind = int(prompt[0]) % 3
        if kind == 0:
            return Score(None, "not_applicable")
        if kind == 1 or len(completion) % 2:
            return Score(0.0, "no_answer", steps=())
        return Score(1.0, steps=[(0, 1, float(len(completion) % 3))])

    start(tmp_path / "run", algorithm="grpo_process", rewards=(graded,), train={"steps": 6})
    rows = [
        json.loads(line)
        for path in sorted((tmp_path / "run" / "rollouts").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    taught = [r for r in rows if r["advantage"]]
    assert taught
    assert len(taught) < len(rows) / 2
    assert all(len(r["completion"]) % 2 == 0 for r in taught)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "absolute", "full"])
def test_every_kl_estimator_works_in_the_loop(tmp_path: Path, estimator: str) -> None:
    # k1's own gradient is zero in expectation, so it is refused; times the ratio it is the reverse KL's.
    gradient = "ratio" if estimator == "k1" else "formula"
    algorithm = {"name": "grpo", "kl": {"estimator": estimator, "coef": 0.1, "gradient": gradient}}
    start(tmp_path / "run", algorithm=algorithm, rewards=(varied,), train={"steps": 2})
    metrics = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["kl_loss"] == pytest.approx(0, abs=1e-6)
    assert metrics[1]["kl_loss"] != 0


def another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sampler record log-probs that are a little off, as one with its own kernels does."""
    sample = LocalSampler.sample

    def off(self: LocalSampler, *arguments: Any) -> Iterator[SampledCompletion]:
        for sampled in sample(self, *arguments):
            recorded = sampled.completion.logprobs * np.float32(1.0001) - np.float32(1e-5)
            yield sampled._replace(completion=replace(sampled.completion, logprobs=recorded))

    monkeypatch.setattr(LocalSampler, "sample", off)
    monkeypatch.setattr(LocalSampler, "bit_exact", False)


@pytest.mark.parametrize("weight", ["truncated", "masked", "geometric_mask", "decoupled", "off_policy_mask"])
def test_every_rollout_weight_works_in_the_loop(
    tmp_path: Path, weight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    another_engine(monkeypatch)
    algorithm = {"name": "dapo", "filter": None, "correction": weight}
    start(
        tmp_path / "run", algorithm=algorithm, rewards=(varied,), train={"steps": 1, "updates_per_batch": 2}
    )
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["mismatch/max"] > 1e-5
    assert metrics["optimizer/grad_norm"] > 0


@pytest.mark.parametrize("truncation", [{"top_p": 0.6}, {"top_k": 3, "temperature": 0.7}])
@pytest.mark.parametrize(
    "algorithm",
    [
        "dppo",
        "scale_rl",
        {"name": "dapo", "old": "sampler"},
        {"name": "dapo", "correction": "geometric_mask"},
        {"name": "grpo", "kl": {"coef": 0.1}},
        {"name": "grpo", "kl": {"estimator": "full", "coef": 0.1}, "entropy": {"coef": 0.01}},
    ],
)
def test_truncated_sampling_is_on_policy_until_the_policy_moves(
    tmp_path: Path, algorithm: Any, truncation: dict[str, Any]
) -> None:
    start(tmp_path / "run", algorithm=algorithm, rewards=(varied,), rollout=truncation, train={"steps": 2})
    for metrics in metrics_of(tmp_path / "run"):
        close = pytest.approx(
            1, abs=1e-4
        )  # to the bit where the operations are compiled: tests/models/test_ops
        assert [metrics[f"ratio/{name}"] for name in ("q01", "mean", "q99")] == [close] * 3
        assert metrics["mismatch/max"] < 1e-4
        assert (
            metrics.get("clip/low", 0)
            == metrics.get("clip/high", 0)
            == metrics.get("correction/zero", 0)
            == 0
        )
        assert metrics["clip/zero_gradient"] == 0
        assert 1 <= metrics["rollout/kept_tokens"] <= truncation.get("top_k", 300)
        assert 0 < metrics["entropy"] <= np.log(truncation.get("top_k", 300))


def test_an_update_under_truncated_sampling_raises_what_it_is_told_to(tmp_path: Path) -> None:
    """The advantage acts on the distribution that is sampled from, also where a few tokens are all of it."""

    def first_digit(completion: str) -> float:
        return float(completion[:1] in set("02468"))

    start(
        tmp_path / "run",
        algorithm={"name": "dapo", "filter": None, "old": "sampler"},
        rewards=(first_digit,),
        rollout={"top_p": 0.8, "max_tokens": 2, "group_size": 16},
        train={"steps": 25, "lr": 3e-3, "updates_per_batch": 2},
    )
    rewards = [m["reward/mean"] for m in metrics_of(tmp_path / "run")]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3


def test_a_truncated_run_continues_with_the_same_bits_and_other_micro_batches_agree(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "algorithm": {"name": "dapo", "old": "sampler", "filter": None},
        "rewards": (varied,),
        "rollout": {"top_p": 0.7},
    }
    start(tmp_path / "whole", train={"updates_per_batch": 2}, **settings)
    interrupted(tmp_path / "cut", 60, train={"updates_per_batch": 2}, **settings)
    start(tmp_path / "cut", train={"updates_per_batch": 2}, **settings)
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")
    small = {"updates_per_batch": 2, "steps": 1}
    start(tmp_path / "one", train=small, **settings)
    start(tmp_path / "many", train={**small, "tokens_per_micro_batch": 20}, **settings)
    one, many = (load_file(tmp_path / n / "final" / "model.safetensors") for n in ("one", "many"))
    alike(one, many)


def test_adaptive_coefficients_move_towards_their_targets(tmp_path: Path) -> None:
    algorithm = {
        "name": "grpo",
        "kl": {"coef": 0.1, "target": 1e-6, "horizon": 100},
        "entropy": {"coef": 0.01, "target": 100.0},
    }
    start(tmp_path / "run", algorithm=algorithm, rewards=(varied,), train={"steps": 4})
    metrics = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["kl/coef"] > metrics[0]["kl/coef"]
    assert [m["entropy/coef"] for m in metrics] == pytest.approx([0.01, 0.015, 0.02, 0.025])


def test_a_refreshed_reference_brings_the_kl_back_to_zero(tmp_path: Path) -> None:
    algorithm = {"name": "grpo", "kl": {"coef": 0.01, "refresh_every": 2}}
    start(tmp_path / "run", algorithm=algorithm, rewards=(varied,), train={"steps": 6})
    metrics = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    saw = [m["kl/token_k3"] for m in metrics]
    assert saw[0] == saw[2] == saw[4] == 0
    assert min(saw[1], saw[3], saw[5]) > 0


@pytest.mark.parametrize(("every", "renewed_after"), [(4, [2, 4, 6]), (8, [4]), (3, [2, 3, 5, 6])])
def test_a_reference_is_renewed_by_updates_not_by_steps(
    tmp_path: Path, every: int, renewed_after: list[int]
) -> None:
    # Two updates a step: the reference moves at the end of the step in which a multiple is reached.
    algorithm = {"name": "grpo", "kl": {"coef": 0.01, "refresh_every": every}}
    train = {"steps": 6, "updates_per_batch": 2, "save_every": 1, "keep": 9}
    start(tmp_path / "run", algorithm=algorithm, rewards=(varied,), train=train)
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    references = [load_file(folder / "reference.safetensors") for folder in folders]
    policies = [load_file(folder / "model.safetensors") for folder in folders]
    assert len(folders) == 6

    def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(one[name], other[name]) for name in one)

    renewed = [step for step in range(1, 7) if equal(references[step - 1], policies[step - 1])]
    stayed = [step for step in range(2, 7) if equal(references[step - 1], references[step - 2])]
    assert renewed == renewed_after
    assert stayed == [step for step in range(2, 7) if step not in renewed_after]


def test_rules_that_cannot_act_are_said_when_a_stage_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(RunConsole, "say", lambda _, text, style="": said.append(text))
    start(tmp_path / "one", algorithm="dapo", rewards=(varied,))
    assert sum("every ratio is 1, so clip" in text for text in said) == 1
    said.clear()
    start(tmp_path / "two", algorithm="dapo", rewards=(varied,), train={"updates_per_batch": 2})
    assert not any("every ratio is 1" in text for text in said)


def test_an_unreliable_judge_is_announced_repeatable_and_kept_out_of_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(RunConsole, "say", lambda _, text, style="": said.append((text, style)))
    settings: dict[str, Any] = {"algorithm": "remax", "rewards": (coin,)}
    noisy: dict[str, Any] = {**settings, "scoring": {"noise": 0.4}}
    start(tmp_path / "exact", **settings)
    assert not any("flipped" in text for text, _ in said)
    start(tmp_path / "whole", **noisy)
    assert said.count(("40 % of the labels are flipped (scoring.noise)", "yellow")) == 1
    interrupted(tmp_path / "cut", 60, **noisy)
    start(tmp_path / "cut", **noisy)
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")
    first = [(tmp_path / n / "evals.jsonl").read_text().splitlines()[0] for n in ("exact", "whole")]
    assert first[0] == first[1]
    metrics = [json.loads(x) for x in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert 0.2 < np.mean([m["reward/coin/flipped"] for m in metrics]) < 0.6


def test_a_judge_that_is_wrong_more_often_than_right_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scoring\.noise"):
        load_config(values={"scoring": {"noise": 0.6}})

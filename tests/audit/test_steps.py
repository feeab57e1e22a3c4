"""From the loss to the weights: the steps of a real optimizer are watched, and each deviation is named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from covey.audit.checks.check import apply
from covey.audit.readers.record_file import read_record
from covey.audit.table import CHECKS
from covey.audit.writers.recorder import Recorder
from tests.audit.lines import Lines, found, motion, own, rows, samples, sound, updates

Optimizer = torch.optim.Optimizer
Loop = Callable[[nn.Module, Optimizer], None]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)


def nothing(_model: nn.Module, _optimizer: Optimizer) -> None:
    pass


def watched(
    path: Path,
    make: Callable[[nn.Module], Optimizer] = adamw,
    before: Loop = nothing,
    after: Loop = nothing,
    bound: float = 1.0,
    scale: float = 1.0,
) -> list[str]:
    """Names of the findings of a loop with a watched optimizer, and what it does before and after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.LayerNorm(4))
    optimizer = make(model)
    file = Recorder(
        path / "run.jsonl", framework="mine", settings={"max_grad_norm": 1.0, "learning_rate": 1e-2}
    )
    file.watch(model, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        (model(torch.randn(32, 8)) - torch.randn(32, 4)).square().mean().mul(scale).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), bound))
        before(model, optimizer)
        optimizer.step()
        after(model, optimizer)
        file.write(kind="update", step=step, grad_norm=norm, learning_rate=optimizer.param_groups[0]["lr"])
    return [f.id for f in apply(CHECKS, read_record(path / "run.jsonl")).findings]


@pytest.mark.parametrize("make", [adamw, adam, sgd])
def test_steps_that_follow_from_their_gradients_have_no_finding(
    make: Callable[[nn.Module], Optimizer], tmp_path: Path
) -> None:
    assert watched(tmp_path, make) == []


def test_a_run_that_continues_with_its_moments_has_no_finding(tmp_path: Path) -> None:
    def continued(model: nn.Module) -> Optimizer:
        twin = copy.deepcopy(model)
        earlier = adamw(twin)
        for _ in range(3):
            earlier.zero_grad()
            twin(torch.randn(4, 8)).square().sum().backward()
            earlier.step()
        optimizer = adamw(model)
        optimizer.load_state_dict(earlier.state_dict())
        return optimizer

    assert watched(tmp_path, continued) == []


def test_a_schedule_and_skipped_steps_are_no_deviation(tmp_path: Path) -> None:
    def slower(_model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"] *= 0.7

    assert watched(tmp_path, after=slower) == []


class Averaged:
    """An average of weights that is copied back into the model."""

    def __init__(self) -> None:
        self.shadow: list[torch.Tensor] = []

    def __call__(self, model: nn.Module, _optimizer: Optimizer) -> None:
        with torch.no_grad():
            self.shadow = self.shadow or [p.clone() for p in model.parameters()]
            for average, parameter in zip(self.shadow, model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
                parameter.copy_(average)


def test_weights_that_are_copied_back_move_between_steps(tmp_path: Path) -> None:
    assert watched(tmp_path, after=Averaged()) == ["moved_between"]


def test_an_optimizer_that_is_no_longer_the_watched_one_is_seen(tmp_path: Path) -> None:
    def of_another(model: nn.Module, _optimizer: Optimizer) -> None:
        another = adamw(model)
        another.step()
        for parameter in model.parameters():
            parameter.grad = None

    assert watched(tmp_path, before=of_another) == ["moved_between"]


def moments_lost(_model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state.clear()


def pulled_apart(model: nn.Module) -> Optimizer:
    """An optimizer that does not hold the last layers."""
    return torch.optim.AdamW(model[0].parameters(), lr=1e-2, weight_decay=0.1)


class Doubled(torch.optim.AdamW):
    """An AdamW whose class is the watched one's, for the recorder."""


@pytest.mark.parametrize(
    ("make", "before", "said"),
    [
        (adamw, moments_lost, "its moments are lost"),
        (pulled_apart, nothing, "do not move, though they have a gradient"),
    ],
)
def test_how_steps_deviate_is_said(
    make: Callable[[nn.Module], Optimizer], before: Loop, said: str, tmp_path: Path
) -> None:
    assert watched(tmp_path, make, before) == ["step_differs"]
    report = apply(CHECKS, read_record(tmp_path / "run.jsonl"))
    assert said in report.findings[0].sentence


def test_an_optimizer_of_another_kind_is_watched_without_a_formula(tmp_path: Path) -> None:
    assert watched(tmp_path, lambda model: Doubled(model.parameters(), lr=1e-2)) == []


def test_an_optimizer_without_hooks_is_left_alone(tmp_path: Path) -> None:
    file = Recorder(tmp_path / "run.jsonl", framework="mine")
    file.watch(nn.Linear(2, 2), object())
    file.write(kind="update", step=0, loss=1.0)
    assert not read_record(tmp_path / "run.jsonl").updates[0].motions


def test_a_gradient_that_is_not_clipped_is_seen(tmp_path: Path) -> None:
    assert watched(tmp_path, bound=math.inf, scale=50.0) == ["gradient_unexplained"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"change": 0.01, "off": 0.02}, "against their gradients, times 1;"),
        ({"change": 0.02, "off": 0.01}, "2 times as far"),
        ({"change": 0.01, "off": 0.012}, "otherwise than"),
        ({"change": 0.0, "off": 0.01}, "do not move"),
    ],
)
def test_the_factor_of_a_step_is_read_off_its_norms(
    values: dict[str, float], said: str, tmp_path: Path
) -> None:
    lines = sound()
    for update in updates(lines):
        update["motions"] = [motion("embedding", fresh=1.0), motion("head", fresh=1.0, **values)]
    assert found(lines, tmp_path / "run.jsonl") == ["step_differs"]
    report = apply(CHECKS, read_record(tmp_path / "run.jsonl"))
    assert (
        said in report.findings[0].sentence and "1 of 2 watched tensors (head)" in report.findings[0].sentence
    )


# --- learning rates -----------------------------------------------------------------------------------


def scheduled(kind: str | None, rates: list[float], **settings: Any) -> Callable[[Path], list[str]]:
    def names(folder: Path) -> list[str]:
        lines = sound()
        lines[0]["settings"] |= {"learning_rate": 1e-5, "lr_scheduler_type": kind, "max_steps": 8, **settings}
        for update, rate in zip(updates(lines), rates, strict=True):
            update["learning_rate"] = rate * 1e-5
        return found(lines, folder / "run.jsonl")

    return names


@pytest.mark.parametrize(
    ("kind", "rates", "settings", "names"),
    [
        ("linear", [1, 7 / 8, 6 / 8, 5 / 8], {}, []),
        ("linear", [1, 6 / 8, 4 / 8, 2 / 8], {}, ["rate_differs"]),  # stepped twice
        ("linear", [7 / 8, 6 / 8, 5 / 8, 4 / 8], {}, []),  # another loop may count from 1
        ("linear", [0, 0.5, 1, 5 / 6], {"warmup_steps": 2}, []),
        ("linear", [0, 0.5, 1, 5 / 6], {"warmup_steps": 0.25}, []),
        ("cosine", [0.5 * (1 + math.cos(math.pi * n / 8)) for n in range(4)], {}, []),
        ("cosine", [1, 1, 1, 1], {}, ["rate_differs"]),
        ("constant", [1, 1, 1, 1], {}, []),
        ("constant", [10, 10, 10, 10], {}, ["rate_differs"]),
        ("polynomial", [1, 0.2, 0.1, 0.1], {}, []),
        ("linear", [1, 1, 1, 1], {"max_steps": -1}, []),  # the number of steps is unknown
        (None, [1, 0.5, 0.3, 0.2], {}, []),
        (None, [10, 10, 10, 10], {}, ["rate_differs"]),
    ],
)
def test_rates_are_those_of_the_schedule(
    kind: str | None, rates: list[float], settings: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    assert scheduled(kind, rates, **settings)(tmp_path) == names


# --- baselines and weights ----------------------------------------------------------------------------


def reinforced(lines: Lines, baseline: Callable[[int], float]) -> Lines:
    """The record of a loop whose algorithm covey lacks, with one number as the baseline of a rollout."""
    lines = own(lines, algorithm="reinforce with a running mean", loss_type="reinforce_mean")
    for row in rows(lines):
        paid = float(row["completion"] % 2)
        row["advantage"] = paid - baseline(row["rollout"])
        row.pop("after_logprobs")
        row["values"] = row["returns"] = None
    for n, sample in enumerate(samples(lines)):
        sample["advantage"] = float(n % 2) - baseline(n // 8)
    for update in updates(lines):
        update["loss"] = None
    return lines


@pytest.mark.parametrize(
    ("baseline", "names"),
    [
        (lambda rollout: 0.05 + 0.1 * rollout, []),  # a running mean that begins with 0
        (lambda rollout: 1.05, []),
        (lambda rollout: 1.5 + 4 * rollout, ["baseline_beyond"]),  # fed with sums
        (lambda rollout: -0.5, ["baseline_beyond"]),
    ],
)
def test_a_mean_of_rewards_lies_between_them(
    baseline: Callable[[int], float], names: list[str], tmp_path: Path
) -> None:
    lines = reinforced(sound(), baseline)
    assert [n for n in found(lines, tmp_path / "run.jsonl") if n == "baseline_beyond"] == names


@pytest.mark.parametrize(("weights", "names"), [([1.0, 0.2], ["weights_ignored"]), ([1.0, 1.0], [])])
def test_weights_that_are_left_out_are_named(weights: list[float], names: list[str], tmp_path: Path) -> None:
    lines = sound()
    lines[0]["settings"]["reward_weights"] = weights
    by_place = [0.0, 0.25, 0.5, 1.0, 0.75, 0.0, 0.5, 0.25]
    for line in lines:
        for place, sample in enumerate(line.get("completions", ())):
            for kind in ("rewards", "alone"):
                sample[kind] = {**sample[kind], "style": by_place[place]}
            total = [s % 2 + by_place[s] for s in range(place - place % 4, place - place % 4 + 4)]
            mean = sum(total) / 4
            std = math.sqrt(sum((value - mean) ** 2 for value in total) / 3)
            sample["advantage"] = (place % 2 + by_place[place] - mean) / (std + 1e-4)
            for row in rows(lines):
                if row["completion"] == place:
                    row["advantage"] = sample["advantage"]
    for update in updates(lines):
        update["loss"] = None
    judged = ("weights_ignored", "advantages_differ", "advantages_scaled")
    assert [name for name in found(lines, tmp_path / "run.jsonl") if name in judged] == names

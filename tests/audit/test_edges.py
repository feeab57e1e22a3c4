"""Between two parts of a trainer: what one hands over is what the other should have got."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from covey.audit.writers.trl import _answers_by_prompt, _frozen_part, _key
from tests.audit.lines import (
    EOS,
    Lines,
    derived,
    found,
    own,
    report_of,
    rollouts,
    rows,
    samples,
    sound,
    updates,
)

# --- log-probs ----------------------------------------------------------------------------------------


def in_minibatches(lines: Lines, late: bool) -> Lines:
    """Each rollout is trained in two halves; the second finds weights that the first has moved."""
    lines = own(lines)
    for n, update in enumerate(updates(lines)):
        update["rows"] = update["rows"][:4] if n % 2 == 0 else update["rows"][4:]
        update["loss"] = None
        for row in update["rows"]:
            row.update(
                dict.fromkeys(("kl", "token_scores", "token_rewards", "returns", "values", "ref_logprobs"))
            )
            if late and n % 2:
                row["old_logprobs"] = [p + 1e-6 for p in row["logprobs"]]
    return lines


@pytest.mark.parametrize(("late", "names"), [(False, []), (True, ["ratio_stuck"])])
def test_old_logprobs_of_a_minibatch_are_not_those_of_its_first_update(
    late: bool, names: list[str], tmp_path: Path
) -> None:
    assert found(in_minibatches(sound(), late), tmp_path / "run.jsonl") == names


def test_a_sampler_of_another_program_does_not_make_old_logprobs_late(tmp_path: Path) -> None:
    lines = in_minibatches(sound(), late=False)
    for sample in samples(lines):
        sample["sampler_logprobs"] = [p + 0.01 for p in sample["sampler_logprobs"]]
        sample["model_logprobs"] = sample["model_logprobs_at_1"] = None
    for row in rows(lines):
        row["after_logprobs"] = None
        row["logprobs"] = [p + 1e-6 for p in row["old_logprobs"]]  # a low learning rate
    assert found(lines, tmp_path / "run.jsonl") == []


@pytest.mark.parametrize(("by", "names"), [(0, []), (3, ["logprobs_order"])])
def test_log_probs_of_a_reference_belong_to_their_completions(
    by: int, names: list[str], tmp_path: Path
) -> None:
    lines = own(sound())
    for update in updates(lines):
        references = [row["ref_logprobs"] for row in update["rows"]]
        for place, row in enumerate(update["rows"]):
            row.update(dict.fromkeys(("kl", "token_scores", "token_rewards", "returns", "values")))
            other = references[(place + by) % 8]
            row["ref_logprobs"] = (other + [0.0] * 8)[: len(row["mask"])]
    assert found(lines, tmp_path / "run.jsonl") == names


@pytest.mark.parametrize(("follows", "names"), [(True, ["reference_moves"]), (False, [])])
def test_a_reference_that_follows_at_once_holds_nothing(
    follows: bool, names: list[str], tmp_path: Path
) -> None:
    lines = own(sound(), sync_ref_model=True)
    for row in rows(lines):
        row.update(dict.fromkeys(("kl", "token_scores", "token_rewards", "returns", "values")))
        if follows:
            row["ref_logprobs"] = row["logprobs"]
    assert found(lines, tmp_path / "run.jsonl") == names


# --- the derivative of a loss whose value is unknown --------------------------------------------------


def halved(lines: Lines, several: bool) -> Lines:
    """The record with a mean over tokens, of which each update trains a part: its value says nothing.

    ``several``: each update trains parts of two rollouts, which divide by numbers of their own.
    """
    lines[0]["settings"]["loss_type"] = "dapo"
    for row in rows(lines):
        # Of a mean over each completion, to that over the tokens of the rollout.
        factor = len(row["mask"]) * (1 + several * row["rollout"])
        row["gradients"] = [slope * factor for slope in row["gradients"]]
    first, _, third, _ = updates(lines)
    for update in updates(lines):
        update["rows"] = update["rows"][:4]
        update["loss"] = 17.0
    if several:
        third["rows"] += copy.deepcopy(first["rows"])
    return lines


@pytest.mark.parametrize("several", [False, True])
def test_a_part_of_a_rollout_is_judged_by_the_direction_of_its_gradient(
    several: bool, tmp_path: Path
) -> None:
    lines = halved(derived(sound()), several)
    of_loss = (
        "gradient_differs",
        "loss_differs",
        "loss_negated",
        "loss_scaled",
        "reduction_differs",
        "kl_sign",
    )
    assert not set(of_loss) & set(found(lines, tmp_path / "run.jsonl"))
    for row in updates(lines)[2]["rows"]:
        row["gradients"][0] = 0.0
    assert ("gradient_differs" in found(lines, tmp_path / "run.jsonl")) is not several


@pytest.mark.parametrize(
    ("settings", "by", "names"),
    [
        ({}, 1.0, []),
        ({}, 3.0, ["gradient_differs"]),
        ({}, 2.0, ["loss_scaled"]),  # as many as micro-batches, where the loss itself is 0
        ({"fp16": True}, 3.0, []),  # a scaler multiplies the loss
        ({"processes": 2}, 3.0, []),
    ],
)
def test_the_scale_of_a_gradient_shows_where_the_loss_is_0(
    settings: dict[str, Any], by: float, names: list[str], tmp_path: Path
) -> None:
    lines = derived(sound())
    lines[0]["settings"] |= settings
    # The first update on the first rollout, whose advantages sum to 0, and whose KL is 0.
    lines = [line for line in lines if line.get("kind") != "update" or line["step"] == 0]
    for row in rows(lines):
        row["gradients"] = [slope * by for slope in row["gradients"]]
    (update,) = updates(lines)
    assert abs(update["loss"]) < 1e-9
    of_loss = ("gradient_differs", "loss_scaled", "loss_differs", "reduction_differs")
    assert [name for name in found(lines, tmp_path / "run.jsonl") if name in of_loss] == names


# --- rewards and rows ---------------------------------------------------------------------------------


def truncated(paid: Callable[[int, bool], float]) -> Lines:
    """A verifier's rewards, by the completion's place and by whether it is truncated."""
    lines = own(sound(), max_completion_length=6)
    for n, sample in enumerate(samples(lines)):
        is_cut = n % 2 == 1
        sample["ids"] = [30 + n + t for t in range(5 + is_cut)] + [EOS] * (not is_cut)
        sample |= {"rewards": {"right": paid(n, is_cut)}, "text": f"text {n}"}
        sample.update(dict.fromkeys(("advantage", "inserted", "model_logprobs", "model_logprobs_at_1")))
        sample.update(dict.fromkeys(("sampler_logprobs", "alone", "elsewhere", "empty", "listed"), None))
        for name in ("alone", "elsewhere", "empty", "listed"):
            sample.pop(name)
    return [line for line in lines if line.get("kind") != "update"]


@pytest.mark.parametrize(
    ("paid", "names"),
    [
        (lambda n, is_cut: float(is_cut or n % 8 == 0), ["pays_incorrect"]),
        (lambda n, is_cut: float(is_cut and n % 4 == 1), []),
        (lambda n, is_cut: float(is_cut) + 0.1 * n, []),  # a reward of length, not a verdict
    ],
)
def test_no_verdict_is_due_to_a_truncated_text(
    paid: Callable[[int, bool], float], names: list[str], tmp_path: Path
) -> None:
    found_names = found(truncated(paid), tmp_path / "run.jsonl")
    assert [name for name in found_names if name == "pays_incorrect"] == names


def test_an_answer_that_no_row_has_for_its_prompt_is_told(tmp_path: Path) -> None:
    data = SimpleNamespace(column_names=["prompt", "answer"])
    columns = {"prompt": ["1+1=", "1+2=", "1+1="], "answer": ["2", "3", "two"]}
    data = type(
        "Data",
        (),
        {"column_names": [*columns], "__len__": lambda _: 3, "__getitem__": lambda _, n: columns[n]},
    )()
    known = _answers_by_prompt(data)
    assert known[_key("1+1=")] == {_key({"answer": "2"}), _key({"answer": "two"})}
    lines = sound()
    for sample in samples(lines)[:3]:
        sample["foreign"] = 1
    assert found(lines, tmp_path / "run.jsonl") == []
    samples(lines)[3]["foreign"] = 1
    report = report_of(lines, tmp_path)
    assert [f.id for f in report.findings] == ["answers_differ"]
    assert "4 of 16 completions come with an answer that no row has" in report.findings[0].sentence


# --- settings that others override --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "names"),
    [
        ("temperature", 0.5, []),
        ("temperature", 0.9, ["drawn_otherwise"]),
        ("repetition_penalty", 1.3, ["penalty_untrained"]),
        ("top_p", 0.3, ["penalty_untrained"]),
        ("top_p", 0.95, []),
    ],
)
def test_generation_kwargs_override_the_settings(
    name: str, value: float, names: list[str], tmp_path: Path
) -> None:
    lines = sound()
    lines[0]["settings"][f"generation_kwargs.{name}"] = value
    assert found(lines, tmp_path / "run.jsonl") == names


@pytest.mark.parametrize(("hotter", "names"), [(False, []), (True, ["drawn_otherwise"])])
def test_tokens_are_drawn_at_the_temperature_of_the_settings(
    hotter: bool, names: list[str], tmp_path: Path
) -> None:
    """Two tokens of logits 0 and 1, at temperature .5 or at 1."""
    lines = own(sound())
    likely, unlikely = (-math.log1p(math.exp(-1 / t)) for t in (0.5, 1.0))
    by_kind = {True: (likely, unlikely), False: (likely - 2, unlikely - 1)}
    rare = 27 if hotter else 12  # of 100: the probability of the second token
    kinds = iter([n * 37 % 100 >= rare for n in range(2000)])
    for sample in samples(lines):
        sample["ids"] = [30] * 80
        values = [by_kind[next(kinds)] for _ in range(80)]
        sample["model_logprobs"], sample["model_logprobs_at_1"] = (list(v) for v in zip(*values, strict=True))
        sample["sampler_logprobs"] = sample["inserted"] = None
    for row in rows(lines):
        sample = rollouts(lines)[row["rollout"]]["completions"][row["completion"]]
        names_of_tokens = [n for n, value in row.items() if isinstance(value, list)]
        row.update(dict.fromkeys(names_of_tokens))
        row |= {"mask": [1] * 80, "logprobs": sample["model_logprobs"]}
    for update in updates(lines):
        update["loss"] = None
    found_names = found(lines, tmp_path / "run.jsonl")
    assert [name for name in found_names if name == "drawn_otherwise"] == names


class Adapted(nn.Module):
    """A model with an adapter as peft names it, and another one that is not active."""

    def __init__(self) -> None:
        super().__init__()
        self.active_adapter = "default"
        self.base = nn.Linear(2, 2).requires_grad_(False)
        self.lora_A = nn.ModuleDict(
            {"default": nn.Linear(2, 1), "ref": nn.Linear(2, 1).requires_grad_(False)}
        )
        self.lora_B = nn.ModuleDict({"default": nn.Linear(1, 2)})


def test_an_adapter_that_is_frozen_does_not_move(tmp_path: Path) -> None:
    model = Adapted()
    assert _frozen_part(model) == 0.0 and _frozen_part(nn.Linear(2, 2)) is None
    model.lora_A["default"].requires_grad_(False)  # as in LoRA-FA
    assert _frozen_part(model) == 0.5
    model.lora_B["default"].requires_grad_(False)
    for part, names in ((0.5, []), (1.0, ["no_motion"])):
        lines = sound()
        for update in updates(lines):
            update["adapter_frozen"] = part
        assert found(lines, tmp_path / "run.jsonl") == names

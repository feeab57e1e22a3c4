"""Runs begun from Python with live objects: model and tokenizer, rows, functions of the algorithm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.training.objects import ROWS, SMALL, Dataset, live, varied, weights
from torch import nn
from transformers import PreTrainedModel

import covey
from covey.cli import main
from covey.config.python_objects import with_objects
from covey_verify.errors import ConfigError, CoveyError, DataError


def same(model: nn.Module, folder: Path) -> bool:
    held = load_file(folder / "model.safetensors")
    return all(torch.equal(weight, model.state_dict()[name]) for name, weight in held.items())


def without(run: Path, *names: str) -> Path:
    """The run as it is when it has ended before these were written."""
    for name in names:
        (run / name).unlink()
    return run


def test_a_model_with_its_rows_is_trained_in_place_and_continued(tmp_path: Path, capsys) -> None:
    given, run = live(), tmp_path / "run"
    model: PreTrainedModel = given["model"].train()
    before, threads = weights(model), torch.get_num_threads()
    data = {"train": Dataset(ROWS), "test": (row for row in ROWS[:4])}
    result = covey.train(**given, **SMALL, data=data, rewards=[varied], output=run)
    assert any(not torch.equal(before[name], weight) for name, weight in weights(model).items())
    assert same(model, result.folder / "final")
    assert model.training
    assert torch.get_num_threads() == threads
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    assert recorded["model"] == "an object in Python: Qwen3ForCausalLM"
    assert recorded["data"]["train"] == "an object in Python: 16 rows"
    assert len((run / "start.json").read_text()) < 2000  # rows are not copied there

    assert main(["resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert "model: `Qwen3ForCausalLM` was a Python object" in said
    again = "model=..., tokenizer=..., data={" + '"train": [...], "test": [...]})'
    assert f"covey.resume({str(run)!r}, {again}" in said
    data = {"train": ROWS, "test": ROWS[:4]}
    without(run, "result.json")
    other = live(seed=1)
    more = covey.resume(run, **other, data=data, train={"steps": 3}, quiet=True)
    assert more.steps == 3
    assert same(other["model"], run / "final")
    last = live(seed=2)
    assert covey.resume(run, **last, data=data, train={"steps": 3}, quiet=True).steps == 3
    assert same(last["model"], run / "final")  # nothing was left to train


def test_a_compiled_model_is_trained_as_the_model_that_it_wraps(tmp_path: Path) -> None:
    given = live()
    model: PreTrainedModel = given["model"]
    before = weights(model)
    given["model"] = torch.compile(model, backend="eager")
    covey.train(**given, **SMALL, data=ROWS, rewards=[varied], output=tmp_path / "run")
    assert any(not torch.equal(before[name], weight) for name, weight in weights(model).items())
    assert same(model, tmp_path / "run" / "final")


def test_a_run_that_is_continued_with_the_objects_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    def begin(folder: str, **settings: Any) -> Path:
        run = tmp_path / folder
        all_settings = {**SMALL, **live(), "data": ROWS, "rewards": [varied], **settings}
        return covey.train(**all_settings, output=run).folder

    whole = begin("whole", train={**SMALL["train"], "steps": 3})
    parts = without(begin("parts"), "result.json")
    covey.resume(parts, **live(seed=5), data=ROWS, train={"steps": 3}, quiet=True)
    found, expected = (load_file(run / "final" / "model.safetensors") for run in (parts, whole))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert (whole / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    assert not (parts / "events.jsonl").exists()  # nothing was different


def test_a_run_on_objects_is_explained_and_audited_without_them(tmp_path: Path, capsys) -> None:
    run = covey.train(**live(), **SMALL, data=ROWS, rewards=[varied], output=tmp_path / "run").folder
    assert "unread_config" not in [finding.id for finding in covey.explain(run)]
    capsys.readouterr()
    assert main(["audit", str(run)]) == 0, capsys.readouterr().err


def test_a_run_on_an_iterator_that_ends_is_continued_for_more_steps(tmp_path: Path) -> None:
    """It was refused: the rows of two steps were an iterator, those of three steps were 16 rows."""
    small = {**SMALL, "rollout": {**SMALL["rollout"], "max_resampling_rounds": 2}}
    data = {"train": iter(ROWS), "test": ROWS[:4]}
    run = covey.train(**live(), **small, data=data, rewards=[varied], output=tmp_path / "run").folder
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    assert recorded["data"]["train"] == "an object in Python: an iterator of rows"
    data = {"train": iter(ROWS), "test": ROWS[:4]}
    assert covey.resume(run, **live(), data=data, train={"steps": 3}, quiet=True).steps == 3
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events if e["event"] == "no longer exact"]


def test_other_data_is_refused_and_other_content_is_told(tmp_path: Path, capsys) -> None:
    run = covey.train(**live(), **SMALL, data=ROWS, rewards=[varied], output=tmp_path / "run").folder
    with pytest.raises(ConfigError, match="16 rows there, an object in Python: 15 rows here"):
        covey.resume(run, **live(), data=ROWS[1:], quiet=True)
    without(run, "result.json")
    changed = [{**row, "answer": "0"} for row in ROWS]
    covey.resume(run, **live(), data=changed, train={"steps": 3})
    assert "data changed since the run began" in capsys.readouterr().out
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [e["because"] for e in events if e["event"] == "no longer exact"]


def test_adapters_are_merged_into_the_object(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    given = live()
    names = list(given["model"].state_dict())
    run = covey.train(
        **given, **SMALL, data=ROWS, rewards=[varied], lora={"rank": 2}, output=tmp_path / "run"
    ).folder
    assert list(given["model"].state_dict()) == names
    assert same(given["model"], run / "final")
    assert all(p.requires_grad for p in given["model"].parameters())
    assert not hasattr(given["model"], "peft_config")


def test_stages_train_the_same_object(tmp_path: Path) -> None:
    given = live()
    rows = [{**row, "completion": row["answer"]} for row in ROWS]
    stages = [{"method": "sft", "data": iter(rows)}, {"method": "rl", "data": ROWS}]
    run = tmp_path / "run"
    covey.train(**given, **SMALL, rewards=[varied], stages=stages, output=run)
    assert same(given["model"], run / "2-rl" / "final")
    before = (run / "2-rl" / "metrics.jsonl").read_bytes()
    for name in ("result.json", "metrics.jsonl"):
        (run / "2-rl" / name).unlink()
    for folder in (run / "2-rl" / "checkpoints").iterdir():
        (folder / "trainer.json").unlink()
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    stages = [{"method": "sft", "data": rows}, {"method": "rl", "data": ROWS}]
    covey.resume(run, **live(seed=3), stages=stages, rewards=[varied], quiet=True)
    assert (run / "2-rl" / "metrics.jsonl").read_bytes() == before


def test_a_model_is_measured_and_sampled(tmp_path: Path, capsys) -> None:
    given, run = live(), tmp_path / "run"
    data = {"train": ROWS, "test": ROWS[:4]}
    covey.train(**given, **SMALL, data=data, rewards=[varied], output=run)
    settings = {"data": data, "rewards": [varied], "rollout": SMALL["rollout"], "eval": SMALL["eval"]}
    by_run = covey.evaluate(run, data=data, quiet=True).record()  # its model is in final/
    assert (
        covey.evaluate(given["model"], tokenizer=given["tokenizer"], **settings, quiet=True).record()
        == by_run
    )
    # What is measured needs no rows to train on.
    settings["data"] = {"test": ROWS[:4]}
    assert (
        covey.evaluate(given["model"], tokenizer=given["tokenizer"], **settings, quiet=True).record()
        == by_run
    )
    texts = covey.sample(given["model"], ["1+1="], n=2, max_tokens=3, tokenizer=given["tokenizer"])
    assert texts == covey.sample(str(run / "final"), ["1+1="], n=2, max_tokens=3)
    assert main(["eval", str(run)]) == 2
    assert "covey.evaluate(" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["default dtype", "inference", "autocast", "device", "no gradients"])
def test_the_modes_that_a_caller_works_in_are_not_a_runs(tmp_path: Path, mode: str) -> None:
    """With bfloat16 as the default dtype the compiled operations wrote behind the ends of tensors."""

    def ended(given: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
        data = {"train": ROWS, "test": ROWS[:4]}
        covey.train(**given, **SMALL, data=data, rewards=[varied], output=tmp_path / name)
        covey.sample(str(tmp_path / name / "final"), ["1+1="], max_tokens=3, quiet=True)
        return load_file(tmp_path / name / "final" / "model.safetensors")

    expected, given = ended(live(), "plain"), live()
    modes = {
        "inference": torch.inference_mode,
        "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        "device": partial(torch.device, "meta"),
        "no gradients": torch.no_grad,
    }
    with modes.get(mode, nullcontext)():
        if mode == "default dtype":
            torch.set_default_dtype(torch.bfloat16)
        try:
            found = ended(given, "other")
            assert torch.get_default_dtype() == (torch.bfloat16 if mode == "default dtype" else torch.float32)
        finally:
            torch.set_default_dtype(torch.float32)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight)


def half(rewards: torch.Tensor, *, factor: float = 0.5) -> torch.Tensor:
    return (rewards - rewards.mean()) * factor


class Advantage:
    def __call__(self, rewards: torch.Tensor) -> torch.Tensor:
        return (rewards - rewards.mean()) * 0.5


@pytest.mark.parametrize(
    "lost", [lambda rewards: (rewards - rewards.mean()) * 0.5, Advantage()], ids=["lambda", "object"]
)
def test_a_function_on_an_axis(tmp_path: Path, capsys, lost: Callable[..., torch.Tensor]) -> None:
    settings = {
        **SMALL,
        "data": {"task": "last_digit", "train_size": 16, "test_size": 4},
        "rewards": [varied],
    }
    named = covey.train(**settings, algorithm={"name": "grpo", "advantage": half}, output=tmp_path / "named")
    recorded = yaml.safe_load((named.folder / "config.yaml").read_text())["algorithm"]["advantage"]
    assert recorded["name"].endswith(":half")
    assert main(["explain", str(named.folder)]) == 0
    run = covey.train(**settings, algorithm={"advantage": lost}, output=tmp_path / "run").folder
    recorded = yaml.safe_load((run / "config.yaml").read_text())["algorithm"]["advantage"]
    assert recorded["name"].startswith("an object in Python: ")
    assert main(["resume", str(run)]) == 2
    assert "algorithm={...}" in capsys.readouterr().err
    assert covey.resume(run, algorithm={"advantage": lost}, train={"steps": 3}, quiet=True).steps == 3


def test_a_model_whose_norm_was_replaced_trains(tmp_path: Path, capsys) -> None:
    given = live()
    given["model"].model.layers[0].input_layernorm = torch.nn.Identity()
    before = weights(given["model"])
    rows = {"data": {"train": ROWS}, "rewards": [varied], "output": tmp_path / "run"}
    covey.train(**given, **rows, **{**SMALL, "quiet": False})
    assert "its own modules compute it; final/ has its weights, not that code" in capsys.readouterr().out
    after = weights(given["model"])
    assert any(not torch.equal(weight, after[name]) for name, weight in before.items())


class Broken:
    def __call__(self, ratio: torch.Tensor) -> torch.Tensor:
        return ratio[:, 1000]


@pytest.mark.parametrize(("surrogate", "name"), [(lambda ratio: ratio[9], "<lambda>"), (Broken(), "Broken")])
def test_a_function_that_raises_is_named_with_its_line(
    tmp_path: Path, surrogate: object, name: str, capsys
) -> None:
    line = r"IndexError: index \d+ is out of bounds .* \(test_from_objects.py:\d+: .*ratio\["
    with pytest.raises(CoveyError, match=rf"{name}, your function, raises {line}"):
        covey.train(
            **SMALL,
            data={"task": "last_digit"},
            rewards=[varied],
            algorithm={"surrogate": surrogate},
            output=tmp_path / "run",
        )
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("axis", "function", "said"),
    [
        (
            "advantage",
            lambda reward: reward,
            "asks for 'reward', which this axis does not offer; did you mean",
        ),
        ("advantage", {"name": half, "factr": 1.0}, "half has no such setting; did you mean factor"),
        ("advantage", {"name": half, "factor": "a"}, "unable to parse string as a number"),
        ("token_weights", lambda gradient: gradient, "asks for 'gradient'"),
        ("advantage", max, "has no signature that names its data"),
        ("advantage", 7, "7 must be a name or a mapping"),
    ],
)
def test_a_wrong_function_is_refused_when_the_config_is_read(
    tmp_path: Path, axis: str, function: object, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        covey.train(**SMALL, data={"task": "sums"}, algorithm={axis: function}, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class PandasTable:
    """A table with the names of pandas, which leaves out all but one of equal columns."""

    def __init__(self, columns: list[str]) -> None:
        self.columns = columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def to_dict(self, orient: str) -> list[dict[str, str]]:
        return [dict.fromkeys(self.columns, "1")]


def test_columns_are_rows(tmp_path: Path) -> None:
    """A slice of a table of `datasets`, for example: lists and arrays by name."""
    rows = [{"prompt": ROWS[n]["prompt"], "test": [n], "number": n} for n in range(4)]
    columns: dict[str, Any] = {
        "prompt": [row["prompt"] for row in rows],
        "test": tuple([n] for n in range(4)),
        "number": np.arange(4),
    }
    for data in ({"train": columns}, {name: columns[name] for name in ("prompt", "number")}):
        read: Any = with_objects({"data": data})["data"]
        assert read["train"].rows == [{name: row[name] for name in data.get("train", data)} for row in rows]
        assert type(read["train"].rows[1]["number"]) is int


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "data.train: there are no rows"),
        (iter(()), "data.train: there are no rows"),
        ([ROWS[0], "text"], "data.train: row 2: a row must be a JSON object, not a str"),
        (
            [ROWS[0], {"question": "1+1="}],
            "data.train: row 2: there is no column 'prompt'; the row has 'question'",
        ),
        ([{"prompt": " "}], "data.train: row 1: 'prompt' must be text"),
        ({"prompt": ["1+1=", " "]}, "data.train: row 2: 'prompt' must be text"),
        ({"train": {"prompt": [], "answer": []}}, "data.train: there are no rows"),
        (
            {"test": {"prompt": ["1+1="], "answer": []}, "train": ROWS},
            "data.test: the columns have different numbers of values: prompt 1, answer 0",
        ),
        ({"train": {"prompt": "1+1="}}, r"data.train: this dict \('prompt'\) holds neither rows nor columns"),
        ({"train": {"a": ROWS, "b": ROWS}}, "If it holds tables, give one of them"),
        (PandasTable(["prompt", "a", "a"]), "data.train: several columns are named 'a'"),
        ({"train": ROWS, "test": [{}]}, "data.test: row 1: there is no column 'prompt'"),
        ([{**ROWS[0], "prompts": 1}], "data.train: row 1: rewards use the name 'prompts'"),
        (
            [{"prompt": "half a pair: \ud83d"}],
            "data.train: row 1: the text contains half of a surrogate pair",
        ),
        ({"task": "sums", "train": ROWS}, "give either task or train"),
        ({"task": "sums", "chat": True}, "data.chat: the built-in task sums has prompts"),
    ],
)
def test_rows_are_checked_as_a_files_are(tmp_path: Path, data: object, said: str) -> None:
    with pytest.raises(CoveyError, match=said) as refused:
        covey.train(**SMALL, data=data, rewards=[varied], output=tmp_path / "run")
    assert isinstance(refused.value, DataError | ConfigError)


class NoModel:
    """Neither a name nor a model."""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer": None}, "Qwen3ForCausalLM needs its tokenizer"),
        ({"model": "tiny"}, "only a model given as an object needs one"),
        ({"model": None}, "only a model given as an object needs one"),
        ({"model": NoModel()}, "a NoModel is not a causal language model"),
        ({"model": nn.Linear(2, 2)}, "a Linear is not a causal language model"),
        ({"tokenizer": NoModel()}, "a NoModel is not a tokenizer"),
        ({"model": 7, "tokenizer": None}, "model = 7: write a string"),
    ],
)
def test_what_is_no_model_with_its_tokenizer_is_refused(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        covey.train(**{**live(), **changes}, **SMALL, data=ROWS, rewards=[varied], output=tmp_path / "run")


@pytest.mark.parametrize("fault", ["half", "frozen", "nan", "inference"])
def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path, fault: str) -> None:
    with torch.inference_mode(fault == "inference"):
        given = live()
    model: PreTrainedModel = given["model"]
    said = {"half": "float16", "frozen": "requires_grad", "nan": "not finite", "inference": "inference_mode"}
    if fault == "half":
        model.half()
    elif fault == "frozen":
        model.requires_grad_(False)
    elif fault == "nan":
        next(model.parameters()).data[0] = torch.nan
    with pytest.raises(ConfigError, match=said[fault]):
        covey.train(**given, **SMALL, data=ROWS, rewards=[varied], output=tmp_path / "run")


def test_a_model_is_given_back_when_a_run_fails(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    given = live()
    before = weights(given["model"].train())
    with pytest.raises(DataError, match="too long"):
        covey.train(
            **given, **{**SMALL, "rollout": {"max_tokens": 4000}}, data=ROWS, rewards=[varied], lora={},
            output=tmp_path / "run",
        )  # fmt: skip
    assert given["model"].training
    assert all(torch.equal(before[name], weight) for name, weight in weights(given["model"]).items())


def test_a_run_stays_in_its_folder_when_a_reward_changes_the_working_directory(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def elsewhere(completion: str) -> float:
        os.chdir(tmp_path / "there")
        return varied(completion)

    covey.train(**live(), **SMALL, data=ROWS, rewards=[elsewhere], output="run")
    assert (tmp_path / "here" / "run" / "final").is_dir()
    assert not list((tmp_path / "there").iterdir())

"""The generation settings in the folders that a run writes: what others sample is what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.conftest import policy_of
from tests.training.runs import PAID

from covey.cli import main
from covey.models.policy import save_policy

ADVICE = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "max_new_tokens": 99,
}


def trained(home: Path, advice: dict[str, Any], *options: str) -> None:
    save_policy(policy_of("qwen3"), home / "base")
    path = home / "base" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **advice}))
    config = {
        "model": "base",
        "output": "run",
        "data": {"task": "last_digit", "train_size": 16, "test_size": 2},
        "rewards": [f"{PAID}:varied"],
        "rollout": {"group_size": 2, "prompts_per_step": 2, "max_tokens": 8},
        "train": {"steps": 1},
        "threads": 1,
    }
    (home / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(home / "run.yaml"), "--output", str(home / "run"), *options]) in (0, 1)


def generation(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "generation_config.json").read_text())


@pytest.mark.parametrize("lora", [(), ("--lora.rank", "2")], ids=["whole", "lora"])
def test_a_trained_folder_samples_as_it_was_trained(tmp_path: Path, capsys, lora: tuple[str, ...]) -> None:
    trained(tmp_path, ADVICE, *lora)
    said = capsys.readouterr().out
    assert said.count("has repetition_penalty 1.05, temperature 0.7, top_k 20, top_p 0.8; this run") == 1
    assert "with temperature 1, top_p 1, top_k 0, and final/ says so" in said
    assert main(["export", str(tmp_path / "run"), "--step", "1", "-o", str(tmp_path / "exported")]) == 0
    for folder in (tmp_path / "run" / "final", tmp_path / "exported"):
        found = generation(folder)
        assert "repetition_penalty" not in found
        assert (found["do_sample"], found["temperature"], found["top_p"], found["top_k"]) == (
            True,
            1.0,
            1.0,
            0,
        )
        assert found["max_new_tokens"] == 99


def test_what_changes_nothing_is_not_spoken_of(tmp_path: Path, capsys) -> None:
    trained(tmp_path, {"repetition_penalty": 1.0, "do_sample": False})
    assert "generation_config" not in capsys.readouterr().out
    assert generation(tmp_path / "run" / "final")["do_sample"] is False


def test_a_run_s_own_temperature_is_in_its_folder(tmp_path: Path, capsys) -> None:
    trained(tmp_path, {"temperature": 0.7}, "--rollout.temperature", "0.7", "--rollout.top_k", "5")
    assert "generation_config" not in capsys.readouterr().out
    found = generation(tmp_path / "run" / "final")
    assert (found["do_sample"], found["temperature"], found["top_k"]) == (True, 0.7, 5)

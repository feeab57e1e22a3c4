"""What a stranger's model folder may hold, and what of the user's must never be written."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import yaml
from tests.conftest import policy_of

from covey.cli import main
from covey.models.load import save_policy


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text("def varied(completion):\n    return len(completion)\n")
    config = {
        "model": "stranger",
        "output": str(tmp_path / "run"),
        "data": {"task": "last_digit", "train_size": 16, "test_size": 2},
        "rewards": ["rewards.py:varied"],
        "rollout": {"group_size": 2, "prompts_per_step": 2, "max_tokens": 4},
        "train": {"steps": 1},
        "eval": {"problems": 2, "samples": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    save_policy(policy_of("qwen3"), tmp_path / "stranger")
    return tmp_path


class Bomb:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.trace,)


def test_pickled_weights_are_refused_unread(project: Path, capsys) -> None:
    model = project / "stranger"
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(project / "trace")))
    assert main(["train", str(project / "run.yaml")]) == 2
    assert "safetensors" in capsys.readouterr().err
    assert not (project / "trace").exists()


def test_code_of_a_model_folder_is_not_run(project: Path, capsys) -> None:
    model, trace = project / "stranger", project / "trace"
    (model / "modeling.py").write_text(
        f"import pathlib\npathlib.Path({str(trace)!r}).touch()\nConfig = Model = 1\n"
    )
    config = json.loads((model / "config.json").read_text())
    config["model_type"] = "stranger"
    config["auto_map"] = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    (model / "config.json").write_text(json.dumps(config))
    assert main(["train", str(project / "run.yaml")]) == 2
    assert "could not be loaded" in capsys.readouterr().err
    assert not trace.exists()


def test_secrets_of_the_environment_are_nowhere_in_a_run(project: Path, capsys, monkeypatch) -> None:
    canaries = {
        name: f"canary-{name.lower()}" for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY")
    }
    for name, value in canaries.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(project / "run.yaml"), "--inject", "step.sigterm@1"]) == 75
    assert main(["resume", str(project / "run")]) in (0, 1)
    out, err = capsys.readouterr()
    written = b"".join(p.read_bytes() for p in (project / "run").rglob("*") if p.is_file())
    for value in canaries.values():
        assert value not in out + err
        assert value.encode() not in written


@pytest.mark.parametrize("count", [10**9, 2**63 - 1])
def test_a_header_that_promises_too_much_is_an_error_of_one_line(project: Path, capsys, count: int) -> None:
    header = json.dumps(
        {"lm_head.weight": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}
    )
    length = len(header).to_bytes(8, "little")
    (project / "stranger" / "model.safetensors").write_bytes(length + header.encode())
    assert main(["train", str(project / "run.yaml")]) == 2
    assert "could not be loaded" in capsys.readouterr().err

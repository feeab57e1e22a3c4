"""Benchmarks: configs are valid, table and picture say what the curves say, no GPU is no benchmark of it."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from covey.config.load import load


def loaded() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "presets.py"
    spec = importlib.util.spec_from_file_location("benchmark_presets", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BENCH = loaded()


@pytest.mark.parametrize("name", BENCH.PRESETS)
def test_every_preset_has_a_valid_config_with_as_many_completions(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BENCH.config_of(name, 1, 50, tmp_path)))
    config = load(tmp_path / "run.yaml").config
    algorithm = config.algorithm if isinstance(config.algorithm, str) else config.algorithm["name"]
    assert (algorithm, config.seed, config.train.steps) == (name, 1, 50)
    assert config.rollout.group_size * config.rollout.prompts_per_step == 256
    assert (config.train.warmup_steps, config.eval.every) == (5, 10)


def test_the_table_says_what_the_curves_say() -> None:
    fast = BENCH.Curve([0, 10, 20], [0.5, 0.8, 0.95], [0.3, 0.6, 0.9], [0, 1280, 2560])
    slow = BENCH.Curve([0, 10, 20], [0.5, 0.7, 0.85], [0.3, 0.6, 0.7], [0, 1280, 2560])
    rows = BENCH.table({"grpo": [fast, slow], "dapo": [slow]}).splitlines()
    assert rows[2].startswith(
        "| grpo | 15 (10 to 20) | 20 (20 to 20), 1 missed | 2 (1 to 3) | 90 (85 to 95) |"
    )
    assert rows[3].startswith(
        "| dapo | 20 (20 to 20) | not reached | 3 (3 to 3) | 85 (85 to 85) | 70 (70 to 70) |"
    )
    drawn = BENCH.picture({"grpo": [fast, slow], "dapo": [slow]})
    assert drawn.count("<polyline") == 3
    assert "0.0,50.0 90.0,20.0 180.0,5.0" in drawn


def test_a_gpu_is_measured_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(__file__).parents[1] / "benchmarks" / "speed"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["speed", "--gpu"])
    speed = runpy.run_path(str(folder / "__main__.py"))
    with pytest.raises(SystemExit):
        speed["main"]()
    assert "--gpu measures on a GPU, and torch finds none here" in capsys.readouterr().err
    sizes = {size: speed["subject"].matrix_parameters(size) for size in ("0.5B", "1.5B")}
    assert sizes == pytest.approx({"0.5B": 0.494e9, "1.5B": 1.544e9}, rel=1e-3)

"""A code task with hidden tests and mathematics with symbolic answers train through their verifiers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.config.load import load_config
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.pipeline import run_pipeline
from covey_verify.errors import SandboxUnavailable
from covey_verify.sandbox.choice import choose

STAGES = [
    {"method": "sft", "train": {"steps": 50, "lr": 3e-3, "batch_size": 4}},
    {"method": "rl", "algorithm": "grpo", "train": {"steps": 3, "lr": 1e-4}},
]


def trained(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> tuple[list[Any], list[Any], Any]:
    """Metrics, rollouts and the environment of the RL stage."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollout = {"group_size": 4, "prompts_per_step": 4, "max_tokens": 32, "temperature": 1.3}
    values = {"data": {"train": folder / "rows.jsonl"}, "rollout": rollout, "threads": 1, "stages": STAGES}
    run_pipeline(
        load_config(values={**values, **settings, "output": folder / "run"}),
        RunConsole(quiet=True),
        StopSignal(),
    )
    stage = folder / "run" / "2-rl"
    metrics = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    logs = sorted((stage / "rollouts").glob("*.jsonl"))
    rollouts = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return metrics, rollouts, json.loads((stage / "env.json").read_text())


def test_programs_with_hidden_tests(tmp_path: Path) -> None:
    try:
        choose()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    rows = [
        {
            "prompt": f"add {n}:",
            "completion": f"```python\ndef f(x): return x+{n}\n```",
            "solution": f"def f(x): return x+{n}",
            "entry_point": "f",
            "tests": [
                {"input": [0], "output": n, "visible": True},
                {"input": [5], "output": 5 + n},
                {"input": [7], "output": 7 + n},
            ],
        }
        for n in range(1, 9)
    ]
    metrics, rollouts, environment = trained(tmp_path, rows, rewards=["code_tests"])
    values = {r["components"]["code_tests"] for r in rollouts}
    assert values == {0.0, 1.0}
    for r in rollouts:
        if r["components"]["code_tests"] == 1.0:
            n = r["prompt"].removeprefix("add ").removesuffix(":")
            assert f"x+{n}" in r["completion"].replace(" ", "")
    assert any(m["optimizer/grad_norm"] > 0 for m in metrics)
    assert "reward/code_tests/gap" in metrics[0]
    assert environment["sandbox"]["backend"] in ("bwrap", "landlock")


def test_symbolic_answers(tmp_path: Path) -> None:
    pytest.importorskip("sympy")
    rows = [
        {"prompt": f"(x+{n})^2=", "completion": f"\\boxed{{x^2+{2 * n}x+{n * n}}}", "answer": f"(x+{n})^2"}
        for n in range(1, 5)
    ]
    gated = {"repetition": {"weight": 0.1, "gated_by": "math_answer:correct"}}
    metrics, rollouts, _ = trained(tmp_path, rows, rewards=["math_answer", gated])
    right = [r for r in rollouts if r["components"]["math_answer"] == 1.0]
    assert right and len(right) < len(rollouts)
    assert all(r["extracted"]["math_answer"].startswith("x^2") for r in right)
    assert any(m["optimizer/grad_norm"] > 0 for m in metrics)

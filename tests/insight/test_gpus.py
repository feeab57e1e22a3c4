"""The table of GPUs in a preview: what a run keeps in memory on each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli import main
from covey.config.load import load_config
from covey.insight.gpus import GPUS, GpuMemory, Subject, gpu_lines, memory_on_gpus
from covey.learner.memory import Shape

QWEN3_4B = Shape(4.02e9, 4.02e9, 151_936, 36, 2560, 32, 8, 128, 9728, bytes_each=2, compiled=False)


def rows(**values: object) -> dict[str, GpuMemory]:
    stage = load_config(values={"data": {"task": "sums"}, **values})
    return {row.gpu: row for row in memory_on_gpus(Subject(QWEN3_4B, [100]), stage)}


def test_a_model_of_4b_fits_a_large_gpu_and_not_a_small_one() -> None:
    assert rows()["H200"].fits
    assert not rows()["L4"].fits


def test_a_reference_takes_the_bytes_of_its_weights() -> None:
    without, with_reference = rows(algorithm="dr_grpo"), rows(algorithm={"name": "dr_grpo", "kl": 0.1})
    assert with_reference["A100"].memory - without["A100"].memory == 2 * int(QWEN3_4B.parameters)


def test_a_critic_and_reward_models_are_counted() -> None:
    stage = load_config(values={"data": {"task": "sums"}})
    alone, judged, criticized = (
        memory_on_gpus(Subject(QWEN3_4B, [100], **others), stage)[0].memory
        for others in ({}, {"reward_models": 10**9}, {"critic": 10**8})
    )
    assert judged - alone == 10**9
    assert criticized - alone >= 10**8 * 12, "float32 weights and two moments at the least"


def test_a_preview_shows_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    varied = "def varied(completion):\n    return len(completion) + sum(map(ord, completion)) % 7\n"
    (tmp_path / "rewards.py").write_text(varied)
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {task: last_digit, train_size: 16, test_size: 8}\nrewards: [rewards.py:varied]\nthreads: 1\n"
        "rollout: {group_size: 4, prompts_per_step: 2, max_tokens: 8}\ntrain: {steps: 4}\n"
    )
    assert main(["preview", str(path), "--groups", "2", "--samples", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["gpu"] for row in shown["gpus"]] == list(GPUS)
    assert all(row["fits"] for row in shown["gpus"])


def test_the_table_names_the_gpus_that_are_too_small() -> None:
    text = list(gpu_lines(list(rows().values())))
    assert text[1].split() == ["GPU", "memory,", "GB"]
    assert "does not fit" in text[-1]

"""The table of GPUs in a preview: held to published figures, and to what a run keeps in memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from covey.cli import main
from covey.config.load import load_config
from covey.insight.forecast import Forecast, Workload
from covey.insight.gpus import (
    BACKWARD,
    GPUS,
    GpuForecast,
    Subject,
    decode_seconds,
    forward_seconds,
    gpu_lines,
    on_gpus,
)
from covey.insight.prices import cost_lines, read_prices
from covey.learner.memory import Shape
from covey_verify.errors import ConfigError

H100 = next(gpu for gpu in GPUS if gpu.name == "H100")
QWEN3_06B = Shape(596e6, 596e6, 151_936, 28, 1024, 16, 8, 128, 3072, bytes_each=2, compiled=False)
QWEN3_4B = Shape(4.02e9, 4.02e9, 151_936, 36, 2560, 32, 8, 128, 9728, bytes_each=2, compiled=False)


@pytest.mark.parametrize(("shape", "published"), [(QWEN3_06B, 16_384 / 11_900), (QWEN3_4B, 16_384 / 6_200)])
def test_an_update_takes_what_prime_rl_reports(shape: Shape, published: float) -> None:
    """Sequences of 16K on one H100 (its BENCHMARKS.md, 2026-02), which gave the share of compute."""
    found = BACKWARD * forward_seconds(H100, shape, completions=1, length=16_384, prompts=0)
    assert found == pytest.approx(published, rel=0.4)


def test_sampling_takes_what_it_took() -> None:
    """256 completions of 256 tokens at 31,920 tokens a second, which gave the time of a layer."""
    shape = Shape(630e6, 630e6, 151_936, 24, 896, 14, 2, 64, 4864, bytes_each=2, compiled=False)
    found = decode_seconds(H100, shape, 256, 256, 36, running=256, longest=256)
    assert found == pytest.approx(256 * 256 / 31_920, rel=0.1)


def test_a_small_update_waits_for_the_host() -> None:
    few, many = rows(rollout={"group_size": 2, "prompts_per_step": 1}), rows(train={"updates_per_batch": 4})
    assert few["H200"]["step"] > 36 * 7e-3
    assert many["H200"]["step"] > 4 * 36 * 7e-3


def rows(**values: object) -> dict[str, dict[str, object]]:
    stage = load_config(values={"data": {"task": "sums"}, **values})
    work = Workload.of(stage.config, stage.algorithm, dead=0.25, length=100.0)
    here = Forecast(5.0, 5.0, 0.0, 10, 0, 1e6, 0.0, {}, 0)
    return {row.gpu: row.record() for row in on_gpus(Subject(QWEN3_4B, [100]), stage, work, here)}


def test_what_does_not_fit_is_said_and_a_run_is_as_long_as_its_steps() -> None:
    found = rows()
    assert found["H200"]["fits"] and not found["L4"]["fits"]
    assert found["H100"]["hours"] == pytest.approx(10 * found["H100"]["step"] / 3600)
    assert found["L4"]["step"] > found["H100"]["step"] > found["H200"]["step"]


def test_a_reference_and_more_completions_take_more() -> None:
    plain, pulled = rows(algorithm="dr_grpo"), rows(algorithm={"name": "dr_grpo", "kl": 0.1})
    assert pulled["A100"]["memory"] - plain["A100"]["memory"] == 2 * int(QWEN3_4B.parameters)
    assert pulled["A100"]["step"] > plain["A100"]["step"]
    assert rows(rollout={"group_size": 32})["A100"]["step"] > plain["A100"]["step"]


def test_a_preview_shows_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    varied = "def varied(completion):\n    return len(completion) + sum(map(ord, completion)) % 7\n"
    (tmp_path / "rewards.py").write_text(varied)
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {task: last_digit, train_size: 16, test_size: 8}\nrewards: [rewards.py:varied]\nthreads: 1\n"
        "rollout: {group_size: 4, prompts_per_step: 2, max_tokens: 8}\ntrain: {steps: 4}\n"
    )
    command = ["preview", str(path), "--groups", "2", "--samples", "4"]
    assert main([*command, "--price", "h100=2.5", "--price", "here=0", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["gpu"] for row in shown["gpus"]] == [gpu.name for gpu in GPUS]
    assert all(row["fits"] for row in shown["gpus"])
    hours = {row["gpu"]: row["hours"] for row in shown["gpus"]}
    assert shown["cost"] == {"H100": pytest.approx(2.5 * hours["H100"]), "here": 0.0}


@pytest.mark.parametrize(
    ("price", "complaint"),
    [
        ("A40=1", "no forecast for 'A40'"),
        ("2.5", "no forecast for '2.5'; write DEVICE=AMOUNT"),
        ("H100=two", "'two' is not the price of an hour, such as H100=2.5"),
        ("H100", "'' is not the price"),
        ("L4=-1", "'-1' is not the price"),
        ("here=inf", "'inf' is not the price"),
    ],
)
def test_a_price_that_is_none_is_refused(price: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        read_prices([price])


def test_costs_are_named_by_device_and_a_gpu_that_is_too_small_has_none() -> None:
    gpus = [GpuForecast("H100", 70, 80, 1.0, 3.0), GpuForecast("L4", 70, 24, 5.0, 15.0)]
    here = Forecast(5.0, 5.0, 0.0, 360, 0, 1e6, 0.0, {}, 0)
    (line,) = cost_lines(here, gpus, {"here": 0.5, "H100": 2.0, "L4": 1.0})
    assert line.endswith(": 0.500 here, 6.00 on H100, unknown for L4")
    assert not list(cost_lines(here, gpus, {}))
    (line,) = cost_lines(None, [], {"here": 0.5})
    assert line.endswith(": unknown for here")


def test_lines_are_a_table() -> None:
    stage = load_config(values={"data": {"task": "sums"}})
    work = Workload.of(stage.config, stage.algorithm, dead=0.0, length=100.0)
    here = Forecast(5.0, 5.0, 0.0, 10, 0, 1e6, 0.0, {}, 0)
    text = list(gpu_lines(on_gpus(Subject(QWEN3_4B, [100]), stage, work, here)))
    assert text[1].split() == ["GPU", "memory,", "GB", "a", "step", "the", "run"]
    assert "does not fit" in text[-1]

"""A run says what goes wrong while it trains, a resumed one the same; how far it has moved is watched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from covey.cli import main
from covey.errors import Stopped
from covey.insight.pages.records import Runs, run_list, run_page
from covey.runs.folder import checkpoints, read_stream, step_of
from covey.runs.rollouts import recorded_steps
from covey.system.signals import StopSignal
from covey.training.drift import Drift, first_completions
from tests.training.runs import start


def low(completion: str) -> float:
    """Differs between completions, and calls none of them correct."""
    return len(completion) / 1000


SHORT = {
    "rewards": (low,),
    "algorithm": "grpo",
    "rollout": {"max_tokens": 5, "prompts_per_step": 2, "max_resampling_rounds": 0},
    "train": {"steps": 7, "save_every": 2},
}


@pytest.mark.parametrize("stopped_after", [0, 3, 6])
def test_a_resumed_run_says_what_one_in_one_go_says(tmp_path: Path, stopped_after: int) -> None:
    whole = start(tmp_path / "whole", **SHORT)[0].folder
    assert {f["id"] for f in read_stream(whole, "findings.jsonl")} >= {"truncated"}

    class Signal(StopSignal):
        def check(self) -> None:
            steps = tmp_path / "cut" / "metrics.jsonl"
            if stopped_after and steps.exists() and len(steps.read_text().splitlines()) == stopped_after:
                raise Stopped("now")

    cut = tmp_path / "cut"
    if stopped_after:
        with pytest.raises(Stopped):
            start(cut, Signal(), **SHORT)
    start(cut, **SHORT)
    assert (cut / "findings.jsonl").read_bytes() == (whole / "findings.jsonl").read_bytes()
    assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_live_findings_are_those_computed_from_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = start(tmp_path / "run", **SHORT)[0].folder
    found = read_stream(folder, "findings.jsonl")
    said = next(f for f in found if f["id"] == "truncated")
    evidence = said["evidence"]
    rows = read_stream(folder / "rollouts", f"step_{evidence['step']:06d}.jsonl")
    (row,) = [r for r in rows if (r["group"], r["sample"]) == (evidence["group"], evidence["completion"])]
    assert row["finish"] == "length"
    assert evidence["token"] == row["tokens"] - 1
    main(["explain", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["findings"] == found
    (folder / "findings.jsonl").unlink()
    main(["explain", str(folder), "--json"])
    again = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["id"], f["step"], f["sentence"]) for f in again] == [
        (f["id"], f["step"], f["sentence"]) for f in found
    ]


def test_a_step_has_one_number_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Findings counted from 1, and the command in the same line from 0: it showed the step before."""
    folder = start(tmp_path / "run", **SHORT)[0].folder
    numbers = list(range(1, 8))
    assert [m["step"] for m in read_stream(folder, "metrics.jsonl")] == numbers
    assert [t["step"] for t in read_stream(folder, "timings.jsonl")] == numbers
    assert recorded_steps(folder) == numbers
    assert step_of(checkpoints(folder)[-1]) == read_stream(folder, "evals.jsonl")[-1]["step"] == 7
    assert main(["show", str(folder)]) == 0
    said = capsys.readouterr().out
    assert [int(row) for row in re.findall(r"^ +(\d+)  ", said, re.MULTILINE)] == numbers
    assert f"covey show {folder} STEP, of 1 to 7" in said
    (shown,) = re.findall(r"^step (\d+): .*truncated.*covey show \S+ (\d+) \d+\)$", said, re.MULTILINE)
    assert shown[0] == shown[1]
    assert main(["show", str(folder), "7"]) == 0
    assert f"{folder}, step 7: " in capsys.readouterr().out
    assert main(["show", str(folder), "0"]) == 2
    assert "no completions of step 0 in its rollout log; it has 1 to 7" in capsys.readouterr().err
    page = run_page("run", folder)
    assert [m["step"] for m in page["metrics"]] == page["logged"] == numbers
    assert run_list(Runs(folder))["runs"][0]["done"] == 7


def test_the_distance_from_the_start_is_that_of_the_log_probs(tmp_path: Path) -> None:
    folder = start(tmp_path / "run", algorithm="grpo", train={"steps": 3, "lr": 1e-2})[0].folder
    distances = [m.get("kl/start") for m in read_stream(folder, "metrics.jsonl")]
    assert distances[0] is None, "the first step is not written down yet when its policy is new"
    assert distances[2] != 0


def test_a_small_batch_is_measured_in_fewer_steps(tmp_path: Path) -> None:
    # 8 completions of 4 x 8 are kept; with 32 a step, one in 16 means every fourth step after the eighth.
    settings = {"rollout": {"group_size": 8, "prompts_per_step": 4}, "train": {"steps": 14, "lr": 0.0}}
    folder = start(tmp_path / "run", algorithm="grpo", **settings)[0].folder
    steps = [m["step"] for m in read_stream(folder, "metrics.jsonl") if "kl/start" in m]
    assert steps == [2, 3, 4, 5, 6, 7, 8, 9, 13]


def test_without_an_update_nothing_has_moved(tmp_path: Path) -> None:
    folder = start(tmp_path / "run", algorithm="grpo", train={"steps": 4, "lr": 0.0})[0].folder
    distances = [m["kl/start"] for m in read_stream(folder, "metrics.jsonl")[1:]]
    assert np.allclose(distances, 0.0, atol=1e-4)


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_kept_completions_are_those_of_the_first_step(tmp_path: Path, top_p: float) -> None:
    settings = {"rollout": {"top_p": top_p}, "train": {"steps": 2, "lr": 0.0}}
    folder = start(tmp_path / "run", algorithm="grpo", **settings)[0].folder
    kept = first_completions(folder)
    assert kept is not None
    assert len(kept) == 8, "one in 32 of 16, and eight at least"
    with np.load(folder / "rollouts" / "step_000001.npz") as log:
        assert np.array_equal(kept.tokens[-1], log["tokens"][log["ends"][-2] :])
        logprobs = kept.sampler_logprobs[-1, : len(kept.tokens[-1])]
        assert np.array_equal(logprobs, log["logprobs"][log["ends"][-2] :])
        assert (kept.sampling_masks is not None) == (top_p < 1)
    last = read_stream(folder, "metrics.jsonl")[-1]
    assert abs(last["kl/start"]) < 1e-4, "under the same mask, with the same weights"


def test_a_log_that_is_gone_ends_the_watch_and_nothing_else(tmp_path: Path) -> None:
    assert Drift(tmp_path).metrics(None, 1.0, 0, 16) == {}  # type: ignore[arg-type]
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text("{broken")
    assert first_completions(tmp_path) is None

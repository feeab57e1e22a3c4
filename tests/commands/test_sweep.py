"""Sweeps: what is refused beforehand, runs that are ordinary, what an interruption and a failure cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from tests.fakes import rewrite_evaluations
from tests.fakes import rows_of as stream_rows
from tests.training.runs import StopAt

import covey
from covey.cli import main
from covey.commands.sweep import cells_of, sweep
from covey.config.grid import Grid, planned_runs
from covey.config.start import Start
from covey.errors import Stopped
from covey.insight.cells import Cell, CellRow, EndedRun, Sweep, best_cell_line, cell_rows, sweep_lines
from covey.runs.estimates import over_seeds
from covey.runs.reader import last_stage
from covey.system.console import RunConsole
from covey.system.fault_injection import Faults
from covey_verify.errors import ConfigError

CONFIG = {
    "model": "tiny",
    "method": "sft",
    "data": {"task": "last_digit", "train_size": 32, "test_size": 8},
    "rollout": {"max_tokens": 8},
    "train": {"steps": 2, "lr": 1e-3, "batch_size": 4, "save_every": 1},
    "eval": {"problems": 8, "samples": 1},
    "guards": {"bad_updates": 1},
}


def written(folder: Path, **more: object) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "output": str(folder / "out"), **more}))
    return file


def grid(folder: Path, *sets: str, seeds: int = 1) -> Grid:
    return planned_runs(Start(written(folder)), sets, seeds)


@pytest.mark.parametrize(
    ("sets", "seeds", "says"),
    [
        (["train.lrr=1,2"], 1, "did you mean train.lr"),
        (["train.lr"], 1, "write a setting and its values"),
        (["=1"], 1, "write a setting and its values"),
        (["train.lr="], 1, "a value is empty"),
        (["train.lr=1e-4,,2e-4"], 1, "a value is empty"),
        (["train.lr=1e-4,0.0001"], 1, "0.0001 occurs twice"),
        (["train.lr=1e-4", "train.lr=2e-4"], 1, "given twice"),
        (["train.lr=1e-4,2e-4", "learning_rate=1e-4"], 1, "are the same run"),
        (["train.lr=-1,1"], 1, "greater than or equal to 0"),
        (["train.lr=nan,1"], 1, "finite number"),
        (["rollout.group_size=4,many"], 1, "valid integer"),
        (["seed=1,2"], 1, "use --seeds N"),
        (["output=a,b"], 1, "by their settings"),
        (["train.lr=1,2"], 0, "at least 1 seed"),
        (["train.lr=1,2"], 501, "at most 1,000 runs"),
    ],
)
def test_nonsense_is_refused_before_the_first_run(
    tmp_path: Path, sets: list[str], seeds: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        grid(tmp_path, *sets, seeds=seeds)
    assert not (tmp_path / "out").exists()


def test_folders_are_named_by_their_settings(tmp_path: Path) -> None:
    found = grid(tmp_path, "train.lr=1e-4,2e-4", "train.betas=[0.9,0.95],[0.9,0.99]", seeds=2)
    assert len(found.runs) == 8
    names = [run.folder.name for run in found.runs]
    assert names[0].startswith("lr=0.0001,betas=_0.9_0.95_,")
    assert names[0].endswith("seed=0")
    assert len(set(names)) == 8
    assert {run.resolved.config.train.betas for run in found.runs} == {(0.9, 0.95), (0.9, 0.99)}
    two = grid(tmp_path, "train.steps=3", "eval.problems=3", "train.lr=0.5").runs[0].folder.name
    assert two == "steps=3,problems=3,lr=0.5,seed=0"
    same_end = [
        r.folder.name for r in grid(tmp_path, "algorithm.kl.coef=0.1", "algorithm.entropy.coef=0.2").runs
    ]
    assert same_end == ["algorithm.kl.coef=0.1,algorithm.entropy.coef=0.2,seed=0"]
    long = grid(tmp_path, f"model={'x' * 300},{'x' * 299}y").runs
    assert len({run.folder.name for run in long}) == 2
    assert max(len(run.folder.name) for run in long) < 250


def test_a_folder_with_a_run_in_it_is_not_swept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text("model: tiny\n")
    with pytest.raises(ConfigError, match="holds a run"):
        cells_of(grid(tmp_path, "train.lr=1,2"))


@pytest.mark.parametrize("where", ["config", "torchrun"])
def test_a_sweep_on_several_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "torchrun":
        monkeypatch.setenv("WORLD_SIZE", "2")
    more = {"launch": {"processes": 2}} if where == "config" else {}
    with pytest.raises(ConfigError, match="a sweep runs in one process"):
        planned_runs(Start(written(tmp_path, **more), ()), ["train.lr=1,2"], 1)


def test_a_failed_run_is_said_and_ended_ones_are_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", str(written(tmp_path)), "--set", "train.lr=1e30,1e-3", "--seeds", "2"]
    assert main([*command, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert [cell["settings"] for cell in record["cells"]] == [{"train.lr": "0.001"}]
    assert record["cells"][0]["ended"] == [0, 1]
    assert len(record["failed"]) == 2
    assert all("not finite" in why for why in record["failed"].values())
    ended = [tmp_path / "out" / f"lr=0.001,seed={seed}" / "result.json" for seed in (0, 1)]
    stamps = [file.stat().st_mtime_ns for file in ended]
    assert main(command) == 1
    said = capsys.readouterr().out
    order = [line.partition(": ")[2] for line in said.splitlines() if line.startswith("run ")]
    assert order == [f"lr={lr},seed={s}" for lr in ("0.001", "1e+30") for s in (0, 1)]  # failed ones last
    assert said.count("already complete") == 2
    assert [file.stat().st_mtime_ns for file in ended] == stamps
    assert "failed: lr=1e+30,seed=0" in said
    assert (tmp_path / "out" / "sweep.svg").read_text().startswith("<svg")


def test_a_pipeline_that_failed_after_a_stage_has_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first stage's accuracy is another model's: it must not compete with whole pipelines."""
    reward = tmp_path / "mine.py"
    reward.write_text("def mine(completion):\n    return sum(map(ord, completion)) % 7 / 7 / 0\n")
    rl = {"method": "rl", "algorithm": "grpo", "rewards": ["mine.py:mine"], "train": {"steps": 1}}
    stages = [{"method": "sft", "train": {"steps": 1}}, rl]
    file = tmp_path / "run.yaml"
    common = {name: CONFIG[name] for name in ("model", "data", "rollout", "eval")}
    file.write_text(yaml.safe_dump({**common, "output": str(tmp_path / "out"), "stages": stages}))
    assert main(["sweep", str(file), "--set", "eval.samples=1,2", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert len(record["failed"]) == 2
    assert len([*(tmp_path / "out").glob("*/1-sft/result.json")]) == 2  # they have accuracies
    assert record["cells"] == []
    assert main(["sweep", str(file), "--set", "eval.samples=1,2"]) == 1
    said = capsys.readouterr().out
    assert "no run with held-out problems has ended yet" in said
    assert "sweep.svg" not in said  # there is nothing to draw
    reward.write_text(reward.read_text().replace(" / 0", ""))
    assert main(["sweep", str(file), "--set", "eval.samples=1,2", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    last = [stream_rows(Path(c["runs"]["0"]) / "2-rl/evals.jsonl")[-1]["pass@1"] for c in cells]
    assert [cell["sampled"]["value"] for cell in cells] == last


def test_temperature_group_size_and_rate_are_swept_with_their_held_out_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What readers are told to tune first, all three at once."""
    (tmp_path / "mine.py").write_text(
        "import covey\n@covey.reward(isolate='inline')\n"
        "def varied(completion):\n    return sum(map(ord, completion)) % 7 / 7\n"
    )
    rl = {
        "method": "rl",
        "algorithm": "grpo",
        "rewards": [{"mine.py:varied": {"verdict": True}}],
        "rollout": {"prompts_per_step": 2, "max_tokens": 4},
        "train": {"steps": 1},
    }
    file = written(tmp_path, **rl)
    values = {"rollout.temperature": "0.7,1.3", "rollout.group_size": "2,4", "train.lr": "1e-4,1e-3"}
    asked = [word for key, both in values.items() for word in ("--set", f"{key}={both}")]
    assert main(["sweep", str(file), *asked, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["settings"] == list(values)
    assert all(len({cell["settings"][key] for cell in record["cells"]}) == 2 for key in values)
    assert len(record["cells"]) == 8
    for cell in record["cells"][1:]:
        for effect in (cell["sampled"], cell["less_first"]["sampled"]):
            assert effect["low"] <= effect["value"] <= effect["high"]
    drawn = (tmp_path / "out" / "sweep.svg").read_text()
    assert all(f">{key}<" in drawn for key in values)


def test_runs_before_and_after_a_change_of_the_reward_are_not_called_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text("def mine(completion):\n    return sum(map(ord, completion)) % 7 / 7\n")
    rl = {"method": "rl", "algorithm": "grpo", "rewards": ["mine.py:mine"]}
    rollout = {"prompts_per_step": 2, "group_size": 2, "max_tokens": 4}
    command = ["sweep", str(written(tmp_path, **rl, rollout=rollout, train={"steps": 1})), "--set"]
    assert main([*command, "train.lr=1e-3,1e-4"]) == 0
    assert "changed between" not in capsys.readouterr().out
    reward.write_text(reward.read_text().replace("% 7 / 7", "% 5 / 5"))
    assert main([*command, "train.lr=1e-3,1e-4,1e-5"]) == 1, (
        "those that ended are not taken for runs of today"
    )
    said = capsys.readouterr().out
    assert "lr=0.001,seed=0 has ended with other rewards or data: reward mine.py:mine" in said.replace(
        "\n", " "
    )
    assert "mine.py changed between these runs" in said
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert record["changed_between"] == ["mine.py"]


def test_a_stopped_sweep_continues_and_its_runs_are_ordinary_ones(tmp_path: Path) -> None:
    plan, quiet = grid(tmp_path, "train.lr=1e-3,2e-3"), RunConsole(quiet=True)
    counter = StopAt()
    elsewhere = Start(written(tmp_path), ("--output", str(tmp_path / "whole")))
    sweep(planned_runs(elsewhere, ("train.lr=1e-3,2e-3",), 1), quiet, counter, False, Faults())
    with pytest.raises(Stopped, match="of 2 runs are complete; repeat the command"):
        sweep(plan, quiet, StopAt(counter.checks // 2), False, Faults())
    found, failed = sweep(plan, quiet, StopAt(), False, Faults())
    assert not failed
    assert [len(row.ended) for row in cell_rows(found)] == [1, 1]
    covey.train(written(tmp_path), quiet=True, train={"lr": 2e-3}, output=str(tmp_path / "alone"))
    weights = [
        (tmp_path / name / "final" / "model.safetensors").read_bytes()
        for name in ("whole/lr=0.002,seed=0", "out/lr=0.002,seed=0", "alone")
    ]
    assert weights[0] == weights[1] == weights[2]
    with pytest.raises(ConfigError, match=r"Runs are below it: lr=0\.001,seed=0, lr=0\.002,seed=0$"):
        last_stage(tmp_path / "out")
    said = "\n".join(sweep_lines(found, {}))
    assert "with one seed the intervals leave out" in said
    assert "points [" in said
    assert "no setting improved on its start (0.0 % sampled); train.lr 0.001 lost the least" in said
    run = tmp_path / "out/lr=0.002,seed=0"
    *before, last = stream_rows(run / "evals.jsonl")
    last["outcome"]["correct"] = [1] * 8
    rewrite_evaluations(run, (*before, last))
    assert "best: train.lr 0.002\n" in "\n".join(sweep_lines(found, {}))
    other_seed = replace(found.cells[1], folders={**found.cells[1].folders, 7: tmp_path / "failed"})
    lucky = replace(found, cells=[found.cells[0], other_seed])
    said = "\n".join(sweep_lines(lucky, {tmp_path / "failed": "not finite"}))
    assert "best" not in said, "what came through of a setting that fails is no fair sample of it"
    assert "train.lr 0.001 (of the settings without a failed run)" in said
    for evals in (tmp_path / "out").glob("*/evals.jsonl"):
        known = stream_rows(evals)
        for own in known:
            own["outcome"]["correct"] = [own["samples"]] * 8
        rewrite_evaluations(evals.parent, known)
    assert "all answers were correct from the start" in "\n".join(sweep_lines(found, {}))


def test_the_interval_of_seeds_and_problems() -> None:
    """Seeds with means .4, .5 and .6: Student's part is 4.303 * .1 / sqrt(3) = .2484."""
    values = np.zeros((3, 400))
    for seed, correct in enumerate((160, 200, 240)):
        values[seed, :correct] = 1
    estimate = over_seeds(values)
    by_problem = np.concatenate([values.mean(0), [0, 1, 0, 1]])
    half = np.hypot(4.303 * 0.1 / np.sqrt(3), 1.959964 * by_problem.std(ddof=1) / np.sqrt(404))
    assert estimate.value == pytest.approx(0.5)
    assert estimate.high - estimate.low == pytest.approx(2 * half)
    assert 2 * half == pytest.approx(2 * 0.2484, rel=0.03)  # the seeds differ by more than problems do
    alone = over_seeds(values[:1])
    assert alone.high - alone.low < estimate.high - estimate.low
    change = over_seeds(values[1:] - values[:2], -1.0)  # both seeds gain 10 points on the same problems
    assert change.value == pytest.approx(0.1)
    assert change.low > 0


def drawn_rows(generator: np.random.Generator, cells: int, seeds: int, gains: float = 0.0) -> list[CellRow]:
    """Cells whose runs differ by 3 points a seed; the last one is better by ``gains``."""
    chances, rows = generator.random(256), list[CellRow]()
    for cell in range(cells):
        ended = {}
        for seed in range(seeds):
            shift = generator.normal(0, 0.03) + gains * (cell == cells - 1)
            solved = generator.binomial(2, np.clip(chances + shift, 0, 1)) / 2
            ended[seed] = EndedRun({"greedy": solved, "sampled": solved}, 0.0, "same", 1.0, Path())
        found = {n: over_seeds(np.stack([e.rates[n] for e in ended.values()])) for n in ("greedy", "sampled")}
        change = {"sampled": found["sampled"]} if cell else {}
        rows.append(
            CellRow(Cell((str(cell),), {s: Path(f"{cell}-{s}") for s in ended}), ended, found, change)
        )
    return rows


@pytest.mark.parametrize(("cells", "seeds"), [(4, 1), (9, 1), (4, 3)])
def test_of_cells_that_are_equal_none_is_called_best(cells: int, seeds: int) -> None:
    """With one seed some cell's difference excluded 0 in 41 % of sweeps of 4 cells, in 58 % of those of 9."""
    generator = np.random.default_rng(0)
    plan = Sweep(Path(), ("train.lr",), ())
    said = [best_cell_line(plan, drawn_rows(generator, cells, seeds), {}) for _ in range(60)]
    assert sum(line.startswith("best") for line in said) <= 3
    assert any("of the other cells may be chance" in line for line in said)


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_cell_that_is_much_better_is_called_best(seeds: int) -> None:
    generator, plan = np.random.default_rng(0), Sweep(Path(), ("train.lr",), ())
    said = [best_cell_line(plan, drawn_rows(generator, 4, seeds, gains=0.4), {}) for _ in range(10)]
    assert said.count("best: train.lr 3") >= 9

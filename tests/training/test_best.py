"""A run that gets worse: the best evaluated checkpoint outlives the others, is named and can be taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.training.runs import alike, interrupted, start
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.cli import main
from covey.insight.findings.finding import Finding
from covey.insight.findings.table import gravest
from covey.runs.best import best_evaluation
from covey_verify.errors import ConfigError


def many(completion: str) -> float:
    """What is called correct: the model begins with it."""
    return float(len(set(completion)) >= 5)


def same(completion: str) -> float:
    """What is paid besides, and more."""
    return -float(len(set(completion)))


WORSE: dict[str, Any] = {
    "rewards": ({many: {"weight": 0.2, "verdict": True}}, {same: {"verdict": False}}),
    "algorithm": {"name": "grpo", "kl": None},
    "rollout": {"group_size": 8, "prompts_per_step": 4, "max_tokens": 12},
    "train": {"steps": 6, "lr": 3e-2, "save_every": 1, "keep": 1},
    "eval": {"every": 1, "problems": 8, "samples": 8},
    "precision": "float32",  # a fixture of the module begins before that of conftest
}


def accuracies(run: Path) -> dict[int, float]:
    lines = (run / "evals.jsonl").read_text().splitlines()
    return {r["step"]: r["pass@1"] for r in map(json.loads, lines)}


def steps_kept(run: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in (run / "checkpoints").iterdir())


def best_step(run: Path) -> int:
    known = accuracies(run)
    return max((step for step in known if step), key=lambda step: known[step])


@pytest.fixture(scope="module")
def worse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("worse") / "run"
    start(run, **WORSE)
    return run


def test_the_best_evaluated_checkpoint_is_kept_named_and_exported(
    worse: Path, tmp_path: Path, capsys
) -> None:
    best = best_step(worse)
    assert best < 6
    assert steps_kept(worse) == [best, 6]
    sentence = json.loads((worse / "result.json").read_text())["conclusion"]["sentence"]
    assert f"step {best} was better" in sentence
    assert main(["export", str(worse), "--step", str(best), "-o", str(tmp_path / "out")]) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    alike(weights, load_file(worse / f"checkpoints/step_{best:06d}/model.safetensors"))
    assert not list((tmp_path / "out").glob("optimizer*"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    AutoTokenizer.from_pretrained(tmp_path / "out")
    assert f"| step {best} |" in (tmp_path / "out" / "README.md").read_text()
    capsys.readouterr()
    assert main(["export", str(worse)]) == 0  # the best, in the run's folder
    assert capsys.readouterr().out.split() == ["model", str(worse / f"export/step_{best:06d}")]
    assert main(["export", str(worse)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["export", str(worse), "--step", "4"]) == 2
    assert f"there are: {best}, 6" in capsys.readouterr().err
    (worse / f"checkpoints/step_{best:06d}/model.safetensors").write_bytes(b"")
    assert main(["export", str(worse), "--step", str(best), "-o", str(tmp_path / "other")]) == 4
    assert not (tmp_path / "other").exists()
    (worse / f"checkpoints/step_{best:06d}/model.safetensors").write_bytes(
        (tmp_path / "out" / "model.safetensors").read_bytes()
    )


def test_the_end_names_the_command_and_what_was_found_on_the_way(tmp_path: Path, capsys) -> None:
    shutil.copy(Path(__file__), tmp_path / "r.py")
    config = tmp_path / "c.yaml"
    config.write_text(
        "data: {task: last_digit, train_size: 64, test_size: 16}\n"
        "rewards: [{'r.py:many': {weight: 0.2, verdict: true}}, {'r.py:same': {verdict: false}}]\n"
        "algorithm: {name: grpo, kl: null}\n"
        "rollout: {group_size: 8, prompts_per_step: 4, max_tokens: 12}\n"
        "train: {steps: 6, lr: 3.0e-2}\neval: {every: 1, problems: 8, samples: 8}\nthreads: 1\n"
    )
    run = tmp_path / "run"
    main(["train", str(config), "--output", str(run)])
    said = capsys.readouterr().out
    best = best_step(run)
    assert f"covey export {run} --step {best}" in " ".join(said.split())
    found = [json.loads(line) for line in (run / "findings.jsonl").read_text().splitlines()]
    others = [f["sentence"] for f in found if f["severity"] == "severe" and f["id"] != "worse"]
    assert f"likely cause: {others[0]}" in said


def test_what_explains_the_end_is_the_most_severe_that_was_found() -> None:
    noted = Finding("truncated", 3, "warning", "truncated")
    bad, farmed = Finding("worse", 4, "severe", "worse"), Finding("farmed", 7, "severe", "farmed")
    assert gravest([noted, bad, farmed]) is farmed
    assert gravest([bad]) is bad
    assert gravest([bad, noted]) is noted
    assert gravest([]) is None


def test_final_may_be_the_best(tmp_path: Path, worse: Path) -> None:
    (result,) = start(tmp_path / "run", **{**WORSE, "train": {**WORSE["train"], "final": "best"}})
    best = best_step(tmp_path / "run")
    final = load_file(tmp_path / "run/final/model.safetensors")
    kept = load_file(tmp_path / f"run/checkpoints/step_{best:06d}/model.safetensors")
    assert all((final[name] == weight).all() for name, weight in kept.items())
    assert result.steps == 6
    assert result.conclusion is not None
    assert f"final/ is step {best}, the best of 6 evaluations" in result.conclusion.sentence
    last = load_file(tmp_path / "run/checkpoints/step_000006/model.safetensors")
    assert all((last[n] == w).all() for n, w in load_file(worse / "final/model.safetensors").items())
    with pytest.raises(ConfigError, match=r"no step is left for these changes: train\.final"):
        start(tmp_path / "run", **WORSE)


def test_a_run_that_is_stopped_keeps_the_same(tmp_path: Path, worse: Path) -> None:
    for checks in (12, 20, 28):
        run = tmp_path / str(checks)
        interrupted(run, checks, **WORSE)
        start(run, **WORSE)
        assert steps_kept(run) == steps_kept(worse)
        assert (run / "evals.jsonl").read_bytes() == (worse / "evals.jsonl").read_bytes()


def test_adapters_are_exported_as_they_are_finished(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    GGUFReader = pytest.importorskip("gguf").GGUFReader  # noqa: N806 - a class
    run = tmp_path / "run"
    start(run, lora={"rank": 2})
    out = tmp_path / "out"
    assert main(["export", str(run), "--step", "4", "-o", str(out), "--gguf", "q8_0"]) == 0
    assert GGUFReader(out / "run-q8_0.gguf").fields["general.name"].contents() == "run"
    assert "A checkpoint of the run `run`" in (out / "adapter/README.md").read_text()
    assert "library_name: transformers" in (out / "README.md").read_text()
    assert "library_name: peft" in (out / "adapter/README.md").read_text()
    final = load_file(run / "final/model.safetensors")
    assert all((final[n] == w).all() for n, w in load_file(tmp_path / "out/model.safetensors").items())
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1, "safetensors leaves others no access"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train": {"final": "best"}, "eval": {"every": 0}}, "train.final best: no evaluation runs"),
        ({"train": {"final": "worst"}}, "train.final"),
    ],
)
def test_a_best_that_nobody_measures_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        start(tmp_path / "run", **settings)


def record(step: int, correct: list[int], greedy: list[int], problems: list[str], verdict: str = "v") -> dict:
    outcome = {"greedy": greedy, "correct": correct, "majority": greedy, "reward": [0.0] * len(greedy)}
    basis = {"verdict": verdict, "rewards": "r", "problems": problems}
    return {"step": step, "samples": 4, "verdict": verdict, "outcome": outcome, "basis": basis}


def test_the_best_is_that_of_what_is_measured_now() -> None:
    pair = ["a", "b"]
    assert best_evaluation([]) is None
    assert best_evaluation([record(0, [4, 4], [1, 1], pair)]) is None  # nothing was trained yet
    rows = [record(1, [1, 1], [0, 0], pair), record(2, [2, 0], [0, 1], pair), record(3, [1, 1], [0, 0], pair)]
    best = best_evaluation(rows)
    assert best is not None
    assert (best.step, best.is_worse_now, best.count) == (
        2,
        False,
        3,
    )  # equal samples: the greedy answers tell
    first = best_evaluation(rows[:1] + rows[2:])
    assert first is not None
    assert first.step == 1  # of equals the first
    best = best_evaluation(
        [*rows, record(4, [4, 4], [1, 1], pair, "other"), record(5, [3, 3], [1, 1], pair, "other")]
    )
    assert best is not None
    assert (best.step, best.count, best.is_worse_now) == (4, 2, True)
    best = best_evaluation([record(1, [4, 0], [1, 0], pair), record(2, [3], [1], ["a"])])
    assert best is not None
    assert (best.step, best.is_worse_now) == (1, True)  # on the problem that both have

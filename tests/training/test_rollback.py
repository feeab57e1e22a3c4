"""A run that rolls back because of a finding, and continues with the finding's config line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.training.runs import StopAt, fingerprint, interrupted, metrics_of, start

from covey.cli import main
from covey.config.load import load_config
from covey.config.python_objects import ModelObject
from covey.insight.findings.rule import Rule
from covey.insight.findings.watch import explain_run
from covey.insight.pages.records import run_page
from covey.proof.check_run import check_run
from covey.runs.folder import checkpoints, step_of
from covey.runs.reader import recorded_settings
from covey.runs.removal import remove_run
from covey.runs.rollbacks import ROLLBACKS, Rollback, read_rollbacks
from covey.system.console import RunConsole
from covey_verify.errors import ConfigError


def many(completion: str) -> float:
    """What the tiny model does well before it is trained."""
    return float(len(set(completion)) >= 8)


TINY: dict[str, Any] = {
    "data": {"task": "last_digit", "train_size": 32, "test_size": 16},
    "rewards": (many,),
    "algorithm": {"name": "grpo", "kl": None},
    "rollout": {"group_size": 8, "prompts_per_step": 4, "max_tokens": 12},
    "train": {"steps": 6, "lr": 1.0, "schedule": "constant", "warmup_steps": 0},
    "guards": {"dead_steps": 0, "on_finding": "rollback"},
    "precision": "float32",
}


def with_rate(lr: float, **more: object) -> dict[str, Any]:
    return {**TINY, "train": {**TINY["train"], "lr": lr}, **more}


def lines(run: Path) -> list[str]:
    return [rollback.line for rollback in read_rollbacks(run)]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run whose learning rate is a hundred times too high, and how often it looks for a stop."""
    folder = tmp_path_factory.mktemp("rollback") / "run"
    counter = StopAt()
    start(folder, counter, **TINY)
    return folder, counter.checks


@pytest.fixture
def run(counted: tuple[Path, int]) -> Path:
    return counted[0]


def test_a_rate_far_too_high_is_lowered_until_the_run_learns(run: Path, tmp_path: Path, capsys: Any) -> None:
    assert lines(run) == ["train.lr: 0.1", "train.lr: 0.01"]
    settings = recorded_settings(run)
    assert settings is not None
    assert settings["train"]["lr"] == 0.01
    # From its first model on, it is the run that its config.yaml describes.
    start(tmp_path / "from the start", **with_rate(0.01))
    assert fingerprint(run) == fingerprint(tmp_path / "from the start")
    assert not (tmp_path / "from the start" / ROLLBACKS).exists()

    first, second = read_rollbacks(run)
    assert (first.step, first.finding, first.was, first.back_to) == (2, "leaps", 1.0, 0)
    gain, comparison, again = re.fullmatch(r"(.+?), (step.+?)\. (.+)", first.outcome).groups()
    assert gain.startswith("That helps: +56 points")
    assert comparison == "step 2 with the change against the same without it"
    assert again == "The finding leaps occurred again"
    assert "leaps did not occur again" in second.outcome
    assert len(metrics_of(run / "rollbacks" / "1")) == 2, "what was done before is kept"
    assert main(["show", str(run)]) == 0
    said = capsys.readouterr().out
    assert f"step 2: {first}" in said
    assert any(f"step 2: {first}" in note for note in run_page("run", run)["notes"])
    assert main(["verify", str(run)]) == 0
    assert main(["show", str(run / "rollbacks" / "1")]) == 0
    assert all(claim.holds for claim in check_run(run, 2, RunConsole(quiet=True)))


def test_the_same_command_says_that_nothing_is_left(run: Path) -> None:
    before = (run / ROLLBACKS).read_bytes(), fingerprint(run)
    (result,) = start(run, **TINY)
    assert result.steps == 6
    assert ((run / ROLLBACKS).read_bytes(), fingerprint(run)) == before


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_a_run_that_was_stopped_rolls_back_to_the_same_bits(
    counted: tuple[Path, int], tmp_path: Path, part: float
) -> None:
    run, checks = counted
    interrupted(tmp_path / "run", int(part * checks), **TINY)
    start(tmp_path / "run", **TINY)
    assert fingerprint(tmp_path / "run") == fingerprint(run)
    assert read_rollbacks(tmp_path / "run") == read_rollbacks(run)


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Counted:
    """Calls a function; the n-th call, over all of one list, kills the process before it."""

    function: Callable[..., Any]
    at: int
    calls: list[int] = field(default_factory=list)

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls.append(1)
        if len(self.calls) == self.at:
            raise Killed
        return self.function(*given, **named)


def test_a_kill_while_the_run_goes_back_changes_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import covey.runs.archive as log
    from covey.training import rollback

    changes = [(log, "write_file"), (log, "discard"), (log, "make_folder"), (log, "sync")]
    changes += [
        (log, "forget_completions"),
        (rollback, "write_own"),
        (rollback, "sync"),
        (rollback, "write_rollbacks"),
    ]
    real = {place: getattr(*place) for place in changes}
    # Twice in a run: about 40 changes of the disk. Each of some is the last one of its process.
    for at in (1, 2, 3, 5, 8, 12, 16, 20, 24, 30):
        folder = tmp_path / str(at)
        calls: list[int] = []
        with monkeypatch.context() as patched:
            for module, name in changes:
                patched.setattr(module, name, Counted(real[module, name], at, calls))
            with pytest.raises(Killed):
                start(folder, **TINY)
        start(folder, **TINY)
        assert fingerprint(folder) == fingerprint(run), at
        assert read_rollbacks(folder) == read_rollbacks(run), at
        assert len(metrics_of(folder / "rollbacks" / "1")) == 2
        assert not list((folder / "rollbacks").glob("*.part"))


def test_when_the_tries_are_used_the_run_continues(tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "run.yaml"
    (tmp_path / "paid.py").write_text("def many(completion):\n    return float(len(set(completion)) >= 8)\n")
    guards = {**TINY["guards"], "max_rollbacks": 1}
    config.write_text(json.dumps({**TINY, "rewards": [f"{tmp_path}/paid.py:many"], "guards": guards}))
    run = tmp_path / "run"
    main(["train", str(config), "--output", str(run)])
    said = " ".join(capsys.readouterr().out.split())
    assert lines(run) == ["train.lr: 0.1"]
    assert "rolling back to the first model with train.lr: 0.1" in said
    assert "leaps: no remedy tried: guards.max_rollbacks 1 is reached" in said
    assert len(metrics_of(run)) == 6
    assert "Rolled back to the first model with train.lr: 0.1. That helps" in said
    # Another value of the user's is not overwritten by what the run chose.
    assert main(["resume", str(run), "--train.lr", "0.02", "--train.steps", "7"]) in (0, 1)
    settings = recorded_settings(run)
    assert settings is not None
    assert settings["train"]["lr"] == 0.02


def test_a_run_without_trouble_has_the_same_bits(tmp_path: Path) -> None:
    start(tmp_path / "plain")
    start(tmp_path / "guarded", guards={"on_finding": "rollback"})
    assert fingerprint(tmp_path / "plain") == fingerprint(tmp_path / "guarded")
    assert not (tmp_path / "guarded" / ROLLBACKS).exists()


def planted(monkeypatch: pytest.MonkeyPatch, line: str, after: int = 10, severity: Any = "severe") -> None:
    """Let the run find something after so many steps, until its config has the line."""
    key, _, value = line.partition(": ")

    def predicate(view: Any) -> str | None:
        """It is planted."""
        changed = json.loads(json.dumps(view.setting(key))) == json.loads(value)
        return None if changed else "it is planted"

    rule = Rule("planted", predicate, "", (lambda _: line,), after=after, severity=severity)
    monkeypatch.setattr("covey.insight.findings.watch.RULES", (rule,))


def few(completion: str) -> float:
    """What is learned within some steps: to repeat."""
    return float(len(set(completion)) <= 7)


LONG = {
    "rewards": (few,),
    "algorithm": {"name": "grpo", "kl": None},
    "rollout": {"group_size": 8},
    "train": {"steps": 12, "lr": 3e-2, "save_every": 100, "keep": 1},
    "eval": {"every": 1, "problems": 16, "samples": 8},
}
"""A run that learns from its first steps on."""


def test_it_goes_back_to_the_best_evaluation_if_that_is_better_and_old_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path / "plain", **LONG)
    records = map(json.loads, (tmp_path / "plain/evals.jsonl").read_text().splitlines())
    evals = {r["step"]: r["pass@1"] for r in records}
    best = max(range(1, 11), key=lambda step: (evals[step], -step))
    assert evals[best] > 0.5 + evals[0]
    assert best <= 5
    planted(monkeypatch, "train.lr: 0.001")
    run = tmp_path / "run"
    start(run, **LONG, guards={"on_finding": "rollback"})
    (rollback,) = read_rollbacks(run)
    assert (rollback.step, rollback.back_to) == (10, best)
    rollouts = [p.name for p in sorted((run / "rollouts").glob("*.jsonl"))]
    assert len(rollouts) == 12
    for name in rollouts[:best]:
        assert (run / "rollouts" / name).read_bytes() == (tmp_path / "plain/rollouts" / name).read_bytes()
    assert [m["optimizer/lr"] for m in metrics_of(run)][best:] == [1e-3] * (12 - best)
    assert len(list((run / "rollbacks/1/rollouts").glob("*.jsonl"))) == 10, "a run of its own"
    with pytest.raises(ConfigError, match=f"after {best} steps it continued with other settings"):
        check_run(run, 2, RunConsole(quiet=True))
    assert all(claim.holds for claim in check_run(run / "rollbacks/1", 2, RunConsole(quiet=True)))


def test_the_best_evaluated_checkpoint_stays_even_if_the_run_goes_back_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A change of what is correct: no evaluation before it counts.
    planted(monkeypatch, 'rewards: ["answer_format", "exact_answer"]')
    run = tmp_path / "run"
    start(run, **LONG, guards={"on_finding": "rollback", "max_rollbacks": 1})
    first = read_rollbacks(run)[0]
    assert first.back_to == 0
    (kept,) = checkpoints(run / "rollbacks/1")
    assert load_file(kept / "model.safetensors")
    evals = [json.loads(line) for line in (run / "rollbacks/1/evals.jsonl").read_text().splitlines()]
    assert step_of(kept) == max(evals[1:], key=lambda r: r["pass@1"])["step"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('rewards: ["answer_format"]', "no group has different rewards"),
        ('rewards: ["math_schema"]', "the run ended"),
        ('rewards: ["code_tests"]', "the run ended"),
    ],
)
def test_a_change_with_which_nothing_can_be_learned_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, why: str
) -> None:
    planted(monkeypatch, line, after=3)
    start(tmp_path / "run", guards={"on_finding": "rollback"})
    start(tmp_path / "plain")
    changed, back = read_rollbacks(tmp_path / "run")
    assert changed.line == line
    assert why in back.sentence
    assert str(back).endswith("Rolled back to the first model without it")
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "plain")


def test_a_change_is_taken_back_by_a_resumed_process_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, 'rewards: ["answer_format"]', after=3)
    guards = {"on_finding": "rollback"}
    counter = StopAt()
    whole = tmp_path / "whole"
    start(whole, counter, guards=guards)
    for part in (0.4, 0.5, 0.6):
        run = tmp_path / str(part)
        interrupted(run, int(part * counter.checks), guards=guards)
        start(run, guards=guards)
        assert read_rollbacks(run) == read_rollbacks(whole)
        assert recorded_settings(run)["rewards"] == recorded_settings(whole)["rewards"]
        assert fingerprint(run) == fingerprint(whole)


def test_a_line_that_the_config_refuses_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "rollout.group_size: 1", after=3)
    start(tmp_path / "run", guards={"on_finding": "rollback"})
    assert not (tmp_path / "run" / ROLLBACKS).exists()


def test_a_warning_waits_whether_it_goes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "train.lr: 0.002", after=2, severity="warning")
    start(tmp_path / "run", guards={"on_finding": "rollback"}, train={"steps": 8})
    assert [(a.step, a.line) for a in read_rollbacks(tmp_path / "run")] == [(7, "train.lr: 0.002")]
    planted(monkeypatch, "train.lr: 0.002", after=2, severity="note")
    start(tmp_path / "other", guards={"on_finding": "rollback"}, train={"steps": 8})
    assert not (tmp_path / "other" / ROLLBACKS).exists()


def test_a_stage_of_a_pipeline_rolls_back_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "train.lr: 0.002", after=2)
    stages = [{"method": "sft", "train": {"steps": 1, "batch_size": 2}}, {"method": "rl"}]
    start(tmp_path / "run", stages=stages, guards={"on_finding": "rollback"})
    assert lines(tmp_path / "run/2-rl") == ["train.lr: 0.002"]
    first, second = (recorded_settings(tmp_path / "run" / stage) for stage in ("1-sft", "2-rl"))
    assert first is not None
    assert second is not None
    assert (first["train"]["lr"], second["train"]["lr"]) == (1e-3, 2e-3)
    assert second["model"] == "../1-sft/final"


def test_a_model_given_as_an_object_cannot_roll_back() -> None:
    given = ModelObject(object(), object())
    with pytest.raises(
        ConfigError, match="on_finding rollback: a model given as an object is trained in place"
    ):
        load_config(values={"model": given, "guards": {"on_finding": "rollback"}})


def test_a_run_begun_anew_remembers_nothing(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    remove_run(tmp_path / "run")
    assert not read_rollbacks(tmp_path / "run")
    assert not (tmp_path / "run" / "rollbacks").exists()


def test_a_damaged_log_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    (tmp_path / ROLLBACKS).write_text((run / ROLLBACKS).read_text().replace("leaps", "leaves"))
    with pytest.raises(Exception, match=r"rollbacks\.jsonl:1: the line is damaged"):
        explain_run(tmp_path)


def test_a_rollback_is_told_in_a_sentence() -> None:
    rollback = Rollback(7, "worse", "it got worse", "train.lr: 0.1", 1.0, 4)
    said = "worse: it got worse. Rolled back to step 4 with train.lr: 0.1. "
    assert str(rollback) == f"{said}The end of the run will show whether it helped"

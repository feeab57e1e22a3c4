"""What ends a run before it does harm, and what the run folder is then good for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.training.runs import FAST, StopAt, alike, fingerprint, interrupted, start

from covey.config.load import load_config
from covey.config.schema import Guards
from covey.errors import CheckpointError, GuardStop, OutOfRoom, Stopped
from covey.insight.findings.watch import explain_run
from covey.insight.pages.records import run_page
from covey.objective.controllers import raise_coef
from covey.runs.checkpoint import GuardMemory
from covey.runs.state import run_state
from covey.system.console import RunConsole
from covey.system.fault_injection import Faults
from covey.system.signals import StopSignal
from covey.training.guards import KLAlarm, Stop, Warn, apply_guards, count_skipped_update, kl_alarm
from covey.training.metrics import console_facts
from covey.training.options import RunOptions
from covey.training.pipeline import run_in_folder
from covey.training.setup import set_up
from covey_verify.errors import RewardError


def read(folder: Path, stream: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / stream).read_text().splitlines()]


def failing(faults: str) -> RunOptions:
    return RunOptions(faults=Faults(faults))


def finite(folder: Path) -> bool:
    weights = [load_file(p) for p in folder.rglob("model.safetensors")]
    return all(bool(w.isfinite().all()) for tensors in weights for w in tensors.values())


@pytest.mark.parametrize("fault", ["grad.nan", "loss.nan"])
@pytest.mark.parametrize("method", ["rl", "sft"])
def test_an_update_that_is_not_finite_is_skipped_counted_and_kept(
    tmp_path: Path, fault: str, method: str
) -> None:
    start(tmp_path / "run", options=failing(f"{fault}@2"), method=method)
    skipped = [m["optimizer/skipped"] for m in read(tmp_path / "run", "metrics.jsonl")]
    assert skipped == [0, 1, 0, 0]
    assert finite(tmp_path / "run")
    (event,) = read(tmp_path / "run", "events.jsonl")
    assert event["event"] == "update skipped"
    batch = load_file(tmp_path / "run" / "skipped" / f"{event['batch']}.safetensors")
    assert {"advantages", "mask", "prompt.0", "tokens.0"} <= set(batch)
    about = json.loads((tmp_path / "run" / "skipped" / f"{event['batch']}.json").read_text())
    assert about["step"] == 2
    assert bool(about["parameters"]) == (fault == "grad.nan")


def test_a_skipped_batch_is_kept_with_what_its_critic_learns_from(tmp_path: Path) -> None:
    start(tmp_path / "run", options=failing("grad.nan@2"), algorithm="ppo")
    (file,) = (tmp_path / "run" / "skipped").glob("*.safetensors")
    batch = load_file(file)
    assert batch["values"].shape == batch["targets"].shape == batch["returns"].shape == batch["mask"].shape


def test_three_skipped_updates_in_a_row_end_the_run_and_keep_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    with pytest.raises(GuardStop, match=r"updates in a row was not finite.*step_000004") as caught:
        start(tmp_path / "run", options=failing("grad.nan@3-5"), train={"steps": 8})
    assert caught.value.code == 6
    assert {p.name for p in (tmp_path / "run" / "checkpoints").iterdir()} == {"step_000002", "step_000004"}
    assert finite(tmp_path / "run")
    start(tmp_path / "run", train={"steps": 8})
    assert not any(m["optimizer/skipped"] for m in read(tmp_path / "run", "metrics.jsonl")[4:])


def test_skipped_updates_that_are_not_in_a_row_end_nothing(tmp_path: Path) -> None:
    faults = "grad.nan@1,grad.nan@3,grad.nan@5,grad.nan@7"
    start(tmp_path / "run", options=failing(faults), train={"steps": 8}, guards={"bad_updates": 2})
    skipped = [m["optimizer/skipped"] for m in read(tmp_path / "run", "metrics.jsonl")]
    assert skipped == [1, 0] * 4


def test_a_skipped_update_resumes_exactly(tmp_path: Path) -> None:
    counter = StopAt()
    start(tmp_path / "whole", counter, options=failing("grad.nan@2"))
    with pytest.raises(Stopped):
        start(tmp_path / "parts", StopAt(counter.checks * 2 // 3), options=failing("grad.nan@2"))
    assert read(tmp_path / "parts", "metrics.jsonl")[1]["optimizer/skipped"] == 1
    start(tmp_path / "parts")
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "parts")


def test_weights_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(GuardStop, match="is not finite, so nothing was written"):
        start(tmp_path / "run", options=failing("weights.nan@2"), train={"save_every": 2})
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    assert not list((tmp_path / "run").rglob(".tmp-*"))


def test_a_learning_rate_that_destroys_the_model_never_reaches_the_disk(tmp_path: Path) -> None:
    try:
        start(tmp_path / "run", train={"lr": 1e30, "save_every": 1, "grad_clip": 1e30})
    except GuardStop as stop:
        assert stop.code == 6
    assert finite(tmp_path / "run")


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (lambda completion: 1.0, "All completions were correct in 100 % of the groups, incorrect in 0 %"),
        (lambda completion: 0.0, "of the completions are truncated at rollout.max_tokens"),
        (lambda completion: None, "unscored in 100 %. 100 % of the completions could not be scored"),
    ],
    ids=["correct", "incorrect", "unscored"],
)
def test_steps_without_signal_end_the_run_and_say_why(tmp_path: Path, reward, says: str) -> None:
    with pytest.raises(GuardStop, match="for 3 steps no group had a nonzero advantage") as caught:
        start(tmp_path / "run", rewards=(reward,), guards={"dead_steps": 3}, train={"steps": 9})
    assert says in str(caught.value)
    assert len(read(tmp_path / "run", "metrics.jsonl")) == 3


@pytest.mark.parametrize("algorithm", ["dapo", {"name": "dapo", "nll": 0.1}])
def test_a_run_that_changed_no_weight_is_no_success(tmp_path: Path, algorithm: Any) -> None:
    with pytest.raises(
        GuardStop,
        match=r"without changing a single weight.*correct in 100 % of the groups.*cannot tell answers apart",
    ):
        start(tmp_path / "run", rewards=(lambda completion: 1.0,), algorithm=algorithm)
    assert not (tmp_path / "run" / "final").exists()


FAR = {"name": "grpo", "kl": {"coef": 1e-4}}


@pytest.mark.parametrize("estimator", ["k3", "full"])
def test_the_kl_guard_stops_beyond_its_bound(tmp_path: Path, estimator: str) -> None:
    far = {"name": "grpo", "kl": {"coef": 1e-4, "estimator": estimator}}
    with pytest.raises(GuardStop, match=r"nats per completion, above guards.kl_stop \(1\)"):
        start(tmp_path / "run", algorithm=far, train={"steps": 20, "lr": 0.05}, guards={"kl_stop": 1.0})
    metrics = read(tmp_path / "run", "metrics.jsonl")
    assert metrics[-1]["kl/completion_k1"] > 1
    assert all(m["kl/completion_k1"] <= 1 for m in metrics[:-1])


def test_the_kl_guard_raises_its_coefficient_and_a_resume_knows_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "algorithm": FAR,
        "train": {"steps": 6, "lr": 0.01, "save_every": 3},
        "guards": {"kl_warn": 0.01, "kl_act": 0.02, "kl_stop": None, "kl_action": "raise_coef"},
    }
    counter = StopAt()
    start(tmp_path / "whole", counter, **settings)
    coefficients = [m["kl/coef"] for m in read(tmp_path / "whole", "metrics.jsonl")]
    assert coefficients[0] == 1e-4
    assert coefficients[-1] > 1.5e-4
    interrupted(tmp_path / "parts", counter.checks - 40, **settings)
    start(tmp_path / "parts", **settings)
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "parts")


def test_a_resume_takes_another_coefficient(tmp_path: Path) -> None:
    far = {**FAR, "kl": {"coef": 1e-4}}
    start(tmp_path / "run", algorithm=far, train={"steps": 2})
    settings = {"algorithm": {**FAR, "kl": {"coef": 0.5}}, "train": {"steps": 4}}
    start(tmp_path / "run", options=RunOptions(changes=True), **settings)
    coefficients = [m["kl/coef"] for m in read(tmp_path / "run", "metrics.jsonl")]
    assert coefficients == [1e-4, 1e-4, 0.5, 0.5]


@pytest.mark.parametrize(
    ("seen", "coefficients"),
    [([2, 2, 0.5, 0.5, 0.5], [0.15, 0.225, 0.15, 0.1, 0.1]), ([0.5, math.nan], [0.1, 0.1])],
)
def test_a_raised_coefficient_comes_back(seen: list[float], coefficients: list[float]) -> None:
    """1.5 times .1 and again, then the same way back, and never below what the config says."""
    limits = Guards(kl_warn=None, kl_act=1.0, kl_stop=None, kl_action="raise_coef")
    found, coef = [], 0.1
    for kl in seen:
        coef = raise_coef(coef, 0.1, kl_alarm(kl, limits) == KLAlarm.ACT)
        found.append(coef)
    assert found == pytest.approx(coefficients)


def test_guards_are_functions_of_what_they_are_given() -> None:
    limits = Guards(bad_updates=2, dead_steps=2, entropy_floor=0.5)
    memory, stop = count_skipped_update(False, GuardMemory(), limits, step=3)
    assert (memory, stop) == (GuardMemory(bad_updates=1), None)
    assert isinstance(count_skipped_update(False, memory, limits, step=4)[1], Stop)
    assert count_skipped_update(True, memory, limits, step=4) == (GuardMemory(), None)
    metrics = {"entropy/sampled": 1.0, "kl/completion_k1": 7.0}
    memory, (warning,) = apply_guards(3, metrics, False, GuardMemory(), limits, lambda n: f"{n} steps", str)
    assert memory == GuardMemory(dead_steps=1, kl_alarm=1)
    assert isinstance(warning, Warn)
    memory, (stop,) = apply_guards(4, metrics, False, memory, limits, lambda n: f"{n} steps", str)
    assert isinstance(stop, Stop)
    assert "2 steps" in stop.why
    _, (stop,) = apply_guards(5, {"entropy/sampled": 0.1}, True, memory, limits, str, str)
    assert "entropy_floor" in stop.why


ESTIMATORS = """
def silent(rewards):
    return 0 * rewards

def bold(rewards):
    return rewards

def centred(rewards):
    return (rewards - rewards.mean()) / 2
"""


def estimated(tmp_path: Path, name: str, estimator: str, *stop: StopSignal) -> list[dict[str, Any]]:
    """The events of a run with an estimator of ESTIMATORS, or with a built-in one."""
    (tmp_path / "own.py").write_text(ESTIMATORS)
    advantage = f"{tmp_path / 'own.py'}:{estimator}" if f"def {estimator}(" in ESTIMATORS else estimator
    start(tmp_path / name, *stop, algorithm={"name": "grpo", "kl": None, "advantage": advantage})
    events = tmp_path / name / "events.jsonl"
    return read(tmp_path / name, "events.jsonl") if events.exists() else []


def test_an_estimator_that_gives_nothing_is_named_as_the_cause(tmp_path: Path) -> None:
    with pytest.raises(GuardStop, match=r"it is algorithm.advantage that gives every answer 0"):
        estimated(tmp_path, "run", "silent")


def test_an_own_estimator_without_a_baseline_is_named_once(tmp_path: Path) -> None:
    counter = StopAt()
    (event,) = estimated(tmp_path, "whole", "bold", counter)
    assert (event["step"], event["event"]) == (1, "advantages do not sum to zero")
    assert event["sum"] > 0
    with pytest.raises(Stopped):
        estimated(tmp_path, "parts", "bold", StopAt(counter.checks * 2 // 3))
    assert estimated(tmp_path, "parts", "bold") == [event]
    assert estimated(tmp_path, "centred", "centred") == []
    assert estimated(tmp_path, "reinforce", "reward") == []  # it has no baseline by name


def test_metrics_say_what_they_cover_and_the_entropy_guard_covers_everything(tmp_path: Path) -> None:
    """Where no group differs nothing goes through the update, and the guard sees that exploration ended."""

    def constant(completion: str) -> float:
        return 1.0

    start(tmp_path / "all", algorithm="grpo")
    for metrics in read(tmp_path / "all", "metrics.jsonl"):
        assert metrics["update/coverage"] == 1.0  # a KL in the loss: every completion has a gradient
        assert metrics["entropy/sampled"] == pytest.approx(metrics["entropy"], rel=0.25)
    with pytest.raises(GuardStop, match="entropy_floor"):
        start(tmp_path / "idle", rewards=(constant,), guards={"entropy_floor": 100.0}, algorithm="dr_grpo")
    (metrics,) = read(tmp_path / "idle", "metrics.jsonl")
    assert metrics["update/coverage"] == 0.0
    assert "entropy" not in metrics
    assert metrics["entropy/sampled"] > 0
    texts = [{"reward": f"{v}", **console_facts({**metrics, "accuracy": v}, {})} for v in (0.0, 1.0)]
    assert not any("nan" in text for shown in texts for text in shown.values())


def test_the_entropy_floor_stops(tmp_path: Path) -> None:
    with pytest.raises(GuardStop, match=r"below guards.entropy_floor 100"):
        start(tmp_path / "run", guards={"entropy_floor": 100.0})


@pytest.mark.parametrize("method", ["rl", "sft"])
def test_out_of_memory_splits_the_micro_batch_and_keeps_the_gradient(tmp_path: Path, method: str) -> None:
    train = {"steps": 2, "tokens_per_micro_batch": 512}
    start(tmp_path / "whole", train=train, method=method)
    start(tmp_path / "split", train=train, method=method, options=failing("memory.full@1-2"))
    events = [e["tokens_per_micro_batch"] for e in read(tmp_path / "split", "events.jsonl")]
    assert events == [256, 128]
    a, b = (load_file(tmp_path / n / "final" / "model.safetensors") for n in ("whole", "split"))
    alike(a, b)
    assert read(tmp_path / "whole", "metrics.jsonl")[0]["loss"] == pytest.approx(
        read(tmp_path / "split", "metrics.jsonl")[0]["loss"], abs=1e-6
    )


@pytest.mark.parametrize("method", ["rl", "sft"])
def test_micro_batches_before_the_one_that_did_not_fit_count_once(tmp_path: Path, method: str) -> None:
    train = {"steps": 1, "tokens_per_micro_batch": 64}
    start(tmp_path / "whole", train=train, method=method)
    start(tmp_path / "split", train=train, method=method, options=failing("memory.full@3"))
    assert [e["event"] for e in read(tmp_path / "split", "events.jsonl")] == ["out of memory"]
    norms = [read(tmp_path / n, "metrics.jsonl")[0]["optimizer/grad_norm"] for n in ("whole", "split")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("faults", ["memory.sampling@5-7", "memory.sampling@5,memory.sampling@40-41"])
def test_out_of_memory_while_sampling_changes_no_bit(tmp_path: Path, faults: str) -> None:
    start(tmp_path / "whole")
    start(tmp_path / "run", options=failing(faults))
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "run")
    # The first evaluation has 24 completions under way when memory ends.
    assert [e["running"] for e in read(tmp_path / "run", "events.jsonl")] == [12, 6, 3]


def test_frozen_log_probs_are_made_in_smaller_pieces_when_memory_runs_out(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algorithm": {"name": "grpo", "kl": {"coef": 0.1}}, "train": {"steps": 1}}
    start(tmp_path / "whole", **settings)
    start(tmp_path / "run", options=failing("memory.full@1"), **settings)
    arrays = [np.load(tmp_path / n / "rollouts" / "step_000001.npz") for n in ("whole", "run")]
    assert all((arrays[0][name] == arrays[1][name]).all() for name in arrays[0])
    assert [e["step"] for e in read(tmp_path / "run", "events.jsonl")] == [1]


def test_out_of_memory_with_a_single_completion_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(OutOfRoom, match=r"even with one completion at a time.*max_tokens") as caught:
        start(tmp_path / "run", options=failing("memory.full@1-99"))
    assert caught.value.code == 8


@pytest.mark.parametrize("fault", ["save.full", "save.enospc", "save.eio"])
def test_a_save_that_fails_once_is_tried_again_after_rotation(tmp_path: Path, fault: str) -> None:
    start(tmp_path / "whole", train={"save_every": 1})
    start(tmp_path / "run", options=failing(f"{fault}@3"), train={"save_every": 1})
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "run")


@pytest.mark.parametrize("fault", ["save.full", "save.enospc", "save.eio"])
def test_a_save_that_fails_leaves_a_folder_that_can_continue(tmp_path: Path, fault: str) -> None:
    start(tmp_path / "whole", train={"save_every": 1})
    with pytest.raises(OutOfRoom) as caught:
        start(tmp_path / "run", options=failing(f"{fault}@3-4"), train={"save_every": 1})
    assert caught.value.code == 8
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]
    start(tmp_path / "run", train={"save_every": 1})
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "run")


def test_strict_refuses_a_damaged_checkpoint_and_so_does_a_run_without_a_good_one(tmp_path: Path) -> None:
    counter = StopAt()
    start(tmp_path / "whole", counter)
    interrupted(tmp_path / "run", counter.checks - 1)
    newest_first = sorted((tmp_path / "run" / "checkpoints").iterdir(), reverse=True)
    for checkpoint, strict in zip(newest_first, (True, False), strict=True):
        (checkpoint / "trainer.json").write_text("{}")
        with pytest.raises(CheckpointError, match=r"trainer.json is not as it was written") as caught:
            start(tmp_path / "run", options=RunOptions(strict=strict))
        assert caught.value.code == 4


def test_time_is_up(tmp_path: Path) -> None:
    with pytest.raises(Stopped, match=r"stopped after 0.0001 minutes; saved after step"):
        start(tmp_path / "run", StopSignal(max_minutes=1e-4), train={"steps": 1000})


def moody(completion: str) -> float:
    """A reward that cannot judge about every third completion."""
    if completion and sum(map(ord, completion)) % 3 == 0:
        raise RuntimeError("no mood")
    return float(len(completion) + sum(map(ord, completion)) % 7)


def test_failures_of_judging_are_remembered_over_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rewards": (moody,), "train": {"steps": 9, "lr": 0.0}}
    counter = StopAt()
    with pytest.raises(RewardError, match=r"of the last 5 steps could not be judged") as whole:
        start(tmp_path / "whole", counter, **settings)
    interrupted(tmp_path / "parts", counter.checks // 2, **settings)
    assert 0 < len(read(tmp_path / "parts", "metrics.jsonl")) < 4
    with pytest.raises(RewardError) as parts:
        start(tmp_path / "parts", **settings)
    said = [str(caught.value).partition(" (")[0] for caught in (whole, parts)]
    assert said[0] == said[1]
    assert len(read(tmp_path / "whole", "metrics.jsonl")) == len(read(tmp_path / "parts", "metrics.jsonl"))


def test_what_the_guards_remember_is_in_the_checkpoint(tmp_path: Path) -> None:
    """The level of the KL is said once, also by a resumed run; a verifier's refusals in a row add up."""
    settings: dict[str, Any] = {
        "algorithm": "grpo",
        "guards": {"kl_warn": 1e-9, "kl_act": None, "kl_stop": None},
    }
    start(tmp_path / "whole", **settings)
    counter = StopAt()
    start(tmp_path / "count", counter, **settings)
    interrupted(tmp_path / "parts", counter.checks * 2 // 3, **settings)
    newest = max((tmp_path / "parts/checkpoints").iterdir())
    saved = json.loads((newest / "trainer.json").read_text())["state"]
    assert {"unjudged", "refused"} <= set(saved["position"])
    assert saved["guards"]["kl_alarm"] == 1
    start(tmp_path / "parts", **settings)
    assert read(tmp_path / "whole", "events.jsonl") == read(tmp_path / "parts", "events.jsonl")
    resolved = load_config(values={**FAST, "output": tmp_path / "refused"})
    run = set_up(resolved, RunConsole(quiet=True), StopSignal())
    run.advance(1, {"refused": {"varied": 2}})
    run.save()
    run.journal.folder.close()
    again = set_up(resolved, RunConsole(quiet=True), StopSignal())
    again.journal.folder.close()
    assert again.state.position.refused == {"varied": 2}


def test_a_run_that_a_guard_stopped_is_shown_as_that(tmp_path: Path) -> None:
    run = tmp_path / "run"
    resolved = load_config(values={**FAST, "train": {**FAST["train"], "steps": 8}, "output": run})
    with pytest.raises(GuardStop):
        run_in_folder(resolved, RunConsole(quiet=True), StopSignal(), failing("grad.nan@3-5"))
    assert run_state(run) == "stopped"  # though this process, which had its lock, is alive
    page = run_page("run", run)
    assert page["state"] == "stopped"
    (note,) = [n for n in page["notes"] if "updates in a row was not finite" in n]
    assert note.startswith("stopped by a guard: ")
    assert "covey resume" not in note
    assert "covey resume" not in explain_run(run).conclusion
    (run / "exit.json").write_text(
        json.dumps({"exit_code": 75, "error": "stopped", "resume_command": "covey resume"})
    )
    assert run_state(run) != "stopped"
    assert "Continue with: covey resume" in explain_run(run).conclusion

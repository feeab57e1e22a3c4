"""Whoever loads a run's model computes as the run did, on any processor, or says that it cannot."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.fakes import rewrite_config

import covey
from covey.cli import main
from covey.cluster.serving.run import service_of
from covey.commands.inference import evaluate_once, model_of
from covey.config.load import ResolvedConfig, load_config
from covey.learner.process import restore_process_settings
from covey.models.kernels.calls import available, follow, rounding_pays
from covey.models.policy import Policy
from covey.models.tiny import build_model, build_tokenizer
from covey.proof import check_run as repeating
from covey.proof.agreement import Agreement
from covey.proof.check import check_config
from covey.proof.check_run import check_run, coarsely_computed
from covey.runs.arithmetic import any_step_rounded
from covey.runs.reader import load_run, read_environment
from covey.system.console import RunConsole
from covey.system.integrity import SEAL, sealed
from covey.training import models
from covey_verify.errors import ConfigError

pytestmark = pytest.mark.skipif(
    not available(torch.bfloat16, torch.device("cpu")), reason="no C compiler on this machine"
)
QUIET = RunConsole(quiet=True)


REWARD = "def uneven(completion):\n    return float(sum(map(ord, completion)) % 3)\n"


@pytest.fixture(scope="module", params=[True, False], ids=["rounded", "float32"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    rewards = folder.parent / "rewards.py"  # a worker imports it, and this file is slow to import
    rewards.write_text(REWARD)
    with restore_process_settings():
        follow(None, rounding=request.param)
        covey.train(
            quiet=True,
            output=str(folder),
            data={"task": "last_digit", "train_size": 16, "test_size": 4},
            rewards=[f"{rewards}:uneven"],
            rollout={"group_size": 4, "prompts_per_step": 2, "max_tokens": 6},
            train={"steps": 2, "save_every": 1, "lr": 1e-3},
            eval={"problems": 2, "samples": 1},
        )
    assert read_environment(folder)["rounds_products"] is request.param
    return folder


def rounds(run: Path) -> bool:
    return bool(read_environment(run)["rounds_products"])


def of_final(run: Path) -> ResolvedConfig:
    return load_config(values={"model": str(run / "final")})


def of_checkpoint(run: Path) -> ResolvedConfig:
    return load_config(values={"model": str(run / "checkpoints" / "step_000001")})


@pytest.mark.parametrize("loader", [load_run, of_final, of_checkpoint])
def test_a_runs_model_computes_as_in_its_run(run: Path, loader) -> None:
    follow(None, rounding=not rounds(run))
    said: list[str] = []
    with model_of(loader(run), said.append) as policy:
        assert policy.rounds is rounds(run)
    assert rounding_pays() is not rounds(run)  # the process is the caller's again
    assert said == []


def test_the_given_precision_overrides_the_recorded_one(run: Path) -> None:
    resolved = load_run(run, values={"precision": "float32"})
    with model_of(resolved, pytest.fail) as policy:
        assert not policy.rounds


def test_a_record_of_another_machine_says_whether_products_are_rounded(run: Path, tmp_path: Path) -> None:
    record = {**read_environment(run), "rounds_products": not rounds(run), "machine": "flags : of another"}
    record.pop(SEAL, None)
    (tmp_path / "final").symlink_to(run / "final")
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    (tmp_path / "env.json").write_text(sealed(record))
    with model_of(load_run(tmp_path, trust=True), pytest.fail) as policy:
        assert policy.rounds is not rounds(run)
    (tmp_path / "env.json").write_text(sealed({**record, "device": "NVIDIA of somebody"}))
    with model_of(load_run(tmp_path, trust=True), pytest.fail) as policy:
        assert not policy.rounds  # as here: a GPU rounds by its weights' dtype


def test_a_machine_that_cannot_round_says_so_in_one_line(run: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("covey.models.forward.passes_known_answers", lambda *_: False)
    evaluate_once(load_run(run), RunConsole())
    lines = [line for line in capsys.readouterr().out.splitlines() if "rounded its products" in line]
    assert len(lines) == rounds(run)
    assert main(["sample", str(run / "final"), "1+1=", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().err.count("rounded its products") == rounds(run)
    assert main(["sample", str(run / "final"), "1+1=", "--max-tokens", "2", "--precision", "float32"]) == 0
    assert "rounded its products" not in capsys.readouterr().err
    assert main(["sample", str(run / "final"), "1+1=", "--max-tokens", "2", "--json"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("faster", [True, False])
def test_an_evaluation_says_that_products_are_rounded_and_why(monkeypatch, capsys, faster: bool) -> None:
    """A run that began where it pays goes on so where it does not."""
    monkeypatch.setattr("covey.models.load.rounding_is_faster", lambda: faster)
    follow(None, rounding=True)
    values = {"data": {"task": "last_digit"}, "rollout": {"max_tokens": 2}, "eval": {"problems": 1}}
    evaluate_once(load_config(values=values), RunConsole())
    why = "which is much faster" if faster else "as in the run so far"
    assert f"matrix products use bfloat16, {why}" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["final", "sync"])
def test_a_server_computes_as_the_run_that_it_serves(run: Path, place: str) -> None:
    follow(None, rounding=not rounds(run))
    (run / "sync").mkdir(exist_ok=True)
    model, weights = (str(run / "final"), None) if place == "final" else ("tiny", run / "sync")
    assert service_of(model, weights, "policy", ()).model.policy.rounds is rounds(run)


def test_the_step_that_is_checked_computes_as_the_run(run: Path, monkeypatch) -> None:
    follow(None, rounding=not rounds(run))
    seen: list[bool] = []

    def watched(*arguments: object) -> Policy:
        policy = load_policy(*arguments)
        seen.append(policy.rounds)
        return policy

    load_policy = models.load_policy
    monkeypatch.setattr(models, "load_policy", watched)
    assert all(claim.holds for claim in check_config(load_run(run), QUIET))
    assert seen == [rounds(run)]


@pytest.mark.parametrize("asked", ["auto", "bfloat16"])
def test_a_correct_run_is_called_so_where_products_cannot_be_rounded(
    run: Path, tmp_path: Path, monkeypatch, asked: str
) -> None:
    shutil.copytree(run, tmp_path / "copy")
    rewrite_config(tmp_path / "copy" / "config.yaml", "precision: auto", f"precision: {asked}")
    monkeypatch.setattr("covey.models.forward.passes_known_answers", lambda *_: False)
    assert [claim for claim in check_run(tmp_path / "copy", 2, QUIET, trust=True) if not claim.holds] == []


@pytest.mark.parametrize(("of_rounding", "right"), [((0.0, 0.002), True), ((0.0, 1e-5), False)])
def test_a_run_may_be_as_far_from_the_shadow_as_rounding_takes_a_twin(
    run: Path, monkeypatch, of_rounding: tuple[float, float], right: bool
) -> None:
    """Rounding grows from step to step, at a rate that is the run's own."""
    none = Agreement(1, logprobs=0.0, advantages=0.0, gradient=0.0, kl_coef=0.0)
    found = [none, replace(none, step=2, logprobs=0.01), replace(none, step=3, logprobs=0.009)]
    twins = [replace(none, logprobs=gap) for gap in (*of_rounding, 0.0)]  # it may be near again by chance

    def replayed(*_: object, twin: bool = False, **__: object) -> list[Agreement]:
        return [replace(a, apart=b if twin else None) for a, b in zip(found, twins, strict=True)]

    monkeypatch.setattr(repeating, "replay", replayed)
    claim = check_run(run, 3, QUIET)[0]
    assert claim.holds is right
    assert "1.0e-02 nats in steps 1 to 3; rounding alone comes to" in claim.evidence


@pytest.mark.parametrize("changed", ["lr: 0.001", "temperature: 1.0"])
def test_a_record_that_does_not_follow_from_its_config_is_found(
    run: Path, tmp_path: Path, changed: str
) -> None:
    shutil.copytree(run, tmp_path / "copy")
    name, _, value = changed.partition(": ")
    rewrite_config(tmp_path / "copy" / "config.yaml", changed, f"{name}: {float(value) * 1.5}")
    assert not all(claim.holds for claim in check_run(tmp_path / "copy", 2, QUIET, trust=True))


def test_a_run_that_was_rounded_in_a_part_is_not_called_exact(run: Path, tmp_path: Path, monkeypatch) -> None:
    """Its first steps are rounded for ever, also after it went on where that cannot be."""
    shutil.copytree(run, tmp_path / "copy")
    for processes in range(2):
        monkeypatch.setattr("covey.models.forward.passes_known_answers", lambda *_: False)
        covey.resume(tmp_path / "copy", train={"steps": 3 + processes}, quiet=True)
        assert not rounds(tmp_path / "copy")
        assert coarsely_computed(tmp_path / "copy") is rounds(run)
        assert [claim for claim in check_run(tmp_path / "copy", 3, QUIET) if not claim.holds] == []


def test_weights_of_half_the_bits_are_not_exact(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["1+1="])
    policy = Policy(build_model(tokenizer, 0, hidden=32, layers=1), tokenizer)
    assert not any_step_rounded(tmp_path, policy, resumes=False)
    policy.model.bfloat16()
    assert any_step_rounded(tmp_path, policy, resumes=False)


def test_without_a_record_nothing_is_compared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="whether numbers were rounded"):
        coarsely_computed(tmp_path)

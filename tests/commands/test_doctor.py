"""`covey doctor`: each part says what it found and what to do next, and nothing it meets ends it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from covey.cli.entry_point import main
from covey.commands import doctor
from covey.models.kernels import build
from covey_verify.errors import SandboxUnavailable
from covey_verify.sandbox import choice


def test_every_part_is_looked_at_and_json_says_the_same(capsys) -> None:
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    parts = ["versions", "device", "kernels", "threads", "memory", "disk", "sandbox"]
    assert [d["part"] for d in found] == parts
    assert code == int(any(d["status"] == "FAIL" for d in found))
    assert all(d["next_step"] for d in found if d["status"] != "OK")


def test_a_part_that_breaks_is_a_finding(monkeypatch) -> None:
    def memory() -> None:
        raise ZeroDivisionError("nothing to divide")

    monkeypatch.setattr(doctor, "memory", memory)
    found = {d.part: d for d in doctor.examine()}
    broken = next(d for d in found.values() if "ZeroDivisionError" in d.detail)
    assert broken.status == "FAIL"
    assert len(found) == 7


def test_more_threads_than_processors(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    monkeypatch.setattr(doctor, "available_threads", lambda: 999)
    assert doctor.threads().status == "WARN"
    assert "unset OMP_NUM_THREADS" in doctor.threads().next_step


@pytest.mark.parametrize("value", ["many", "65536", "9" * 20])
def test_a_number_of_threads_that_is_not_used_is_said(monkeypatch, value: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    found = doctor.threads()
    assert found.status == "WARN"
    assert f"OMP_NUM_THREADS={value} is not a number from 1 to 1024, so it is ignored" in found.detail
    assert "unset OMP_NUM_THREADS" in found.next_step


def test_a_library_that_fails_its_trial_is_said(monkeypatch) -> None:
    import warnings

    def fails() -> None:
        warnings.warn(f"the compiled operations cannot be used (sums); {build.COST}", stacklevel=1)

    monkeypatch.delenv(build.OFF, raising=False)
    monkeypatch.setattr(build, "tested_kernels", fails)
    found = doctor.kernels()
    assert (found.status, "three times as long" in found.detail) == ("WARN", True)


def test_without_compiler_the_next_step_is_to_install_one(monkeypatch) -> None:
    monkeypatch.delenv(build.OFF, raising=False)
    monkeypatch.setattr(build, "tested_kernels", lambda: None)
    monkeypatch.setattr(build, "compilers", list)
    assert doctor.kernels().detail == f"no C compiler; {build.COST}"
    assert "apt-get install gcc" in doctor.kernels().next_step
    monkeypatch.setattr(build, "compilers", lambda: ["cc", "clang"])
    assert doctor.kernels().detail.startswith("no C compiler that works (cc, clang failed)")
    assert "choose another compiler, such as CC=" in doctor.kernels().next_step


def test_with_a_gpu_kernels_are_for_runs_on_the_cpu(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build, "tested_kernels", lambda: None)
    found = doctor.kernels()
    assert found.status == "OK"
    assert found.detail.startswith("only runs with `device: cpu` use them, others take the GPU. ")
    assert found.next_step


def test_no_sandbox_is_a_warning(monkeypatch) -> None:
    def none() -> None:
        raise SandboxUnavailable("bwrap: not here")

    monkeypatch.setattr(choice, "choose", none)
    assert doctor.sandbox().status == "WARN"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.chdir(tmp_path)
    assert doctor.disk().status == "FAIL"


@pytest.mark.parametrize(("forward", "said"), [(771.0, True), (120.0, False)])
def test_bfloat16_is_named_where_its_products_gain_much(monkeypatch, forward: float, said: bool) -> None:
    found = build.tested_kernels()
    assert found is not None
    rates = {
        "float32": {"decode": (97.0, 72.0), "forward": (100.0, 110.0)},
        "mixed": {"decode": (557.0, 71.0), "forward": (forward, 109.0)},
    }
    trial = replace(found.trial, rates=rates)
    monkeypatch.setattr(build, "tested_kernels", lambda: found._replace(trial=trial))
    # The kind that gains least: decoding 557 / 97 = 5.7, or the forward pass 120 / 110 = 1.1.
    assert ("they take 1/5.7 of the time" in doctor.kernels().detail) is said

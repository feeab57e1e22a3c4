"""Whose products are taken, and what becomes of a library that fails its trial."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from covey.config.load import load_config
from covey.models.kernels import build
from covey.models.kernels.calls import DTYPES, available, follow, name_of_numbers, products
from covey.models.kernels.choice import NUMBERS, PRODUCT_KINDS, Trial, trial_of
from covey.models.packing import pack
from covey.models.policy import Policy
from covey.runs.arithmetic import follow_run
from covey.runs.compatibility import environment
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from covey.system.integrity import sealed
from tests.conftest import policy_of, random_prompts

pytestmark = pytest.mark.skipif(
    not available(torch.float32, torch.device("cpu")), reason="no C compiler on this machine"
)


@pytest.fixture(autouse=True)
def measured() -> Iterator[None]:
    yield
    follow(None)


def outcomes(policy: Policy) -> tuple[np.ndarray, list[torch.Tensor]]:
    policy.model.zero_grad()
    prompt = random_prompts(70)[0]
    (drawn,) = LocalSampler(policy).sample([Request(prompt, [1])], SamplingParams(5))
    tokens = drawn.completion.tokens
    logprobs = policy.token_outputs(pack([prompt], [[tokens]]), 1.0).logprobs
    logprobs.sum().backward()
    assert np.allclose(logprobs.detach().numpy(), drawn.completion.logprobs, atol=1e-5)
    return drawn.completion.logprobs, [p.grad.clone() for p in policy.parameters]


@pytest.mark.parametrize("kind", PRODUCT_KINDS)
def test_torchs_product_in_any_place_gives_the_same_values(kind: str) -> None:
    follow({})
    template = policy_of("qwen3")
    logprobs, gradients = outcomes(template)
    follow({"float32": [kind]})
    policy = Policy(template.model, template.tokenizer)
    assert policy.bit_exact == (kind in ("inputs", "weights"))
    found, slopes = outcomes(policy)
    assert np.allclose(found, logprobs, atol=1e-5)
    for ours, theirs in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4 * float(ours.abs().max()), rtol=1e-4)


def test_torch_is_taken_where_it_is_much_faster() -> None:
    rates = {"float32": {"decode": (80.0, 60.0), "weights": (4.0, 85.0), "inputs": (80.0, 90.0)}}
    assert Trial(rates=rates).choice() == {"float32": ["weights"]}


def test_this_library_was_tried_in_a_child_and_its_rates_are_kept() -> None:
    found = build.tested_kernels()
    assert found is not None
    kept = json.loads(found.path.with_suffix(".json").read_text())
    assert set(kept["rates"]) == {"float32", "bfloat16", "mixed"}
    assert all(min(kept["rates"]["float32"][kind]) > 0 for kind in PRODUCT_KINDS)


def test_a_library_that_fails_in_the_child_is_not_used(tmp_path: Path) -> None:
    trial = build._trial_result(b"\x7fELF nonsense", tmp_path / "kernels-x.so")
    assert not trial.works
    assert trial.problem.startswith("they fail on this processor: ")


def test_a_users_file_with_the_name_of_a_module_is_not_the_childs(tmp_path: Path, monkeypatch) -> None:
    """`covey train` does not look for modules in the working folder, so its child must not either."""
    (tmp_path / "random.py").write_text("raise SystemExit('an experiment of my own')")
    monkeypatch.chdir(tmp_path)
    trial = build._trial_result(b"\x7fELF nonsense", tmp_path / "kernels-x.so")
    assert "experiment" not in trial.problem
    assert "OSError" in trial.problem


WHOLE = {
    "rates": {n: {kind: [2.0, 1.0] for kind in PRODUCT_KINDS} for n in NUMBERS},
    "differs": dict.fromkeys(NUMBERS, ""),
}


def with_rate(rate: object) -> dict[str, object]:
    return {**WHOLE, "rates": {**WHOLE["rates"], "mixed": {**WHOLE["rates"]["mixed"], "decode": rate}}}


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prints what the file `says` holds instead of trying a library; a line in `asked` each time."""
    (tmp_path / "python").write_text(f"#!/bin/sh\necho >> {tmp_path}/asked; cat {tmp_path}/says\n")
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "says").write_text(json.dumps(WHOLE))
    monkeypatch.setattr(build.sys, "executable", str(tmp_path / "python"))
    return tmp_path


def trials_made(child: Path) -> int:
    return len((child / "asked").read_text().splitlines())


DAMAGED = {
    "nothing in it": "{}",
    "no seal": json.dumps({"problem": ""}),
    "whole without a seal": json.dumps(WHOLE),
    "another rate than was sealed": sealed(WHOLE).replace("2.0", "9.0", 1),
    "a sealed nothing": sealed({}),
    "sealed without differences": sealed({"rates": WHOLE["rates"]}),
    "a rate of zero": sealed(with_rate([0.0, 1.0])),
    "a rate alone": sealed(with_rate([2.0])),
    "rates that are none": sealed({**WHOLE, "rates": dict.fromkeys(NUMBERS, 1)}),
    "a list": "[]",
    "brackets": "[" * 100_000,
    "cut": sealed(WHOLE)[:50],
    "empty": "",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_trial_that_is_not_as_it_was_written_is_made_anew_and_said(child: Path, capfd, name: str) -> None:
    kept = child / "kernels-x.json"
    kept.write_text(DAMAGED[name])
    for _ in range(2):
        assert build._trial_result(b"", child / "kernels-x.so") == trial_of(WHOLE)
    assert trials_made(child) == 1
    assert capfd.readouterr().err == f"note: {kept} is damaged or not ours alone; measured anew\n"


@pytest.mark.parametrize("instead", [Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_no_trial(child: Path, instead: Callable[[Path], None]) -> None:
    instead(child / "kernels-x.json")
    assert build._trial_result(b"", child / "kernels-x.so") == trial_of(WHOLE)


def test_a_trial_is_made_once_and_in_silence(child: Path, capfd) -> None:
    for _ in range(2):
        assert build._trial_result(b"", child / "kernels-x.so") == trial_of(WHOLE)
    assert (trials_made(child), capfd.readouterr().err) == (1, "")


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files lie in memory on Linux only")
def test_a_library_is_tried_and_loaded_from_no_disk(child: Path, tmp_path: Path) -> None:
    """Where /tmp and the cache are mounted noexec, nothing on them can be loaded."""
    content, path = build._find_or_compile("cc")
    lines = (
        f'readlink "$COVEY_KERNELS" > {child}/place; cat "$COVEY_KERNELS" > {child}/tried; cat {child}/says'
    )
    (child / "python").write_text(f"#!/bin/sh\n{lines}\n")
    assert build._trial_result(content, child / "kernels-x.so").works
    assert (child / "place").read_text().startswith("/memfd:")
    assert (child / "tried").read_bytes() == content
    assert str(path.parent) not in build._load_library(content, path)._name


def test_one_that_never_ends_is_a_problem_that_does_not_stay(child: Path, monkeypatch) -> None:
    (child / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(build, "TRIAL_SECONDS", 0.2)
    assert "no result within" in build._trial_result(b"", child / "kernels-x.so").problem
    assert not (child / "kernels-x.json").exists()


def test_half_a_trial_is_a_problem_that_does_not_stay(child: Path) -> None:
    (child / "says").write_text(json.dumps({"rates": WHOLE["rates"]}))
    assert not build._trial_result(b"", child / "kernels-x.so").works
    assert not (child / "kernels-x.json").exists()


def test_a_trial_is_asked_for_all_numbers_that_there_are() -> None:
    assert set(NUMBERS) == {name_of_numbers(numbers) for numbers in DTYPES}


@pytest.mark.parametrize("here", [True, False])
def test_a_run_continues_with_the_choice_it_began_with(tmp_path: Path, here: bool) -> None:
    machine = build.processor() if here else "flags : of another"
    record = {"machine": machine, "products": {"float32": ["inputs"]}}
    (tmp_path / "env.json").write_text(sealed(record))
    measured = products()
    follow_run(tmp_path, torch.device("cpu"))
    assert products() == ({"float32": ["inputs"]} if here else measured)


def test_nothing_is_compiled_or_measured_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.models.kernels.calls.tested_kernels", lambda: pytest.fail("compiled"))
    monkeypatch.setattr("covey.runs.compatibility.tested_kernels", lambda: pytest.fail("compiled"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA of a test")
    monkeypatch.setattr("covey.runs.compatibility.pick_device", lambda _: torch.device("cuda"))
    follow_run(tmp_path, torch.device("cuda"))
    found = environment(load_config(values={"data": {"task": "last_digit"}}))
    assert found["device"] == "NVIDIA of a test"
    assert (found["kernels"], found["library"], found["products"]) == ("torch", None, {})


@pytest.mark.parametrize(("how", "kept"), [("TERM", False), ("KILL", False), ("ILL", True), ("SEGV", True)])
def test_only_a_fault_of_the_library_is_a_verdict_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, kept: bool
) -> None:
    """Memory that ran out, or a signal, says nothing of the processor."""
    (tmp_path / "python").write_text(f"#!/bin/sh\nkill -{how} $$\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(build.sys, "executable", str(tmp_path / "python"))
    assert f"killed by SIG{how}" in build._trial_result(b"", tmp_path / "kernels-x.so").problem
    assert (tmp_path / "kernels-x.json").exists() == kept

"""Whose products are taken, and what becomes of a library that fails its trial."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from covey.integrity import sealed
from covey.kernels import build
from covey.kernels.calls import available, follow, products
from covey.kernels.choice import PRODUCT_KINDS, Trial
from covey.models.packing import pack
from covey.models.policy import Policy
from covey.runs.arithmetic import follow_run
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
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
    scores = policy.score(pack([prompt], [[tokens]]), 1.0).logprobs
    scores.sum().backward()
    assert np.allclose(scores.detach().numpy(), drawn.completion.logprobs, atol=1e-5)
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
    trial = build._tried(b"\x7fELF nonsense", tmp_path / "kernels-x.so")
    assert not trial.works
    assert trial.problem.startswith("they fail on this processor: ")


@pytest.mark.parametrize("here", [True, False])
def test_a_run_goes_on_with_the_choice_it_began_with(tmp_path: Path, here: bool) -> None:
    machine = build.processor() if here else "flags : of another"
    record = {"machine": machine, "products": {"float32": ["inputs"]}}
    (tmp_path / "env.json").write_text(sealed(record))
    measured = products()
    follow_run(tmp_path)
    assert products() == ({"float32": ["inputs"]} if here else measured)


@pytest.mark.parametrize(("how", "kept"), [("TERM", False), ("KILL", False), ("ILL", True), ("SEGV", True)])
def test_only_a_fault_of_the_library_is_a_verdict_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, kept: bool
) -> None:
    """Memory that ran out, or a signal, says nothing of the processor."""
    (tmp_path / "python").write_text(f"#!/bin/sh\nkill -{how} $$\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(build.sys, "executable", str(tmp_path / "python"))
    assert "ended with -" in build._tried(b"", tmp_path / "kernels-x.so").problem
    assert (tmp_path / "kernels-x.json").exists() == kept

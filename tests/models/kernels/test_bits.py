"""The trial of a library notices when sampling and training differ in their last bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from covey.models.kernels import bits, build, calls
from covey.models.kernels.calls import available, call
from covey.models.kernels.choice import Trial
from tests.conftest import policy_of

pytestmark = pytest.mark.skipif(
    not available(torch.float32, torch.device("cpu")), reason="no C compiler on this machine"
)
OUTPUT = {"product": 3, "decode_attend": -8, "draw": 4}
"""Where an operation writes what is compared, among its arguments."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_this_library_has_the_same_bits(dtype: torch.dtype) -> None:
    assert bits.first_difference(dtype) == ""


@pytest.mark.parametrize("name", OUTPUT)
def test_one_bit_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def one_bit_off(operation: str, *arguments, dtype: torch.dtype) -> None:
        call(operation, *arguments, dtype=dtype)
        if operation == name:
            numbers = arguments[OUTPUT[name]].view(-1).numpy()
            numbers[-1] = np.nextafter(numbers[-1], np.float32(9))

    monkeypatch.setattr(bits, "call", one_bit_off)
    found = bits.first_difference(torch.float32)
    assert found.startswith({"product": "a product", "decode_attend": "attention", "draw": "log-probs"}[name])


def test_a_policy_whose_library_differs_does_not_claim_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = build.tested_kernels()
    assert found is not None
    assert policy_of("qwen3").bit_exact
    trial = Trial(rates=found.trial.rates, differs={"float32": "attention", "bfloat16": ""})
    monkeypatch.setattr(calls, "tested_kernels", lambda: found._replace(trial=trial))
    assert not policy_of("qwen3").bit_exact

"""A trainer that shares nothing with covey repeats its runs: the same log-probs, gradients and weights."""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path

import pytest

from covey.proof.check_run import TWIN_FACTOR
from tests.proof.cases import Case, Model, covering_cases, every_case, repeat
from tests.training.runs import metrics_of


def agree(case: Case, output: Path, model: Model, twin: bool = False) -> None:
    steps = repeat(case, output, model, twin)
    assert len(steps) == 5
    # bfloat16 keeps 8 bits of each activation, so there only the course of training can agree.
    exact = case.dtype == "float32"
    limits = {
        "logprobs": 1e-4 if exact else 0.2,
        "advantages": 1e-4 if exact else 0.2,
        "gradient": 1e-4 if exact else 0.1,
        "kl_coef": 1e-6,
        # The largest of all: Adam moves a weight whose gradient is mere rounding by a share of the rate.
        "weights": case.lr * (0.5 if exact else 20),
        "course": 3e-3 if exact else 0.3,
    }
    assert steps[-1].course is not None
    assert any((m["optimizer/grad_norm"] or 0) > 0 for m in metrics_of(output))
    for name, limit in limits.items():
        of_rounding = accumulate((getattr(step.apart, name, 0.0) for step in steps), max)
        for step, apart in zip(steps, of_rounding, strict=True):
            assert (getattr(step, name) or 0.0) < max(limit, TWIN_FACTOR * apart), (name, step)


@pytest.mark.parametrize("case", covering_cases())
def test_the_shadow_reaches_the_same_weights(case: Case, tmp_path: Path, model: Model) -> None:
    agree(case, tmp_path / "run", model)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(every_case())[::7])
def test_the_shadow_reaches_the_same_weights_under_more_settings(
    case: Case, tmp_path: Path, model: Model
) -> None:
    """Some of them are at the edge of a clip, or learn so little that rounding is a part of it."""
    agree(case, tmp_path / "run", model, twin=True)


def test_the_shadow_imports_nothing_of_covey() -> None:
    proof = Path(__file__).parents[2] / "src" / "covey" / "proof"
    for name in (
        "formulas.py",
        "losses.py",
        "decoder.py",
        "descent.py",
        "shadow.py",
        "shadow_given.py",
        "streams.py",
    ):
        imports = re.findall(r"^\s*(?:from|import) +(covey\S*)", (proof / name).read_text(), re.MULTILINE)
        assert set(imports) <= {
            "covey.proof",
            "covey.proof.formulas",
            "covey.proof.decoder",
            "covey.proof.descent",
            "covey.proof.losses",
            "covey.proof.shadow",
            "covey.proof.streams",
        }

"""A trainer that shares nothing with covey repeats its runs: the same log-probs, gradients and weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.proof.cases import Case, Model, covering_cases, every_case, repeat
from tests.train.test_runs import metrics_of


def agree(case: Case, output: Path, model: Model) -> None:
    steps = repeat(case, output, model)
    last = steps[-1]
    assert len(steps) == 5
    # bfloat16 keeps 8 bits of each activation, so there only the course of training can agree.
    exact = case.dtype == "float32"
    for step in steps:
        assert step.logprobs < (1e-4 if exact else 0.2)
        assert step.advantages < (1e-4 if exact else 0.2)
        assert step.gradient < (1e-4 if exact else 0.1)
        assert step.kl_coef < 1e-6
    assert any(m["optimizer/grad_norm"] > 0 for m in metrics_of(output))
    assert last.weights is not None
    # The largest of all: Adam moves a weight whose gradient is mere rounding by a share of the rate.
    assert last.weights < case.lr * (0.5 if exact else 20)
    assert last.course is not None
    assert last.course < (3e-3 if exact else 0.3)


@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_the_shadow_reaches_the_same_weights(case: Case, tmp_path: Path, model: Model) -> None:
    agree(case, tmp_path / "run", model)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(every_case())[::7], ids=str)
def test_the_shadow_reaches_the_same_weights_under_more_settings(
    case: Case, tmp_path: Path, model: Model
) -> None:
    agree(case, tmp_path / "run", model)


def test_the_shadow_imports_nothing_of_covey() -> None:
    proof = Path(__file__).parents[2] / "src" / "covey" / "proof"
    for name in ("formulas.py", "losses.py", "decoder.py", "shadow.py"):
        imports = re.findall(r"^\s*(?:from|import) +(covey\S*)", (proof / name).read_text(), re.MULTILINE)
        assert set(imports) <= {
            "covey.proof",
            "covey.proof.formulas",
            "covey.proof.decoder",
        }

"""Logits of bfloat16 weights are not rounded to bfloat16, with the gradient of the plain product."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from covey.models import logits
from covey.models.logits import logits_of
from covey.models.policy import Policy
from tests.conftest import CONFIGS, full_tokenizer, sharpened


def wide_head(rows: int = 7) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(64, 50, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.mul_(30)  # logits of about 20, which bfloat16 rounds to eighths
    return head, torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("shape", [(7, 64), (2, 3, 64), (1, 64)])
def test_products_of_bfloat16_keep_their_float32_sums(shape: tuple[int, ...]) -> None:
    head, _ = wide_head()
    hidden = torch.randn(shape, dtype=torch.bfloat16)
    logits = logits_of(head, hidden).detach()
    exact = hidden.double() @ head.weight.detach().double().t()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-6, atol=1e-4)
    rounded = head(hidden).detach().double()
    assert float((rounded - exact).abs().max()) > 0.01, "rounding shall matter here"


def test_blocks_of_the_vocabulary_give_the_values_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden = wide_head()
    whole = logits_of(head, hidden)
    monkeypatch.setattr(logits, "BLOCK_NUMBERS", 64 * 7)  # 7 ids; 50 are no multiple
    torch.testing.assert_close(logits_of(head, hidden), whole, rtol=1e-6, atol=1e-4)


def test_gradients_are_those_of_the_plain_product() -> None:
    head, hidden = wide_head()
    weights = torch.randn(7, 50)
    for of in (hidden, head.weight):
        wide, plain = (
            torch.autograd.grad((weights * f(hidden).float()).sum(), of)[0]
            for f in (lambda h: logits_of(head, h), head)
        )
        assert wide.dtype == torch.bfloat16
        torch.testing.assert_close(wide, plain)


@pytest.mark.parametrize("change", ["float32", "bias", "hook", "class"])
def test_a_layer_that_does_more_is_called_itself(change: str) -> None:
    head, hidden = wide_head()
    if change == "float32":
        head, hidden = head.float(), hidden.float()
    elif change == "bias":
        head.bias = nn.Parameter(torch.ones(50, dtype=torch.bfloat16))
    elif change == "hook":
        head.register_forward_hook(lambda _module, _inputs, output: output * 2)
    else:
        head.__class__ = type("Halved", (nn.Linear,), {"forward": lambda self, x: x @ self.weight.t() / 2})
    assert torch.equal(logits_of(head, hidden), head(hidden))


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma2"])
def test_policies_in_bfloat16_have_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way a model is computed: its head is still recognized although Hugging Face rounds."""
    monkeypatch.setattr("covey.models.ops_choice.available", lambda *_: False)
    policy = Policy(sharpened(CONFIGS[name]).to(torch.bfloat16), full_tokenizer())
    assert policy.plain_head
    hidden = torch.randn(3, 32, dtype=torch.bfloat16)
    assert policy.head(hidden).dtype == torch.float32

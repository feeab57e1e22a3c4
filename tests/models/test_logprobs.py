"""Scoring tokens in chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from covey.models import logprobs
from covey.models.compiled import compiled_token_outputs
from covey.models.kernels.calls import available
from covey.models.linear import FusedLinear
from covey.models.logprobs import token_outputs
from covey.models.ops import soft_cap
from covey.types import SamplingMask


def small_head(vocabulary: int = 50, width: int = 8) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False)
    return head, torch.randn(33, width, requires_grad=True), torch.randint(vocabulary, (33,))


def test_values_are_those_of_the_definition() -> None:
    head, hidden, targets = small_head()
    outputs = token_outputs(hidden, head, targets, temperature=0.7)
    logprobs_all = (head(hidden) / 0.7).log_softmax(-1)
    probs = logprobs_all.exp()
    torch.testing.assert_close(outputs.logprobs, logprobs_all[torch.arange(33), targets])
    torch.testing.assert_close(outputs.entropy, -(probs * logprobs_all).sum(-1))
    torch.testing.assert_close(outputs.collision, (probs**2).sum(-1))
    assert not outputs.full_kl.any()


def test_chunks_change_neither_values_nor_gradients(monkeypatch) -> None:
    head, hidden, targets = small_head()
    reference = (torch.randn(33, 8), nn.Linear(8, 50, bias=False))

    def gradients(chunk: int) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk)
        outputs = token_outputs(hidden, head, targets, 1.0, reference)
        total = (outputs.logprobs * 2 + outputs.entropy - outputs.collision + 3 * outputs.full_kl).sum()
        return (total.detach(), *torch.autograd.grad(total, (hidden, head.weight)))

    for whole, chunked in zip(gradients(1 << 24), gradients(50 * 4), strict=True):
        torch.testing.assert_close(whole, chunked, atol=1e-5, rtol=1e-5)


def test_full_kl_is_zero_for_the_same_model_and_positive_for_another() -> None:
    head, hidden, targets = small_head()
    head.requires_grad_(False)
    hidden = hidden.detach()
    same = token_outputs(hidden, head, targets, 1.0, (hidden, head)).full_kl
    other = token_outputs(hidden, head, targets, 1.0, (torch.randn(33, 8), head)).full_kl
    assert float(same.abs().max()) < 1e-6
    assert bool((other > 0).all())


def test_full_kl_is_the_reverse_kl_of_the_definition() -> None:
    head, hidden, targets = small_head()
    torch.manual_seed(1)
    elsewhere = torch.randn(33, 8)
    got = token_outputs(hidden, head, targets, 0.7, (elsewhere, head)).full_kl
    policy, reference = ((head(h) / 0.7).log_softmax(-1) for h in (hidden, elsewhere))
    torch.testing.assert_close(got, (policy.exp() * (policy - reference)).sum(-1))


def kept_sets(targets: torch.Tensor, vocabulary: int) -> SamplingMask:
    """A target alone, all tokens, and sets between; every target is in its own."""
    rng = np.random.default_rng(0)
    sizes = [1, vocabulary, *rng.integers(1, vocabulary, len(targets))]
    sets = [{int(t), *rng.permutation(vocabulary)[: n - 1]} for t, n in zip(targets, sizes, strict=False)]
    return SamplingMask.of([np.array(sorted(s)) for s in sets])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("chunk", [50, 50 * 4, 1 << 24])
def test_under_a_sampling_mask_all_is_of_the_softmax_over_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, cap: float | None, chunk: int
) -> None:
    """Against dense float64 logits with -inf, values and gradients."""
    if compiled and not available(torch.float32, torch.device("cpu")):
        pytest.skip("no C compiler on this machine")
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk)
    monkeypatch.setattr(logprobs, "CACHED_LOGITS", chunk)
    monkeypatch.setattr(logprobs, "MIN_ROWS", 1)
    head, hidden, targets = small_head(width=16)
    mask = kept_sets(targets, 50)
    with torch.no_grad():
        head.weight.mul_(8)
    other_head, other_hidden = nn.Linear(16, 50, bias=False), torch.randn(33, 16)

    def limited(logits: torch.Tensor) -> torch.Tensor:
        return logits if cap is None else soft_cap(logits, cap)

    if compiled:
        found = compiled_token_outputs(hidden, FusedLinear(head), targets, 0.7, mask, cap, None)
    else:
        other = (other_hidden, lambda h: limited(other_head(h)))
        found = token_outputs(hidden, lambda h: limited(head(h)), targets, 0.7, other, mask)
    weights = torch.linspace(-1, 1, 33)
    total = (weights * (2 * found.logprobs + found.entropy + 3 * found.full_kl)).sum()
    total.backward()

    wide, weight = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    dropped = torch.ones(33, 50, dtype=torch.bool)
    starts = [0, *mask.ends[:-1]]
    for row, (start, end) in enumerate(zip(starts, mask.ends, strict=True)):
        dropped[row, torch.from_numpy(mask.ids[start:end]).long()] = False
    logp = (limited(wide @ weight.t()) / 0.7).masked_fill(dropped, -torch.inf).log_softmax(-1)
    ref = limited(other_hidden.double() @ other_head.weight.detach().double().t()) / 0.7
    ref = ref.masked_fill(dropped, -torch.inf)
    p, logp_kept = logp.exp(), logp.masked_fill(dropped, 0.0)
    chosen = logp.gather(1, targets[:, None])[:, 0]
    entropy = -(p * logp_kept).sum(-1)
    full_kl = (p * (logp_kept - ref.log_softmax(-1).masked_fill(dropped, 0.0))).sum(-1) * (not compiled)
    expected = (weights.double() * (2 * chosen + entropy + 3 * full_kl)).sum()
    expected.backward()
    assert wide.grad is not None and weight.grad is not None and hidden.grad is not None
    close = {"check_dtype": False, "rtol": 1e-5, "atol": 2e-5}
    torch.testing.assert_close(found.logprobs, chosen, **close)
    torch.testing.assert_close(found.entropy, entropy, **close)
    torch.testing.assert_close(found.collision, p.square().sum(-1), **close)
    torch.testing.assert_close(found.full_kl, full_kl, **close)
    torch.testing.assert_close(hidden.grad, wide.grad, **close)
    torch.testing.assert_close(head.weight.grad, weight.grad, **close)
    assert found.logprobs[0] == found.entropy[0] == 0  # the first token could only be itself

"""Scoring tokens in chunks."""

from __future__ import annotations

import torch
from torch import nn

from covey.models import logprobs
from covey.models.logprobs import score_tokens


def small_head(vocabulary: int = 50, width: int = 8) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False)
    return head, torch.randn(33, width, requires_grad=True), torch.randint(vocabulary, (33,))


def test_values_are_those_of_the_definition() -> None:
    head, hidden, targets = small_head()
    scores = score_tokens(hidden, head, targets, temperature=0.7)
    logprobs_all = (head(hidden) / 0.7).log_softmax(-1)
    probs = logprobs_all.exp()
    torch.testing.assert_close(scores.logprobs, logprobs_all[torch.arange(33), targets])
    torch.testing.assert_close(scores.entropy, -(probs * logprobs_all).sum(-1))
    torch.testing.assert_close(scores.collision, (probs**2).sum(-1))
    assert not scores.full_kl.any()


def test_chunks_change_neither_values_nor_gradients(monkeypatch) -> None:
    head, hidden, targets = small_head()
    reference = (torch.randn(33, 8), nn.Linear(8, 50, bias=False))

    def gradients(chunk: int) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk)
        scores = score_tokens(hidden, head, targets, 1.0, reference)
        total = (scores.logprobs * 2 + scores.entropy - scores.collision + 3 * scores.full_kl).sum()
        return (total.detach(), *torch.autograd.grad(total, (hidden, head.weight)))

    for whole, chunked in zip(gradients(1 << 24), gradients(50 * 4), strict=True):
        torch.testing.assert_close(whole, chunked, atol=1e-5, rtol=1e-5)


def test_full_kl_is_zero_for_the_same_model_and_positive_for_another() -> None:
    head, hidden, targets = small_head()
    head.requires_grad_(False)
    hidden = hidden.detach()
    same = score_tokens(hidden, head, targets, 1.0, (hidden, head)).full_kl
    other = score_tokens(hidden, head, targets, 1.0, (torch.randn(33, 8), head)).full_kl
    assert float(same.abs().max()) < 1e-6
    assert bool((other > 0).all())


def test_full_kl_is_the_reverse_kl_of_the_definition() -> None:
    head, hidden, targets = small_head()
    torch.manual_seed(1)
    elsewhere = torch.randn(33, 8)
    got = score_tokens(hidden, head, targets, 0.7, (elsewhere, head)).full_kl
    policy, reference = ((head(h) / 0.7).log_softmax(-1) for h in (hidden, elsewhere))
    torch.testing.assert_close(got, (policy.exp() * (policy - reference)).sum(-1))

"""Drawing a token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.rng import key, uniforms, uniforms_of
from covey.sampling.base import SamplingParams
from covey.sampling.draw import draw, kept_tokens


def test_inverse_cdf_by_hand() -> None:
    # Probabilities .5, .3, .2: cumulative .5, .8, 1.
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(5, 3)
    tokens, logprobs, _ = draw(logits, torch.tensor([0.0, 0.49, 0.51, 0.79, 0.9999]), SamplingParams())
    assert tokens.tolist() == [0, 0, 1, 1, 2]
    np.testing.assert_allclose(logprobs.exp(), [0.5, 0.5, 0.3, 0.3, 0.2], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 40, 3000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary(
    dtype: torch.dtype, size: int, temperature: float
) -> None:
    rows = torch.randn(6, size)
    rows[0], rows[1, 2], rows[2], rows[3, 3] = torch.nan, torch.nan, torch.inf, torch.inf
    rows[4], rows[5, -1] = -torch.inf, torch.nan
    for uniform in (0.0, 0.5, 0.999999):
        uniforms_ = torch.full((6,), uniform)
        tokens, *_ = draw(rows.to(dtype), uniforms_, SamplingParams(temperature=temperature))
        assert all(0 <= token < size for token in tokens.tolist())


def test_truncation_renormalises_the_log_prob() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # top-k 2 keeps .4 and .3; top-p .65 keeps the same: .4 alone is not enough.
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.65)):
        token, logprob, _ = draw(logits, torch.tensor([0.99]), params)
        assert token.item() == 1
        np.testing.assert_allclose(logprob.exp(), 0.3 / 0.7, rtol=1e-6)


def test_top_p_keeps_the_token_that_crosses_the_bound_and_never_none() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log()
    kept = lambda p: kept_tokens(logits, SamplingParams(top_p=p)).tolist()[0]
    assert kept(0.5) == [True, False, False]
    assert kept(0.7) == [True, True, False]
    assert kept(1e-9) == [True, False, False]


@pytest.mark.parametrize("size", [3, 50, 3000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 7])
def test_the_nucleus_is_that_of_a_full_sort_in_any_company(size: int, top_p: float, top_k: int) -> None:
    torch.manual_seed(size)
    logits = torch.randn(9, size) * torch.tensor([[0.0], [0.1], [0.5], [1], [2], [3], [5], [9], [30]])
    params = SamplingParams(top_p=top_p, top_k=top_k)
    together = kept_tokens(logits, params)
    for row, found in zip(logits, together, strict=True):
        assert torch.equal(kept_tokens(row[None], params)[0], found)
        fit = row.topk(min(top_k, size)).indices if top_k else torch.arange(size)
        wide = torch.full((size,), -torch.inf, dtype=torch.float64)
        wide[fit] = row.double()[fit]
        ordered, order = wide.softmax(-1).sort(descending=True)
        expected = order[: int((ordered.cumsum(-1) - ordered < top_p).sum())]
        if row.any():  # equal tokens are all kept
            assert set(found.nonzero()[:, 0].tolist()) == set(expected.tolist())
        else:
            assert found.all()


@given(st.integers(0, 2**63), st.floats(0.05, 30.0))
@settings(max_examples=60, deadline=None)
def test_a_token_without_probability_is_never_drawn(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, scale, (8, 40)).astype(np.float32))
    logits[:, rng.integers(0, 40, 20)] = -torch.inf
    highest = torch.full((8,), float(np.float32(1) - np.float32(2**-23)))
    for uniform in (torch.zeros(8), highest):
        tokens, logprobs, _ = draw(logits, uniform, SamplingParams())
        assert bool((tokens < 40).all())
        assert bool(torch.isfinite(logprobs).all())


def test_uniforms_are_keyed_and_in_range() -> None:
    stream = uniforms(key("a", 1), 100_000)
    assert stream.min() >= 0
    assert stream.max() < 1
    assert abs(stream.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(stream[:-1], stream[1:])[0, 1]) < 0.01
    assert not np.array_equal(uniforms(key("a", 2), 8), stream[:8])
    np.testing.assert_array_equal(uniforms(key("a", 1), 10, start=50), stream[50:60])
    several = uniforms_of([2**64 - 1, key("a", 1)], 10, [7, 50])
    np.testing.assert_array_equal(several, [uniforms(2**64 - 1, 10, start=7), stream[50:60]])

"""From groups to micro-batches: nothing lost, nothing counted twice."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import policy_of, random_prompts
from tests.fakes import group

from covey.config.algorithm import build_algorithm
from covey.learner.advantage import with_advantages
from covey.learner.batching import (
    OldDistribution,
    ValueTargets,
    collate,
    given_batch,
    micro_batches,
    minibatches,
)
from covey.rng import key
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from covey.sampling.prompts import EncodedProblem, GivenAnswer
from covey.types import Group, Problem, SamplingMask

GRPO = build_algorithm("dr_grpo")


def test_collate_keeps_tokens_logprobs_and_masks() -> None:
    batch = collate([group([1, 0], [2, 4]), group([math.nan, 1], [3, 1])])
    assert batch.mask.sum(-1).tolist() == [2, 4, 0, 1]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.sampler_logprobs[1].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    totals = batch.totals(max_tokens=9)
    assert (totals.tokens, totals.completions, totals.prompts, totals.max_tokens) == (7, 3, 2, 9)
    assert batch.group_tokens.tolist() == [6, 6, 1, 1]


def test_truncated_completions_can_be_left_untrained() -> None:
    cut = group([1, 0])
    first, second = cut.completions
    cut = replace(cut, completions=(first, replace(second, finish="length")))
    assert collate([cut]).mask.any(-1).tolist() == [True, True]
    assert collate([cut], mask_truncated=True).mask.any(-1).tolist() == [True, False]


def test_selected_rows_keep_all_that_is_known_of_them() -> None:
    """A field that ``Batch.select`` forgot would be missing in every micro-batch."""
    mask = SamplingMask.of([np.array([4])] * 3)
    groups = [group([1, 0]), group([0, 1], name="q")]
    groups = [
        replace(g, completions=tuple(replace(c, sampling_mask=mask) for c in g.completions)) for g in groups
    ]
    batch = collate(groups)
    old, entropy, collision, ref, values, targets, returns = torch.rand(7, *batch.mask.shape)
    batch = replace(
        batch,
        old_logprobs=old,
        old_distribution=OldDistribution(entropy, collision),
        ref_logprobs=ref,
        value_targets=ValueTargets(values, targets, returns),
        selected=old > 0.5,
    )
    assert all(value is not None for value in vars(batch).values())
    back = batch.select([3, 0, 2, 1]).select([1, 3, 2, 0])
    for name, value in vars(batch).items():
        found = getattr(back, name)
        pairs = zip(value, found, strict=True) if isinstance(value, tuple) else [(value, found)]
        for one, other in pairs:
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one is other, name


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_sampling_mask_follows_its_tokens_into_every_piece(name: str) -> None:
    policy = policy_of(name)
    params = SamplingParams(max_tokens=9, temperature=0.8, top_p=0.7)
    prompts = random_prompts(4, 11, 7)
    requests = [Request(prompt, [key(3, i, g) for g in range(4)]) for i, prompt in enumerate(prompts)]
    drawn = {(r, s): c for r, s, c in LocalSampler(policy, 5).sample(requests, params)}
    groups = [
        Group(Problem(str(r), ""), prompt, tuple(drawn[r, s] for s in range(4)), np.arange(4.0))
        for r, prompt in enumerate(prompts)
    ]
    whole = collate(groups)
    whole = replace(whole, advantages=whole.mask.float())
    seen = 0
    for count in (1, 2, 3):
        for part in minibatches(whole, count, np.array([2, 0, 1])):
            for budget in (1, 9, 25, 60, 1 << 30):
                for micro in micro_batches(part, budget, 9):
                    found = micro.packed.unpack(policy.token_outputs(micro.packed, 0.8).logprobs).detach()
                    torch.testing.assert_close(found, micro.rows.sampler_logprobs, rtol=0, atol=2e-4)
                    seen += len(micro.rows)
    assert seen == 3 * 5 * 12


def test_no_groups_make_an_empty_batch() -> None:
    batch = with_advantages(collate([]), [], GRPO)
    assert len(batch) == 0
    assert list(micro_batches(batch, 100, 10)) == []
    assert minibatches(batch, 2, np.arange(0)) == []


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    budget=st.integers(1, 60),
    count=st.integers(1, 7),
    seed=st.integers(0, 1000),
)
def test_any_cut_keeps_every_completion_once_with_the_totals_of_the_step(sizes, budget, count, seed) -> None:
    rng = np.random.default_rng(seed)
    groups = [
        group(rng.normal(size=n).tolist(), rng.integers(1, 12, n).tolist(), f"g{i}")
        for i, n in enumerate(sizes)
    ]
    batch = with_advantages(collate(groups), groups, build_algorithm("reinforce"))
    parts = minibatches(batch, count, rng.permutation(len(groups)))
    assert len(parts) == min(count, len(groups))
    assert sum(len(p) for p in parts) == len(batch)
    for part in parts:
        totals = part.totals(max_tokens=12)
        assert sorted(part.group.unique().tolist()) == sorted(set(part.group.tolist()))
        micros = list(micro_batches(part, budget, 12))
        assert sum(len(m.rows) for m in micros) == len(part)
        assert sum(int(m.rows.mask.sum()) for m in micros) == totals.tokens
        assert all(m.totals == totals for m in micros)
        joined = torch.cat([m.group_tokens for m in micros])
        assert joined.tolist() == part.group_tokens.tolist()
        for micro in micros:
            used = len(micro.packed.tokens)
            assert used <= budget or len(micro.rows) == 1


def test_a_group_that_fits_shares_its_prompt() -> None:
    groups = [group([1, 0, 1], [4, 4, 4])]
    batch = with_advantages(collate(groups), groups, GRPO)
    (micro,) = micro_batches(batch, 1000, 10)
    assert len(micro.packed.tokens) == 3 + 3 * 3
    assert len(list(micro_batches(batch, 8, 10))) == 3


def test_idle_completions_are_skipped_and_still_counted() -> None:
    groups = [group([1, 1]), group([1, 0])]
    batch = with_advantages(collate(groups), groups, GRPO)
    (micro,) = micro_batches(batch, 1000, 10, computed=batch.has_gradient(skips_idle=True))
    assert micro.rows.group.tolist() == [1, 1]
    assert micro.totals.completions == 4


def test_untrained_completions_are_skipped_and_still_rows() -> None:
    groups = [group([1, math.nan]), group([math.nan, 0])]
    batch = with_advantages(collate(groups), groups, GRPO)
    (micro,) = micro_batches(batch, 1000, 10, computed=batch.has_gradient(skips_idle=False))
    assert micro.rows.rewards.tolist() == [1, 0]
    assert (micro.totals.completions, micro.totals.rows) == (2, 4)


def test_what_is_masked_makes_no_completion_busy() -> None:
    """`covey check` puts NaN there, and called the other order of summing up a leak."""
    batch = collate([group([1, 1], [3, 3])])
    odd = replace(batch, mask=batch.mask & (torch.arange(3) < 2))
    odd.advantages[:, 2] = torch.nan
    odd.advantages[1, 0] = 1.0
    (micro,) = micro_batches(odd, 1000, 10, computed=odd.has_gradient(skips_idle=True))
    assert list(micro.numbers) == [1]


def test_unscorable_completions_stand_outside_the_baseline() -> None:
    groups = [group([1.0, math.nan, 0.0])]
    batch = with_advantages(collate(groups), groups, GRPO)
    assert batch.advantages[:, 0].tolist() == [0.5, 0.0, -0.5]
    nothing = [group([math.nan, math.nan])]
    assert not with_advantages(collate(nothing), nothing, GRPO).advantages.any()


def test_supervised_batches_train_every_answer_token() -> None:
    batch = given_batch([example([1, 2], [4, 5, 6]), example([3], [7])])
    assert batch.totals(1).tokens == 4
    (micro,) = micro_batches(batch, 100, 1)
    assert micro.packed.targets.tolist() == [4, 5, 6, 7]


def example(prompt: list[int], *answers: list[int]) -> EncodedProblem:
    """A problem with given answers, the first of them the better one."""
    given = tuple(GivenAnswer(np.array(a), np.ones(len(a), dtype=bool)) for a in answers)
    return EncodedProblem(Problem("p", "p"), np.array(prompt), given, (1.0, 0.0)[: len(given)])


def test_a_pair_stays_together_and_its_prompt_is_computed_once() -> None:
    pairs = [example([1, 2, 3], [4, 5], [6]), example([7], [8] * 9, [9])]
    batch = given_batch(pairs)
    for budget in (1, 3, 100):
        micros = list(micro_batches(batch, budget, 1, whole_groups=True))
        assert [m.rows.rewards.tolist() for m in micros] in ([[1, 0]] * 2, [[1, 0, 1, 0]])
        assert all(m.totals.prompts == 2 for m in micros)
    # Of each answer all but its last token is read: 3 + 1 + 0, and 1 + 8 + 0.
    assert micros[0].packed.tokens.tolist() == [1, 2, 3, 4, 7] + [8] * 8
    halves = [m.rows.rewards.tolist() for m in micro_batches(batch, 3, 1)]
    assert halves == [[1], [0], [1], [0]]


def test_what_a_tool_says_in_an_answer_is_read_and_not_trained() -> None:
    answer = GivenAnswer(np.array([4, 5, 6, 7]), np.array([True, False, False, True]))
    batch = given_batch([EncodedProblem(Problem("p", "p"), np.array([1]), (answer,), (1.0,))])
    assert batch.mask.tolist() == [[True, False, False, True]]
    assert batch.totals(1).tokens == 2
    (micro,) = micro_batches(batch, 100, 1)
    assert micro.packed.tokens.tolist() == [1, 4, 5, 6]

"""From scored groups to the advantages of a batch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.learner.advantage import with_advantages
from covey.learner.batching import Batch, collate
from covey.objective import advantages, credit, penalties
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.axis_function import bind
from covey.objective.penalties import KL
from covey.types import Baselines, Group
from covey_verify.errors import DataError
from covey_verify.types import StepRewards
from tests.fakes import component, group

CENTRED = Algorithm(bind(advantages.group_centered))


def rows(batch: Batch) -> list[list[float]]:
    return [
        [round(v, 6) for v in row[m].tolist()] for row, m in zip(batch.advantages, batch.mask, strict=True)
    ]


def given(groups: list[Group], algorithm: Algorithm, values: Tensor | None = None, **fields: Tensor) -> Batch:
    return with_advantages(replace(collate(groups), **fields), groups, algorithm, values=values)


def test_ragged_groups_and_lengths() -> None:
    groups = [group([1, 0], [2, 1]), group([0, 3, 3], [1, 1, 3]), group([7], [2])]
    assert rows(given(groups, CENTRED)) == [[0.5, 0.5], [-0.5], [-2], [1], [1, 1, 1], [0, 0]]


def test_unscorable_completions_stand_outside_every_statistic() -> None:
    with_one, without = group([1, math.nan, 0], [2, 2, 2]), group([1, 0], [2, 2])
    for name in ("grpo", "rloo", "opo", "max_rl", "gdpo", "lite_ppo", "reinforce_pp_baseline", "gpg"):
        algorithm = replace(PRESETS[name], kl=None)
        a, b = rows(given([with_one], algorithm)), rows(given([without], algorithm))
        assert [a[0], a[2]] == b, name
        assert not given([with_one], algorithm).advantages[1].any()


def test_a_group_that_nobody_could_judge_gets_nothing() -> None:
    batch = given([group([math.nan, math.nan]), group([1, 0])], PRESETS["dapo"])
    assert not batch.advantages[:2].any() and batch.advantages[2:].any()
    assert not given([group([math.nan])], PRESETS["lite_ppo"]).advantages.any()


def test_a_group_of_empty_completions_gets_nothing() -> None:
    groups = [
        replace(of, baselines=Baselines(greedy_reward=0.5, running_mean=np.zeros(len(of.rewards))))
        for of in (group([1, 0], [0, 0]), group([1, 0, 2], [3, 0, 2]))
    ]
    for name, algorithm in PRESETS.items():
        found = given(groups, replace(algorithm, kl=None), values=torch.zeros(5, 3)).advantages
        assert not found[[0, 1, 3]].any(), name
        assert found.isfinite().all() and found.any(), name


def test_rows_of_a_group_may_stand_anywhere() -> None:
    groups = [group([1, 0], [2, 1], "a"), group([0, 3, 3], [1, 1, 3], "b")]
    batch = collate(groups).select([2, 0, 3, 4, 1])
    assert rows(with_advantages(batch, groups, CENTRED)) == [[-2], [0.5, 0.5], [1], [1, 1, 1], [-0.5]]


def test_rewards_keep_their_precision() -> None:
    # 1 + 1e-12 would be 1 in float32, and the group dead.
    batch = collate([group([1.0, 1.0 + 1e-12])])
    assert batch.rewards.tolist() == [1.0, 1.0 + 1e-12]
    assert with_advantages(
        batch, [group([1.0, 1.0 + 1e-12])], replace(PRESETS["grpo"], kl=None)
    ).advantages.any()


def test_truncated_completions_count_in_their_group_but_not_in_the_batch() -> None:
    cut = group([4, 0, 2])
    completions = tuple(replace(c, finish="length") if i == 0 else c for i, c in enumerate(cut.completions))
    groups = [replace(cut, completions=completions), group([1, 0])]
    batch = collate(groups, mask_truncated=True)
    assert with_advantages(batch, groups, CENTRED).advantages[:, 0].tolist() == [0, -2, 0, 0.5, -0.5]
    whitened = with_advantages(batch, groups, replace(CENTRED, whiten=bind(advantages.batch_centered)))
    # Mean of the four trained: -2/4.
    assert whitened.advantages[:, 0].tolist() == [0, -1.5, 0.5, 1.0, 0.0]


# --- the KL in the reward -------------------------------------------------------------------------

PAIR = [group([1, 0], [3, 2])]
# log pi_old - log ref: 1 2 3 and 4 5 (the last entry is padding).
DIFFERENCE = {
    "old_logprobs": torch.tensor([[1.0, 2, 3], [4, 5, math.nan]]),
    "ref_logprobs": torch.zeros(2, 3),
}


def penalised(estimator=penalties.k1, **settings) -> Algorithm:
    return Algorithm(bind(advantages.reward), kl=KL(bind(estimator), coef=0.1, place="reward", **settings))


def test_by_token_each_bears_what_it_and_all_later_ones_cost() -> None:
    # Rewards 1 and 0; costs to go .6 .5 .3 and .9 .5.
    assert rows(given(PAIR, penalised(), **DIFFERENCE)) == [[0.4, 0.5, 0.7], [-0.9, -0.5]]
    # k2 = d^2 / 2: .5 2 4.5 and 8 12.5.
    assert rows(given(PAIR, penalised(penalties.k2), **DIFFERENCE))[0] == [0.3, 0.35, 0.55]


def test_by_response_it_is_part_of_the_reward_before_the_baseline() -> None:
    # 1 - .6 = .4 and 0 - .9: centred +-.65.
    algorithm = replace(penalised(level="completion"), advantage=bind(advantages.group_centered))
    assert rows(given(PAIR, algorithm, **DIFFERENCE)) == [[0.65] * 3, [-0.65] * 2]
    # k2 of the sums 6 and 9: 18 and 40.5, so -.8 and -4.05.
    squared = penalised(penalties.k2, level="completion")
    assert rows(given(PAIR, squared, **DIFFERENCE)) == [[-0.8] * 3, [-4.05] * 2]


def test_the_adaptive_coefficient_takes_its_place() -> None:
    batch = replace(collate(PAIR), **DIFFERENCE)
    steered = with_advantages(batch, PAIR, penalised(), kl_coef=0.2)
    assert rows(steered)[1] == [-1.8, -1.0]
    assert rows(with_advantages(batch, PAIR, penalised(), kl_coef=0.0)) == [[1] * 3, [0] * 2]


def test_a_penalty_in_the_loss_stays_out_of_the_advantages() -> None:
    in_loss = replace(penalised(), kl=KL(coef=0.1))
    assert rows(given(PAIR, in_loss, **DIFFERENCE)) == [[1] * 3, [0] * 2]


# --- the second step ------------------------------------------------------------------------------

GROUPS = [group([1, 0], [3, 1]), group([0.5, 0.5], [2, 2])]


@pytest.mark.parametrize(
    ("whiten", "expected"),
    [
        # Completions .5 -.5 0 0: mean 0, sum of squares 1/2.
        (bind(advantages.batch_centered), [0.5, -0.5, 0, 0]),
        (bind(advantages.batch_std, of="advantages", ddof=0, eps=0.0), [math.sqrt(2), -math.sqrt(2), 0, 0]),
        # Rewards 1 0 .5 .5 have the same spread.
        (bind(advantages.batch_std, ddof=0, eps=0.0), [math.sqrt(2), -math.sqrt(2), 0, 0]),
        (bind(advantages.sample_zscore, ddof=1, eps=0.0), [math.sqrt(1.5), -math.sqrt(1.5), 0, 0]),
        # Tokens .5 x 3, -.5, 0 x 4: mean 1/8; squares 4/4 - 8/64 = 7/8 over 8.
        (
            bind(advantages.token_zscore, ddof=0, eps=0.0),
            [(a - 1 / 8) / math.sqrt(7 / 64) for a in (0.5, -0.5, 0, 0)],
        ),
        # Two of four completions are in a group with a signal.
        (bind(advantages.valid_group_scale), [1, -1, 0, 0]),
    ],
)
def test_whiten_steps(whiten, expected: list[float]) -> None:
    got = given(GROUPS, replace(CENTRED, whiten=whiten))
    assert got.advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-7)
    assert not got.advantages[~got.mask].any()


# --- data beyond the rewards ----------------------------------------------------------------------


def test_components_with_their_weights() -> None:
    pair = group([1, 0])
    style = replace(
        pair,
        components={"answer": component(pair.rewards, verdict=True), "style": component([0, 10], 0.5)},
    )
    algorithm = Algorithm(bind(advantages.component_zscore, ddof=0, eps=0.0))
    assert given([style], algorithm).advantages[:, 0].tolist() == [0.5, -0.5]


def test_the_greedy_reward() -> None:
    greedy = replace(group([1, 0]), baselines=Baselines(greedy_reward=0.25))
    assert given([greedy], PRESETS["remax"]).advantages[:, 0].tolist() == [0.75, -0.25]


def test_lengths_are_those_of_trained_tokens() -> None:
    assert given([group([1, 0], [1, 3])], PRESETS["opo"]).advantages[:, 0].tolist() == [0.75, -0.25]


def test_tokens_make_the_tree() -> None:
    # tests.fakes gives every completion of a group the same first tokens: they part at the end only.
    tree = Algorithm(bind(credit.prefix_tree))
    same = group([1, 0], [2, 3])
    assert rows(given([same], tree)) == [[0, 0], [0, 0, -0.5]]
    # Also where the longer one goes on with token 0, which padding must not look like.
    short, long = same.completions
    zero = replace(same, completions=(short, replace(long, tokens=np.append(short.tokens, 0))))
    assert rows(given([zero], tree)) == [[0, 0], [0, 0, -0.5]]


def test_steps_by_completion_and_only_of_scorable_ones() -> None:
    steps = (StepRewards([1, 0], [0, 2]), StepRewards([5], [0]), StepRewards([0, 1], [0, 1]))
    graded = stepped(group([1, math.nan, 1]), steps)
    algorithm = Algorithm(bind(credit.process_zscore, credit="own_step", ddof=0, eps=0.0))
    assert rows(given([graded], algorithm)) == [[1, -1, -1], [], [-1, 1, 0]]


def stepped(group: Group, steps: tuple[StepRewards, ...]) -> Group:
    """The group as one function by step has judged it."""
    return replace(group, components={"r": component(group.rewards, steps=steps)}, credit="step")


@pytest.mark.parametrize("end", [3, -1])
def test_misplaced_steps_are_refused(end: int) -> None:
    graded = stepped(group([1, 0]), (StepRewards([1], [0]), StepRewards([1], [end])))
    with pytest.raises(DataError, match="reward r gave a step that ends at token"):
        given([graded], PRESETS["grpo_process"])
    assert given([replace(graded, credit="completion")], replace(PRESETS["grpo"], kl=None)).advantages.any()

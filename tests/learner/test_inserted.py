"""Tokens that the model did not draw, a tool's output say: read, but neither trained nor counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import policy_of
from tests.fakes import completion, group
from tests.proof.cases import Model, by_step, make_model, mixed, trained_and_repeated
from tests.training.runs import metrics_of

from covey.config.algorithm import build_algorithm
from covey.config.schema import Train
from covey.learner.advantage import off_centre, with_advantages
from covey.learner.batching import OldDistribution, collate, micro_batches
from covey.learner.learner import Learner
from covey.models.logprobs import TokenOutputs
from covey.objective.algorithms import PRESETS
from covey.objective.diagnostics import group_metrics, sampled_entropy
from covey.objective.loss import policy_loss
from covey.rewards.contract import Context, Reward
from covey.sampling.base import SampledCompletion
from covey.sampling.local import LocalSampler
from covey.types import Baselines, Completion, Group
from covey_verify.texts.length import soft_overlong
from covey_verify.types import StepRewards

TOOL = np.array([40, 41, 42])


def with_tool(one: Completion, at: int = 1) -> Completion:
    """A completion into which a tool has written after ``at`` tokens."""
    inserted = len(TOOL)
    return replace(
        one,
        tokens=np.insert(one.tokens, at, TOOL),
        logprobs=np.insert(one.logprobs, at, np.zeros(inserted, np.float32)),
        drawn_mask=np.insert(np.ones(len(one.tokens), bool), at, np.zeros(inserted, bool)),
    )


def used_tool(rewards: list[float], lengths: list[int]) -> Group:
    """A group whose first completion called a tool."""
    plain = group(rewards, lengths)
    return replace(plain, completions=(with_tool(plain.completions[0]), *plain.completions[1:]))


def test_totals_and_metrics_count_what_was_drawn() -> None:
    groups = [used_tool([1, 0], [2, 4])]
    batch, plain = collate(groups), collate([group([1, 0], [2, 4])])
    assert batch.mask.tolist() == [[True, False, False, False, True], [True] * 4 + [False]]
    assert batch.totals(9) == plain.totals(9)
    assert batch.group_tokens.tolist() == [6, 6]
    assert group_metrics(groups) == group_metrics([group([1, 0], [2, 4])])
    assert sampled_entropy(groups) == sampled_entropy([group([1, 0], [2, 4])])


def test_a_tool_first_does_not_hide_that_advantages_are_off_centre() -> None:
    groups = [replace(g, completions=tuple(with_tool(c, 0) for c in g.completions)) for g in [group([1, 0])]]
    batch = collate(groups)
    assert off_centre(replace(batch, advantages=batch.mask.float()), groups) == (groups[0], 2.0)
    assert off_centre(with_advantages(batch, groups, build_algorithm("dr_grpo")), groups) is None


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"ppo", "vapo", "grpo_process"}))
def test_no_preset_has_a_gradient_at_an_inserted_token(name: str) -> None:
    groups, algorithm = [used_tool([1, 0, 0.5], [2, 4, 3])], PRESETS[name]
    batch, shape = collate(groups), (3, 5)
    away = torch.linspace(-1, 1, 15).view(shape)  # also at inserted places and the padding
    old, distribution = away - 2, OldDistribution(away - 2, away - 2)
    batch = replace(batch, old_logprobs=old, ref_logprobs=old, old_distribution=distribution)
    batch = replace(batch, selected=away > 0)
    segments = (StepRewards([0.5], [0]),) * 3
    groups = [replace(groups[0], baselines=Baselines(0.2, np.zeros(3), segments))]
    batch = with_advantages(batch, groups, algorithm)
    assert not batch.advantages[~batch.mask].any()
    (micro,) = micro_batches(batch, 1000, 9)
    logprobs = (away - 1.5).requires_grad_()
    flat = logprobs[micro.packed.place]
    outputs = TokenOutputs(*(flat for _ in TokenOutputs._fields))
    policy_loss(algorithm, micro.loss_inputs(outputs)).total.backward()
    assert logprobs.grad is not None
    assert bool(logprobs.grad[batch.mask].any())
    assert not logprobs.grad[~batch.mask].any()


def test_the_model_reads_inserted_tokens() -> None:
    policy, one = policy_of("qwen3"), completion(length=4)
    learner = Learner(policy, Train())
    plain, called = (replace(group([1.0], [4]), completions=(c,)) for c in (one, with_tool(one, 2)))
    logprobs = [learner.token_outputs(collate([g]), 1.0).logprobs[0] for g in (plain, called)]
    torch.testing.assert_close(logprobs[0][:2], logprobs[1][:2])
    assert not torch.allclose(logprobs[0][2:4], logprobs[1][5:7], atol=1e-4)


def test_length_rewards_count_what_was_drawn() -> None:
    one, reward = with_tool(completion(length=9)), Reward("soft_overlong", soft_overlong)
    given = reward.arguments(group([1.0]).problem, [one], Context())
    assert [len(ids) for ids in given["sampled_ids"]] == [9]
    assert soft_overlong(given["sampled_ids"], limit=10, buffer=2) == [-0.5]


CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "kl": {"coef": 2.0}}},
    "token mean": {"algorithm": {"name": "dapo", "filter": None}},
    "by sequence": {"algorithm": "gspo"},
    "by group": {"algorithm": {"name": "dapo", "filter": None, "reduce": "prompt_mean"}},
    "lengths": {"algorithm": {"name": "grpo", "advantage": "length_weighted"}},
    "prefixes": {"algorithm": {"name": "grpo", "advantage": "prefix_tree"}},
    "baseline by token": {"algorithm": {"name": "grpo", "advantage": "optimal_token_baseline"}},
    "future": {"algorithm": {"name": "fipo", "filter": None}},
    "entropy": {
        "algorithm": {
            "name": "dapo",
            "filter": None,
            "select_tokens": "top_entropy",
            "token_weights": ["selected_only"],
        }
    },
    "KL in the reward": {"algorithm": {"name": "grpo", "kl": {"coef": 1.0, "place": "reward"}}},
    "steps": {"algorithm": "grpo_process", "rewards": (by_step,)},
    "top_p": {"algorithm": "grpo", "rollout": {"top_p": 0.9}},
    "critic": {"algorithm": {"name": "ppo", "critic": {"lr": 3e-3}}},
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_tools_is_recorded_read_back_and_proved(
    name: str, tmp_path: Path, tool_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = LocalSampler.sample

    def calling(self: LocalSampler, *arguments: Any) -> Iterator[SampledCompletion]:
        for sampled in sample(self, *arguments):
            one = sampled.completion
            called = with_tool(one) if one.tokens[0] % 2 else one
            if called is not one and (mask := one.sampling_mask) is not None:
                sets = np.split(mask.ids, mask.ends[:-1])
                sets[1:1] = list(TOOL[:, None])
                called = replace(called, sampling_mask=type(mask).of(sets))
            yield sampled._replace(completion=called)

    monkeypatch.setattr(LocalSampler, "sample", calling)
    monkeypatch.setattr(LocalSampler, "bit_exact", False)  # it did not read what was inserted
    train = {"lr": 1e-3, "updates_per_batch": 2, "tokens_per_micro_batch": 60}
    settings = {"rewards": (mixed,), **CASES[name], "train": train}
    rollout = {"prompts_per_step": 3, "group_size": 3, "max_tokens": 8, **settings.pop("rollout", {})}
    steps = trained_and_repeated(tmp_path / "run", tool_model, 3, rollout=rollout, **settings)
    for step in steps:
        assert step.advantages < 1e-5
        assert step.gradient < 1e-4
    assert steps[-1].course is not None
    assert steps[-1].course < 1e-3
    assert all(m["optimizer/grad_norm"] > 0 for m in metrics_of(tmp_path / "run"))
    log = tmp_path / "run" / "rollouts" / "step_000001"
    arrays = np.load(log.with_suffix(".npz"))
    lines = [json.loads(line) for line in log.with_suffix(".jsonl").read_text().splitlines()]
    assert 0 < (~arrays["sampled"]).sum() < len(arrays["tokens"]) == sum(line["tokens"] for line in lines)
    assert not arrays["advantages"][~arrays["sampled"]].any()


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))

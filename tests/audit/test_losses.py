"""Losses computed again from recorded calls, and what is made of rewards: mistakes of verl and OpenRLHF."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.audit.checks.check import apply
from covey.audit.checks.returns import returns_of
from covey.audit.readers.record_file import read_record
from covey.audit.readers.sources import open_run
from covey.audit.table import CHECKS
from covey.audit.writers import openrlhf as openrlhf_writer
from covey.audit.writers import verl as verl_writer
from tests.audit import stand_ins
from tests.audit.lines import Lines, found, rows, samples, sound, updates, written
from tests.audit.stand_ins import OpenRlhfTrainer, VerlTrainer

BOUNDS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}


def vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """PPO's loss with the arguments of verl's function."""
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1 - config.low, 1 + config.high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    losses = torch.where(advantages < 0, torch.minimum(losses, -config.dual * advantages), losses)
    losses = losses * (1 if rollout_is_weights is None else rollout_is_weights)
    if loss_agg_mode == "token-mean":
        return (losses * response_mask).sum() / response_mask.sum(), {}
    return ((losses * response_mask).sum(1) / response_mask.sum(1)).mean(), {}


def ppo(
    self: Any,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    rollout_log_probs: Tensor,
) -> tuple[Tensor | None, ...]:
    """PPO's loss with the arguments of OpenRLHF's PolicyLoss, corrected for the sampler."""
    weights = (self.way * (old_log_probs - rollout_log_probs)).exp().clamp(0.5, 5.0)
    mode = "token-mean" if self.token_level_loss else "sequences"
    config = SimpleNamespace(low=self.clip_eps_low, high=self.clip_eps_high, dual=1e9)
    loss, _ = vanilla(old_log_probs, log_probs, advantages, action_mask, mode, config, weights)
    return loss, None, None, None


def k1(logprob: Tensor, ref_logprob: Tensor, _: str) -> Tensor:
    """A KL with the arguments of verl's and OpenRLHF's."""
    return logprob - ref_logprob


def mean(loss_mat: Tensor, loss_mask: Tensor, _: str) -> Tensor:
    """A mean over tokens with the arguments of verl's and OpenRLHF's."""
    return (loss_mat * loss_mask).sum() / loss_mask.sum()


TERMS = {"kl_penalty": k1, "agg_loss": mean}


def tensors() -> dict[str, Tensor]:
    """Log-probs, advantages and masks of four completions, whose ratios reach beyond the bounds."""
    random = torch.Generator().manual_seed(3)
    old = -2 * torch.rand(4, 6, generator=random)
    moved = old + 1.6 * torch.rand(4, 6, generator=random) - 0.8
    sampled = old + 0.3 * torch.rand(4, 6, generator=random) - 0.1
    mask = (torch.arange(6) < torch.tensor([[6], [2], [5], [3]])).long()
    advantages = torch.tensor([[1.0], [-0.6], [0.4], [-1.2]]).expand(4, 6)
    return {"old": old, "now": moved, "sampled": sampled, "mask": mask, "advantages": advantages}


def verls(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str = "token-mean",
    masked_by: float | Tensor = 1,
    **given: Any,
) -> list[str]:
    """Findings on calls of verl's loss in a process that has it."""
    core = SimpleNamespace(POLICY_LOSS_REGISTRY={"vanilla": vanilla}, vanilla=vanilla, **TERMS)
    monkeypatch.setitem(sys.modules, verl_writer.LOSSES, core)
    trainer = VerlTrainer()
    actor: Any = trainer.config["actor_rollout_ref"]
    actor["actor"] |= BOUNDS
    verl_writer.record_run(trainer, path / "run.jsonl")
    trainer.fit(1)
    t = tensors()
    t["mask"] = t["mask"] * masked_by
    config = SimpleNamespace(**{"low": 0.2, "high": 0.3, "dual": 3.0, **given})
    for _ in range(2):
        core.vanilla(
            t["old"], t["now"], t["advantages"], response_mask=t["mask"], loss_agg_mode=mode, config=config
        )
    return [f.id for f in apply(CHECKS, open_run(path / "run.jsonl")).findings]


def test_verls_loss_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verls(tmp_path, monkeypatch) == []
    assert verls(tmp_path, monkeypatch, low=0.3, high=0.2) == ["clip_swapped"]
    assert verls(tmp_path, monkeypatch, low=9.0, high=9.0) == ["clip_missing"]
    assert verls(tmp_path, monkeypatch, mode="seq-mean-token-mean") == ["reduction_differs"]
    assert verls(tmp_path, monkeypatch, low=0.1, high=0.1) == ["loss_differs"]
    assert verls(tmp_path, monkeypatch, masked_by=tensors()["advantages"]) == ["loss_differs"]


def steps(core: Any, zero: bool = True, kl: int = 1, bonus: int = -1, swap: bool = False) -> None:
    """Three steps of a worker on a table of log-probs, with verl's functions for the terms of its loss."""
    t = tensors()
    weights = t["old"].clone().requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=0.1)
    config = SimpleNamespace(low=0.2, high=0.3, dual=3.0)
    for _ in range(3):
        now = weights * 1.0
        loss, _ = core.vanilla(t["old"], now, t["advantages"], t["mask"], "token-mean", config)
        arguments = (t["sampled"], now) if swap else (now, t["sampled"])
        penalty = core.agg_loss(core.kl_penalty(*arguments, "kl"), t["mask"], "token-mean")
        entropy = core.agg_loss(-now, t["mask"], "token-mean")
        if zero:
            optimizer.zero_grad()
        (0.5 * (loss + kl * 0.02 * penalty + bonus * 0.01 * entropy)).backward()
        optimizer.step()


def accumulated(core: Any, between: float) -> None:
    """Two steps of a worker, of three micro-batches each, that multiplies the gradient between these."""
    t = tensors()
    weights = t["old"].clone().requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=0.1)
    config = SimpleNamespace(low=0.2, high=0.3, dual=3.0)
    for _ in range(2):
        optimizer.zero_grad()
        for micro in range(3):
            if micro and weights.grad is not None:
                weights.grad *= between
            loss, _ = core.vanilla(t["old"], weights * 1.0, t["advantages"], t["mask"], "token-mean", config)
            (loss / 3).backward()
        optimizer.step()


@pytest.mark.parametrize(("between", "names"), [(1.0, []), (0.4, ["gradient_rescaled"])])
def test_a_gradient_that_is_scaled_while_it_accumulates_is_known(
    between: float, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = SimpleNamespace(POLICY_LOSS_REGISTRY={"vanilla": vanilla}, vanilla=vanilla, **TERMS)
    monkeypatch.setitem(sys.modules, verl_writer.LOSSES, core)
    trainer = VerlTrainer()
    actor: Any = trainer.config["actor_rollout_ref"]
    actor["actor"] |= BOUNDS
    verl_writer.record_run(trainer, tmp_path / "run.jsonl")
    trainer.fit(1)
    accumulated(core, between)
    assert [f.id for f in apply(CHECKS, open_run(tmp_path / "run.jsonl")).findings] == names


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, []),
        ({"zero": False}, ["gradient_kept"]),
        ({"kl": -1}, ["kl_sign"]),
        ({"bonus": 1}, ["entropy_sign"]),
        ({"swap": True}, ["kl_differs"]),
        ({"kl": 3}, ["coefficient_differs"]),
    ],
)
def test_the_terms_of_a_loss_are_known_by_their_gradients(
    given: dict[str, Any], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = SimpleNamespace(POLICY_LOSS_REGISTRY={"vanilla": vanilla}, vanilla=vanilla, **TERMS)
    monkeypatch.setitem(sys.modules, verl_writer.LOSSES, core)
    trainer = VerlTrainer()
    actor: Any = trainer.config["actor_rollout_ref"]
    actor["actor"] |= {**BOUNDS, "kl_loss_coef": 0.02, "entropy_coeff": 0.01}
    verl_writer.record_run(trainer, tmp_path / "run.jsonl")
    trainer.fit(1)
    steps(core, **given)
    record = open_run(tmp_path / "run.jsonl")
    assert [call.moved for call in record.calls] == [None, True, True]
    assert [f.id for f in apply(CHECKS, record).findings] == names


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, []),
        ({"clip_eps_low": 0.3, "clip_eps_high": 0.2}, ["clip_swapped"]),
        ({"token_level_loss": False}, ["reduction_differs"]),
        ({"way": -1}, ["correction_inverted"]),
        ({"way": 0}, ["correction_missing"]),
    ],
)
def test_openrlhfs_loss_is_computed_again_from_a_workers_file(
    given: dict[str, Any], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("PolicyLoss", (SimpleNamespace,), {"forward": ppo})
    trainer = OpenRlhfTrainer()
    trainer.args.actor = SimpleNamespace(eps_clip_low_high=(0.2, 0.3))
    trainer.args.algo.advantage.is_correction_enable = True
    openrlhf_writer.record_run(trainer, tmp_path / "run.jsonl")
    trainer.fit(1)
    module = SimpleNamespace(PolicyLoss=kind, aggregate_loss=mean)
    monkeypatch.setitem(sys.modules, openrlhf_writer.LOSSES, module)
    monkeypatch.setitem(sys.modules, openrlhf_writer.PENALTIES, SimpleNamespace(compute_approx_kl=k1))
    openrlhf_writer.record_losses(tmp_path / "run.losses.jsonl")
    usual = {"policy_loss_type": "ppo", "clip_eps_low": 0.2, "clip_eps_high": 0.3}
    loss = kind(**{**usual, "token_level_loss": True, "way": 1, **given})
    t = tensors()
    loss.forward(t["now"], t["old"], t["advantages"], action_mask=t["mask"], rollout_log_probs=t["sampled"])
    assert [f.id for f in apply(CHECKS, open_run(tmp_path / "run.jsonl")).findings] == names


class Maker(stand_ins.Maker):
    """The experience maker with the methods in which it asks its models and makes returns."""

    kl_ctl = SimpleNamespace(value=0.1)

    def __init__(self, policy: stand_ins.Policy, reference: stand_ins.Policy) -> None:
        super().__init__(policy)
        self.initial_model_group = reference

    def make_experience(self, samples: list[SimpleNamespace]) -> list[SimpleNamespace]:
        asked = {"sequences": [e.sequences for e in samples]}
        refs = [
            self._dispatch_forward(group, True, **asked) for group in (self.policy, self.initial_model_group)
        ]
        values = [self._flatten_results(ref, 2) for ref in refs]
        for e, own, reference in zip(samples, *values, strict=True):
            e.kl = self.charged(own, reference)
            e.base_action_log_probs = reference if self.in_loss else None
        return samples

    def make_experience_batch(self, samples: tuple[Tensor, Tensor]) -> list[SimpleNamespace]:
        (e,) = super().make_experience_batch(samples)
        e.sequences = e.sequences.clone()
        (e,) = self.make_experience([e])
        ends = torch.nn.functional.one_hot(e.action_mask.cumsum(1).argmax(1), e.action_mask.shape[1])
        rewards = ends * self.advantages(e.rewards)[:, None] - 0.1 * e.kl
        e.returns = self.get_cumulative_returns(rewards, e.action_mask, self.gamma)
        e.advantages = e.returns
        return [e]

    gamma = 1.0
    in_loss = False

    def charged(self, own: Tensor, reference: Tensor) -> Tensor:
        return own - reference

    def get_cumulative_returns(self, rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
        found, total = torch.zeros_like(rewards), torch.zeros(len(rewards))
        for t in reversed(range(rewards.shape[1])):
            total = rewards[:, t] * action_mask[:, t] + gamma * total
            found[:, t] = total
        return found


def with_prompt(trainer: OpenRlhfTrainer) -> None:
    mask = trainer.experience_maker.mask

    def wide(response: Tensor) -> Tensor:
        found = mask(response)
        found[:, : stand_ins.PROMPT - 1] = 1
        return found

    trainer.experience_maker.mask = wide  # type: ignore[method-assign]


def in_the_loss(trainer: OpenRlhfTrainer) -> None:
    """The workers charge the KL, so the maker has 0 of it."""
    maker: Any = trainer.experience_maker
    maker.in_loss = True
    maker.charged = lambda own, _: torch.zeros_like(own)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda _: None, []),
        (lambda t: setattr(t.experience_maker, "charged", lambda own, ref: ref - own), ["kl_differs"]),
        (lambda t: setattr(t.experience_maker, "gamma", 0.9), ["returns_differ"]),
        (in_the_loss, []),
        (with_prompt, ["prompt_in_loss"]),
    ],
)
def test_what_openrlhfs_maker_drops_is_recorded(
    change: Callable[[OpenRlhfTrainer], None], names: list[str], tmp_path: Path
) -> None:
    trainer = OpenRlhfTrainer()
    reference = stand_ins.Policy()
    reference.logits = reference.logits.detach() + 0.01 * torch.randn(reference.logits.shape)
    trainer.experience_maker = Maker(trainer.policy, reference)
    change(trainer)
    openrlhf_writer.record_run(trainer, tmp_path / "run.jsonl")
    trainer.fit(2)
    report = apply(CHECKS, read_record(tmp_path / "run.jsonl"))
    assert [f.id for f in report.findings][:1] == names
    unjudged = {name for checks in report.unjudged.values() for name in checks}
    assert not unjudged & {"kl_differs", "returns_differ", "prompt_in_loss", "reward_on_padding"}


# --- what is made of rewards ------------------------------------------------------------------------


def begun(lines: Lines) -> Lines:
    """The record of a run that has begun before, as its reference shows."""
    for line in updates(lines):
        line["step"] += 1
    return lines


def of(framework: str, lines: Lines, **settings: Any) -> Lines:
    """The record as another framework's that trains without a critic."""
    lines[0] |= {"framework": framework, "settings": settings}
    for sample in samples(lines):
        sample["reward"] = sample["rewards"]["right"]
    return lines


def test_a_reward_behind_the_end_is_on_padding(tmp_path: Path) -> None:
    lines = of("verl", sound(), **{"algorithm.adv_estimator": "grpo"})
    assert found(lines, tmp_path / "run.jsonl") == []
    for row in rows(lines):
        row["token_scores"] = row["token_rewards"] = [*[0.0] * len(row["mask"]), 0.0, 1.0]
    assert found(lines, tmp_path / "run.jsonl")[:1] == ["reward_on_padding"]


def test_tokens_of_the_prompt_are_not_in_the_loss(tmp_path: Path) -> None:
    lines = sound()
    rows(lines)[0]["prompt_trained"] = 2
    assert found(lines, tmp_path / "run.jsonl")[:1] == ["prompt_in_loss"]


@pytest.mark.parametrize(
    ("kl", "says"),
    [
        (lambda d: d, ""),
        (lambda d: -d, "arguments exchanged"),
        (lambda d: d * d / 2, "the KL is k2"),
        (lambda d: 3 * d, "not what its estimator gives"),
    ],
)
def test_the_kl_is_that_of_policy_and_reference(
    kl: Callable[[float], float], says: str, tmp_path: Path
) -> None:
    settings = {"algo.advantage.estimator": "x", "algo.kl.estimator": "k1"}
    lines = of("openrlhf", begun(sound()), **settings)
    for n, row in enumerate(rows(lines)):
        far = [0.1 * (n + t % 3 + 1) for t in range(len(row["mask"]))]
        row["ref_logprobs"] = [old - d for old, d in zip(row["old_logprobs"], far, strict=True)]
        row["kl"] = [kl(d) for d in far]
    report = apply(CHECKS, read_record(written(lines, tmp_path / "run.jsonl")))
    assert [f.id for f in report.findings] == (["kl_differs"] if says else [])
    assert says in str(report.findings)


def test_a_coefficient_of_a_kl_that_no_reward_has_is_none(tmp_path: Path) -> None:
    settings = {"algorithm.kl_ctrl.kl_coef": 0.001, "algorithm.adv_estimator": "x"}
    lines = of("verl", begun(sound()), **settings)
    for row in rows(lines):
        del row["kl"]
        row["ref_logprobs"] = [p - 0.5 for p in row["old_logprobs"]]
    assert found(lines, tmp_path / "run.jsonl") == []
    lines[0]["settings"]["algorithm.use_kl_in_reward"] = True
    assert found(lines, tmp_path / "run.jsonl")[:1] == ["kl_differs"]


def test_returns_are_those_of_gamma_and_lambda(tmp_path: Path) -> None:
    right = {"algorithm.adv_estimator": "gae", "algorithm.gamma": 0.99, "algorithm.lam": 0.8}

    def said(gamma: float, lam: float) -> str:
        lines = of("verl", copy.deepcopy(sound()), **right)
        for row in rows(lines):
            row["values"] = [0.3 + 0.1 * math.sin(t) for t in range(len(row["mask"]))]
            row["returns"] = returns_of(row["token_rewards"], row["values"], gamma, lam).tolist()
        report = apply(CHECKS, read_record(written(lines, tmp_path / "run.jsonl")))
        return str([f for f in report.findings if f.id == "returns_differ"])

    assert said(0.99, 0.8) == "[]"
    assert "but from gamma 0.8 and lambda 0.99" in said(0.8, 0.99)
    assert "but from gamma 0.99 and lambda 0.99" in said(0.99, 0.99)


def test_importance_weights_are_trainer_over_sampler(tmp_path: Path) -> None:
    for sign, names in ((1, []), (-1, ["correction_inverted"])):
        lines = of("verl", copy.deepcopy(sound()), **{"algorithm.rollout_correction.rollout_is": "token"})
        for sample in samples(lines):
            sample["sampler_logprobs"] = [p - 0.05 for p in sample["sampler_logprobs"]]
        for row in rows(lines):
            row["corrections"] = [math.exp(sign * 0.05)] * len(row["mask"])
        assert found(lines, tmp_path / "run.jsonl") == names


def test_numbers_passed_as_a_mask_are_a_loss_that_differs(tmp_path: Path) -> None:
    """As verl did for a while, whose actor gave the advantages where the mask belongs."""
    lines = sound()
    call = next(line for line in lines if line.get("kind") == "loss")
    call["rows"][0]["mask"] = [-1, 0.5]
    call["loss"] = 3.0  # sum / sum of such a mask
    assert found(lines, tmp_path / "run.jsonl")[0] == "loss_differs"

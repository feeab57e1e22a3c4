"""OpenRLHF 0.11.2: its experience maker's advantages, PolicyLoss, ValueLoss and compute_approx_kl.

    CONFORMANCE_PEER=FOLDER python conformance/run.py conformance/adapters/openrlhf_0_11.py

FOLDER is the wheel's ``purelib``; needs torch. Its ``float()`` is taken as ``double()``, or every KL and
every whitened advantage would differ by the rounding of float32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from shared import Case, bare, by_token, group_size, mask_of, only_for, peer, tensor, with_gradient, within

peer(
    "openrlhf",
    "ray",
    "deepspeed",
    "openrlhf.trainer.ray",
    "openrlhf.trainer.ray.launcher",
    "openrlhf.trainer.ppo_utils.experience",
    "openrlhf.trainer.ppo_utils.length_penalty",
    "openrlhf.utils",
    "openrlhf.utils.logging_utils",
    "openrlhf.utils.seqlen_balancing",
)
bare("openrlhf", "openrlhf.models", "openrlhf.trainer", "openrlhf.trainer.ppo_utils")
from openrlhf.models.loss import PolicyLoss, ValueLoss, aggregate_loss  # noqa: E402
from openrlhf.models.utils import compute_approx_kl  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker as Maker  # noqa: E402

Tensor.float = Tensor.double  # type: ignore[method-assign]
PRESETS = (
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gspo",
    "dual_clip",
)
EPS = "it adds 1e-9 to the std, the case 1e-4, the paper nothing"
WHITEN = "it whitens by the population's variance, the case by the sample's"
EXPECTED = {
    **{f"paper/{name}": EPS for name in ("grpo", "dapo", "gspo", "dual_clip")},
    "advantage/group_zscore": EPS,
    "advantage/group_zscore_population": "its std is the sample's",
    "advantage/group_zscore_tied": "it divides the rounding of the mean by 1e-9",
    "advantage/gae": "it discounts through the tool's token, with a value of 0 there",
    "advantage/kl_in_reward_by_completion": "its KL comes after the baseline, by token",
    "whiten/token_zscore": WHITEN,
    "correction/geometric_mask": "completions that are left keep the weight of each token",
    "paper/rloo": "its KL comes after the baseline; the paper takes it from the response's reward before",
    "paper/reinforce_pp": WHITEN,
    "paper/reinforce_pp_baseline": WHITEN,
}
ESTIMATORS = {
    ("group_zscore", None): "group_norm",
    ("group_centered", None): "dr_grpo",
    ("group_centered", "token_zscore"): "reinforce_baseline",
    ("leave_one_out", None): "rloo",
    ("reward", "token_zscore"): "reinforce",
    ("discounted_return", "token_zscore"): "reinforce",
}


def advantages(case: Case) -> Tensor:
    """``compute_advantages_and_returns`` of one batch."""
    only_for(case, "openrlhf-0.11", PRESETS)
    axes = case["asks"]
    mask = mask_of(case)
    if axes["advantage"]["name"] == "gae" and not axes["advantage"].get("length_adaptive"):
        last = torch.nn.functional.one_hot((torch.arange(mask.shape[1]) * mask).argmax(-1), mask.shape[1])
        paid = last * tensor(case, "rewards")[:, None]
        return Maker.get_advantages_and_returns(
            None, tensor(case, "values"), paid, mask, 1.0, axes["advantage"]["lam"]
        )[0]
    name = ESTIMATORS.get((axes["advantage"]["name"], axes.get("whiten", {}).get("name")))
    if name is None:
        raise NotImplementedError
    kl = axes.get("kl", {})
    shaped = kl.get("place") == "reward"
    far = (
        compute_approx_kl(tensor(case, "old"), tensor(case, "ref"), kl_estimator="k1") if shaped else mask * 0
    )
    samples = group_size(case)
    settings = SimpleNamespace(estimator=name, gamma=axes["advantage"].get("gamma", 1.0), no_std_norm=False)
    arguments = SimpleNamespace(
        algo=SimpleNamespace(advantage=settings),
        rollout=SimpleNamespace(n_samples_per_prompt=samples),
        reward=SimpleNamespace(clip_range=None),
    )
    maker = SimpleNamespace(
        strategy=SimpleNamespace(args=arguments),
        advantage_estimator=name,
        kl_ctl=SimpleNamespace(value=kl["coef"] if shaped else 0.0),
    )
    maker.get_cumulative_returns = lambda *given: Maker.get_cumulative_returns(maker, *given)
    rewards = tensor(case, "rewards")
    batch = SimpleNamespace(
        rewards=rewards, index=list(range(len(rewards))), kl=far, action_mask=mask, info={}
    )
    (made,) = Maker.compute_advantages_and_returns(maker, [batch])
    return made.advantages


def loss(case: Case) -> dict[str, Any]:
    """PolicyLoss, and the terms that its actor adds."""
    only_for(case, "openrlhf-0.11", PRESETS)
    axes = case["asks"]
    if "value_loss" in axes:
        values = tensor(case, "new_values").requires_grad_()
        total = ValueLoss(axes["value_loss"].get("clip_value"))(
            values, tensor(case, "values"), tensor(case, "returns"), mask_of(case)
        )
        return with_gradient(total, values)
    if "preference" in axes or axes.get("nll") or axes.get("old") or axes.get("token_weights"):
        raise NotImplementedError
    within(axes, reduce=("token_mean", "sequence_mean"))
    if axes["reduce"].get("rows") == "all" or axes["reduce"].get("eps", 0.0) > 1e-8:
        raise NotImplementedError
    of_tokens = axes["reduce"]["name"] == "token_mean"
    mask = mask_of(case)
    new = tensor(case, "new").requires_grad_()
    rule = PolicyLoss(**clip(case), token_level_loss=of_tokens, **correction(axes.get("correction", [])))
    sampler = tensor(case, "sampler") if "correction" in axes else None
    total = rule(new, tensor(case, "old"), by_token(case), mask, sampler)[0]
    kl = axes.get("kl", {})
    if kl.get("place") == "loss":
        plain = kl["level"] == "token" and kl["to"] == "reference" and kl["gradient"] == "formula"
        if (
            not plain
            or kl["estimator"]["name"] not in ("k1", "k2", "k3")
            or kl.get("bound") not in (None, 10.0)
        ):
            raise NotImplementedError
        far = compute_approx_kl(new, tensor(case, "ref"), kl_estimator=kl["estimator"]["name"])
        total = total + kl["coef"] * aggregate_loss(far, mask, of_tokens)
    if "entropy" in axes:
        total = total - axes["entropy"]["coef"] * aggregate_loss(tensor(case, "entropy"), mask, of_tokens)
    return with_gradient(total, new)


def clip(case: Case) -> dict[str, Any]:
    """The settings of PolicyLoss for a clip; it has no other loss, and these presets get it as well."""
    axes = case["asks"]
    if case.get("preset") in ("reinforce", "rloo", "reinforce_pp", "reinforce_pp_baseline"):
        return {}
    within(axes, surrogate=("clip",), ratio=(None, "token", "sequence"))
    kind = "gspo" if axes.get("ratio", {}).get("name") == "sequence" else "ppo"
    rule = axes["surrogate"]
    bounds = {"clip_eps_low": rule["clip_low"], "clip_eps_high": rule["clip_high"]}
    return {**bounds, "dual_clip": rule.get("dual_clip"), "policy_loss_type": kind}


def correction(chosen: list[dict[str, Any]]) -> dict[str, Any]:
    """Its gate for the mismatch of the sampler."""
    if not chosen:
        return {}
    one = chosen[0]
    bounds = (one.get("low", 0.0), one.get("high", one.get("cap")))
    modes = {
        ("truncated", "token"): ("token", "clip"),
        ("masked", "token"): ("token", "mask"),
        ("geometric_mask", None): ("seq", "mask"),
    }
    mode = modes.get((one["name"], one.get("level")))
    if mode is None:
        raise NotImplementedError
    return {"is_correction_level": mode[0], "is_correction_mode": mode[1], "is_correction_threshold": bounds}

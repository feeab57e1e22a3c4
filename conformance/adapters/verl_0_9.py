"""verl 0.9.1: its advantage estimators, policy losses, KL and rollout corrections, called as they are.

    CONFORMANCE_PEER=FOLDER python conformance/run.py conformance/adapters/verl_0_9.py

FOLDER is the unpacked wheel; needs torch, numpy, transformers and packaging. Settings of a case become those
that a user of verl would give; what has no setting keeps verl's default (dual clip 3, KL bound 10).
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from shared import Anything, Case, bare, by_token, mask_of, only_for, peer, tensor, with_gradient, within

OTHERS = (
    "ray",
    "tensordict",
    "omegaconf",
    "verl.protocol",
    "verl.trainer.config",
    "verl.trainer.config.algorithm",
)
peer("verl", *OTHERS, "verl.workers", "verl.workers.config", "verl.workers.config.actor", "verl.utils.device")
bare("verl", "verl.trainer", "verl.trainer.ppo", "verl.utils")
sys.modules["verl.utils.device"].get_device_name = lambda: "cpu"  # type: ignore[attr-defined]


class ActorConfig(SimpleNamespace):
    """The settings that a policy loss reads."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


sys.modules["verl.workers.config"].ActorConfig = ActorConfig  # type: ignore[attr-defined]
sys.modules["verl.trainer.config"].AlgoConfig = type("AlgoConfig", (Anything,), {})  # type: ignore[attr-defined]
from verl.utils import groupwise  # noqa: E402

for name in ("as_torch_index", "group_mean_std"):
    setattr(sys.modules["verl.utils"], name, getattr(groupwise, name))
import verl.trainer.ppo.core_algos as core  # noqa: E402
import verl.trainer.ppo.rollout_corr_helper as mismatch  # noqa: E402

PRESETS = (
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "remax",
    "opo",
    "gpg",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gdpo",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "dro",
    "dual_clip",
)
EPS = "it adds 1e-6 to the std, the case 1e-4, the paper nothing"
CLIP = "it chooses the loss apart from the estimator: PPO's clip by default, the paper has none"
SINGLE = "a number of float32: "
EXPECTED = {
    **{f"paper/{name}": EPS for name in ("grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "dual_clip")},
    "advantage/group_zscore": EPS,
    "advantage/group_zscore_population": "its std is the sample's",
    "advantage/group_zscore_lone": "a completion without siblings gets its reward",
    "advantage/pass_at_k": "its grpo_passk is another paper's, 2503.19595: the best gets r_max - r_2nd",
    "whiten/token_zscore_floor": "it adds 1e-8 to the sample's variance",
    "whiten/valid_group_scale": "it counts rewards other than 0, the paper groups with a signal",
    "ratio/geometric_clipped": "its geo_mean is always a mean over rows, the untrained one included",
    "surrogate/sapo": "its SAPO is always a mean over completions",
    "surrogate/kl_on_selected": "it selects by the current log-probs and rounds .2 of 6 tokens down to 1",
    "correction/geometric_mask": "what it rejects leaves the mask, so that the mean divides by fewer tokens",
    "paper/rloo": CLIP,
    "paper/remax": CLIP,
    "paper/opo": CLIP,
    "paper/gpg": "it counts rewards other than 0, and its loss is -A log pi: the same gradient",
    "paper/gdpo": "its second step is over tokens, the authors' TRL fork's over completions",
    "verl-0.9.1/gpg": SINGLE + "its scale",
    "verl-0.9.1/gdpo": SINGLE + "its rewards",
    "verl-0.9.1/grpo_lone": SINGLE + "1 + 1e-6, the divisor of a completion without siblings",
}
MEANS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum",
    "constant_length": "seq-mean-token-sum-norm",
    "token_sum": "token-sum",
}
ESTIMATORS = {
    ("group_zscore", None): "grpo",
    ("group_centered", None): "grpo",
    ("group_centered", "token_zscore"): "reinforce_plus_plus_baseline",
    ("group_centered", "valid_group_scale"): "gpg",
    ("leave_one_out", None): "rloo",
    ("length_weighted", None): "opo",
    ("greedy_baseline", None): "remax",
    ("component_zscore", "sample_zscore"): "gdpo",
    ("component_zscore", "token_zscore"): "gdpo",
    ("reward", "token_zscore"): "reinforce_plus_plus",
    ("discounted_return", "token_zscore"): "reinforce_plus_plus",
    ("pass_at_k", None): "grpo_passk",
    ("optimal_token_baseline", None): "optimal_token_baseline",
    ("gae", None): "gae",
}
NO_CLIP = ("rloo", "remax", "opo", "reinforce_pp", "reinforce_pp_baseline")
"""Presets for which verl has an estimator and no loss of its own: they get PPO's clip."""


def advantages(case: Case) -> Tensor:
    """The estimator of the same name, from rewards at the last tokens."""
    only_for(case, "verl-0.9.1", PRESETS)
    axes = case["asks"]
    whiten = axes.get("whiten", {}).get("name")
    name = ESTIMATORS.get((axes["advantage"]["name"], whiten))
    if name is None or axes["advantage"].get("length_adaptive"):
        raise NotImplementedError
    mask = mask_of(case)
    paid = at_last(tensor(case, "rewards"), mask)
    if axes.get("kl", {}).get("place") == "reward":
        paid = core.compute_rewards(paid, tensor(case, "old"), tensor(case, "ref"), axes["kl"]["coef"]) * mask
    given: dict[str, Any] = {
        "token_level_rewards": paid,
        "response_mask": mask,
        "index": np.array(case["inputs"]["group"]),
    }
    if name == "grpo":
        given["norm_adv_by_std_in_grpo"] = axes["advantage"]["name"] == "group_zscore"
    if name == "grpo_passk":
        given["config"] = {"norm_adv_by_std_in_grpo": True}
    if name == "remax":
        given["reward_baselines"] = torch.full_like(mask[:, 0], case["inputs"]["greedy_reward"])
    if name == "reinforce_plus_plus":
        given["config"] = SimpleNamespace(gamma=axes["advantage"].get("gamma", 1.0))
    if name == "optimal_token_baseline":
        given |= {"old_log_probs": tensor(case, "old"), "sum_pi_squared": tensor(case, "old_collision")}
    if name == "gae":
        settings = axes["advantage"]
        _, returns = core.compute_gae_advantage_return(
            paid, tensor(case, "values"), mask, settings["gamma"], settings["lam"]
        )
        return returns - tensor(case, "values")  # before it whitens
    if name == "gdpo":
        return gdpo(case, given)
    return core.get_adv_estimator_fn(name)(**given)[0]


def gdpo(case: Case, given: dict[str, Any]) -> Tensor:
    """Its loop over rewards, each at the last token; its own reading of them is float32."""
    parts = case["inputs"]["components"]
    names = [f"reward_{k}" for k in range(len(parts))]
    mask = given["response_mask"]
    batch = {"prompts": torch.zeros(len(mask), 0), "attention_mask": mask.long()}
    config = {"gdpo_reward_keys": names, "gdpo_reward_weights": case["inputs"]["weights"]}
    return core.compute_gdpo_outcome_advantage(
        **given, config=config, non_tensor_batch=dict(zip(names, parts, strict=True)), batch=batch
    )[0]


def at_last(rewards: Tensor, mask: Tensor) -> Tensor:
    """(N,) -> (N, T): each reward at the last trained token, or at the first place if there is none."""
    places = torch.arange(mask.shape[1]) * mask
    last = places.argmax(-1, keepdim=True)
    return torch.zeros_like(mask).scatter(1, last, rewards[:, None])


def loss(case: Case) -> dict[str, Any]:
    """A policy loss, its aggregation, and the terms that its actor adds."""
    only_for(case, "verl-0.9.1", PRESETS)
    axes = case["asks"]
    if "value_loss" in axes:
        return of_critic(case)
    if "preference" in axes or axes.get("nll") or axes.get("old") or axes.get("token_weights"):
        raise NotImplementedError
    within(axes, reduce=MEANS)
    name, settings = policy_loss(case)
    mask = mask_of(case)
    new = tensor(case, "new").requires_grad_()
    mean = MEANS[axes["reduce"]["name"]]
    batch = {"loss_scale_factor": axes["reduce"].get("length") or case["inputs"]["max_tokens"]}
    if axes["reduce"].get("rows") == "all" or axes["reduce"].get("eps", 0.0) > 1e-8:
        raise NotImplementedError
    config = ActorConfig(**settings, global_batch_info=batch)
    weights, trained = correction(axes.get("correction", []), case, mask)
    total, _ = core.get_policy_loss_fn(name)(
        tensor(case, "old"), new, by_token(case), trained, mean, config, weights
    )
    if axes.get("kl", {}).get("place") == "loss":
        total = total + axes["kl"]["coef"] * core.agg_loss(kl(axes["kl"], case, new), mask, mean, **batch)
    if "entropy" in axes:
        total = total - axes["entropy"]["coef"] * core.agg_loss(tensor(case, "entropy"), mask, mean, **batch)
    return with_gradient(total, new)


def policy_loss(case: Case) -> tuple[str, dict[str, Any]]:  # noqa: C901 - a case for each of its losses
    """Return the name in verl's registry, and the settings of its actor."""
    axes = case["asks"]
    ratio, surrogate = axes.get("ratio", {"name": "token"}), axes["surrogate"]
    kind = surrogate["name"]
    bounds = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    if case.get("preset") in NO_CLIP:
        return "vanilla", bounds
    if case.get("preset") == "gpg":
        return "gpg", bounds
    if kind == "clip" and ratio["name"] in ("token", "sequence", "sequence_token"):
        bounds |= {"clip_ratio_low": surrogate["clip_low"], "clip_ratio_high": surrogate["clip_high"]}
        if surrogate.get("dual_clip"):
            bounds["clip_ratio_c"] = surrogate["dual_clip"]
        return "vanilla" if ratio["name"] == "token" else "gspo", bounds
    if kind == "unclipped" and ratio["name"] == "geometric_clipped":
        return "geo_mean", dict.fromkeys(bounds, ratio["clip_log"])
    if kind == "unclipped" and ratio["name"] == "token":
        return "vanilla", {**dict.fromkeys(bounds, 1e3), "clip_ratio_c": 1e3}
    if kind == "unclipped" and ratio["name"] in ("sequence", "sequence_token"):
        return "gspo", dict.fromkeys(bounds, 1e3)
    if kind == "cispo" and ratio["name"] == "token":
        return "cispo", {
            **bounds,
            "clip_ratio_low": 1 - surrogate["floor"],
            "clip_ratio_high": surrogate["cap"] - 1,
        }
    if kind == "sapo":
        return "sapo", {"tau_pos": surrogate["tau_up"], "tau_neg": surrogate["tau_down"]}
    if kind == "dro":
        return "dro", {"policy_loss": SimpleNamespace(dro_beta=surrogate["beta"])}
    if kind.startswith("divergence_mask"):
        return "dppo_" + kind[-2:], {
            **dict.fromkeys(bounds, surrogate["threshold"]),
            "clip_ratio_c": surrogate["cap"],
        }
    if kind == "kl_on_selected":
        fraction = axes["select_tokens"]["fraction"]
        return "kl_cov", {
            "policy_loss": SimpleNamespace(kl_cov_ratio=fraction, ppo_kl_coef=surrogate["coef"])
        }
    raise NotImplementedError


def kl(axis: dict[str, Any], case: Case, new: Tensor) -> Tensor:
    """Its penalty of each token."""
    names = {"k1": "k1", "k2": "k2", "k3": "low_var_kl", "absolute": "abs"}
    plain = axis["level"] == "token" and axis["to"] == "reference" and axis.get("bound") in (None, 10.0)
    plus = {"formula": "", "straight_through": "+"}.get(axis["gradient"])
    estimator = axis["estimator"]["name"]
    if not plain or plus is None or estimator not in names:
        raise NotImplementedError
    name = "k3+" if plus else names[estimator]
    return core.kl_penalty(new, tensor(case, "ref"), name)


def correction(chosen: list[dict[str, Any]], case: Case, mask: Tensor) -> tuple[Tensor | None, Tensor]:
    """Its weights for the sampler's mismatch, and the mask that its rejection leaves."""
    if not chosen:
        return None, mask
    one = chosen[0]
    far = tensor(case, "old") - tensor(case, "sampler")
    if one["name"] == "geometric_mask":
        bounds = f"{one['low']}_{one['high']}"
        left, _ = mismatch.compute_rollout_rejection_mask(far, mask, "seq_mean_k1", bounds)
        return None, left
    threshold = {"truncated": one.get("cap"), "masked": f"{one.get('low')}_{one.get('high')}"}.get(
        one["name"]
    )
    if threshold is None:
        raise NotImplementedError
    weights, _ = mismatch.compute_rollout_correction_weights(far, mask, one["level"], threshold)
    return weights, mask


def of_critic(case: Case) -> dict[str, Any]:
    """Its clipped value loss; without a clip, a clip that is never reached."""
    values = tensor(case, "new_values").requires_grad_()
    clip = case["asks"]["value_loss"].get("clip_value", 1e9)
    total, _ = core.compute_value_loss(
        values, tensor(case, "returns"), tensor(case, "values"), mask_of(case), clip
    )
    return with_gradient(total, values)

"""NeMo-RL 0.7.0 (81aa43dd): its advantage estimators, ClippedPGLossFn and MseValueLossFn, called as they are.

    CONFORMANCE_PEER=FOLDER python conformance/run.py conformance/adapters/nemo_rl_0_7.py

FOLDER is a checkout; needs torch, transformers and pydantic.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from shared import Case, bare, by_token, mask_of, only_for, peer, tensor, with_gradient, within

peer(
    "nemo_rl",
    "nemo_rl.algorithms.x_token",
    "nemo_rl.algorithms.x_token.loss_utils",
    "nemo_rl.data",
    "nemo_rl.data.chat_templates",
    "nemo_rl.distributed",
    "nemo_rl.distributed.batched_data_dict",
    "nemo_rl.distributed.model_utils",
    "nemo_rl.models",
    "nemo_rl.models.dtensor",
    "nemo_rl.models.dtensor.parallelize",
    "nemo_rl.models.policy",
    "nemo_rl.utils",
    "nemo_rl.utils.logger",
)
bare("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss")
sys.modules["nemo_rl.distributed.batched_data_dict"].BatchedDataDict = dict  # type: ignore[attr-defined]
import nemo_rl.algorithms.loss.loss_functions as losses  # noqa: E402

sys.modules["nemo_rl.algorithms.loss"].ClippedPGLossConfig = losses.ClippedPGLossConfig  # type: ignore[attr-defined]
import nemo_rl.algorithms.advantage_estimator as estimators  # noqa: E402

torch.set_default_dtype(torch.float64)  # it multiplies by matrices of the default
PRESETS = (
    "grpo",
    "dapo",
    "rloo",
    "gdpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gspo",
    "cispo",
    "dual_clip",
)
EPS = "it adds 1e-6 to the std, the case 1e-4, the paper nothing"
LONE = "a completion without siblings is its own baseline: 0"
WHITEN = "it whitens by the population's variance, the case by the sample's"
SCORE = "its KL has the gradient of pi / sg(pi) x the value"
COUNTS = "it adds 1e-8 to a completion's tokens in the ratio and to the number of completions"
EXPECTED = {
    **{f"paper/{name}": EPS for name in ("dapo", "gspo", "cispo", "gdpo", "dual_clip")},
    **{f"kl/{name}": SCORE for name in ("k1", "k2", "k3")},
    "advantage/group_zscore": EPS,
    "advantage/group_zscore_population": "its std is the sample's",
    "advantage/group_zscore_lone": EPS,
    "advantage/group_zscore_lone_reward": LONE,
    "advantage/leave_one_out_lone": LONE,
    "whiten/token_zscore": WHITEN,
    "correction/geometric_mask": "completions that are left keep the weight of each token",
    "paper/rloo": "its KL is not in the reward of this estimator",
    "paper/grpo": f"{EPS}; {SCORE}",
    "paper/reinforce_pp": f"{WHITEN}; a token bears its own KL, not that of later ones",
    "paper/reinforce_pp_baseline": f"{WHITEN}; {SCORE}",
    "nemo-rl-0.7/gspo": COUNTS,
    "nemo-rl-0.7/gspo_untrained": COUNTS,
}
GRPO = {
    "group_zscore": {"use_leave_one_out_baseline": False, "normalize_rewards": True},
    "leave_one_out_zscore": {"use_leave_one_out_baseline": True, "normalize_rewards": True},
    "group_centered": {"use_leave_one_out_baseline": False, "normalize_rewards": False},
    "leave_one_out": {"use_leave_one_out_baseline": True, "normalize_rewards": False},
}
GDPO = {"component_zscore": False, "component_leave_one_out": True}


def advantages(case: Case) -> Tensor:
    """The estimator of the same name; its baseline of siblings where a case asks for that."""
    only_for(case, "nemo-rl-0.7", PRESETS)
    axes = case["asks"]
    name = axes["advantage"]["name"]
    whiten = axes.get("whiten", {}).get("name")
    mask = mask_of(case)
    prompts = torch.tensor(case["inputs"]["group"])[:, None]
    given = (prompts, tensor(case, "rewards"), mask)
    in_reward = axes.get("kl", {}).get("place") == "reward"
    config = losses.ClippedPGLossConfig(
        use_kl_in_reward=in_reward,
        reference_policy_kl_penalty=axes["kl"]["coef"] if in_reward else 0.0,
        reference_policy_kl_type="k1",
    )
    if name == "gae":
        settings = {
            "gae_lambda": axes["advantage"]["lam"],
            "gae_gamma": axes["advantage"]["gamma"],
            "normalize_advantages": False,
            "gae_lambda_value": None,
            "gae_lambda_policy": None,
            "length_adaptive_alpha": axes["advantage"].get("length_adaptive") or 0.0,
        }
        return estimators.GeneralizedAdvantageEstimator(settings, config).compute_advantage(
            *given, values=tensor(case, "values")
        )[0]
    if whiten == "token_zscore" and name in ("reward", "group_centered"):
        found = estimators.ReinforcePlusPlusAdvantageEstimator({"minus_baseline": name != "reward"}, config)
        far = (
            {"logprobs_policy": tensor(case, "old"), "logprobs_reference": tensor(case, "ref")}
            if in_reward
            else {}
        )
        return found.compute_advantage(*given, **far)
    if whiten == "sample_zscore" and name in GDPO:
        settings = {"use_leave_one_out_baseline": GDPO[name], "normalize_rewards": True}
        parts = tensor(case, "components")
        batch = {f"reward{k + 1}": part for k, part in enumerate(parts)}
        return estimators.GDPOAdvantageEstimator(settings, config).compute_advantage(
            *given, repeated_batch=batch
        )
    if whiten is None and name in GRPO and not (in_reward and case["id"].startswith("advantage/")):
        return estimators.GRPOAdvantageEstimator(GRPO[name], config).compute_advantage(*given)
    if whiten is None and name == "reward" and not in_reward:
        raw = estimators.RawRewardAdvantageEstimator({"normalize_advantages": False}, config)
        return raw.compute_advantage(*given)[0]
    raise NotImplementedError


def loss(case: Case) -> dict[str, Any]:
    """ClippedPGLossFn of one batch; it shifts everything but the log-probs by a token."""
    only_for(case, "nemo-rl-0.7", PRESETS)
    axes = case["asks"]
    if "value_loss" in axes:
        return of_critic(case)
    if "preference" in axes or "entropy" in axes or axes.get("old") or axes.get("token_weights"):
        raise NotImplementedError
    within(axes, reduce=("token_mean", "sequence_mean"))
    if axes["reduce"].get("rows") == "all" or axes["reduce"].get("eps", 0.0) > 1e-8:
        raise NotImplementedError
    settings = {"token_level_loss": axes["reduce"]["name"] == "token_mean"}
    settings |= rule(case) | kl(axes.get("kl", {})) | correction(axes.get("correction", []))
    settings["positive_example_nll_weight"] = axes.get("nll", 0.0)
    mask = mask_of(case)
    new = tensor(case, "new").requires_grad_()
    old, ref = tensor(case, "old"), tensor(case, "ref")
    shifted = {
        "token_mask": mask,
        "advantages": by_token(case),
        "prev_logprobs": old,
        "generation_logprobs": tensor(case, "sampler"),
        "reference_policy_logprobs": ref,
    }
    data = {name: torch.nn.functional.pad(values, (1, 0)) for name, values in shifted.items()}
    data["sample_mask"] = mask.any(-1).double()
    data["rewards"] = torch.tensor(case["inputs"].get("correct", [0] * len(mask))).double()
    function = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(**settings))
    total, _ = function(new, data, data["sample_mask"].sum(), mask.sum())
    return with_gradient(total, new)


def rule(case: Case) -> dict[str, Any]:
    """The settings of its policy term."""
    axes = case["asks"]
    ratio, surrogate = axes.get("ratio", {}).get("name", "token"), axes["surrogate"]
    kind = surrogate["name"]
    if kind == "clip" and ratio in ("token", "sequence"):
        bounds = {"ratio_clip_min": surrogate["clip_low"], "ratio_clip_max": surrogate["clip_high"]}
        return {
            **bounds,
            "ratio_clip_c": surrogate.get("dual_clip"),
            "sequence_level_importance_ratios": ratio == "sequence",
        }
    if kind == "unclipped" and ratio == "token":
        return {"ratio_clip_min": 1e3, "ratio_clip_max": 1e3}
    if kind == "unclipped" and ratio == "on_policy":
        return {"force_on_policy_ratio": True}
    if kind == "cispo" and ratio == "token" and surrogate["cap"] == surrogate["floor"] == 1.0:
        return {"disable_ppo_ratio": True}  # -A log pi
    if kind == "cispo" and ratio == "token":
        return {
            "use_cispo": True,
            "ratio_clip_min": 1 - surrogate["floor"],
            "ratio_clip_max": surrogate["cap"] - 1,
        }
    raise NotImplementedError


def kl(axis: dict[str, Any]) -> dict[str, Any]:
    """The settings of its KL, whose gradient is always that of pi / sg(pi) times the value."""
    if axis.get("place") != "loss":
        return {"reference_policy_kl_penalty": 0.0}
    plain = (
        axis["level"] == "token" and axis["to"] == "reference" and axis["gradient"] in ("formula", "score")
    )
    if (
        not plain
        or axis["estimator"]["name"] not in ("k1", "k2", "k3")
        or axis.get("bound") not in (None, 10.0)
    ):
        raise NotImplementedError
    return {
        "reference_policy_kl_penalty": axis["coef"],
        "reference_policy_kl_type": axis["estimator"]["name"],
    }


def correction(chosen: list[dict[str, Any]]) -> dict[str, Any]:
    """Its weights for the sampler's mismatch."""
    if not chosen:
        return {}
    one = chosen[0]
    kinds = {
        ("truncated", "token"): ("tis", one.get("cap"), None),
        ("masked", "token"): ("icepop", one.get("high"), one.get("low")),
        ("geometric_mask", None): ("seq-mask-tis", one.get("high"), one.get("low")),
        ("decoupled", None): (None, None, None),
    }
    if (one["name"], one.get("level")) not in kinds:
        raise NotImplementedError
    kind, high, low = kinds[one["name"], one.get("level")]
    return {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }


def of_critic(case: Case) -> dict[str, Any]:
    values = tensor(case, "new_values").requires_grad_()
    mask = mask_of(case)
    data = {"token_mask": mask, "sample_mask": torch.ones(len(mask)), "returns": tensor(case, "returns")}
    data["values"] = tensor(case, "values")
    clip = case["asks"]["value_loss"].get("clip_value")
    function = losses.MseValueLossFn(losses.MseValueLossConfig(cliprange=clip))
    return with_gradient(function(values, data, torch.ones(()), mask.sum())[0], values)

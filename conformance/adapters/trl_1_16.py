"""TRL 1.16: the advantages and losses of its trainers' own methods, on a stand-in that holds their settings.

    python conformance/run.py conformance/adapters/trl_1_16.py      # where TRL is installed

Log-probs are given instead of a model. The lines that make advantages are no function: they are cut from the
source of the installed TRL and run.
"""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
import torch
from torch import Tensor
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import nanstd

sys.path.insert(0, str(Path(__file__).parent))
from shared import Case, by_token, group_size, mask_of, only_for, tensor, with_gradient

PRESETS = (
    "grpo",
    "dr_grpo",
    "dapo",
    "lite_ppo",
    "rloo",
    "gspo",
    "luspo",
    "gmpo",
    "cispo",
    "sapo",
    "vespo",
    "gdpo",
    "intellect_2",
)
ROWS = "its mean over completions counts those of which nothing is trained"
KL_GRADIENT = (
    "its k3 has the gradient of ratio x k3 by default (use_bias_correction_kl), the paper's that of k3"
)
EXPECTED = {
    "advantage/group_zscore_population": "its std is the sample's",
    "ratio/geometric_clipped": "its GMPO is always a mean over completions, the untrained one included",
    "surrogate/sapo": "its SAPO is always a mean over completions, and the untrained one counts",
    "reduce/sequence_mean": ROWS,
    "reduce/constant_length": ROWS,
    "term/entropy_by_completion": "its entropy bonus is a mean over tokens whatever the loss's mean, and "
    + ROWS,
    "weight/top_entropy_rounded": "its quantile interpolates: 2 of 6 tokens where .24 of 6 rounds to 1",
    "preference/dpo_smoothed": "its sigmoid loss has no label smoothing",
    "preference/ipo_summed": "it averages by token, as the authors",
    "paper/rloo": "its loss clips the response's ratio; the paper has none",
    "paper/grpo": KL_GRADIENT,
    "paper/intellect_2": KL_GRADIENT,
    "paper/sapo": "its temperature 1.05 is float32",
}
OFF = 1e3
"""A clip that never acts."""
KINDS = {
    "dpo": "sigmoid",
    "robust_dpo": "robust",
    "hinge": "hinge",
    "ipo": "ipo",
    "exo": "exo_pair",
    "nca": "nca_pair",
    "sppo": "sppo_hard",
    "apo_zero": "apo_zero",
    "apo_down": "apo_down",
    "ln_dpo": "sigmoid_norm",
    "mpo": ["sigmoid", "bco_pair", "sft"],
}
SCALES = {
    ("group_zscore", None): ("sum_then_normalize", "group"),
    ("group_centered", None): ("sum_then_normalize", "none"),
    ("group_centered", "batch_std"): ("sum_then_normalize", "batch"),
    ("component_zscore", "sample_zscore"): ("normalize_then_sum", "group"),
}


def advantages(case: Case) -> Tensor:
    """GRPOTrainer's or RLOOTrainer's lines, on rewards by function."""
    only_for(case, "trl-1.16", PRESETS)
    axes = case["asks"]
    name = (axes["advantage"]["name"], axes.get("whiten", {}).get("name"))
    kl = axes.get("kl", {})
    size = group_size(case)
    mask = mask_of(case)
    rewards = tensor(case, "rewards")[:, None]
    scope = {
        "num_generations": size,
        "device": "cpu",
        "torch": torch,
        "nanstd": nanstd,
        "gather": lambda x: x,
    }
    trainer = SimpleNamespace(reward_clip_range=None, normalize_advantages=False, reward_funcs="a", beta=0.0)
    if name == ("leave_one_out", None) and kl.get("level", "completion") == "completion":
        trainer.beta = kl.get("coef", 0.0) if kl.get("place") == "reward" else 0.0
        if trainer.beta:
            scope |= {"old_per_token_logps": tensor(case, "old"), "ref_per_token_logps": tensor(case, "ref")}
        scope["completion_mask"] = mask
        lines = between(
            RLOOTrainer._generate_and_score_completions,  # noqa: SLF001
            "    # Apply weights to each reward function's output and sum",
            "    # Unscorable completions carry no",
        )
    elif (
        name in SCALES
        and kl.get("place") != "reward"
        and axes.get("whiten", {}).get("of", "rewards") == "rewards"
    ):
        trainer.multi_objective_aggregation, trainer.scale_rewards = SCALES[name]
        if name[0] == "component_zscore":
            rewards = tensor(case, "components").T
            trainer.reward_funcs = "ab"
        lines = between(
            GRPOTrainer._generate_and_score_completions,  # noqa: SLF001
            '    if self.multi_objective_aggregation == "sum_then_normalize"',
            "    # Unscorable completions (every reward",
        )
    else:
        raise NotImplementedError
    trainer.reward_weights = torch.tensor(
        case["inputs"].get("weights", [1.0]) if len(rewards.T) > 1 else [1.0]
    ).double()
    scope |= {"self": trainer, "rewards_per_func": rewards, "unscorable_mask": rewards.isnan().all(1)}
    torch.set_default_dtype(torch.float64)  # the factor n / (n - 1) of its std is of two whole numbers
    try:
        exec(lines, scope)  # noqa: S102 - TRL's own
    finally:
        torch.set_default_dtype(torch.float32)
    return scope["advantages"].nan_to_num(0.0)[:, None].expand(mask.shape)


def between(method: Any, first: str, after: str) -> str:
    """Return the lines of a method from one text up to another."""
    source = textwrap.dedent(inspect.getsource(method))
    return textwrap.dedent(source[source.index(first) : source.index(after)])


def loss(case: Case) -> dict[str, Any]:
    """``_compute_loss`` of the trainer that has the loss, under the settings of the case."""
    only_for(case, "trl-1.16", PRESETS)
    axes = case["asks"]
    if "preference" in axes:
        return offline(axes["preference"], case)
    if "value_loss" in axes or axes.get("nll") or axes.get("old"):
        raise NotImplementedError
    trainer, settings = policy(axes)
    kl = axes.get("kl", {})
    if kl.get("place") == "loss":
        plain = kl["level"] == "token" and kl["to"] == "reference" and kl.get("bound") is None
        if kl["estimator"]["name"] != "k3" or not plain or kl["gradient"] not in ("formula", "ratio"):
            raise NotImplementedError
        # A user who takes the paper's coefficient gets the gradient of ratio x k3 by default.
        default = "framework" in case or case["id"].startswith("paper/")
        settings |= {"beta": kl["coef"], "use_bias_correction_kl": default or kl["gradient"] == "ratio"}
    settings |= extras(axes, case)
    return computed(trainer, settings, case)


def policy(axes: Case) -> tuple[type, dict[str, Any]]:
    """Return the trainer and its settings of ratio, clip and mean."""
    ratio, rule, mean = axes.get("ratio", {"name": "token"}), axes["surrogate"], axes["reduce"]["name"]
    kind = (ratio["name"], rule["name"])
    bounds = {"epsilon_low": rule.get("clip_low", OFF), "epsilon_high": rule.get("clip_high", OFF)}
    of_token = {"token_mean": "dapo", "sequence_mean": "grpo", "constant_length": "dr_grpo"}
    if rule["name"] in ("clip", "unclipped") and ratio["name"] in ("token", "sequence"):
        level = {"importance_sampling_level": ratio["name"], "delta": rule.get("dual_clip")}
        if mean == "sequence_sum" and ratio["name"] == "sequence":
            return GRPOTrainer, {**bounds, **level, "loss_type": "luspo"}
        if mean in of_token and not axes["reduce"].get("length") and not axes["reduce"].get("eps"):
            return GRPOTrainer, {**bounds, **level, "loss_type": of_token[mean]}
    if kind == ("completion", "clip") or (kind == ("on_policy", "unclipped") and mean == "sequence_sum"):
        clip = bounds if rule["name"] == "clip" else {"epsilon_low": 0.2, "epsilon_high": 0.2}
        return RLOOTrainer, clip
    if kind == ("geometric_clipped", "unclipped"):
        return GMPOTrainer, {"epsilon_low": ratio["clip_log"], "epsilon_high": ratio["clip_log"]}
    if kind == ("token", "cispo") and mean == "token_mean" and not rule["floor"]:
        return GRPOTrainer, {"loss_type": "cispo", "epsilon_high": rule["cap"]}
    if kind == ("token", "sapo"):
        taus = {"sapo_temperature_pos": rule["tau_up"], "sapo_temperature_neg": 1.05}
        return GRPOTrainer, {"loss_type": "sapo", **taus}
    if kind == ("completion", "vespo") and mean == "token_mean":
        return GRPOTrainer, {"loss_type": "vespo"}
    raise NotImplementedError


def extras(axes: Case, case: Case) -> dict[str, Any]:
    """Return the settings of masks and of the bonus."""
    found: dict[str, Any] = {}
    if "entropy" in axes:
        found["entropy_coef"] = axes["entropy"]["coef"]
    if "select_tokens" in axes or axes.get("token_weights"):
        if axes.get("select_tokens", {}).get("name") != "top_entropy":
            raise NotImplementedError
        found["top_entropy_quantile"] = axes["select_tokens"]["fraction"]
    if axes.get("correction"):
        one = axes["correction"][0]
        if one["name"] != "off_policy_mask":
            raise NotImplementedError  # its weights are made where it samples
        found |= {"off_policy_mask_threshold": one["delta"], "sampler": tensor(case, "sampler")}
    return found


def computed(trainer: type, settings: dict[str, Any], case: Case) -> dict[str, Any]:
    """Call a trainer's ``_compute_loss`` on the given log-probs."""
    mask = mask_of(case)
    new = tensor(case, "new").requires_grad_()
    entropy = tensor(case, "entropy") if "entropy" in case["inputs"] else torch.zeros_like(mask)
    old = tensor(case, "old")
    sampler = settings.pop("sampler", None)
    arguments = {
        "use_bias_correction_kl": True,
        "delta": None,
        "steps_per_generation": 1,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    arguments |= {name: settings.pop(name) for name in list(settings) if name in arguments}
    defaults = {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "entropy_coef": 0.0,
    }
    same = lambda x, *_, **__: x
    stand_in = SimpleNamespace(
        **{**defaults, **settings},
        args=SimpleNamespace(**arguments),
        use_vllm=sampler is not None,
        use_adaptive_entropy=False,
        model=torch.nn.Identity().train(),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=same, reduce=same, pad_across_processes=same
        ),
        current_gradient_accumulation_steps=1,
        max_completion_length=case["inputs"]["max_tokens"],
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=settings.get("entropy_coef", 0.0) != 0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, entropy, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    stand_in.get_high_entropy_mask = lambda *given: GRPOTrainer.get_high_entropy_mask(stand_in, *given)
    none = torch.zeros(len(mask), 0, dtype=torch.int64)
    shares = tensor(case, "advantages")
    inputs = {
        "prompt_ids": none,
        "prompt_mask": none,
        "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "completion_mask": mask.long(),
        "advantages": shares if shares.ndim == 1 else by_token(case)[:, 0],
        "old_per_token_logps": old,
        "old_logps": (old * mask).sum(-1),
        "num_items_in_batch": mask.sum(),
    }
    if "ref" in case["inputs"]:
        inputs["ref_per_token_logps"] = tensor(case, "ref")
    if sampler is not None:
        inputs |= {"importance_sampling_ratio": torch.ones_like(mask), "sampling_per_token_logps": sampler}
    return with_gradient(trainer._compute_loss(stand_in, None, inputs), new)  # type: ignore[attr-defined] # noqa: SLF001


def offline(asked: Case, case: Case) -> dict[str, Any]:
    """The loss of pairs; those of DPOTrainer with its own method."""
    pairs = [tensor(case, name).requires_grad_() for name in ("chosen", "rejected")]
    lengths = [tensor(case, f"{name}_lengths") for name in ("chosen", "rejected")]
    means = [values / count for values, count in zip(pairs, lengths, strict=True)]
    device = SimpleNamespace(device="cpu")
    name = asked["name"]
    if name == "simpo":
        trainer = SimpleNamespace(alpha=0.0, loss_type="simpo", label_smoothing=0.0, accelerator=device)
        trainer.beta, trainer.simpo_gamma = asked["beta"], asked["gamma"]
        total = CPOTrainer.cpo_loss(trainer, *means)[0].mean()
    elif name == "orpo":
        trainer = SimpleNamespace(beta=asked["lam"], accelerator=device)
        total = (-means[0] - ORPOTrainer.odds_ratio_loss(trainer, *means)[0]).mean()
    elif name in KINDS:
        total = of_pairs(asked, case, pairs)
    else:
        raise NotImplementedError
    return {"loss": total.detach(), "gradient": torch.stack(torch.autograd.grad(total, pairs))}


def of_pairs(asked: Case, case: Case, pairs: list[Tensor]) -> Tensor:
    """``DPOTrainer._compute_loss`` on pairs whose summed log-probs are given."""
    kinds = KINDS[asked["name"]]
    mixed = isinstance(kinds, list)
    weights = (
        [asked[f"{name}_weight"] for name in ("preference", "quality", "generation")] if mixed else [1.0]
    )
    lengths = torch.cat([tensor(case, f"{name}_lengths") for name in ("chosen", "rejected")])
    longest = int(lengths.max())
    mask = torch.nn.functional.pad((torch.arange(longest) < lengths[:, None]).long(), (1, 0))
    first = torch.nn.functional.one_hot(torch.zeros(len(lengths), dtype=torch.int64), longest)
    flat = torch.zeros(len(lengths), longest)
    outputs = SimpleNamespace(
        log_probs=torch.cat(pairs)[:, None] * first, entropy=flat, mean_logits=flat, is_top1=flat.bool()
    )
    stand_in = SimpleNamespace(
        model=torch.nn.Identity().eval(),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=kinds if mixed else [kinds],
        loss_weights=weights,
        use_weighting=False,
        beta=asked.get("beta", asked.get("tau")),
        label_smoothing=asked.get("label_smoothing", 0.0),
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "input_ids": torch.zeros(len(lengths), longest + 1, dtype=torch.int64),
        "completion_mask": mask,
        "ref_chosen_logps": tensor(case, "ref_chosen"),
        "ref_rejected_logps": tensor(case, "ref_rejected"),
    }
    return DPOTrainer._compute_loss(stand_in, lambda **_: outputs, inputs, return_outputs=False)  # noqa: SLF001

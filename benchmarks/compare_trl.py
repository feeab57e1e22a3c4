"""The same losses as TRL: its own methods and ours on the same made-up batch, loss and gradient.

    pip install 'covey[bench]'
    python benchmarks/compare_trl.py            # the table; exit code 1 if anything differs
    python benchmarks/compare_trl.py --write    # and keep it in benchmarks/results/compare_trl.md

TRL's methods are called as they are, on a stand-in for the trainer that holds the settings they read and
gives them log-probs instead of running a model. In float64. What is aligned, and how, is in the table:
what TRL calls epsilon_high under cispo is our cap; its eps of 1e-4 and its sample std are our defaults;
its means count completions without trained tokens, ours do where a config has TRL's names.
"""

from __future__ import annotations

import argparse
import datetime as dt
import inspect
import os
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
try:
    import trl
except ImportError:
    print("trl is not installed, nothing is compared; pip install 'covey[bench]' brings it")
    sys.exit(0)

import numpy as np
import torch
from torch import Tensor
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import nanstd

from covey.config.algorithm import build_algorithm
from covey.config.trl_loss import algorithm_of
from covey.learner.advantage import with_advantages
from covey.learner.batching import collate
from covey.objective import corrections, penalties, preference, ratios, reductions, surrogates, token_weights
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.bound import bind
from covey.objective.data import LossInputs
from covey.objective.loss import policy_loss
from covey.objective.penalties import KL, Entropy
from covey.objective.reductions import Totals
from covey.types import Completion, Component, Group, Problem
from covey_verify.types import Score

RESULT = Path(__file__).parent / "results/compare_trl.md"
AGREE = 1e-12
LIMIT = 9
LENGTHS = torch.tensor([7, 3, 5, 6, 1, 7])


def drawn(*shape: int, seed: int) -> Tensor:
    """Normal numbers, always the same."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


MASK = torch.arange(7) < LENGTHS[:, None]
OLD = -(drawn(6, 7, seed=1) * 0.7 - 0.3).exp()
NOW = OLD + 0.5 * drawn(6, 7, seed=2)
REF = OLD + 0.5 * drawn(6, 7, seed=3)
SAMPLER = OLD + 0.3 * drawn(6, 7, seed=4)
ENTROPY = drawn(6, 7, seed=5).abs()
ADVANTAGES = torch.tensor([1.2, -0.7, 0.0, 0.4, -1.1, 0.2], dtype=torch.float64)


@dataclass(frozen=True)
class Difference:
    """How far TRL and we are apart in one case."""

    case: str
    aligned: str
    loss: float
    gradient: float


# --- the loss types -------------------------------------------------------------------------------

PLAIN = replace(PRESETS["dr_grpo"], surrogate=bind(surrogates.clip, clip_low=0.2, clip_high=0.28))
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    **{kind: {"epsilon_high": 0.28} for kind in ("grpo", "dr_grpo", "dapo", "luspo")},
    "cispo": {"epsilon_high": 1.3},
    # TRL's where() makes float32 of the temperature 1.05.
    "sapo": {"sapo_temperature_neg": float(np.float32(1.05))},
    "vespo": {},
}
OURS: Mapping[str, Algorithm] = {
    kind: build_algorithm(algorithm_of({"loss_type": kind, "scale_rewards": False, **given}))
    for kind, given in SETTINGS.items()
}
"""What a config with TRL's names comes to."""
OURS = {**OURS, "bnpo": OURS["dapo"]}  # where one micro-batch is the whole update


def theirs(trainer: type, mask: Tensor = MASK, **settings: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient of a TRL trainer's own ``_compute_loss``."""
    logprobs, entropies = (x.clone().requires_grad_() for x in (NOW, ENTROPY))
    arguments = {
        "use_bias_correction_kl": False,
        "delta": None,
        "steps_per_generation": 1,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    weight = settings.pop("importance_sampling_ratio", None)
    given = {k: settings.pop(k) for k in list(settings) if k in arguments}
    stand_in = SimpleNamespace(
        **{
            "loss_type": "grpo",
            "importance_sampling_level": "token",
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "use_vllm": weight is not None,
            "use_adaptive_entropy": False,
            "entropy_coef": 0.0,
            **settings,
        },
        args=SimpleNamespace(**{**arguments, **given}),
        model=torch.nn.Identity().train(),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,  # noqa: ARG005
            pad_across_processes=lambda x, dim, pad_index: x,  # noqa: ARG005
        ),
        current_gradient_accumulation_steps=1,
        max_completion_length=LIMIT,
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=settings.get("entropy_coef", 0.0) != 0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    stand_in.get_high_entropy_mask = lambda *a: GRPOTrainer.get_high_entropy_mask(stand_in, *a)
    none = torch.zeros(6, 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": none,
        "prompt_mask": none,
        "completion_ids": torch.zeros(6, 7, dtype=torch.int64),
        "completion_mask": mask.long(),
        "advantages": ADVANTAGES,
        "old_per_token_logps": OLD,
        "old_logps": (OLD * mask).sum(-1),
        "ref_per_token_logps": REF,
        "num_items_in_batch": mask.sum(),
    }
    if weight is not None:
        inputs |= {"importance_sampling_ratio": weight, "sampling_per_token_logps": SAMPLER}
    loss = trainer._compute_loss(stand_in, None, inputs)  # noqa: SLF001
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def ours(algorithm: Algorithm, mask: Tensor = MASK, selected: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Loss and gradient of ours."""
    logprobs = NOW.clone().requires_grad_()
    trained = mask.any(-1)
    inputs = LossInputs(
        logprobs=logprobs,
        mask=mask,
        advantages=ADVANTAGES[:, None].expand(mask.shape),
        old_logprobs=OLD,
        totals=Totals(int(mask.sum()), int(trained.sum()), 2, LIMIT, rows=len(mask)),
        group_tokens=mask.sum(-1),
        sampler_logprobs=SAMPLER,
        ref_logprobs=REF,
        entropy=ENTROPY,
        selected=selected,
    )
    loss = policy_loss(algorithm, inputs).total
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the largest entry."""
    return float((a - b).abs().max() / b.abs().max())


def compared(case: str, aligned: str, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Difference:
    """TRL's (loss, gradient) against ours."""
    return Difference(case, aligned, apart(a[0], b[0]), apart(a[1], b[1]))


def loss_types() -> Iterator[Difference]:
    """Every loss type at both levels of the importance ratio, without and with a KL penalty."""
    for name, algorithm in OURS.items():
        for level, ratio in (("token", ratios.token), ("sequence", ratios.sequence)):
            if name == "vespo" and level == "sequence":
                continue  # TRL refuses it
            cap = {"epsilon_high": 1.3} if name == "cispo" else {}
            mine = algorithm if name == "vespo" else replace(algorithm, ratio=bind(ratio))
            settings = {"loss_type": name, "importance_sampling_level": level, **cap}
            note = {"cispo": "epsilon_high is our cap", "sapo": "tau 1.05 in float32"}.get(name, "")
            yield compared(f"{name}, {level}", note, theirs(GRPOTrainer, **settings), ours(mine))
            if name == "vespo":
                continue  # its response ratio would weigh the KL by another ratio than TRL's token one
            for correct, mode in ((False, "formula"), (True, "ratio")):
                chosen = replace(mine, kl=KL(bind(penalties.k3), coef=0.04, gradient=mode))
                got = theirs(GRPOTrainer, beta=0.04, use_bias_correction_kl=correct, **settings)
                yield compared(f"{name}, {level}, KL k3", f"KL gradient {mode}", got, ours(chosen))


def options() -> Iterator[Difference]:
    """TRL's other settings."""
    dapo = OURS["dapo"]
    dual = replace(dapo, surrogate=bind(surrogates.clip, clip_low=0.2, clip_high=0.28, dual_clip=1.5))
    yield compared(
        "dapo, delta 1.5",
        "delta is our dual_clip",
        theirs(GRPOTrainer, loss_type="dapo", delta=1.5),
        ours(dual),
    )
    selected = token_weights.top_entropy(ENTROPY, MASK, share=9 / 29)
    quantile = float((torch.sort(ENTROPY[MASK]).values < ENTROPY[selected].min()).double().mean())
    got = theirs(GRPOTrainer, loss_type="dapo", top_entropy_quantile=1 - quantile)
    masked = replace(dapo, token_weights=(bind(token_weights.selected_only),))
    yield compared(
        "dapo, top_entropy_quantile", "the same 9 of 29 tokens", got, ours(masked, selected=selected)
    )
    for name, algorithm in (("dapo", dapo), ("grpo", OURS["grpo"])):
        got = theirs(GRPOTrainer, loss_type=name, off_policy_mask_threshold=0.1)
        yield compared(
            f"{name}, off_policy_mask_threshold",
            "without vLLM: against old",
            got,
            ours(replace(algorithm, correction=(bind(without_sampler, delta=0.1),))),
        )
    mismatch = (OLD - SAMPLER) * MASK
    for name, level, weight, choice in (
        ("token_truncate", "token", mismatch.exp().clamp(max=1.2), bind(corrections.truncated, cap=1.2)),
        (
            "sequence_mask",
            "sequence",
            corrections.masked(mismatch, low=0.0, high=3.0, level="sequence"),
            bind(corrections.masked, low=0.0, high=3.0, level="sequence"),
        ),
    ):
        got = theirs(GRPOTrainer, loss_type="dapo", importance_sampling_ratio=weight)
        yield compared(f"dapo, vLLM correction {name}", level, got, ours(replace(dapo, correction=(choice,))))
    got = theirs(GRPOTrainer, loss_type="dapo", entropy_coef=0.1)
    bonus = replace(dapo, entropy=Entropy(coef=0.1))
    yield compared("dapo, entropy_coef", "token mean of the entropy", got, ours(bonus))

    mask = MASK & (torch.arange(6) != 3)[:, None]
    got, mine = theirs(GRPOTrainer, mask, loss_type="grpo"), ours(OURS["grpo"], mask)
    yield compared("grpo, one completion of 6 untrained", "6 rows count: rows all", got, mine)


def without_sampler(log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, delta: float) -> Tensor:
    """The off-policy mask where nothing is known of the sampler: a user's own function."""
    return corrections.off_policy_mask(log_ratio * 0, log_ratio, advantages, mask, delta=delta)


def other_trainers() -> Iterator[Difference]:
    """RLOO's completion-level clip and GMPO."""
    rloo = replace(PLAIN, ratio=bind(ratios.completion), reduce=bind(reductions.sequence_mean))
    yield compared("RLOOTrainer", "response ratio, clipped", theirs(RLOOTrainer), ours(rloo))
    got = theirs(GMPOTrainer, epsilon_low=0.4, epsilon_high=0.4)
    yield compared("GMPOTrainer", "", got, ours(PRESETS["gmpo"]))


# --- advantages -----------------------------------------------------------------------------------


def advantages_of_trl(aggregation: str, scale: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards (2, 12), their weights, and what the lines of TRL make of them, taken from its source."""
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))  # noqa: SLF001
    start = source.index('    if self.multi_objective_aggregation == "sum_then_normalize"')
    end = source.index("    advantages = torch.nan_to_num(advantages, nan=0.0)")
    components = drawn(2, 12, seed=6)
    components[0] = (components[0] > 0).double()
    components[:, 4:8] = 0.7
    components[1, 2] = torch.nan
    components[:, 9] = torch.nan
    shares = torch.tensor([1.0, 0.5], dtype=torch.float64)
    scope = {
        "self": SimpleNamespace(
            multi_objective_aggregation=aggregation,
            scale_rewards=scale,
            reward_weights=shares,
            reward_funcs="ab",
        ),
        "rewards_per_func": components.T.clone(),
        "num_generations": 4,
        "unscorable_mask": components.isnan().all(0),
        "device": "cpu",
        "torch": torch,
        "nanstd": nanstd,
    }
    torch.set_default_dtype(torch.float64)  # the factor n / (n - 1) of its std is of two whole numbers
    try:
        exec(textwrap.dedent(source[start:end]), scope)  # noqa: S102  TRL's own lines
    finally:
        torch.set_default_dtype(torch.float32)
    found = scope["advantages"]
    assert isinstance(found, Tensor)
    return components, shares, found.nan_to_num(0.0)


def advantages() -> Iterator[Difference]:
    """TRL's advantages against ours."""
    for aggregation, scale, name in (
        ("sum_then_normalize", "group", "grpo"),
        ("sum_then_normalize", "none", "dr_grpo"),
        ("sum_then_normalize", "batch", "lite_ppo"),
        ("normalize_then_sum", "group", "gdpo"),
    ):
        components, shares, expected = advantages_of_trl(aggregation, scale)
        groups = made_groups(components, shares)
        batch = with_advantages(collate(groups), groups, replace(PRESETS[name], kl=None))
        # Ours are kept in float32. Where all rewards tie TRL may leave rounding noise; ours is exactly 0.
        difference = apart(expected, batch.advantages[:, 0].double())
        yield Difference(f"advantages: {aggregation}, {scale}", f"{name}; ours in float32", difference, 0.0)


def part(values: np.ndarray, weight: float, verdict: bool = False) -> Component:
    """A reward function's part in a group."""
    return Component(values, weight, tuple(Score(float(v)) for v in values), verdict=verdict)


def made_groups(components: Tensor, shares: Tensor) -> list[Group]:
    """Three groups of four completions with two reward components."""
    groups = []
    for g in range(3):
        own = components[:, 4 * g : 4 * g + 4].numpy()
        total = np.where(np.isnan(own).all(0), np.nan, np.nansum(own * shares.numpy()[:, None], axis=0))
        one = Completion(np.zeros(2, np.int64), np.zeros(2, np.float32), "", "stop")
        groups.append(
            Group(
                Problem(str(g), ""),
                np.zeros(1, np.int64),
                (one,) * 4,
                total,
                {"a": part(own[0], 1.0, verdict=True), "b": part(own[1], 0.5)},
            )
        )
    return groups


# --- offline --------------------------------------------------------------------------------------

CHOSEN, REJECTED = (-drawn(5, seed=s).abs() - 0.1 for s in (7, 8))
REF_CHOSEN, REF_REJECTED = (x + 0.3 * drawn(5, seed=s) for x, s in ((CHOSEN, 9), (REJECTED, 10)))
CHOSEN_LENGTHS, REJECTED_LENGTHS = torch.tensor([3, 1, 4, 2, 5]), torch.tensor([2, 2, 1, 5, 3])


def offline() -> Iterator[Difference]:
    """Pair losses."""
    for kind in ("sigmoid", "ipo"):
        pairs = [x.clone().requires_grad_() for x in (CHOSEN, REJECTED)]
        loss = dpo_of_trl(kind, *pairs)
        got = (loss.detach(), torch.stack(torch.autograd.grad(loss, pairs)))
        if kind == "sigmoid":
            mine = lambda a, b: preference.dpo(a, b, REF_CHOSEN, REF_REJECTED, beta=0.1)
        else:
            mine = lambda a, b: preference.ipo(
                a, b, REF_CHOSEN, REF_REJECTED, CHOSEN_LENGTHS, REJECTED_LENGTHS, tau=0.1
            )
        yield compared(f"DPOTrainer, {kind}", "averaged" if kind == "ipo" else "", got, derived(mine))
    cpo = SimpleNamespace(
        alpha=0.0,
        loss_type="simpo",
        simpo_gamma=0.5,
        beta=2.0,
        label_smoothing=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )
    got = derived(lambda a, b: CPOTrainer.cpo_loss(cpo, a / CHOSEN_LENGTHS, b / REJECTED_LENGTHS)[0])
    mine = derived(lambda a, b: preference.simpo(a, b, CHOSEN_LENGTHS, REJECTED_LENGTHS, beta=2.0, gamma=0.5))
    yield compared("CPOTrainer, simpo", "averaged log-probs", got, mine)
    orpo = SimpleNamespace(beta=0.1, accelerator=SimpleNamespace(device="cpu"))
    got = derived(
        lambda a, b: (
            -a / CHOSEN_LENGTHS
            - ORPOTrainer.odds_ratio_loss(orpo, a / CHOSEN_LENGTHS, b / REJECTED_LENGTHS)[0]
        )
    )
    mine = derived(
        lambda a, b: preference.orpo(a, b, CHOSEN_LENGTHS, REJECTED_LENGTHS, -a / CHOSEN_LENGTHS, lam=0.1)
    )
    yield compared("ORPOTrainer", "TRL computes in float32", got, mine)


def derived(loss: Any) -> tuple[Tensor, Tensor]:
    """Mean loss over the pairs and its gradient."""
    pairs = [x.clone().requires_grad_() for x in (CHOSEN, REJECTED)]
    value = loss(*pairs).mean()
    return value.detach(), torch.stack(torch.autograd.grad(value, pairs))


def dpo_of_trl(kind: str, chosen: Tensor, rejected: Tensor) -> Tensor:
    """``DPOTrainer._compute_loss`` on pairs whose summed log-probs are given."""
    lengths = torch.cat((CHOSEN_LENGTHS, REJECTED_LENGTHS))
    mask = torch.nn.functional.pad((torch.arange(5) < lengths[:, None]).long(), (1, 0))
    first = torch.nn.functional.one_hot(torch.zeros(10, dtype=torch.int64), 5)
    by_token = torch.cat((chosen, rejected))[:, None] * first
    flat = torch.zeros(10, 5)
    outputs = SimpleNamespace(log_probs=by_token, entropy=flat, mean_logits=flat, is_top1=flat.bool())
    stand_in = SimpleNamespace(
        model=torch.nn.Identity().eval(),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        use_weighting=False,
        beta=0.1,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "input_ids": torch.zeros(10, 6, dtype=torch.int64),
        "completion_mask": mask,
        "ref_chosen_logps": REF_CHOSEN,
        "ref_rejected_logps": REF_REJECTED,
    }
    return DPOTrainer._compute_loss(stand_in, lambda **_: outputs, inputs, return_outputs=False)  # noqa: SLF001


def main() -> int:
    """Compare everything; 1 if something differs by more than rounding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    options_given = parser.parse_args()
    found = [*loss_types(), *options(), *other_trainers(), *advantages(), *offline()]
    today = dt.datetime.now(tz=dt.UTC).date()
    summary = (
        f"{today}, TRL {trl.__version__}, torch {torch.__version__.partition('+')[0]}, `python "
        "benchmarks/compare_trl.py --write`. Largest relative differences; float64 unless said otherwise."
    )
    lines = [
        "# The same losses as TRL",
        "",
        summary,
        "",
        "| case | aligned | loss | gradient |",
        "|---|---|---|---|",
        *(f"| {d.case} | {d.aligned} | {d.loss:.0e} | {d.gradient:.0e} |" for d in found),
        "",
    ]
    print("\n".join(lines))
    if options_given.write:
        RESULT.write_text("\n".join(lines), encoding="utf-8")
    coarse = ("ours in float32", "TRL computes in float32")
    wrong = [d for d in found if max(d.loss, d.gradient) > (1e-6 if d.aligned.endswith(coarse) else AGREE)]
    for d in wrong:
        print(f"differs: {d}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

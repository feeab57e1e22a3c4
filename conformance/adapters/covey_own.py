"""covey's own functions, under the names that the runner calls. ``make.py`` writes the cases with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.config.algorithm import build_algorithm
from covey.objective.algorithms import Algorithm
from covey.objective.data import BatchData, GroupData, KLData, LossInputs, SelectionData
from covey.objective.loss import penalty, policy_loss
from covey.objective.penalties import bounded_value
from covey.objective.preference import PREFERENCES
from covey.objective.reductions import Totals
from covey.objective.value import value_loss
from covey_verify.types import StepRewards

Case = dict[str, Any]
EXPECTED: dict[str, str] = {}


def advantages(case: Case) -> Tensor:
    """Advantages of every token, (N, T) float64, as a run computes them before it stores float32."""
    algorithm = build_algorithm(case["asks"])
    given = case["inputs"]
    mask = numbers(given, "mask").bool()
    group = torch.tensor(given["group"])
    response, by_token = kl_costs(algorithm, given, mask)
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for g in range(int(group.max()) + 1):
        rows = torch.nonzero(group == g)[:, 0]
        own = algorithm.advantage(group_data(given, rows, mask, response, by_token))
        found[rows] = own[:, None].expand(-1, mask.shape[1]) if own.ndim == 1 else own
    if "token_rewards" not in algorithm.advantage.needs:
        found += by_token.flip(-1).cumsum(-1).flip(-1)
    found = found.where(mask, 0.0)
    trained = torch.nonzero(mask.any(-1))[:, 0]
    if algorithm.whiten is not None:
        rewards = numbers(given, "rewards")[trained]
        found[trained] = algorithm.whiten(BatchData(found[trained], mask[trained], rewards, group[trained]))
    return found.where(mask, 0.0)


def loss(case: Case) -> dict[str, Any]:
    """The terms of tokens (or pairs), their reduction, and its gradient with respect to what is trained."""
    if "preference" in case["asks"]:
        return preference(case)
    if "value_loss" in case["asks"]:
        return of_critic(case)
    algorithm = build_algorithm(case["asks"])
    logprobs = numbers(case["inputs"], "new").requires_grad_()
    inputs = loss_inputs(algorithm, case["inputs"], logprobs)
    result = policy_loss(algorithm, inputs)
    terms = result.tokens.value
    inputs = replace(inputs, ratio=result.tokens.ratio)
    if algorithm.kl is not None and algorithm.kl.place == "loss":
        terms = terms + algorithm.kl.coef * penalty(algorithm.kl, inputs)
    if algorithm.entropy is not None and inputs.entropy is not None:
        terms = terms - algorithm.entropy.coef * inputs.entropy
    gradient = torch.autograd.grad(result.total, logprobs)[0]
    return {"tokens": terms.detach() * inputs.mask, "loss": result.total.detach(), "gradient": gradient}


def preference(case: Case) -> dict[str, Any]:
    settings = dict(case["asks"]["preference"])
    function = PREFERENCES[settings.pop("name")]
    given = {name: torch.tensor(values) for name, values in case["inputs"].items()}
    given = {name: v.double() if v.is_floating_point() else v for name, v in given.items()}
    trained = [given[name].requires_grad_() for name in case["trained"]]
    if "nll" in case["needs"]:
        given["nll"] = -given["chosen"] / given["chosen_lengths"]
    if "chosen_nll" in case["needs"]:  # its mean is that of all tokens
        given["chosen_nll"] = -given["chosen"] / given["chosen_lengths"].double().mean()
    values = function(**{name: given[name] for name in case["needs"]}, **settings)
    gradient = torch.stack(torch.autograd.grad(values.mean(), trained))
    return {"tokens": values.detach(), "loss": values.mean().detach(), "gradient": gradient}


def of_critic(case: Case) -> dict[str, Any]:
    names = ("new_values", "values", "returns", "mask")
    values, old, returns, mask = (numbers(case["inputs"], name) for name in names)
    values.requires_grad_()
    terms = value_loss(values, old, returns, **case["asks"]["value_loss"]) * mask
    total = terms.sum() / mask.sum()
    gradient = torch.autograd.grad(total, values)[0]
    return {"tokens": terms.detach(), "loss": total.detach(), "gradient": gradient}


def numbers(given: Case, name: str) -> Tensor:
    return torch.tensor(given[name], dtype=torch.float64)


def optional(given: Case, name: str) -> Tensor | None:
    return numbers(given, name) if name in given else None


def kl_costs(algorithm: Algorithm, given: Case, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The costs of a KL in the reward: by completion (N,) and by token (N, T)."""
    response = torch.zeros(len(mask), dtype=torch.float64)
    by_token = torch.zeros(mask.shape, dtype=torch.float64)
    kl = algorithm.kl
    if kl is not None and kl.place == "reward":
        far = (numbers(given, "old") - numbers(given, "ref")).where(mask, 0.0)
        if kl.level == "completion":
            response = -kl.coef * bounded_value(kl.estimator(KLData(far.sum(-1))), kl.bound)
        else:
            by_token = -kl.coef * bounded_value(kl.estimator(KLData(far)), kl.bound)
    return response, by_token


def group_data(given: Case, rows: Tensor, mask: Tensor, response: Tensor, by_token: Tensor) -> GroupData:
    """One group's data; a completion's reward is paid at its last trained token."""
    own = [int(row) for row in rows]
    rewards = numbers(given, "rewards")[rows] + response[rows]
    paid = by_token[rows].clone()
    for n, row in enumerate(own):
        trained = torch.nonzero(mask[row])[:, 0]
        if len(trained):
            paid[n, trained[-1]] += rewards[n]
    components = optional(given, "components")
    steps = [StepRewards(**given["steps"][i]) for i in own] if "steps" in given else []
    running = optional(given, "running_mean")
    tokens = given.get("tokens", given["mask"])
    parts = {name: optional(given, name) for name in ("old", "old_collision", "values")}
    return GroupData(
        rewards=rewards,
        components=rewards[None] if components is None else components[:, rows],
        weights=torch.tensor(given.get("weights", [1.0]), dtype=torch.float64),
        mask=mask[rows],
        tokens=torch.tensor(tokens)[rows],
        steps=[steps],
        greedy_reward=given.get("greedy_reward"),
        old_logprobs=None if parts["old"] is None else parts["old"][rows],
        old_collision=None if parts["old_collision"] is None else parts["old_collision"][rows],
        token_rewards=paid * mask[rows],
        values=None if parts["values"] is None else parts["values"][rows],
        running_mean=torch.zeros_like(rewards) if running is None else running[rows],
        segments=[StepRewards(**given["segments"][i]) for i in own] if "segments" in given else (),
    )


def loss_inputs(algorithm: Algorithm, given: Case, logprobs: Tensor) -> LossInputs:
    mask = numbers(given, "mask").bool()
    group = torch.tensor(given["group"])
    correct = torch.tensor(given.get("correct", [False] * len(group))).bool()
    shares = numbers(given, "advantages")
    shares = (shares[:, None].expand(mask.shape) if shares.ndim == 1 else shares).where(mask, 0.0)
    of_group = torch.zeros(int(group.max()) + 1, dtype=torch.int64).index_add(0, group, mask.sum(-1))
    totals = Totals(
        tokens=int(mask.sum()),
        completions=int(mask.any(-1).sum()),
        prompts=int((of_group > 0).sum()),
        max_tokens=given["max_tokens"],
        rows=len(mask),
        correct_tokens=int(mask[correct].sum()),
    )
    old = numbers(given, "sampler" if algorithm.old == "sampler" else "old")
    return LossInputs(
        logprobs=logprobs,
        mask=mask,
        advantages=shares,
        old_logprobs=old,
        totals=totals,
        group_tokens=of_group[group],
        sampler_logprobs=optional(given, "sampler"),
        ref_logprobs=optional(given, "ref"),
        entropy=optional(given, "entropy"),
        full_kl=optional(given, "full_kl"),
        selected=selected(algorithm, given, shares, mask, old),
        correct=correct,
        group=group,
    )


def selected(algorithm: Algorithm, given: Case, shares: Tensor, mask: Tensor, old: Tensor) -> Tensor | None:
    """The tokens that the algorithm's selection singles out, (N, T) bool."""
    if algorithm.select_tokens is None:
        return None
    return algorithm.select_tokens(
        SelectionData(
            advantages=shares,
            mask=mask,
            rewards=shares[:, 0],
            group=torch.tensor(given["group"]),
            sampler_logprobs=old,
            old_logprobs=old,
            old_entropy=optional(given, "old_entropy"),
            old_collision=None,
            noise=optional(given, "noise"),
        )
    )

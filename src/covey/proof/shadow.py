"""A naive trainer: in float64, one completion at a time, with every formula written out.

It repeats the optimizer steps of a run from the record (tokens, rewards, log-probs of the sampler, seeds),
without batches, packing or fused operations, and imports nothing of covey. If it agrees with the run, the
run's gradients are those of the formulas.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from covey.proof import formulas, losses
from covey.proof.decoder import NamedWeights, coarse, logits, states
from covey.proof.descent import ShadowConfig, ShadowKL, ShadowTrainer, gradient_step
from covey.proof.formulas import ShadowRow
from covey.proof.streams import splitmix_uniforms, stream_key

PULL_WITHOUT_ADVANTAGE = ("kl_on_selected", "dro", "group_classification")
"""Surrogates that may have a gradient where the advantage is 0."""


@dataclass(frozen=True)
class StepOutcome:
    """The results of a step, for comparison with the record."""

    rows: Sequence[ShadowRow]
    logprobs: Sequence[Tensor]
    """Log-probs of the recorded tokens, under the weights at the start of the step."""
    norms: list[float]  # of each update's gradient, before clipping
    drifts: list[float]  # log pi - log ref of each completion in each update, nats
    entropies: list[float]  # at each token in each update, nats


# --- One completion -----------------------------------------------------------------------------------


def computed_weights(weights: NamedWeights, setting: ShadowConfig) -> NamedWeights:
    """Return the weights that the model computes with: rounded to bfloat16 if the run rounds them."""
    return {name: coarse(w) for name, w in weights.items()} if setting.rounded else weights


def distribution(weights: NamedWeights, setting: ShadowConfig, row: ShadowRow) -> Tensor:
    """log pi over the vocabulary at each sampled token of a completion, as sampled. (T, V)."""
    read = [*row.prompt, *row.tokens[:-1]]
    all_logits = logits(computed_weights(weights, setting), setting.model, read, setting.product)
    scaled = all_logits[len(row.prompt) - 1 :, : setting.vocabulary][row.positions] / setting.temperature
    if row.allowed is not None:
        # top-p or top-k left only these ids. The sampler renormalized over them too.
        mask = torch.full_like(scaled, -math.inf)
        for t, position in enumerate(row.positions):
            mask[t, torch.tensor(row.allowed[position])] = 0.0
        scaled = scaled + mask
    return scaled.log_softmax(-1)


def critic_values(trainer: ShadowTrainer, setting: ShadowConfig, row: ShadowRow, pull: float) -> Tensor:
    """Return the critic's value of the text before each token. (T,)."""
    critic = setting.algorithm["critic"]
    assert trainer.critic is not None and critic is not None
    head = trainer.critic.weights
    own_trunk = critic["trunk"] == "own"
    body = head if own_trunk else trainer.weights
    trunk = {name: w for name, w in body.items() if not name.startswith("value.")}
    tokens = [*row.prompt, *row.tokens[:-1]]
    all_states = states(computed_weights(trunk, setting), setting.model, tokens, setting.product)
    read = all_states[len(row.prompt) - 1 :][row.positions]
    # The value is unchanged; the gradient into the shared trunk is scaled by `pull` (0: none).
    if not own_trunk:
        read = read.detach() + pull * (read - read.detach())
    return read @ head["value.weight"] + head["value.bias"]


def pick_log_probs(log_pi: Tensor, row: ShadowRow) -> Tensor:
    """Return the log-probs of the sampled tokens. (T, V) -> (T,)."""
    return log_pi.gather(1, torch.tensor(row.tokens)[row.positions, None])[:, 0]


def entropy(log_pi: Tensor) -> Tensor:
    """-sum_v p log p at each token, nats. (T, V) -> (T,)."""
    return -torch.where(log_pi.isinf(), 0.0, log_pi.exp() * log_pi).sum(-1)


# --- One step: rewards -> advantages -> updates -------------------------------------------------------


def step(
    trainer: ShadowTrainer, setting: ShadowConfig, rows: Sequence[ShadowRow], number: int
) -> StepOutcome:
    """Repeat training step ``number`` on its recorded completions, and update ``trainer``."""
    with torch.no_grad():
        freeze_inputs(trainer, setting, rows, number)
        give_advantages(trainer, setting, rows)
    # Copied for the comparison with the sampler, before the sampler's log-probs may replace them.
    before = [row.old for row in rows]
    if setting.algorithm["old"] == "sampler":
        for row in rows:
            row.old = row.sampled
    outcome = StepOutcome(rows, before, [], [], [])
    critic = setting.algorithm["critic"]
    only_critic = critic is not None and number < critic["warmup"]
    start = number * setting.train["inner_epochs"] * setting.train["updates_per_batch"]
    for optimizer_step, minibatch in enumerate(update_parts(setting, rows, number), start):
        mark_selected(setting, minibatch)
        unmoved = optimizer_step == start and setting.algorithm["old"] == "trainer"
        if not only_critic:
            update_policy(trainer, setting, minibatch, optimizer_step, unmoved, outcome)
        if critic and (only_critic or critic["trunk"] == "own"):
            update_critic(trainer, setting, minibatch, optimizer_step)
    return outcome


def freeze_inputs(
    trainer: ShadowTrainer, setting: ShadowConfig, rows: Sequence[ShadowRow], number: int
) -> None:
    """Compute the frozen inputs of the formulas: log-probs of the old policy and of the reference."""
    kl = setting.algorithm["kl"]
    longest = max((len(row.tokens) for row in rows), default=0)
    noise = torch.from_numpy(
        splitmix_uniforms(stream_key(setting.seed, "noise", number), len(rows) * longest)
    ).double()
    for n, row in enumerate(rows):
        log_pi = distribution(trainer.weights, setting, row)
        unscored = math.isnan(row.reward)
        row.trained = bool(row.positions) and not (unscored or (setting.mask_truncated and row.truncated))
        row.old = pick_log_probs(log_pi, row)
        row.old_entropy = entropy(log_pi)
        row.collision = (2 * log_pi).exp().sum(-1)
        row.noise = noise[n * longest :][: len(row.tokens)][row.positions]
        if kl and kl["to"] == "sampler":
            row.reference = row.sampled
        elif kl:
            row.reference = pick_log_probs(distribution(trainer.reference, setting, row), row)
        if trainer.critic is not None:
            row.values = critic_values(trainer, setting, row, 0.0)


def give_advantages(trainer: ShadowTrainer, setting: ShadowConfig, rows: Sequence[ShadowRow]) -> None:
    """Compute one advantage per token: KL in the reward, then the estimator of groups, then of the batch."""
    axes = setting.algorithm
    for group in {row.group for row in rows}:
        judged = [row for row in rows if row.group == group and not math.isnan(row.reward)]
        if judged:
            estimate_group(trainer, setting, judged)
    trained = [row for row in rows if row.trained]
    by_token = axes["advantage"]["name"] in ("gae", "discounted_return")
    if not by_token:  # gae and discounted_return have the KL costs in `token_rewards` already
        for row in trained:
            # A token's advantage loses the KL cost of itself and of all later tokens.
            row.advantage -= trainer.kl_coef * row.kl_costs.flip(0).cumsum(0).flip(0)
    set_targets(setting, trained)
    if axes["whiten"] and trained:
        after = formulas.WHITENINGS[axes["whiten"]["name"]](trained, axes["whiten"])
        for row, advantage in zip(trained, after, strict=True):
            row.advantage = advantage
    for row in rows:
        if not row.trained:
            row.advantage = torch.zeros(len(row.positions), dtype=torch.float64)


def estimate_group(trainer: ShadowTrainer, setting: ShadowConfig, judged: Sequence[ShadowRow]) -> None:
    """Give the judged completions of one group the advantages of the estimator, (T,) each."""
    rewards = []
    for row in judged:
        set_token_rewards(trainer, setting, row)
        cost = completion_cost(trainer, setting, row)
        rewards.append(row.reward - cost)
        row.token_rewards[-1:] -= cost
    axis = setting.algorithm["advantage"]
    estimates = formulas.ESTIMATORS[axis["name"]](formulas.JudgedGroup(judged, rewards, axis))
    for row, value in zip(judged, estimates, strict=True):
        row.advantage = torch.as_tensor(value, dtype=torch.float64).expand(len(row.positions)).clone()


def completion_cost(trainer: ShadowTrainer, setting: ShadowConfig, row: ShadowRow) -> float:
    """Return the cost of a KL in the reward that is computed for the whole completion; else 0."""
    kl = setting.algorithm["kl"]
    if not kl or kl["place"] != "reward" or kl["level"] != "completion":
        return 0.0
    whole = (old_logprobs(setting, row) - row.reference).sum() * row.trained
    return trainer.kl_coef * float(
        clamp_penalty(losses.divergence(kl["estimator"]["name"], whole), kl["bound"])
    )


def set_targets(setting: ShadowConfig, trained: Sequence[ShadowRow]) -> None:
    """Set the critic's targets: its values plus GAE with its own lambda and the advantages' discount."""
    gamma = setting.algorithm["advantage"].get("gamma", 1.0)
    critic = setting.algorithm["critic"]
    if not critic:
        return
    for row in trained:
        row.targets = formulas.gae_of_row(row, gamma, critic["lam"]) + row.values


def set_token_rewards(trainer: ShadowTrainer, setting: ShadowConfig, row: ShadowRow) -> None:
    """Set the reward of each token: steps at their ends, the rest at the last token, minus a KL by token."""
    kl = setting.algorithm["kl"]
    row.token_rewards, row.kl_costs = torch.zeros(2, len(row.positions), dtype=torch.float64)
    if not row.positions:
        return
    row.token_rewards[-1] = row.reward
    for name, steps in row.steps.items():
        for _, end, value in steps:
            # The last sampled token of the step, since inserted ones get no reward.
            last = max(bisect_right(row.positions, end - 1) - 1, 0)
            row.token_rewards[last] += row.weights[name] * value
            row.token_rewards[-1] -= row.weights[name] * value
    if kl and kl["place"] == "reward" and kl["level"] == "token":
        gap = old_logprobs(setting, row) - row.reference
        row.kl_costs = clamp_penalty(losses.divergence(kl["estimator"]["name"], gap), kl["bound"])
        row.token_rewards = row.token_rewards - trainer.kl_coef * row.kl_costs


def old_logprobs(setting: ShadowConfig, row: ShadowRow) -> Tensor:
    """Return the old log-probs: the sampler's record, or the trainer's own."""
    return row.sampled if setting.algorithm["old"] == "sampler" else row.old


def update_parts(setting: ShadowConfig, rows: Sequence[ShadowRow], number: int) -> Iterator[list[ShadowRow]]:
    """Yield one minibatch per update: whole groups in the keyed order of the step, in nearly equal parts."""
    groups = sorted({row.group for row in rows})
    for epoch in range(setting.train["inner_epochs"]):
        seed = stream_key(setting.seed, "minibatches", number, epoch)
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(groups))
        for part in np.array_split(order, setting.train["updates_per_batch"]):
            if len(part):
                yield [row for n in part for row in rows if row.group == groups[n]]


def mark_selected(setting: ShadowConfig, minibatch: Sequence[ShadowRow]) -> None:
    """Mark the selected tokens of an update, if the algorithm selects any."""
    axis = setting.algorithm["select_tokens"]
    trained = [row for row in minibatch if row.trained]
    if axis and trained:
        for row, selected in zip(trained, losses.selected_tokens(axis["name"], trained, axis), strict=True):
            row.selected = selected


def row_loss(
    trainer: ShadowTrainer,
    setting: ShadowConfig,
    row: ShadowRow,
    minibatch: Sequence[ShadowRow],
    unmoved: bool,
    outcome: StepOutcome,
) -> Tensor:
    """Return a completion's part of an update's loss; quantities for controllers are added to ``outcome``."""
    axes = setting.algorithm
    kl = axes["kl"]
    log_pi = distribution(trainer.weights, setting, row)
    logprobs = pick_log_probs(log_pi, row)
    if unmoved:
        row.old = logprobs.detach()
    outcome.entropies.extend(entropy(log_pi.detach()).tolist())
    if len(row.reference) and kl and kl["to"] == "reference":
        outcome.drifts.append(float((logprobs.detach() - row.reference).sum()))
    rho = losses.ratio(axes["ratio"]["name"], logprobs, row, axes["ratio"])
    value = policy_term(setting, row, minibatch, logprobs, rho)
    if kl and kl["place"] == "loss":
        value = value + trainer.kl_coef * kl_cost(trainer, setting, kl, row, log_pi, logprobs, rho)
    if axes["entropy"]:
        value = value - trainer.entropy_coef * entropy(log_pi)
    loss = row_weight(setting, row, minibatch) * value.sum()
    if axes["nll"] and row.correct:
        tokens = sum(len(r.positions) for r in minibatch if r.trained and r.correct)
        loss = loss - axes["nll"] * logprobs.sum() / tokens
    if axes["critic"] and axes["critic"]["trunk"] == "policy":
        loss = loss + value_loss_part(trainer, setting, row, minibatch, axes["critic"]["pull"])
    return loss


def policy_term(
    setting: ShadowConfig, row: ShadowRow, minibatch: Sequence[ShadowRow], logprobs: Tensor, rho: Tensor
) -> Tensor:
    """Return the surrogate of each token, times the corrections and the weights of tokens. (T,)."""
    axes = setting.algorithm
    value = losses.surrogate(axes["surrogate"]["name"], rho, logprobs, row, axes["surrogate"])
    if axes["surrogate"]["name"] == "group_classification":
        # This loss is the same at every token of the group, this row's and its siblings'.
        siblings = [r for r in minibatch if r.trained and r.group == row.group]
        whole = sum(row_weight(setting, r, minibatch) * len(r.positions) for r in siblings)
        value = value * whole / (row_weight(setting, row, minibatch) * len(row.positions))
    for factor in axes["correction"]:
        value = value * losses.correction(factor["name"], logprobs, row, factor)
    for factor in axes["token_weights"]:
        value = value * losses.multiplier(factor["name"], logprobs, row, factor)
    return value


def row_weight(setting: ShadowConfig, row: ShadowRow, minibatch: Sequence[ShadowRow]) -> float:
    """Return the weight of each token of a completion in the loss of an update."""
    reduce = setting.algorithm["reduce"]
    return losses.token_weight(reduce["name"], row, minibatch, setting.max_tokens, reduce)


def value_loss_part(
    trainer: ShadowTrainer, setting: ShadowConfig, row: ShadowRow, minibatch: Sequence[ShadowRow], pull: float
) -> Tensor:
    """Return a completion's part of the critic's loss, a mean over the tokens of an update."""
    critic = setting.algorithm["critic"]
    assert critic is not None
    token_losses = losses.value_loss_of_row(critic_values(trainer, setting, row, pull), row, critic["clip"])
    return token_losses.sum() / sum(len(r.positions) for r in minibatch if r.trained)


def kl_cost(
    trainer: ShadowTrainer,
    setting: ShadowConfig,
    kl: ShadowKL,
    row: ShadowRow,
    log_pi: Tensor,
    logprobs: Tensor,
    rho: Tensor,
) -> Tensor:
    """Return the KL to the reference at each token, with the gradient that the config chooses."""
    if kl["estimator"]["name"] == "full":
        with torch.no_grad():
            base = distribution(trainer.reference, setting, row)
        return clamp_penalty(
            torch.where(log_pi.isinf(), 0.0, log_pi.exp() * (log_pi - base)).sum(-1), kl["bound"]
        )
    difference = logprobs - row.reference
    if kl["level"] == "completion":
        difference = difference.sum().expand_as(difference)
    value = losses.divergence(kl["estimator"]["name"], difference)
    if kl["gradient"] == "straight_through":
        straight = losses.divergence("k2", difference)
        return clamp_penalty(value, kl["bound"]).detach() + straight - straight.detach()
    # Equal to 1, with the gradient of log pi: it adds the score-function term.
    unit = (difference - difference.detach()).exp()
    value = value * {"ratio": rho, "score": unit}.get(kl["gradient"], torch.ones(()))
    return clamp_penalty(value, kl["bound"])


def clamp_penalty(value: Tensor, bound: float | None) -> Tensor:
    """Return a penalty clamped to its bound."""
    return value if bound is None else value.clamp(-bound, bound)


def update_policy(
    trainer: ShadowTrainer,
    setting: ShadowConfig,
    minibatch: Sequence[ShadowRow],
    optimizer_step: int,
    unmoved: bool,
    outcome: StepOutcome,
) -> None:
    """Make one update. If no completion has a gradient, nothing is updated and the norm is 0."""
    axes = setting.algorithm
    kl = axes["kl"]
    critic = axes["critic"]
    joined = critic is not None and critic["trunk"] == "policy"
    # Whether a completion has a gradient even without an advantage.
    always = bool(axes["entropy"] or axes["nll"] or joined or (kl and kl["place"] == "loss"))
    always = always or axes["surrogate"]["name"] in PULL_WITHOUT_ADVANTAGE
    with_gradient = [row for row in minibatch if row.trained and (always or bool(row.advantage.any()))]
    if not with_gradient:
        outcome.norms.append(0.0)
        return
    if axes["surrogate"]["name"] == "group_classification":
        set_siblings(trainer, setting, minibatch, unmoved)
    row_losses = (row_loss(trainer, setting, row, minibatch, unmoved, outcome) for row in with_gradient)
    learners = [trainer, *([trainer.critic] if joined and trainer.critic else [])]
    norms = gradient_step(learners, setting, row_losses, optimizer_step)
    outcome.norms.append(norms[0])


@torch.no_grad()
def set_siblings(
    trainer: ShadowTrainer, setting: ShadowConfig, minibatch: Sequence[ShadowRow], unmoved: bool
) -> None:
    """Set for each completion the (sign of advantage, mean log-ratio) of its trained siblings."""
    moved: dict[int, tuple[float, float]] = {}
    for row in minibatch:
        if not row.trained:
            continue
        present = pick_log_probs(distribution(trainer.weights, setting, row), row)
        gap = torch.zeros_like(present) if unmoved else (present - row.old).clamp(-losses.FAR, losses.FAR)
        moved[id(row)] = (float(row.advantage.sum().sign()), float(gap.mean()))
    for row in minibatch:
        others = [r for r in minibatch if r.trained and r is not row and r.group == row.group]
        row.siblings = [moved[id(r)] for r in others]


def update_critic(
    trainer: ShadowTrainer, setting: ShadowConfig, minibatch: Sequence[ShadowRow], optimizer_step: int
) -> None:
    """Make one update of the critic alone; none without a trained completion."""
    assert trainer.critic is not None
    trained = [row for row in minibatch if row.trained]
    if trained:
        parts = (value_loss_part(trainer, setting, row, trained, 0.0) for row in trained)
        gradient_step([trainer.critic], setting, parts, optimizer_step)


def update_coefficients(
    trainer: ShadowTrainer, setting: ShadowConfig, outcome: StepOutcome, groups: int
) -> None:
    """Update the coefficients and the reference after a step that sampled ``groups`` groups."""
    kl = setting.algorithm["kl"]
    bonus = setting.algorithm["entropy"]
    before = trainer.updates
    trainer.updates = trainer.applied
    refresh_every = kl["refresh_every"] if kl else None
    # Whether a multiple of refresh_every lies among the optimizer steps of this training step.
    if kl and refresh_every and trainer.updates // refresh_every > before // refresh_every:
        mix = kl["refresh_mix"]
        for name, w in computed_weights(trainer.weights, setting).items():
            trainer.reference[name] = (1 - mix) * trainer.reference[name] + mix * w.detach().clone()
    if kl and kl["target"] is not None and outcome.drifts:
        error = formulas.mean(outcome.drifts) / kl["target"] - 1
        weight = min(groups * setting.group_size / kl["horizon"], 1.0)
        trainer.kl_coef *= 1 + min(max(error, -0.2), 0.2) * weight
    if bonus and bonus["target"] is not None and outcome.entropies:
        low = formulas.mean(outcome.entropies) < bonus["target"]
        trainer.entropy_coef = min(max(trainer.entropy_coef + (0.005 if low else -0.005), 0.0), 0.1)

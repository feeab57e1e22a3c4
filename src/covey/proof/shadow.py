"""A naive trainer: float64, one completion at a time, every formula written out; imports nothing of covey.

It repeats the optimizer steps of a run from what was recorded (tokens, rewards, sampler log-probs, seeds):
no batch, no packing, no fused operation. Where it and the run agree, the run's gradient is the formula's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from covey.proof import formulas, losses
from covey.proof.decoder import NamedWeights, Product, coarse, exactly, logits, states
from covey.proof.formulas import AxisSettings, Row
from covey.proof.streams import splitmix_uniforms, stream_key

UNPROPORTIONAL = ("kl_on_selected", "dro", "group_classification")
"""Surrogates that may pull where the advantage is 0."""


@dataclass(frozen=True)
class ShadowConfig:
    """The settings that affect the weights."""

    model: AxisSettings
    """The model's own config.json: layers, heads, rotary base, ..."""
    algorithm: AxisSettings
    """Every axis: {name, settings...}, as config.yaml spells them out."""
    train: AxisSettings
    temperature: float
    max_tokens: int
    mask_truncated: bool
    group_size: int
    seed: int
    rounded: bool = False  # whether it computes with bfloat16 copies of float32 weights
    product: Product = exactly  # how it multiplies
    known: int | None = None  # ids below it may be drawn; the others pad the vocabulary
    staleness: int = 0  # by how many steps a completion may be behind


@dataclass
class Trainer:
    """The state of training: weights under training, AdamW's moments, the coefficients that move."""

    weights: NamedWeights
    reference: NamedWeights
    critic: Trainer | None = None  # a network with a value head, or the head alone
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    first: NamedWeights = field(default_factory=dict)
    second: NamedWeights = field(default_factory=dict)
    applied: int = 0  # AdamW steps so far
    updates: int = 0  # AdamW steps before the present training step


@dataclass(frozen=True)
class Done:
    """The results of a step, for comparison with the record."""

    rows: Sequence[Row]
    logprobs: Sequence[Tensor]
    """Log-probs of the recorded tokens, under the weights at the start of the step."""
    norms: list[float]  # of each update's gradient, before clipping
    drifts: list[float]  # log pi - log ref of each completion in each update, nats
    entropies: list[float]  # at each token in each update, nats


# --- what is computed of a completion ----------------------------------------------------------------


def used(weights: NamedWeights, setting: ShadowConfig) -> NamedWeights:
    """Return the weights as the model computes with them: rounded to bfloat16 if the run does so."""
    return {name: coarse(w) for name, w in weights.items()} if setting.rounded else weights


def distribution(weights: NamedWeights, setting: ShadowConfig, row: Row) -> Tensor:
    """log pi over the vocabulary at each sampled token of a completion, as it was sampled. (T, V)."""
    every = logits(used(weights, setting), setting.model, [*row.prompt, *row.tokens[:-1]], setting.product)
    scaled = every[len(row.prompt) - 1 :, : setting.known][row.drawn] / setting.temperature
    if row.kept is not None:
        # top-p or top-k left only these ids: renormalize over them, as the sampler did.
        left = torch.full_like(scaled, -math.inf)
        for t, place in enumerate(row.drawn):
            left[t, torch.tensor(row.kept[place])] = 0.0
        scaled = scaled + left
    return scaled.log_softmax(-1)


def values_of(trainer: Trainer, setting: ShadowConfig, row: Row, pull: float) -> Tensor:
    """V of what was read before each token, under the critic. (T,)."""
    assert trainer.critic is not None
    head = trainer.critic.weights
    own = setting.algorithm["critic"]["trunk"] == "own"
    trunk = {n: w for n, w in (head if own else trainer.weights).items() if not n.startswith("value.")}
    every = states(used(trunk, setting), setting.model, [*row.prompt, *row.tokens[:-1]], setting.product)
    read = every[len(row.prompt) - 1 :][row.drawn]
    # The value is unchanged; the gradient into the shared trunk is scaled by `pull` (0: none).
    read = read if own else read.detach() + pull * (read - read.detach())
    return read @ head["value.weight"] + head["value.bias"]


def picked(log_pi: Tensor, row: Row) -> Tensor:
    """Return the log-probs of the sampled tokens. (T, V) -> (T,)."""
    return log_pi.gather(1, torch.tensor(row.tokens)[row.drawn, None])[:, 0]


def entropy(log_pi: Tensor) -> Tensor:
    """-sum_v p log p at each token, nats. (T, V) -> (T,)."""
    return -torch.where(log_pi.isinf(), 0.0, log_pi.exp() * log_pi).sum(-1)


# --- one step: rewards -> advantages -> updates ---------------------------------------------------


def step(trainer: Trainer, setting: ShadowConfig, rows: Sequence[Row], number: int) -> Done:
    """Repeat training step ``number`` on its recorded completions; moves ``trainer``."""
    with torch.no_grad():
        look(trainer, setting, rows, number)
        give_advantages(trainer, setting, rows)
    # Kept for the comparison with the sampler, before `old` may become the sampler's own.
    before = [row.old for row in rows]
    if setting.algorithm["old"] == "sampler":
        for row in rows:
            row.old = row.sampled
    done = Done(rows, before, [], [], [])
    critic = setting.algorithm["critic"]
    waits = bool(critic) and number < critic["warmup"]
    start = number * setting.train["inner_epochs"] * setting.train["updates_per_batch"]
    for at, minibatch in enumerate(update_parts(setting, rows, number), start):
        mark(setting, minibatch)
        unmoved = at == start and setting.algorithm["old"] == "trainer"
        if not waits:
            apply(trainer, setting, minibatch, at, unmoved, done)
        if critic and (waits or critic["trunk"] == "own"):
            teach(trainer, setting, minibatch, at)
    return done


def look(trainer: Trainer, setting: ShadowConfig, rows: Sequence[Row], number: int) -> None:
    """Compute the frozen inputs of the formulas: log-probs of the old policy and of the reference."""
    longest = max((len(row.tokens) for row in rows), default=0)
    noise = torch.from_numpy(
        splitmix_uniforms(stream_key(setting.seed, "noise", number), len(rows) * longest)
    ).double()
    for place, row in enumerate(rows):
        log_pi = distribution(trainer.weights, setting, row)
        unscored = math.isnan(row.reward)
        row.trained = bool(row.drawn) and not (unscored or (setting.mask_truncated and row.truncated))
        row.old = picked(log_pi, row)
        row.old_entropy = entropy(log_pi)
        row.collision = (2 * log_pi).exp().sum(-1)
        row.noise = noise[place * longest :][: len(row.tokens)][row.drawn]
        if setting.algorithm["kl"] and setting.algorithm["kl"]["to"] == "sampler":
            row.reference = row.sampled
        elif setting.algorithm["kl"]:
            row.reference = picked(distribution(trainer.reference, setting, row), row)
        if trainer.critic is not None:
            row.values = values_of(trainer, setting, row, 0.0)


def give_advantages(trainer: Trainer, setting: ShadowConfig, rows: Sequence[Row]) -> None:
    """Compute one advantage per token: KL in the reward, then the estimator of groups, then of the batch."""
    kl = setting.algorithm["kl"]
    axes = setting.algorithm
    in_reward = kl and kl["place"] == "reward"
    for group in {row.group for row in rows}:
        judged = [row for row in rows if row.group == group and not math.isnan(row.reward)]
        rewards = []
        for row in judged:
            cost = 0.0
            pay(trainer, setting, row)
            if in_reward and kl["level"] == "response":
                whole = (behind(setting, row) - row.reference).sum() * row.trained
                found = losses.divergence(kl["estimator"]["name"], whole)
                cost = trainer.kl_coef * float(within(found, kl["bound"]))
            rewards.append(row.reward - cost)
            row.paid[-1:] -= cost
        if judged:
            given = formulas.advantages(axes["advantage"]["name"], judged, rewards, axes["advantage"])
            for row, value in zip(judged, given, strict=True):
                row.advantage = torch.as_tensor(value, dtype=torch.float64).expand(len(row.drawn)).clone()
    trained = [row for row in rows if row.trained]
    by_token = axes["advantage"]["name"] in ("gae", "discounted_return")
    for row in trained if not by_token else ():
        # A token's advantage loses the KL cost of itself and of all later tokens; gae and discounted_return
        # have it in `paid` already.
        row.advantage -= trainer.kl_coef * row.cost.flip(0).cumsum(0).flip(0)
    set_targets(setting, trained)
    if axes["whiten"] and trained:
        after = formulas.whitened(axes["whiten"]["name"], trained, axes["whiten"])
        for row, advantage in zip(trained, after, strict=True):
            row.advantage = advantage
    for row in rows:
        if not row.trained:
            row.advantage = torch.zeros(len(row.drawn), dtype=torch.float64)


def set_targets(setting: ShadowConfig, trained: Sequence[Row]) -> None:
    """Set the critic's targets: its values plus GAE with its own lambda and the advantages' discount."""
    gamma = setting.algorithm["advantage"].get("gamma", 1.0)
    critic = setting.algorithm["critic"]
    for row in trained if critic else ():
        row.targets = formulas.gae_of_row(row, gamma, critic["lam"]) + row.values


def pay(trainer: Trainer, setting: ShadowConfig, row: Row) -> None:
    """Set the reward of each token: steps at their ends, the rest at the last token, minus a KL by token."""
    kl = setting.algorithm["kl"]
    row.paid, row.cost = torch.zeros(2, len(row.drawn), dtype=torch.float64)
    if not row.drawn:
        return
    row.paid[-1] = row.reward
    for name, steps in row.steps.items():
        for _, end, value in steps:
            place = max(bisect_right(row.drawn, end - 1) - 1, 0)  # what is inserted cannot be paid
            row.paid[place] += row.weights[name] * value
            row.paid[-1] -= row.weights[name] * value
    if kl and kl["place"] == "reward" and kl["level"] == "token":
        gap = behind(setting, row) - row.reference
        row.cost = within(losses.divergence(kl["estimator"]["name"], gap), kl["bound"])
        row.paid = row.paid - trainer.kl_coef * row.cost


def behind(setting: ShadowConfig, row: Row) -> Tensor:
    """Return the old log-probs: the sampler's record, or the trainer's own."""
    return row.sampled if setting.algorithm["old"] == "sampler" else row.old


def update_parts(setting: ShadowConfig, rows: Sequence[Row], number: int) -> Iterator[list[Row]]:
    """Yield one minibatch per update: whole groups in the keyed order of the step, in nearly equal parts."""
    groups = sorted({row.group for row in rows})
    for epoch in range(setting.train["inner_epochs"]):
        seed = stream_key(setting.seed, "minibatches", number, epoch)
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(groups))
        for part in np.array_split(order, setting.train["updates_per_batch"]):
            if len(part):
                yield [row for place in part for row in rows if row.group == groups[place]]


def mark(setting: ShadowConfig, minibatch: Sequence[Row]) -> None:
    """Mark the selected tokens of an update, if the algorithm selects any."""
    axis = setting.algorithm["select_tokens"]
    trained = [row for row in minibatch if row.trained]
    if axis and trained:
        for row, marked in zip(trained, losses.marks(axis["name"], trained, axis), strict=True):
            row.marked = marked


def row_loss(
    trainer: Trainer, setting: ShadowConfig, row: Row, minibatch: Sequence[Row], unmoved: bool, done: Done
) -> Tensor:
    """Return a completion's part of an update's loss; quantities for controllers are added to ``done``."""
    axes = setting.algorithm
    kl = setting.algorithm["kl"]
    log_pi = distribution(trainer.weights, setting, row)
    logprobs = picked(log_pi, row)
    if unmoved:
        row.old = logprobs.detach()
    done.entropies.extend(entropy(log_pi.detach()).tolist())
    if len(row.reference) and kl["to"] == "reference":
        done.drifts.append(float((logprobs.detach() - row.reference).sum()))
    rho = losses.ratio(axes["ratio"]["name"], logprobs, row, axes["ratio"])
    weight = losses.token_weight(axes["reduce"]["name"], row, minibatch, setting.max_tokens, axes["reduce"])
    value = losses.surrogate(axes["surrogate"]["name"], rho, logprobs, row, axes["surrogate"])
    if axes["surrogate"]["name"] == "group_classification":  # at every token of the group, this row's too
        reduce = axes["reduce"]
        own = weight * len(row.drawn)
        value = value * sum(
            losses.token_weight(reduce["name"], r, minibatch, setting.max_tokens, reduce) * len(r.drawn) / own
            for r in minibatch
            if r.trained and r.group == row.group
        )
    for factor in axes["correction"]:
        value = value * losses.correction(factor["name"], logprobs, row, factor)
    for factor in axes["token_weights"]:
        value = value * losses.multiplier(factor["name"], logprobs, row, factor)
    if kl and kl["place"] == "loss":
        value = value + trainer.kl_coef * kl_cost(trainer, setting, row, log_pi, logprobs, rho)
    if axes["entropy"]:
        value = value - trainer.entropy_coef * entropy(log_pi)
    loss = weight * value.sum()
    if axes["nll"] and row.correct:
        tokens = sum(len(r.drawn) for r in minibatch if r.trained and r.correct)
        loss = loss - axes["nll"] * logprobs.sum() / tokens
    if axes["critic"] and axes["critic"]["trunk"] == "policy":
        loss = loss + value_share(trainer, setting, row, minibatch, axes["critic"]["pull"])
    return loss


def value_share(
    trainer: Trainer, setting: ShadowConfig, row: Row, minibatch: Sequence[Row], pull: float
) -> Tensor:
    """Return a completion's part of the critic's loss, a mean over the tokens of an update."""
    each = losses.value_loss_of_row(
        values_of(trainer, setting, row, pull), row, setting.algorithm["critic"]["clip"]
    )
    return each.sum() / sum(len(r.drawn) for r in minibatch if r.trained)


def kl_cost(
    trainer: Trainer, setting: ShadowConfig, row: Row, log_pi: Tensor, logprobs: Tensor, rho: Tensor
) -> Tensor:
    """Return the KL to the reference at each token, with the gradient that the config chooses."""
    kl = setting.algorithm["kl"]
    if kl["estimator"]["name"] == "full":
        with torch.no_grad():
            base = distribution(trainer.reference, setting, row)
        return within(torch.where(log_pi.isinf(), 0.0, log_pi.exp() * (log_pi - base)).sum(-1), kl["bound"])
    difference = logprobs - row.reference
    if kl["level"] == "response":
        difference = difference.sum().expand_as(difference)
    value = losses.divergence(kl["estimator"]["name"], difference)
    if kl["gradient"] == "straight_through":
        straight = losses.divergence("k2", difference)
        return within(value, kl["bound"]).detach() + straight - straight.detach()
    # Equal to 1, with the gradient of log pi: it adds the score-function term.
    drawn = (difference - difference.detach()).exp()
    value = value * {"ratio": rho, "score": drawn}.get(kl["gradient"], torch.ones(()))
    return within(value, kl["bound"])


def within(value: Tensor, bound: float | None) -> Tensor:
    """Return a penalty clamped to its bound."""
    return value if bound is None else value.clamp(-bound, bound)


def apply(
    trainer: Trainer, setting: ShadowConfig, minibatch: Sequence[Row], at: int, unmoved: bool, done: Done
) -> None:
    """Make one update. Without a completion that has a gradient there is none, and the norm is 0."""
    axes = setting.algorithm
    always = axes["entropy"] or axes["nll"] or (axes["kl"] and axes["kl"]["place"] == "loss")
    joined = axes["critic"] and axes["critic"]["trunk"] == "policy"
    always = always or axes["surrogate"]["name"] in UNPROPORTIONAL or joined
    pulling = [row for row in minibatch if row.trained and (always or bool(row.advantage.any()))]
    if not pulling:
        done.norms.append(0.0)
        return
    if axes["surrogate"]["name"] == "group_classification":
        compare(trainer, setting, minibatch, unmoved)
    shares = (row_loss(trainer, setting, row, minibatch, unmoved, done) for row in pulling)
    learners = [trainer, *([trainer.critic] if joined and trainer.critic else [])]
    norms = move(learners, setting, shares, at)
    done.norms.append(norms[0])


@torch.no_grad()
def compare(trainer: Trainer, setting: ShadowConfig, minibatch: Sequence[Row], unmoved: bool) -> None:
    """Note for each completion the sign of advantage and the mean log-ratio of its trained siblings."""
    moved: dict[int, tuple[float, float]] = {}
    for row in (row for row in minibatch if row.trained):
        now = picked(distribution(trainer.weights, setting, row), row)
        gap = torch.zeros_like(now) if unmoved else (now - row.old).clamp(-losses.FAR, losses.FAR)
        moved[id(row)] = (float(row.advantage.sum().sign()), float(gap.mean()))
    for row in minibatch:
        others = [r for r in minibatch if r.trained and r is not row and r.group == row.group]
        row.siblings = [moved[id(r)] for r in others]


def teach(trainer: Trainer, setting: ShadowConfig, minibatch: Sequence[Row], at: int) -> None:
    """Make one update of the critic alone; none without a trained completion."""
    assert trainer.critic is not None
    trained = [row for row in minibatch if row.trained]
    if trained:
        move([trainer.critic], setting, (value_share(trainer, setting, r, trained, 0.0) for r in trained), at)


def move(learners: Sequence[Trainer], setting: ShadowConfig, parts: Iterable[Tensor], at: int) -> list[float]:
    """Sum the gradients of parts of a loss, clip them and move the learners. Return the norms."""
    totals: list[NamedWeights] = [
        {name: torch.zeros_like(w) for name, w in t.weights.items() if w.requires_grad} for t in learners
    ]
    places = [(t, total, name) for t, total in zip(learners, totals, strict=True) for name in total]
    for loss in parts:
        if loss.requires_grad:
            moving = [t.weights[name] for t, _, name in places]
            gradients = torch.autograd.grad(loss, moving, allow_unused=True)
            for (_, total, name), gradient in zip(places, gradients, strict=True):
                total[name] += 0.0 if gradient is None else gradient
    norms = [math.sqrt(math.fsum(float(g.square().sum()) for g in total.values())) for total in totals]
    for learner, total, norm in zip(learners, totals, norms, strict=True):
        if norm or learner.first:  # what has never learned is left alone
            adamw(learner, setting, total, norm, at)
    return norms


@torch.no_grad()
def adamw(trainer: Trainer, setting: ShadowConfig, gradient: NamedWeights, norm: float, at: int) -> None:
    """Clip the gradient by its norm, and move the weights. Loshchilov and Hutter, arXiv 1711.05101."""
    train = setting.train
    trainer.applied += 1
    if "value.weight" in gradient:
        train = {**train, "lr": setting.algorithm["critic"]["lr"]}
    lr = rate_at(train, at)
    beta1, beta2 = train["betas"]
    scale = min(1.0, train["grad_clip"] / (norm + 1e-6))
    for name, raw in gradient.items():
        g = raw * scale
        w = trainer.weights[name]
        trainer.first[name] = beta1 * trainer.first.get(name, torch.zeros_like(g)) + (1 - beta1) * g
        trainer.second[name] = beta2 * trainer.second.get(name, torch.zeros_like(g)) + (1 - beta2) * g**2
        first = trainer.first[name] / (1 - beta1**trainer.applied)
        second = trainer.second[name] / (1 - beta2**trainer.applied)
        w.copy_(w * (1 - lr * train["weight_decay"]) - lr * first / (second.sqrt() + 1e-8))


def rate_at(train: AxisSettings, at: int) -> float:
    """Return the learning rate of optimizer step ``at`` (from 0): linear warm-up, then the schedule."""
    lr = train["lr"]
    warm = train["warmup_steps"]
    each = train["inner_epochs"] * train["updates_per_batch"]
    if at < warm * each:
        return float(lr * (at // each + 1) / warm)
    done = (at - warm * each) / max((train["steps"] - warm) * each, 1)
    falls = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return float(lr * falls[train["schedule"]])


def steer(trainer: Trainer, setting: ShadowConfig, done: Done, groups: int) -> None:
    """Update the coefficients and the reference after a step that sampled ``groups`` groups."""
    kl = setting.algorithm["kl"]
    bonus = setting.algorithm["entropy"]
    before = trainer.updates
    every = kl["refresh_every"] if kl else None
    trainer.updates = trainer.applied
    # Whether a multiple of refresh_every lies among the optimizer steps of this training step.
    if every and trainer.updates // every > before // every:
        mix = kl["refresh_mix"]
        for name, w in used(trainer.weights, setting).items():
            trainer.reference[name] = (1 - mix) * trainer.reference[name] + mix * w.detach().clone()
    if kl and kl["target"] is not None and done.drifts:
        error = formulas.mean(done.drifts) / kl["target"] - 1
        seen = min(groups * setting.group_size / kl["horizon"], 1.0)
        trainer.kl_coef *= 1 + min(max(error, -0.2), 0.2) * seen
    if bonus and bonus["target"] is not None and done.entropies:
        low = formulas.mean(done.entropies) < bonus["target"]
        trainer.entropy_coef = min(max(trainer.entropy_coef + (0.005 if low else -0.005), 0.0), 0.1)

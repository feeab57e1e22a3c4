"""A naive trainer: float64, one completion at a time, every formula written out; imports nothing of covey.

It repeats the optimizer steps of a recorded run from what was recorded (tokens, rewards, sampler
log-probs, seeds) and nothing else: no batch, no packing, no fused operation, no optimizer of a library.
Where it and the run agree, the run's gradient is the formula's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from covey.proof import formulas
from covey.proof.formulas import AxisSettings, Row

NamedWeights = dict[str, Tensor]


@dataclass(frozen=True)
class ShadowConfig:
    """What of the config moves the weights."""

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
    rounded: bool = False
    """Whether the model computes with bfloat16 copies of float32 weights."""


@dataclass
class Trainer:
    """The state of training: weights under training, AdamW's moments, the coefficients that move."""

    weights: NamedWeights
    reference: NamedWeights
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    first: NamedWeights = field(default_factory=dict)
    second: NamedWeights = field(default_factory=dict)
    applied: int = 0
    """Optimizer steps that AdamW has made."""
    updates: int = 0
    """Those of them whose gradient was not 0."""


@dataclass(frozen=True)
class Done:
    """What a step came to, for comparison with the record."""

    rows: Sequence[Row]
    logprobs: Sequence[Tensor]
    """Of the recorded tokens, under the weights the step began with."""
    norms: list[float]
    """Of the gradient of each update, before clipping."""
    drifts: list[float]
    """log pi - log ref of each completion in each update, nats."""
    entropies: list[float]
    """Of each token in each update, nats."""


# --- the model ------------------------------------------------------------------------------------


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x^2 + eps) * weight."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, base: float) -> Tensor:
    """Rotary positions: halves of each head turned by position * base^(-2i/E). (T, H, E)."""
    length, _, width = x.shape
    angle = torch.arange(length)[:, None] * base ** (-torch.arange(0, width, 2).double() / width)
    cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    turned = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return x * cos + turned * sin


def logits(w: NamedWeights, model: AxisSettings, tokens: Sequence[int]) -> Tensor:
    """A decoder of the Llama family on one sequence. (T,) ids -> (T, V)."""

    def linear(x: Tensor, name: str) -> Tensor:
        out = x @ effective(w, f"{name}.weight").T
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    eps, heads, groups = model["rms_norm_eps"], model["num_attention_heads"], model["num_key_value_heads"]
    width = model.get("head_dim") or model["hidden_size"] // heads
    hidden = torch.full((len(tokens), len(tokens)), -math.inf, dtype=torch.float64).triu(1)
    x = w["model.embed_tokens.weight"][torch.tensor(tokens)]
    for i in range(model["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = normed(x, w[layer + "input_layernorm.weight"], eps)
        q, k, v = (linear(h, f"{layer}self_attn.{n}_proj").view(len(tokens), -1, width) for n in "qkv")
        if layer + "self_attn.q_norm.weight" in w:
            q = normed(q, w[layer + "self_attn.q_norm.weight"], eps)
            k = normed(k, w[layer + "self_attn.k_norm.weight"], eps)
        q, k = rotated(q, rotary_base(model)), rotated(k, rotary_base(model))
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        weight = (torch.einsum("ahe,bhe->hab", q, k) / math.sqrt(width) + hidden).softmax(-1)
        x = x + linear(torch.einsum("hab,bhe->ahe", weight, v).flatten(1), f"{layer}self_attn.o_proj")
        h = normed(x, w[layer + "post_attention_layernorm.weight"], eps)
        gate, up = linear(h, layer + "mlp.gate_proj"), linear(h, layer + "mlp.up_proj")
        x = x + linear(gate * gate.sigmoid() * up, layer + "mlp.down_proj")
    head = "lm_head.weight" if "lm_head.weight" in w else "model.embed_tokens.weight"
    return normed(x, w["model.norm.weight"], eps) @ w[head].T


def effective(w: NamedWeights, name: str) -> Tensor:
    """A weight with its low-rank update, where there is one: W + scale * B A."""
    a, b = name.replace(".weight", ".lora_A"), name.replace(".weight", ".lora_B")
    return w[name] + w["lora_scale"] * (w[b] @ w[a]) if a in w else w[name]


def rotary_base(model: AxisSettings) -> float:
    """The base of the rotary angles, wherever a version of the format writes it."""
    return float((model.get("rope_parameters") or model).get("rope_theta", 10_000.0))


def used(weights: NamedWeights, setting: ShadowConfig) -> NamedWeights:
    """The weights as the model computes with them; the gradient passes through the rounding."""
    if not setting.rounded:
        return weights
    return {name: w + (w.bfloat16().double() - w).detach() for name, w in weights.items()}


def distribution(weights: NamedWeights, setting: ShadowConfig, row: Row) -> Tensor:
    """log pi over the vocabulary at each sampled token of a completion, as it was sampled. (T, V)."""
    every = logits(used(weights, setting), setting.model, [*row.prompt, *row.tokens[:-1]])
    scaled = every[len(row.prompt) - 1 :][row.drawn] / setting.temperature
    if row.kept is not None:
        left = torch.full_like(scaled, -math.inf)
        for t, place in enumerate(row.drawn):
            left[t, torch.tensor(row.kept[place])] = 0.0
        scaled = scaled + left
    return scaled.log_softmax(-1)


def picked(log_pi: Tensor, row: Row) -> Tensor:
    """The log-probs of the tokens themselves. (T, V) -> (T,)."""
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
    before = [row.old for row in rows]
    if setting.algorithm["old"] == "sampler":
        for row in rows:
            row.old = row.sampled
    done = Done(rows, before, [], [], [])
    for update, minibatch in enumerate(update_parts(setting, rows, number)):
        mark(setting, minibatch)
        unmoved = update == 0 and setting.algorithm["old"] == "trainer"
        apply(trainer, setting, minibatch, number, unmoved, done)
    return done


def look(trainer: Trainer, setting: ShadowConfig, rows: Sequence[Row], number: int) -> None:
    """Everything frozen that formulas ask for: log-probs of the old policy and the reference."""
    longest = max((len(row.tokens) for row in rows), default=0)
    noise = torch.from_numpy(
        splitmix_uniforms(stream_key(setting.seed, "noise", number), len(rows) * longest)
    ).double()
    for place, row in enumerate(rows):
        log_pi = distribution(trainer.weights, setting, row)
        unscored = math.isnan(row.reward)
        row.trained = bool(row.drawn) and not (unscored or (setting.mask_truncated and row.truncated))
        row.old, row.old_entropy = picked(log_pi, row), entropy(log_pi)
        row.collision = (2 * log_pi).exp().sum(-1)
        row.noise = noise[place * longest :][: len(row.tokens)][row.drawn]
        if setting.algorithm["kl"]:
            row.reference = picked(distribution(trainer.reference, setting, row), row)


def give_advantages(trainer: Trainer, setting: ShadowConfig, rows: Sequence[Row]) -> None:
    """Rewards -> one advantage a token: KL in the reward, the group's estimator, the batch's."""
    kl, axes = setting.algorithm["kl"], setting.algorithm
    in_reward = kl and kl["place"] == "reward"
    for group in {row.group for row in rows}:
        judged = [row for row in rows if row.group == group and not math.isnan(row.reward)]
        rewards = []
        for row in judged:
            cost = 0.0
            if in_reward and kl["level"] == "response":
                whole = (behind(setting, row) - row.reference).sum() * row.trained
                cost = trainer.kl_coef * float(formulas.divergence(kl["estimator"]["name"], whole))
            rewards.append(row.reward - cost)
        if judged:
            given = formulas.advantages(axes["advantage"]["name"], judged, rewards, axes["advantage"])
            for row, value in zip(judged, given, strict=True):
                row.advantage = torch.as_tensor(value, dtype=torch.float64).expand(len(row.drawn)).clone()
    trained = [row for row in rows if row.trained]
    if in_reward and kl["level"] == "token":
        for row in trained:
            each = formulas.divergence(kl["estimator"]["name"], behind(setting, row) - row.reference)
            row.advantage -= trainer.kl_coef * each.flip(0).cumsum(0).flip(0)
    if axes["whiten"] and trained:
        after = formulas.whitened(axes["whiten"]["name"], trained, axes["whiten"])
        for row, advantage in zip(trained, after, strict=True):
            row.advantage = advantage
    for row in rows:
        if not row.trained:
            row.advantage = torch.zeros(len(row.drawn), dtype=torch.float64)


def behind(setting: ShadowConfig, row: Row) -> Tensor:
    """The old log-probs, by whose record they are."""
    return row.sampled if setting.algorithm["old"] == "sampler" else row.old


def update_parts(setting: ShadowConfig, rows: Sequence[Row], number: int) -> Iterator[list[Row]]:
    """Whole groups in the keyed order of the step, in nearly equal parts, one part an update."""
    groups = sorted({row.group for row in rows})
    for epoch in range(setting.train["inner_epochs"]):
        seed = stream_key(setting.seed, "minibatches", number, epoch)
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(groups))
        for part in np.array_split(order, setting.train["updates_per_batch"]):
            if len(part):
                yield [row for place in part for row in rows if row.group == groups[place]]


def mark(setting: ShadowConfig, minibatch: Sequence[Row]) -> None:
    """Single out tokens of the update, where the algorithm does."""
    axis, trained = setting.algorithm["select_tokens"], [row for row in minibatch if row.trained]
    if axis and trained:
        for row, marked in zip(trained, formulas.marks(axis["name"], trained, axis), strict=True):
            row.marked = marked


def row_loss(
    trainer: Trainer, setting: ShadowConfig, row: Row, minibatch: Sequence[Row], unmoved: bool, done: Done
) -> Tensor:
    """A completion's share of the loss of an update; what controllers follow is noted in ``done``."""
    axes, kl = setting.algorithm, setting.algorithm["kl"]
    log_pi = distribution(trainer.weights, setting, row)
    logprobs = picked(log_pi, row)
    if unmoved:
        row.old = logprobs.detach()
    done.entropies.extend(entropy(log_pi.detach()).tolist())
    if len(row.reference):
        done.drifts.append(float((logprobs.detach() - row.reference).sum()))
    rho = formulas.ratio(axes["ratio"]["name"], logprobs, row, axes["ratio"])
    value = formulas.surrogate(axes["surrogate"]["name"], rho, logprobs, row, axes["surrogate"])
    if axes["correction"]:
        value = value * formulas.correction(axes["correction"]["name"], logprobs, row, axes["correction"])
    for factor in axes["token_weights"]:
        value = value * formulas.multiplier(factor["name"], logprobs, row, factor)
    if kl and kl["place"] == "loss":
        value = value + trainer.kl_coef * kl_cost(trainer, setting, row, log_pi, logprobs, rho)
    if axes["entropy"]:
        value = value - trainer.entropy_coef * entropy(log_pi)
    weight = formulas.token_weight(axes["reduce"]["name"], row, minibatch, setting.max_tokens, axes["reduce"])
    return weight * value.sum()


def kl_cost(
    trainer: Trainer, setting: ShadowConfig, row: Row, log_pi: Tensor, logprobs: Tensor, rho: Tensor
) -> Tensor:
    """KL to the reference at each token, with the gradient the config asks for."""
    kl = setting.algorithm["kl"]
    if kl["estimator"]["name"] == "full":
        with torch.no_grad():
            base = distribution(trainer.reference, setting, row)
        return torch.where(log_pi.isinf(), 0.0, log_pi.exp() * (log_pi - base)).sum(-1)
    difference = logprobs - row.reference
    if kl["level"] == "response":
        difference = difference.sum().expand_as(difference)
    value = formulas.divergence(kl["estimator"]["name"], difference)
    if kl["gradient"] == "straight_through":
        straight = formulas.divergence("k2", difference)
        return value.detach() + straight - straight.detach()
    return value * rho if kl["gradient"] == "ratio" else value


def apply(
    trainer: Trainer, setting: ShadowConfig, minibatch: Sequence[Row], number: int, unmoved: bool, done: Done
) -> None:
    """One update. Without a completion that pulls there is none, and the norm is 0."""
    axes = setting.algorithm
    always = axes["entropy"] or (axes["kl"] and axes["kl"]["place"] == "loss")
    always = always or axes["surrogate"]["name"] == "kl_on_selected"
    pulling = [row for row in minibatch if row.trained and (always or bool(row.advantage.any()))]
    if not pulling:
        done.norms.append(0.0)
        return
    moving = {name: w for name, w in trainer.weights.items() if w.requires_grad}
    total = {name: torch.zeros_like(w) for name, w in moving.items()}
    for row in pulling:
        loss = row_loss(trainer, setting, row, minibatch, unmoved, done)
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
            for name, gradient in zip(moving, gradients, strict=True):
                total[name] += 0.0 if gradient is None else gradient
    norm = math.sqrt(math.fsum(float(g.square().sum()) for g in total.values()))
    adamw(trainer, setting, total, norm, number)
    done.norms.append(norm)


@torch.no_grad()
def adamw(trainer: Trainer, setting: ShadowConfig, gradient: NamedWeights, norm: float, number: int) -> None:
    """Clip the gradient by its norm, and move the weights. Loshchilov and Hutter, arXiv 1711.05101."""
    train, trainer.applied = setting.train, trainer.applied + 1
    lr, (beta1, beta2) = rate_at(train, number), train["betas"]
    scale = min(1.0, train["grad_clip"] / (norm + 1e-6))
    for name, raw in gradient.items():
        g, w = raw * scale, trainer.weights[name]
        trainer.first[name] = beta1 * trainer.first.get(name, torch.zeros_like(g)) + (1 - beta1) * g
        trainer.second[name] = beta2 * trainer.second.get(name, torch.zeros_like(g)) + (1 - beta2) * g**2
        first = trainer.first[name] / (1 - beta1**trainer.applied)
        second = trainer.second[name] / (1 - beta2**trainer.applied)
        w.copy_(w * (1 - lr * train["weight_decay"]) - lr * first / (second.sqrt() + 1e-8))


def rate_at(train: AxisSettings, number: int) -> float:
    """Of step ``number``, counted from 0: a linear warm-up that begins above 0, then the schedule."""
    lr, warm, steps = train["lr"], train["warmup_steps"], train["steps"]
    if number < warm:
        return float(lr * (number + 1) / warm)
    done = (number - warm) / max(steps - warm, 1)
    falls = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return float(lr * falls[train["schedule"]])


def steer(trainer: Trainer, setting: ShadowConfig, done: Done, groups: int) -> None:
    """The coefficients and the reference follow what a step has shown; ``groups`` were sampled."""
    kl, bonus = setting.algorithm["kl"], setting.algorithm["entropy"]
    before, every = trainer.updates, kl["refresh_every"] if kl else None
    trainer.updates += sum(norm > 0 for norm in done.norms)
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


# --- keyed randomness, as docs/reliability.md describes it ----------------------------------------


def stream_key(*parts: int | str) -> int:
    """blake2b over the parts' Python forms, joined by the unit separator; 8 bytes, little end first."""
    text = "\x1f".join(map(repr, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def splitmix_uniforms(stream: int, count: int) -> np.ndarray:
    """The first numbers of a key's stream: SplitMix64, the top 23 bits. (count,) float32 in [0, 1)."""
    words = 1 << 64
    drawn = np.zeros(count, np.float32)
    for t in range(count):
        z = (stream + (t + 1) * 0x9E3779B97F4A7C15) % words
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % words
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % words
        drawn[t] = ((z ^ (z >> 31)) >> 41) * 2.0**-23
    return drawn

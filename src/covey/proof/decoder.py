"""A second implementation of the model: a Llama-family decoder in float64, one sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from covey.proof.formulas import AxisSettings

NamedWeights = dict[str, Tensor]
Product = Callable[[Tensor, Tensor], Tensor]
"""x (T, in), W (out, in) -> x W^T."""


def copy_weights(weights: NamedWeights) -> NamedWeights:
    """Return weights that do not move with these, and are not trained."""
    return {name: w.detach().clone() for name, w in weights.items()}


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T."""
    return x @ weight.T


def coarse_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T with both factors rounded to bfloat16, in the backward products too."""
    out = coarse(x) @ coarse(weight).T
    if out.requires_grad:
        # The incoming gradient is a factor of both backward products, so it is rounded too.
        out.register_hook(lambda grad: grad.bfloat16().double())
    return out


def coarse(x: Tensor) -> Tensor:
    """x rounded to bfloat16, with a straight-through gradient."""
    return x + (x.bfloat16().double() - x).detach()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x^2 + eps) * weight."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, base: float) -> Tensor:
    """Apply rotary positions: rotate the halves of each head by position * base^(-2i/E). (T, H, E)."""
    length, _, width = x.shape
    angle = torch.arange(length)[:, None] * base ** (-torch.arange(0, width, 2).double() / width)
    cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    turned = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return x * cos + turned * sin


def logits(
    w: NamedWeights, model: AxisSettings, tokens: Sequence[int], product: Product = exact_product
) -> Tensor:
    """(T,) ids -> (T, V)."""
    head = "lm_head.weight" if "lm_head.weight" in w else "model.embed_tokens.weight"
    return product(states(w, model, tokens, product), w[head])


def states(
    w: NamedWeights, model: AxisSettings, tokens: Sequence[int], product: Product = exact_product
) -> Tensor:
    """A decoder of the Llama family on one sequence. (T,) ids -> (T, D)."""
    eps = model["rms_norm_eps"]
    x = w["model.embed_tokens.weight"][torch.tensor(tokens)]
    for i in range(model["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = rms_norm(x, w[layer + "input_layernorm.weight"], eps)
        mixed = attention(w, model, h, f"{layer}self_attn.", product)
        x = x + linear(w, mixed, f"{layer}self_attn.o_proj", product)
        h = rms_norm(x, w[layer + "post_attention_layernorm.weight"], eps)
        gate = linear(w, h, layer + "mlp.gate_proj", product)
        up = linear(w, h, layer + "mlp.up_proj", product)
        x = x + linear(w, gate * gate.sigmoid() * up, layer + "mlp.down_proj", product)
    return rms_norm(x, w["model.norm.weight"], eps)


def attention(w: NamedWeights, model: AxisSettings, h: Tensor, name: str, product: Product) -> Tensor:
    """Causal attention, before its output projection. (T, D) -> (T, H E)."""
    length = len(h)
    heads = model["num_attention_heads"]
    width = model.get("head_dim") or model["hidden_size"] // heads
    q, k, v = (linear(w, h, f"{name}{n}_proj", product).view(length, -1, width) for n in "qkv")
    if f"{name}q_norm.weight" in w:
        q = rms_norm(q, w[f"{name}q_norm.weight"], model["rms_norm_eps"])
        k = rms_norm(k, w[f"{name}k_norm.weight"], model["rms_norm_eps"])
    q = rotate(q, rotary_base(model))
    k = rotate(k, rotary_base(model))
    # Grouped queries: each key/value head serves several query heads.
    k, v = (t.repeat_interleave(heads // model["num_key_value_heads"], 1) for t in (k, v))
    # Causal mask (T, T): -inf above the diagonal, 0 elsewhere.
    hidden = torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)
    weight = (torch.einsum("ahe,bhe->hab", q, k) / math.sqrt(width) + hidden).softmax(-1)
    return torch.einsum("hab,bhe->ahe", weight, v).flatten(1)


def linear(w: NamedWeights, x: Tensor, name: str, product: Product) -> Tensor:
    """x W^T + b, with the low-rank update of W and the bias where the model has them."""
    out = product(x, effective(w, f"{name}.weight"))
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def effective(w: NamedWeights, name: str) -> Tensor:
    """Return a weight with its low-rank update, if there is one: W + scale * B A."""
    a = name.replace(".weight", ".lora_A")
    b = name.replace(".weight", ".lora_B")
    return w[name] + w["lora_scale"] * (w[b] @ w[a]) if a in w else w[name]


def rotary_base(model: AxisSettings) -> float:
    """Return the base of the rotary angles; config formats differ in where they write it."""
    return float((model.get("rope_parameters") or model).get("rope_theta", 10_000.0))

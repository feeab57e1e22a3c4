"""The models and prompts of the speed benchmark: random weights, lengths that are known in advance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from covey.models.tiny import build_tokenizer

SHAPES = {
    "5M": {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4},
    "80M": {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 10},
    "wide": {"vocab_size": 151_936, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2},
}
LENGTHS = {"equal": (0.0, 128), "ragged": (1 / 64, 256)}
"""Probability that a token ends a completion, and the longest completion."""
PROMPTS, GROUP = 16, 8


def build(size: str, lengths: str, folder: Path) -> None:
    """Write a Hugging Face folder whose completions end with the wanted probability at every token.

    All embeddings share a direction that the head's row of the end token reads.
    """
    torch.manual_seed(0)
    shape = SHAPES[size]
    heads = 12 if size == "80M" else 4
    tokenizer = build_tokenizer([f"{i} + {j}" for i in range(40) for j in range(40)], vocab_size=400)
    config = Qwen3Config(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3 if size == "80M" else 2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    width, vocabulary = shape["hidden_size"], shape["vocab_size"]
    direction = torch.randn(width)
    direction /= direction.norm()
    share = LENGTHS[lengths][0]
    wanted = float(np.log(share / (1 - share) * vocabulary)) if share else -30.0
    with torch.no_grad():
        model.model.embed_tokens.weight += 20 * direction
        model.lm_head.weight[tokenizer.eos_token_id] = direction * wanted / width**0.5
        model.lm_head.weight[tokenizer.pad_token_id] = -direction * 30 / width**0.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prompts() -> list[np.ndarray]:
    """Ids of 24 to 48 tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(10, 300, rng.integers(24, 49)) for _ in range(PROMPTS)]


def completions(lengths: str) -> list[list[np.ndarray]]:
    """Ids with lengths as the models of ``build`` would make them."""
    rng = np.random.default_rng(1)
    share, longest = LENGTHS[lengths]
    sizes = np.minimum(rng.geometric(share, (PROMPTS, GROUP)), longest) if share else None
    return [
        [rng.integers(10, 300, longest if sizes is None else sizes[p, g]) for g in range(GROUP)]
        for p in range(PROMPTS)
    ]

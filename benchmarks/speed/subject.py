"""The models and prompts of the speed benchmark: random weights, lengths that are known in advance."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from covey.models.tiny import build_tokenizer

disable_progress_bar()  # it would write into the tables

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "mixed": torch.float32}
"""Of the weights; mixed: products in bfloat16, covey's by `precision` and its peers' by autocast."""
NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
SHAPES = {
    "0.8M": (512, 128, 384, 4, 4, 2, 32),
    "5M": (4096, 256, 1024, 4, 4, 2, 64),
    "80M": (16384, 768, 2304, 10, 12, 4, 64),
    "135M": (49_152, 576, 1536, 30, 9, 3, 64),  # SmolLM2-135M
    "270M": (262_144, 640, 2048, 18, 4, 1, 256),  # Gemma 3 270M
    "0.5B": (151_936, 896, 4864, 24, 14, 2, 64),
    "1.5B": (151_936, 1536, 8960, 28, 12, 2, 128),
}
LENGTHS = {"equal": (0.0, 128), "ragged": (1 / 64, 256), "256": (0.0, 256), "8k": (0.0, 8192)}
"""Probability that a token ends a completion, and the longest completion."""


def device() -> str:
    """What is measured: the parent process says so to its workers."""
    return os.environ.get("BENCH_DEVICE", "cpu")


PROMPTS = int(os.environ.get("BENCH_PROMPTS", "32" if device() == "cuda" else "16"))
GROUP = int(os.environ.get("BENCH_GROUP", "8"))


def config(size: str, **tokens: int | None) -> Qwen3Config:
    """The shape of a model."""
    shape = dict(zip(NAMES, SHAPES[size], strict=True))
    return Qwen3Config(**shape, **tokens, max_position_embeddings=16_384, tie_word_embeddings=False)


def matrix_parameters(size: str) -> int:
    """Parameters that a token is multiplied with: all but the embedding, which is looked up."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config(size))
    return sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()


def build(size: str, lengths: str, dtype: str, folder: Path) -> None:
    """Write a Hugging Face folder whose completions end with the wanted probability at every token.

    All embeddings share a direction that the head's row of the end token reads.
    """
    torch.manual_seed(0)
    tokenizer = build_tokenizer([f"{i} + {j}" for i in range(40) for j in range(40)], vocab_size=400)
    # A word for each id of the model: covey draws no id that the tokenizer lacks, and its peers do.
    tokenizer.add_tokens([f"<{n}>" for n in range(len(tokenizer), SHAPES[size][0])])
    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.device(device()):
        model = Qwen3ForCausalLM(config(size, eos_token_id=end, pad_token_id=padding, bos_token_id=None))
    vocabulary, width = model.lm_head.weight.shape
    direction = torch.randn(width, device=device())
    direction /= direction.norm()
    share = LENGTHS[lengths][0]
    with torch.no_grad():
        model.model.embed_tokens.weight += 20 * direction
        model.lm_head.weight[padding] = -direction * 30 / width**0.5
        tokens = torch.arange(10, min(vocabulary, 522), device=device())[None]
        hidden = model.model(tokens).last_hidden_state[0]
        others = (hidden @ model.lm_head.weight.T).logsumexp(-1).mean()
        wanted = float(np.log(share / (1 - share)) + others) if share else -30.0
        model.lm_head.weight[end] = direction * wanted / (hidden @ direction).mean()
    model.to(DTYPES[dtype]).save_pretrained(folder)
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

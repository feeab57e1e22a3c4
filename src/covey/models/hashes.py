"""Hashes by which a tokenizer and weights are known again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of a tokenizer's words with their ids."""
    words = sorted((n, word) for word, n in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:32]


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """The sha256 hash of weights and their names."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        # As bytes, since numpy has no bfloat16.
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""A model with more ids than its tokenizer has words."""

from __future__ import annotations

from covey.models.policy import Policy
from covey.models.tiny import build_model, build_tokenizer


def padded(more: int = 200) -> Policy:
    """A model with more ids than its tokenizer, as Qwen's."""
    tokenizer = build_tokenizer(["1+2=3"], 300)
    model = build_model(tokenizer, 0, layers=1, hidden=32)
    model.resize_token_embeddings(len(tokenizer) + more)
    return Policy(model, tokenizer)

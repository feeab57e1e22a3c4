"""The tokens that end a completion."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, turn_ends: int | None) -> list[int]:
    """Ids that end a completion, from the tokenizer, the generation config and the chat template."""
    others = (tokenizer.eos_token_id, turn_ends)
    return sorted({*configured_ends(model), *(i for i in others if i is not None)})


def generation_config(model: PreTrainedModel) -> GenerationConfig | None:
    """The generation config; models that cannot `generate`, such as reward models, have none."""
    return getattr(model, "generation_config", None)


def configured_ends(model: PreTrainedModel) -> set[int]:
    """Ids that end a completion by the generation config."""
    configured = getattr(generation_config(model), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return {i for i in ids if i is not None}

"""Rotary position tables of a model, so built that sampling and training rotate a token by the same angle."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from covey.models.ops import Rotation
from covey_verify.errors import ConfigError

LONGROPE = ("factor", "mscale")
"""Entries that a `longrope` table has for short and for long sequences; only Phi-MoE has mscale."""
NO_ROTATION = "none"
"""Name of the rotary table of layers without positions."""


def longest_stable_rotation(config: PretrainedConfig) -> int | None:
    """The length in tokens up to which the rotation of a position is always the same; None: any length.

    Some tables depend on the longest sequence in the batch: `longrope` has one for short and one for long
    sequences, `dynamic` grows. They would rotate a token differently in sampling and in training.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    # One table for all layers, or one for each kind of layer.
    tables = [t for t in (parameters, *parameters.values()) if isinstance(t, Mapping)]
    limits = [
        int(table.get("original_max_position_embeddings", config.max_position_embeddings))
        for table in tables
        if table.get("rope_type") == "longrope"
        and any(table.get(f"short_{entry}") != table.get(f"long_{entry}") for entry in LONGROPE)
    ]
    limits += [config.max_position_embeddings for table in tables if table.get("rope_type") == "dynamic"]
    return min(limits, default=None)


def use_long_table(model: PreTrainedModel) -> None:
    """Let a `longrope` model rotate sequences of all lengths by its long table; saved models say so too.

    Raises ConfigError for a model without such tables.
    """
    config = model.config.get_text_config()
    body = model.get_decoder()
    table = getattr(config, "rope_parameters", None) or {}
    if table.get("rope_type") != "longrope":
        raise ConfigError(f"longrope: long: {config.model_type} has no long rotary table; remove the setting")
    table.update({f"short_{entry}": table[f"long_{entry}"] for entry in LONGROPE if f"long_{entry}" in table})
    body.rotary_emb = type(body.rotary_emb)(config).to(model.device)


class RotaryTables:
    """The cos and sin tables of a model, by name, built by its Hugging Face module and kept as they grow."""

    def __init__(
        self, rotary: nn.Module, embed: nn.Embedding, names: Collection[str], longest: int | None
    ) -> None:
        """``longest`` comes from ``longest_stable_rotation``; dtype and device from ``embed``."""
        self._rotary = rotary
        self._embed = embed
        self.names = names
        self.longest = longest
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def at(self, positions: Tensor, length: int | None = None) -> dict[str, Rotation]:
        """Rotary tables by name, for all positions, (T,) int64, or for ``length`` of them.

        Raises ConfigError for a position beyond ``longest``; a ``length`` is reduced to that.
        """
        if length is None:
            needed = self.checked(int(positions.max()) + 1)
        else:
            needed = min(length, self.longest or length)
        return {name: Rotation(*self._table(name, needed), positions) for name in self.names}

    def checked(self, tokens: int) -> int:
        """Return ``tokens``; raise ConfigError if sampling and training could rotate so many differently."""
        if tokens > (self.longest or tokens):
            raise ConfigError(
                f"a sequence may have {tokens} tokens, but beyond {self.longest} this model's rotary table "
                "depends on the longest sequence of a batch, so sampling and training would differ; lower "
                "rollout.max_tokens or drop long prompts"
            )
        return tokens

    def _table(self, name: str, length: int) -> tuple[Tensor, Tensor]:
        weight = self._embed.weight
        cached = self._tables.get(name)
        if cached is None or len(cached[0]) < length or cached[0].dtype != weight.dtype:
            # Tables at least double, so that sequences that grow by a token rebuild them rarely.
            doubled = min(2 * len(cached[0]) if cached is not None else 0, self.longest or 1 << 30)
            size = max(length, doubled)
            positions = torch.arange(size, device=weight.device)
            kind = (name,) if name not in ("", NO_ROTATION) else ()
            tables = self._rotary(weight[:1, None], positions[None], *kind)
            cos, sin = (table[0].to(weight.dtype).contiguous() for table in tables)
            if name == NO_ROTATION:
                cos = torch.ones_like(cos)
                sin = torch.zeros_like(sin)
            cached = self._tables[name] = (cos, sin)
        return cached

"""The forward pass of our own decoder, for the model families in ``FAMILIES``, on a loaded model's weights.

Tokens lie flat, one after another, whatever sequences they belong to. Only attention knows about sequences,
so it is passed in: over packed sequences for training (``Decoder.attend_packed``), over a key/value cache for
sampling. Same weights and same code give the same log-probs.

Shapes: T flat tokens, D model width, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from covey.models.compiled import CompiledOps
from covey.models.internals import has_hooks
from covey.models.kernels.calls import MIXED_PRODUCTS, passes_known_answers, products, same_bits
from covey.models.linear import FusedLinear, adapts_linears
from covey.models.ops import ACTIVATIONS, Attention, Heads, Norm, Ops, Sequences
from covey.models.ops_choice import pick_ops, why_unfit
from covey.models.packing import Packed
from covey.models.rotary import NO_ROTATION, RotaryTables, longest_stable_rotation
from covey_verify.errors import ConfigError

ATTENTION = 0
"""The place of the branch in ``Family.before`` and ``Family.after``."""
FEED_FORWARD = 1


class Family(NamedTuple):
    """Differences from Llama that the config does not state."""

    before: tuple[str | None, str | None] = ("input_layernorm", "post_attention_layernorm")
    """The norms before attention and feed-forward, by their names in a layer."""
    after: tuple[str | None, str | None] = (None, None)
    """The norms after each of them, before its result is added."""
    norm_shift: float = 0.0
    """A constant that is added to every norm's weight."""
    interleaved: bool = False
    """Whether rotation pairs neighbouring features instead of the two halves."""
    tables_by_type: bool = False
    """Whether layers of different `layer_types` have different rotary tables."""
    caps: tuple[str, ...] = ()
    """The soft caps in a config that the family's modules apply."""
    activation: str = "hidden_act"
    """Name of the config's entry for the gate's activation."""
    slides: bool = False
    """Whether every layer has the config's window, if there is one; otherwise each layer's module tells."""
    factors: bool = False
    """Whether the config has factors for embeddings, results of layers, and logits."""
    turns_windows: bool = False
    """Whether, in a model with windows, only the layers that have one use positions."""


LLAMA = Family()
AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
SCORES_CAP = "attn_logit_softcapping"
LOGITS_CAP = "final_logit_softcapping"
GEMMA2 = Family(
    ("input_layernorm", "pre_feedforward_layernorm"),
    AFTER,
    norm_shift=1.0,
    caps=(SCORES_CAP, LOGITS_CAP),
    activation="hidden_activation",
)
GEMMA3 = GEMMA2._replace(tables_by_type=True, caps=(LOGITS_CAP,))
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "smollm3", "ministral", "cwm", "seed_oss"), LLAMA),
    **dict.fromkeys(("internlm3", "iquestcoder"), LLAMA),
    "granite": Family(factors=True),
    **dict.fromkeys(("mistral", "phi3"), Family(slides=True)),
    "gemma": Family(norm_shift=1.0),
    "gemma2": GEMMA2,
    "vaultgemma": GEMMA2._replace(after=(None, None)),
    "gemma3_text": GEMMA3,
    # The type with an image encoder, which texts do not use.
    "gemma3": GEMMA3._replace(caps=()),
    **dict.fromkeys(("glm", "ernie4_5", "helium"), Family(interleaved=True)),
    "exaone4": Family((None, None), AFTER, turns_windows=True),
    "glm4": Family(after=("post_self_attn_layernorm", "post_mlp_layernorm"), interleaved=True),
    "olmo2": Family((None, None), AFTER),
    "olmo3": Family((None, None), AFTER, tables_by_type=True),
}
"""Families by `model_type`; all other models run through their Hugging Face modules."""
UNUSUAL = (SCORES_CAP, LOGITS_CAP, "use_bidirectional_attention")
"""Entries of a config that this forward pass supports in some families or in none."""

Attend = Callable[[int, Heads, Tensor], Tensor]
"""Function of a layer's number, its heads and qkv (T, (H + 2K) E) -> (T, H E)."""


def is_supported(model: PreTrainedModel) -> bool:
    """Whether our own forward pass computes exactly this model."""
    config = model.config.get_text_config()
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        return False
    unusual = {name for name in UNUSUAL if getattr(config, name, None)}
    return getattr(config, family.activation) in ACTIVATIONS and unusual <= {*family.caps}


def embed_every_token(model: PreTrainedModel) -> None:
    """Let the padding token's embedding learn like any other, as it does in the compiled operations.

    torch's module gives it no gradient. But many models pad with their end of sequence, which they read in
    every chat; real padding is masked anyway.
    """
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None


def leave_images(model: PreTrainedModel) -> None:
    """Freeze the parts that read images: no prompt has any, so they would only take optimizer memory."""
    if model.config.get_text_config() is model.config:
        return
    parts = (model.get_decoder(), model.get_output_embeddings())
    text_parameters = {p for part in parts if part is not None for p in part.parameters()}
    for parameter in {*model.parameters()} - text_parameters:
        parameter.requires_grad_(False)


def hidden_states(
    decoder: Decoder | None, packed: Packed, states: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The hidden states that predict: (M, D).

    ``states`` runs padded tokens (N, S) with their mask, for architectures without a decoder of ours.
    """
    if decoder is not None:
        attend = decoder.attend_packed(packed.positions, packed.sequences)
        return decoder(packed.tokens, attend)[packed.sources]
    index, real = packed.pad_completions()
    hidden = states(packed.tokens[index], real.long())
    # In row n the predictions of the completion begin at its prompt's last token, column first[n].
    first = packed.completions[:, 1] - 1
    offsets = torch.arange(packed.place.shape[1], device=index.device)
    last_column = index.shape[1] - 1
    # Short completions would run beyond the row; the place drops those columns again.
    columns = (first[:, None] + offsets).clamp(max=last_column)
    rows = torch.arange(len(index), device=index.device)[:, None]
    return hidden[rows, columns][packed.place]


def cap_of(config: PretrainedConfig, name: str) -> float | None:
    """The cap that a config has under a name, or None."""
    cap = getattr(config, name, None)
    return float(cap) if cap else None


def _factor(config: PretrainedConfig, name: str) -> float:
    return float(getattr(config, name)) if FAMILIES[config.model_type].factors else 1.0


def _norm(owner: nn.Module, name: str | None, shift: float) -> Norm | None:
    """A norm that some families have. Raises AttributeError for a module that is not one."""
    module = getattr(owner, name, None) if name else None
    return None if module is None else Norm(module, shift)


def _projection(owner: nn.Module, together: str, *apart: str) -> FusedLinear:
    """The projection that some families store as one module and others as several.

    Raises AttributeError for modules without weights.
    """
    names = (together,) if hasattr(owner, together) else apart
    projection = FusedLinear(*(getattr(owner, name) for name in names))
    _ = projection.parameters
    return projection


class Layer(nn.Module):
    """One transformer layer: a Hugging Face layer computed with our operations.

    Its parameters belong to ``block`` and are read at each call, so that sharding can swap them in its hooks.
    """

    def __init__(self, number: int, block: GradientCheckpointingLayer, config: PretrainedConfig) -> None:
        super().__init__()
        self.number = number
        self.block = block
        family = FAMILIES[config.model_type]
        attention = block.self_attn
        mlp = block.mlp
        # In tuples, so that torch does not register the norms a second time.
        self.before = tuple(_norm(block, name, family.norm_shift) for name in family.before)
        self.after = tuple(_norm(block, name, family.norm_shift) for name in family.after)
        norms = [_norm(attention, name, family.norm_shift) for name in ("q_norm", "k_norm")]
        # A weight wider than a head norms all heads together, before they are split.
        norms_rows = norms[0] is not None and len(norms[0].weight) != attention.head_dim
        self.row_norms = tuple(norm for norm in norms if norms_rows and norm is not None)
        self.heads = Heads(
            config.num_attention_heads,
            config.num_key_value_heads,
            attention.head_dim,
            query_norm=None if norms_rows else norms[0],
            key_norm=None if norms_rows else norms[1],
            scale=attention.scaling,
            window=_window(attention, config),
            rotary=_table(attention, config, number),
            interleaved=family.interleaved,
            cap=cap_of(config, SCORES_CAP),
        )
        self.residual = _factor(config, "residual_multiplier")
        self.gate = ACTIVATIONS[getattr(config, family.activation)]
        self.qkv = _projection(attention, "qkv_proj", "q_proj", "k_proj", "v_proj")
        self.output = FusedLinear(attention.o_proj)
        self.gate_up = _projection(mlp, "gate_up_proj", "gate_proj", "up_proj")
        self.down = FusedLinear(mlp.down_proj)

    def forward(
        self, x: Tensor, delta: Tensor | None, attend: Attend, ops: Ops
    ) -> tuple[Tensor, Tensor | None]:
        """Map the residual stream and the delta still to be added to it to the next pair: (T, D) each.

        x' = x + delta, x'' = x' + attention(norm(x')) -> x'', mlp(norm(x'')). The last sum is left to the
        next norm (the next layer's, or the final one), since ``add_norm`` does both in one pass over a row.
        """
        x, h = self._enter(x, delta, ATTENTION, ops)
        mixed = attend(self.number, self.heads, self._normed_rows(ops.linear(self.qkv, h), ops))
        attended = self._leave(ops.linear(self.output, mixed), ATTENTION, ops)
        x, h = self._enter(x, attended, FEED_FORWARD, ops)
        gated = ops.gate_mul(ops.linear(self.gate_up, h), self.gate)
        return x, self._leave(ops.linear(self.down, gated), FEED_FORWARD, ops)

    def _enter(self, x: Tensor, delta: Tensor | None, branch: int, ops: Ops) -> tuple[Tensor, Tensor]:
        norm = self.before[branch]
        if norm is not None:
            return ops.add_norm(x, delta, norm)
        total = x if delta is None else x + delta
        return total, total.to(x.dtype if delta is None else delta.dtype)

    def _leave(self, out: Tensor, branch: int, ops: Ops) -> Tensor:
        norm = self.after[branch]
        out = out if norm is None else ops.add_norm(out, None, norm)[1]
        return out if self.residual == 1 else out * self.residual

    def _normed_rows(self, qkv: Tensor, ops: Ops) -> Tensor:
        """The projections with queries and keys normed over all heads, in families that do so."""
        if not self.row_norms:
            return qkv
        sizes = [n * self.heads.width for n in (self.heads.queries, self.heads.keys, self.heads.keys)]
        q, k, v = qkv.split(sizes, dim=1)
        parts = zip((q, k), self.row_norms, strict=True)
        return torch.cat([*(ops.add_norm(x.contiguous(), None, norm)[1] for x, norm in parts), v], dim=1)


def _window(attention: nn.Module, config: PretrainedConfig) -> int | None:
    """The attention window of a layer, if it is shorter than the model's context.

    Other families' configs have a `sliding_window` or `layer_types` too, but their modules do not read it.
    """
    owner = config if FAMILIES[config.model_type].slides else attention
    window = getattr(owner, "sliding_window", None) if getattr(attention, "is_sliding", True) else None
    return window if window and window < config.max_position_embeddings else None


def _table(attention: nn.Module, config: PretrainedConfig, number: int) -> str:
    family = FAMILIES[config.model_type]
    has_windows = family.turns_windows and config.sliding_window is not None
    if not getattr(attention, "use_rope", True) or (has_windows and not attention.is_sliding):
        return NO_ROTATION
    return config.layer_types[number] if family.tables_by_type else ""


class Decoder(nn.Module):
    """The transformer between token ids and final hidden states.

    It has no parameters of its own: its modules belong to the Hugging Face model (LoRA layers included).
    That model does not know it, so that its state_dict holds each weight once.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        body = model.get_decoder()
        config = model.config.get_text_config()
        self.embed = body.embed_tokens
        final_norm = _norm(body, "norm", FAMILIES[config.model_type].norm_shift)
        assert final_norm is not None, "every family has one"
        # In a tuple, so that the norm is not registered a second time.
        self.last_norms = (final_norm,)
        layers = [Layer(i, block, config) for i, block in enumerate(body.layers)]
        self.layers = nn.ModuleList(layers)
        self.heads = layers[0].heads
        self.windows = {layer.heads.window for layer in layers}
        names = {layer.heads.rotary for layer in layers}
        self.rotary = RotaryTables(body.rotary_emb, body.embed_tokens, names, longest_stable_rotation(config))
        self.embedding_scale = _factor(config, "embedding_multiplier")
        self.logits_scale = 1 / _factor(config, "logits_scaling")
        self.logits_cap = cap_of(config, LOGITS_CAP)
        """The bound on a language model's logits; None without one."""
        first_position = self.rotary.at(torch.zeros(1, dtype=torch.int64), 1)
        rotated = min(len(table.cos[0]) for table in first_position.values())
        widths = {name: getattr(config, name) for name in ("hidden_size", "intermediate_size")}
        self.unfit = why_unfit(self.embed.weight, self.heads, widths, final_norm.weight, rotated)
        """Reason why the compiled operations cannot compute it; empty if they can."""
        self.ops = pick_ops(self.embed.weight, self.unfit)
        self.recompute = False
        """Whether only each layer's input is kept and the rest is recomputed in the backward pass."""

    @property
    def can_round(self) -> bool:
        """Whether its products can round their factors to bfloat16, as compiled operations on a CPU can."""
        ops = self.ops
        can_mix = (
            isinstance(ops, CompiledOps)
            and ops.dtype == torch.float32
            and passes_known_answers(MIXED_PRODUCTS)
        )
        return can_mix and same_bits(MIXED_PRODUCTS) and all(m.is_product for m in self.linears)

    def round_products(self) -> None:
        """Round inputs and weights to bfloat16 where they are multiplied; all else stays float32.

        Raises ConfigError where the operations cannot do that.
        """
        if not (isinstance(self.ops, CompiledOps) and self.can_round):
            raise ConfigError(
                "precision: only the compiled operations of a CPU round the products of float32 weights "
                "(see `covey doctor`); on a GPU set dtype: bfloat16"
            )
        self.ops.products = MIXED_PRODUCTS
        for linear in self.linears:
            linear.rounds = True

    @property
    def bit_exact(self) -> bool:
        """Whether a token's hidden state has the same bits alone, in a batch, in decoding and in training."""
        return self.ops.bit_exact and all(m.is_product for m in self.linears)

    @property
    def linears(self) -> list[FusedLinear]:
        """The fused products of all layers."""
        return [m for layer in self.layers for m in vars(layer).values() if isinstance(m, FusedLinear)]

    @property
    def all_compiled(self) -> bool:
        """Whether the compiled operations do nearly all the work, and torch none of the products."""
        return self.bit_exact and not any(products().values())

    @property
    def hooked(self) -> bool:
        """Whether hooks run before or after a layer, as they do where sharded weights are gathered."""
        return any(has_hooks(layer) for layer in self.layers)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Final hidden states of flat tokens. (T,) int64 -> (T, D)."""
        return self.through_layers(self.embedded(tokens), attend)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Input of the first layer. (T,) int64 -> (T, D)."""
        x = self.ops.embed(self.embed, tokens)
        return x if self.embedding_scale == 1 else x * self.embedding_scale

    def through_layers(self, x: Tensor, attend: Attend) -> Tensor:
        """Final hidden states of embedded tokens. (T, D) -> (T, D)."""
        delta: Tensor | None = None
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x, delta = checkpoint(layer, x, delta, attend, self.ops, use_reentrant=False)
            else:
                x, delta = layer(x, delta, attend, self.ops)
        hidden = self.ops.add_norm(x, delta, self.last_norms[0])[1]
        # The head is linear, so scaling its input scales the logits.
        return hidden if self.logits_scale == 1 else hidden * self.logits_scale

    def attend_packed(self, positions: Tensor, sequences: Sequences) -> Attend:
        """Attention over packed sequences, in which a completion sees its group's prompt and itself."""
        rotations = self.rotary.at(positions)
        attentions = self.attentions(sequences)

        def attend(_: int, heads: Heads, qkv: Tensor) -> Tensor:
            q, k, v = self.ops.split_heads(qkv, heads, rotations[heads.rotary])
            return attentions[heads.window](q, k, v, heads).flatten(1)

        return attend

    def attentions(self, sequences: Sequences) -> dict[int | None, Attention]:
        """Attention over packed sequences for each window of the model's layers."""
        # A window that reaches over the longest sequence hides nothing, so it has the mask of no window.
        effective_windows = {w: w if w is not None and w < sequences.longest else None for w in self.windows}
        by_mask = {
            window: self.ops.attention(sequences, window) for window in set(effective_windows.values())
        }
        return {window: by_mask[effective] for window, effective in effective_windows.items()}


def decoder_of(model: PreTrainedModel) -> Decoder | None:
    """Our forward pass of a model; None if its own modules have to compute it.

    These are models of other types, models with adapters outside linear layers, and models in which somebody
    has replaced a module, for example a norm by torch's Identity.
    """
    if not (is_supported(model) and adapts_linears(model)):
        return None
    try:
        return Decoder(model)
    except AttributeError:  # a module without the parts that its type has
        return None

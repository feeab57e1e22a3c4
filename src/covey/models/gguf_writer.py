"""Models as GGUF files, for llama.cpp and the programs around it: Llama's and Qwen's shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from covey.models.gguf import NEEDS
from covey_verify.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFWriter, TokenType

PRECISIONS = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
"""Type of stored matrices -> GGUF's name of such a file. Vectors (norms, biases) are always float32."""
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""transformers' `model_type` -> GGUF's `general.architecture`."""
NAMES = (
    (r"model\.embed_tokens\.", "token_embd."),
    (r"model\.norm\.", "output_norm."),
    (r"lm_head\.", "output."),
    (r"model\.layers\.", "blk."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.([qkv])_proj\.", r".attn_\1."),
    (r"\.self_attn\.o_proj\.", ".attn_output."),
    (r"\.self_attn\.([qk])_norm\.", r".attn_\1_norm."),
    (r"\.mlp\.(gate|up|down)_proj\.", r".ffn_\1."),
)
"""Parts of transformers' names of tensors -> GGUF's."""
INSTEAD = "llama.cpp's own converter may do it: python convert_hf_to_gguf.py"


def write_gguf(folder: Path, target: Path, precision: str, title: str) -> None:
    """Write the model in ``folder`` (config, tokenizer, safetensors) as the GGUF file ``target``.

    ``title`` is the name that llama.cpp and others show.

    Raises ConfigError for an architecture, positions or a tokenizer that cannot be written faithfully.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"--gguf {precision}: one of {', '.join(PRECISIONS)}")
    if find_spec("gguf") is None:
        raise ConfigError(NEEDS.replace("a GGUF file as a model", "--gguf"))
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType, quants

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    _refuse(config, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    writer = GGUFWriter(target, ARCHITECTURES[config.model_type])
    try:
        _add_shape(writer, config, title)
        _add_tokenizer(writer, config, tokenizer, folder)
        writer.add_file_type(LlamaFileType[PRECISIONS[precision]])
        writer.add_quantization_version(GGML_QUANT_VERSION)
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                names = tensors.keys()
                for name in names:
                    if name == "lm_head.weight" and config.tie_word_embeddings:
                        # The head is tied, so the embedding is written for both in the file.
                        continue
                    values = _in_llama_cpp_order(name, tensors.get_tensor(name).float(), config).numpy()
                    kind = GGMLQuantizationType[_storage_of(values, precision)]
                    stored = quants.quantize(np.ascontiguousarray(values), kind)
                    writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def gguf_name(name: str) -> str:
    """Return the name of a tensor in a GGUF file.

    >>> gguf_name("model.layers.3.self_attn.q_proj.weight")
    'blk.3.attn_q.weight'
    """
    for pattern, new in NAMES:
        name = re.sub(pattern, new, name)
    return name


def _storage_of(values: np.ndarray, precision: str) -> str:
    """Return how a tensor is stored. Rows that are no whole blocks of 32 numbers cannot be quantized."""
    if values.ndim == 1:
        return "F32"
    return "F16" if precision == "q8_0" and values.shape[-1] % 32 else precision.upper()


def _refuse(config: PretrainedConfig, folder: Path) -> None:
    """Raise ConfigError if a GGUF file of ours would lack something of the model."""
    if config.model_type not in ARCHITECTURES:
        names = ", ".join(ARCHITECTURES)
        raise ConfigError(f"--gguf writes {names}, not {config.model_type}; {INSTEAD} {folder}")
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind != "default":
        raise ConfigError(f"--gguf does not write positions of the type {kind!r}; {INSTEAD} {folder}")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(f"--gguf does not write attention within a window; {INSTEAD} {folder}")


def _add_shape(writer: GGUFWriter, config: PretrainedConfig, name: str) -> None:
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(
    writer: GGUFWriter, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    _refuse_tokenizer(definition, folder)
    tokens, types = _vocabulary(definition, tokenizer, config.vocab_size)
    # A merge is a pair of pieces; older versions of `tokenizers` write it as one text.
    merges = [m if isinstance(m, str) else " ".join(m) for m in definition["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splits(definition["pre_tokenizer"], folder))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    _add_special_ids(writer, tokenizer)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _refuse_tokenizer(definition: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError for a tokenizer that llama.cpp would read differently."""
    model = definition["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ConfigError(f"--gguf writes tokenizers of byte-level BPE; {INSTEAD} {folder}")
    # llama.cpp changes no text before it splits it. NFC, which Qwen's have, leaves all but a few texts alone.
    normalizer = (definition["normalizer"] or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise ConfigError(
            f"--gguf does not write a tokenizer that changes texts ({normalizer}); {INSTEAD} {folder}"
        )


def _vocabulary(
    definition: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, size: int
) -> tuple[list[str], list[TokenType]]:
    """Return the token of each row of the embedding, and its type in GGUF."""
    from gguf import TokenType

    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens = list[str]()
    types = list[TokenType]()
    for i in range(size):
        if i in by_id:
            tokens.append(by_id[i])
            types.append(TokenType.NORMAL)
        else:  # the embedding may have rows that no token uses
            tokens.append(f"[PAD{i}]")
            types.append(TokenType.UNUSED)
    for entry in definition["added_tokens"]:
        if entry["id"] < size:
            types[entry["id"]] = TokenType.CONTROL if entry["special"] else TokenType.USER_DEFINED
    return tokens, types


def _add_special_ids(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
        # Whether a text begins with it is a property of the tokenizer, and shows in any text.
        first = tokenizer("a").input_ids[0]
        writer.add_add_bos_token(first == tokenizer.bos_token_id)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    if tokenizer.unk_token_id is not None:
        writer.add_unk_token_id(tokenizer.unk_token_id)


def _splits(definition: Mapping[str, Any], folder: Path) -> str:
    """Return llama.cpp's name for how a tokenizer splits texts before it merges bytes."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    parts = definition.get("pretokenizers") or [definition]
    kinds = [part["type"] for part in parts]
    adds_prefix = any(part.get("add_prefix_space") for part in parts)
    if kinds == ["ByteLevel"] and parts[0]["use_regex"] and not adds_prefix:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and not adds_prefix:
        return "smollm"
    patterns = [part["pattern"].get("Regex") for part in parts if part["type"] == "Split"]
    for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items():
        if kinds == ["Split", "ByteLevel"] and patterns == [pattern] and not adds_prefix:
            return name
    raise ConfigError(f"--gguf does not know how this tokenizer splits texts; {INSTEAD} {folder}")


def _in_llama_cpp_order(name: str, values: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Reorder the rows of Llama's queries and keys: llama.cpp turns neighbours, transformers halves."""
    match = re.search(r"\.self_attn\.([qk])_proj\.", name)
    if config.model_type != "llama" or match is None:
        return values
    heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
    halves = values.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(values.shape)

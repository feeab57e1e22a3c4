"""The model and the tokenizer that a trainer gets, by name or as objects, and peft's adapters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from covey.config.python_objects import without_compilation
from covey.models.load import load_named
from covey.models.pretrained import load_exclusively, pretrained_tokenizer, unreachable
from covey.models.tiny import build_model, build_tokenizer
from covey.trl.configs import TrainerArguments
from covey.trl.meanings import UnsupportedArgument
from covey_verify.usercode import name_of

MODEL_DTYPES: Mapping[str, torch.dtype | None] = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
IGNORED_OPTIONS = {
    "attn_implementation", "use_cache", "device_map", "revision", "trust_remote_code", "quantization_config",
}  # fmt: skip
"""Keys of model_init_kwargs, besides dtype, that are ignored; the last three only with their defaults."""
TOKENIZER_WANTED = "a tokenizer of transformers"


def load_language_model(
    model: object, tokenizer: object, args: TrainerArguments, texts: Callable[[], Iterable[str]]
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return a language model and its tokenizer; the tokenizer of `tiny` is trained on ``texts``."""
    if model == "tiny":
        tiny_tokenizer = build_tokenizer(texts())
        return build_model(tiny_tokenizer, args.seed), tiny_tokenizer
    if isinstance(model, str | Path):
        loaded, own_tokenizer = load_named(str(model), Path())
        return _to_dtype(loaded, args.model_init_kwargs), _checked_tokenizer(tokenizer or own_tokenizer)
    _refuse_options(args.model_init_kwargs, "belongs to a model given by name")
    return _checked_model(model), _checked_tokenizer(tokenizer or _own_tokenizer(model))


def load_text_classifier(
    model: object, tokenizer: object, options: Mapping[str, object] | None = None
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return a model that gives one number per text, and its tokenizer. Raises UnsupportedArgument.

    ``options`` are model_init_kwargs, for a model given by name.
    """
    if isinstance(model, str | Path):
        further = {"num_labels": 1, "local_files_only": unreachable(str(model))}
        try:
            loaded = load_exclusively(
                AutoModelForSequenceClassification, str(model), dtype=torch.float32, **further
            )
        except (OSError, ValueError) as error:
            raise UnsupportedArgument(
                f"{model}: the model cannot be loaded: {str(error).splitlines()[0]}"
            ) from None
        model = _to_dtype(loaded, options)
    model = _checked_model(model)
    labels = model.config.num_labels  # type: ignore[union-attr]
    if labels != 1:
        raise UnsupportedArgument(
            f"The model has `num_labels={labels}`, but reward models require `num_labels=1`: load it so"
        )
    checked = _checked_tokenizer(tokenizer or _own_tokenizer(model))
    if checked.pad_token_id is None:
        checked.pad_token = checked.eos_token
    return model, checked


def _checked_model(model: object) -> nn.Module:
    model = without_compilation(model)
    if not isinstance(model, PreTrainedModel) and not hasattr(model, "get_base_model"):
        raise UnsupportedArgument(
            f"model: {name_of(model)} is not a name, a model of transformers or a PeftModel"
        )
    assert isinstance(model, nn.Module)
    return model


def _checked_tokenizer(tokenizer: object) -> PreTrainedTokenizerBase:
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UnsupportedArgument(
            f"processing_class: {name_of(tokenizer)} is not {TOKENIZER_WANTED}; covey trains on texts only"
        )
    return tokenizer


def _own_tokenizer(model: object) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the folder or hub id that a model was loaded from. Raises UnsupportedArgument."""
    source = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    if not source:
        raise UnsupportedArgument(
            f"{name_of(model)} was loaded from no folder or hub id: give its processing_class"
        )
    try:
        return pretrained_tokenizer(source, local_files_only=unreachable(source))
    except (OSError, ValueError) as error:
        raise UnsupportedArgument(
            f"processing_class: the tokenizer of {source} cannot be loaded: {error}"
        ) from None


def _to_dtype(model: PreTrainedModel, options: Mapping[str, object] | None) -> PreTrainedModel:
    """Return a model in the dtype of model_init_kwargs, by default float32 as in TRL."""
    others = dict(options or {})
    named = others.pop("dtype", others.pop("torch_dtype", "float32"))
    _refuse_options(others, "is not an option of covey's loader")
    dtype = named if isinstance(named, torch.dtype) else MODEL_DTYPES.get(str(named), torch.float16)
    if dtype not in MODEL_DTYPES.values():
        raise UnsupportedArgument(f"model_init_kwargs: dtype {named}: numbers are float32 or bfloat16")
    return model if dtype is None else model.to(dtype)


def _refuse_options(options: Mapping[str, object] | None, why: str) -> None:
    for name, value in (options or {}).items():
        plain = value in (None, False, "main") or name in ("attn_implementation", "use_cache", "device_map")
        if not (name in IGNORED_OPTIONS and plain) and not (name == "dtype" and value is None):
            raise UnsupportedArgument(f"model_init_kwargs: {name}={value!r} {why}")


def expert_notes(model: PreTrainedModel, args: TrainerArguments) -> list[str]:
    """Return a note if TRL would add a loss that balances the model's experts, which covey does not."""
    config = model.config.get_text_config()
    coef = getattr(config, "router_aux_loss_coef", 0.0)
    # There is a note already if the script sets the coefficient.
    unset = getattr(args, "router_aux_loss_coef", 0.0) is None
    if not (unset and coef and hasattr(config, "output_router_logits")):
        return []
    why = f"TRL would add {coef:g} times a loss that spreads tokens over the experts; covey adds none"
    return [f"router_aux_loss_coef: {why}"]


def with_adapters(model: object, peft_config: object) -> Any:
    """Return a model with peft's adapters. Raises UnsupportedArgument if it could not be sampled from."""
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise UnsupportedArgument(f"peft_config must be a config of peft, not {name_of(peft_config)}")
    if hasattr(model, "get_base_model"):
        raise UnsupportedArgument(
            "You passed a `PeftModel` and a `peft_config`: merge the adapters first (merge_and_unload), or "
            "leave peft_config out"
        )
    if peft_config.is_prompt_learning:
        raise UnsupportedArgument(
            f"peft_config: {peft_config.peft_type.value} is a prompt-learning method: it adds virtual tokens "
            "to prompts, which no sampler here reads; use adapters within layers, as LoRA"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings", UserWarning)
        return get_peft_model(model, peft_config)

"""A model that Python gave as an object: what is asked of it, and how it is left.

It is trained in place, as by TRL: afterwards it has the weights of `final/`, on the device and in the dtype
of the run, adapters merged. Its mode, and which of its weights are trained, are as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from covey.config.given import GivenModel
from covey.models.pretrained import check_finite, pretrained
from covey_verify.errors import ConfigError

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def checked_model(given: GivenModel) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer. Raises ConfigError for what cannot be trained."""
    model, tokenizer = given.model, given.tokenizer
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise ConfigError(
            f"model: a {given.name} is neither a name nor a causal language model of transformers. Adapters "
            "are merged first (merge_and_unload), and wrappers taken off"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"tokenizer: a {type(tokenizer).__name__} is no tokenizer of transformers")
    if strange := [name for name, p in model.named_parameters() if p.dtype not in DTYPE_NAMES or p.is_meta]:
        raise ConfigError(
            f"model: {strange[0]} of {given.name} is {model.get_parameter(strange[0]).dtype}, or not loaded; "
            f"weights have to be {' or '.join(DTYPE_NAMES.values())}"
        )
    if any(p.is_inference() for p in model.parameters()):
        raise ConfigError(
            f"model: {given.name} was made within torch.inference_mode, so its weights can never change; "
            "make or load it outside, or under torch.no_grad"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"model: no weight of {given.name} is to be trained (requires_grad)")
    check_finite(model, given.name)
    return model, tokenizer


@contextmanager
def lent(model: str | GivenModel) -> Iterator[None]:
    """Leave a model that was given as an object without adapters, gradients or the run's mode."""
    if not isinstance(model, GivenModel) or not isinstance(model.model, PreTrainedModel):
        yield
        return
    module = model.model
    mode, trained = module.training, {n: p.requires_grad for n, p in module.named_parameters()}
    had_adapters = hasattr(module, "peft_config")
    try:
        yield
    finally:
        if hasattr(module, "peft_config") and not had_adapters:
            _merge(module)
        module.train(mode)
        for name, parameter in module.named_parameters():
            parameter.grad = None
            if parameter.requires_grad != trained[name]:
                parameter.requires_grad_(trained[name])


def take_weights(model: str | GivenModel, folder: Path) -> None:
    """Give a model that was given as an object the weights of a model folder."""
    if isinstance(model, GivenModel):
        module, _ = checked_model(model)
        saved: nn.Module = pretrained(AutoModelForCausalLM, folder, dtype=torch.float32)
        module.load_state_dict(saved.state_dict())


def _merge(model: PreTrainedModel) -> None:
    """Put the layers back that peft has replaced, with the adapters in their weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            model.set_submodule(name, cast("nn.Module", layer.get_base_layer()))
    del model.peft_config

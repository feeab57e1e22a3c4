"""Models from folders or a hub: safetensors only, no code of the folder's own, one at a time, whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import cached_file

from covey.models.whole import check_intact, check_size, check_whole

LOADING = RLock()
"""transformers switches the tying of weights off for the whole process while it loads a model. Two
threads that load at once can leave it off, and every model after them has its embeddings twice."""

CONFIG, INDEX, ADAPTER = "config.json", "model.safetensors.index.json", "adapter_config.json"
WEIGHTS = re.compile(r"[^/\\]+\.safetensors(\.index\.json)?")


def pretrained(loader: Any, source: str | Path, **options: Any) -> Any:
    """What ``loader``, one of transformers' Auto classes for models, makes of ``source``.

    Raises ConfigError if weights are missing, of another shape, or not finite, or if the model is larger
    than its files or the memory; whatever transformers raises for a source that does not hold a model.
    """
    refuse_strange(str(source))
    check_intact(Path(source))
    with LOADING:
        config = AutoConfig.from_pretrained(
            source, trust_remote_code=False, local_files_only=options.get("local_files_only", False)
        )
        check_size(loader, config, Path(source))
    model, found = alone(loader, source, ignore_mismatched_sizes=True, output_loading_info=True, **options)
    check_whole(model, found, str(source))
    return model


def alone(loader: Any, source: str | Path, **options: Any) -> Any:
    """What ``loader`` gives while nothing else loads."""
    with LOADING:
        # Said, because on a terminal transformers would ask whether to run the folder's code.
        return loader.from_pretrained(source, use_safetensors=True, trust_remote_code=False, **options)


def pretrained_tokenizer(source: str | Path, **options: Any) -> Any:
    """The tokenizer of ``source``. Raises as ``pretrained``."""
    refuse_strange(str(source))
    return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)


@cache
def unreachable(source: str) -> bool:
    """Whether ``source`` is a hub id and no hub answers, so that only a copy on this machine can be loaded.

    Asked once: transformers would retry for most of a minute and print every try.
    """
    if Path(source).is_dir():
        return False
    try:
        get_hf_file_metadata(hf_hub_url(source, "config.json"))
    except (HfHubHTTPError, ValueError):
        return False  # it answers, or is no id at all: loading it says what is wrong
    except Exception:
        return True  # of the transport, whose classes differ between versions; or HF_HUB_OFFLINE
    return False


def refuse_strange(source: str) -> None:
    """Raise ValueError for a source whose files name what transformers would open, and should not.

    It would unpickle a shard that the index calls `weights.bin`, read one that it calls `../../x`,
    load adapters and the model they name, and fetch code for an attention that the config calls `hub/code`.
    """
    if Path(source).is_dir():
        _refuse_links(Path(source))
        indices = sorted(Path(source).glob("*.safetensors.index.json"))
    else:
        indices = list(_found(source, INDEX))
    for path in _found(source, ADAPTER):
        raise ValueError(
            f"{path}: adapters are not loaded; merge them into their model (merge_and_unload) and save that"
        )
    for path in _found(source, CONFIG):
        _refuse_config(path)
    for path in indices:
        _refuse_index(path, Path(source) if Path(source).is_dir() else None)


def _found(source: str, name: str) -> Iterator[Path]:
    """A file of a folder or of a hub id, which is fetched; nothing where there is none."""
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
    """Files of the folder have to be there, or where a hub's cache keeps them: snapshots/X -> blobs."""
    own = folder.resolve()
    homes = [own]
    if own.parent.name == "snapshots" and own.parent.parent.name.startswith("models--"):
        homes.append(own.parent.parent / "blobs")
    for path in sorted(own.iterdir()):
        target = path.resolve()
        if path.is_symlink() and not any(target.is_relative_to(home) for home in homes):
            if target.is_file() or path.name == "additional_chat_templates":
                raise ValueError(
                    f"{path} is a link to {target}, outside the model's folder; copy the file there"
                )
        elif target.exists() and not (target.is_file() or target.is_dir()):
            raise ValueError(f"{path} is neither a file nor a folder")


def _refuse_config(path: Path) -> None:
    config = _read(path)
    weights = config.get("transformers_weights")
    if weights is not None and not (isinstance(weights, str) and WEIGHTS.fullmatch(weights)):
        raise ValueError(f"{path}: transformers_weights {weights!r} is not a safetensors file of the folder")
    for key, value in _items(config):
        if key.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise ValueError(f"{path}: {key} {value!r} is code from a hub, which is not run")


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key, inner
        yield from _items(inner)


def _refuse_index(path: Path, folder: Path | None) -> None:
    names = _object(_read(path).get("weight_map"), f"{path}: weight_map")
    for name in sorted({str(n) for n in names.values()}):
        if not WEIGHTS.fullmatch(name) or name.endswith(".json"):
            raise ValueError(f"{path}: {name!r} is not a safetensors file of the folder; only those are read")
        if folder is not None and not (folder / name).is_file():
            raise ValueError(f"{path}: {name} is missing")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    return _object(value, str(path))


def _object(value: Any, what: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError(f"{what} is not a JSON object")

"""Models from folders or a hub: safetensors only, no code of the folder's own, one at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError

LOADING = RLock()
"""transformers switches the tying of weights off for the whole process while it loads a model. Two
threads that load at once can leave it off, and every model after them has its embeddings twice."""


def pretrained(loader: Any, source: str | Path, **options: Any) -> Any:
    """What ``loader``, one of transformers' Auto classes for models, makes of ``source``.

    Raises OSError, ValueError, KeyError or SafetensorError for a source that does not hold it.
    """
    with LOADING:
        # Said, because on a terminal transformers would ask whether to run the folder's code.
        return loader.from_pretrained(source, use_safetensors=True, trust_remote_code=False, **options)


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

"""Models from folders or a hub: safetensors only, no code of the folder's own, one at a time."""

from __future__ import annotations

from pathlib import Path
from threading import RLock
from typing import Any

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

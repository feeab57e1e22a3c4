"""Checks of a model's folder before its use: sizes of its files, and a trial of its texts in a child."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from covey.models import folder_trial_child
from covey.system.opening import load_json, read_regular
from covey_verify.errors import CoveyError
from covey_verify.sandbox.client import ForkServer
from covey_verify.sandbox.confine import Limits

MAX_CONFIG_BYTES = 16 << 20
"""Most bytes of a JSON file with settings."""
MAX_TEXT_BYTES = 256 << 20
"""Most bytes of a file with a vocabulary."""
VOCABULARIES = {"tokenizer.json", "vocab.json", "added_tokens.json", "model.safetensors.index.json"}
MAX_TOKEN_BYTES = 1 << 16
"""Most bytes of a token, or of a pattern."""
LONG_STRING = re.compile(rb'"[^"]{%d,}"' % MAX_TOKEN_BYTES)
MAX_ENDS = 1000
"""Largest number of end-of-sequence tokens that a model may have."""
TRIAL_SECONDS = 120.0
"""Seconds until the trial of a file is killed."""
TRIAL_CPU_SECONDS = 10
MAX_TRIAL_MEMORY = 3 << 30
"""Most bytes of memory that the trial of a file may take."""
TRYING = str(folder_trial_child.__file__)
TRIED = ("tokenizer.json", *folder_trial_child.WITH_TEMPLATES)


def refuse_unusable(folder: Path) -> None:
    """Raise ValueError that names a file of the folder which is too large or too deeply nested."""
    for path, _, _ in _texts(folder):
        is_vocabulary = path.name in VOCABULARIES or path.suffix in (".txt", ".model")
        try:
            content = read_regular(path, MAX_TEXT_BYTES if is_vocabulary else MAX_CONFIG_BYTES)
            if path.suffix == ".json" and not is_vocabulary:
                _check_ends(load_json(content))
        except CoveyError as error:
            raise ValueError(str(error)) from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if path.name == "tokenizer.json" and LONG_STRING.search(content):
            raise ValueError(f"{path}: it has a token, or a pattern, of more than {MAX_TOKEN_BYTES:,} bytes")


def try_texts(folder: Path) -> None:
    """Use the tokenizer and templates of a folder once, each file in a child process.

    Files that have not changed are not tried again. Raises ValueError that names a file that cannot be used.
    """
    _try(_texts(folder))


def _texts(folder: Path) -> tuple[tuple[Path, int, int], ...]:
    """The files that are read as texts, with the time of their last change and their size."""
    files = sorted(p for p in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")) if p.is_file())
    texts = (p for p in files if p.suffix in (".json", ".jinja", ".txt", ".model"))
    return tuple((p, p.stat().st_mtime_ns, p.stat().st_size) for p in texts)


def _check_ends(config: object) -> None:
    ends = config.get("eos_token_id") if isinstance(config, dict) else None
    if isinstance(ends, list) and len(ends) > MAX_ENDS:
        raise ValueError(f"eos_token_id has {len(ends):,} tokens, and at most {MAX_ENDS:,} end a completion")


@cache
def _try(texts: tuple[tuple[Path, int, int], ...]) -> None:
    limits = Limits(wall=TRIAL_SECONDS, cpu=TRIAL_CPU_SECONDS, memory=MAX_TRIAL_MEMORY)
    server = ForkServer(preload=[TRYING], landlock=False, syscalls=False)
    try:
        for path, _, _ in texts:
            if path.suffix == ".jinja" or path.name in TRIED:
                result = server.call(f"{TRYING}:use", str(path.absolute()), limits=limits)
                if result.kind == "lost":
                    raise OSError(result.text)
                if result.kind != "ok":
                    raise ValueError(
                        f"{path} cannot be used: {result.text[:200]}. It was tried in a process of its own "
                        f"with {TRIAL_CPU_SECONDS} s and {MAX_TRIAL_MEMORY >> 30} GB"
                    )
    finally:
        server.close()

"""Checks of a model's folder before its use: sizes of its files, and a trial of its texts in a child."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from covey.models import trying
from covey.system.opening import load_json, read_regular
from covey_verify.errors import CoveyError

CONFIG_BYTES, TEXT_BYTES = 16 << 20, 256 << 20
"""Most bytes of a JSON file with settings, and of a file with a vocabulary."""
VOCABULARIES = {"tokenizer.json", "vocab.json", "added_tokens.json", "model.safetensors.index.json"}
LONGEST_TOKEN = 1 << 16
"""Most bytes of a token, or of a pattern."""
LONG_STRING = re.compile(rb'"[^"]{%d,}"' % LONGEST_TOKEN)
MOST_ENDS = 1000
"""Largest number of end-of-sequence tokens that a model may have."""
SECONDS, PATIENCE, MEMORY = 10, 120, 3 << 30
"""Limits of a trial: seconds of CPU time, seconds until it is killed, and bytes of memory."""


def refuse_unusable(folder: Path) -> None:
    """Raise ValueError that names a file of the folder which is too large or too deeply nested."""
    for path, _, _ in _texts(folder):
        vocabulary = path.name in VOCABULARIES or path.suffix in (".txt", ".model")
        try:
            content = read_regular(path, TEXT_BYTES if vocabulary else CONFIG_BYTES)
            if path.suffix == ".json" and not vocabulary:
                _check_ends(load_json(content))
        except CoveyError as error:
            raise ValueError(str(error)) from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if path.name == "tokenizer.json" and LONG_STRING.search(content):
            raise ValueError(f"{path}: it has a token, or a pattern, of more than {LONGEST_TOKEN:,} bytes")


def try_texts(folder: Path) -> None:
    """Use the tokenizer and templates of a folder once in a child process; unchanged files are tried once.

    Raises ValueError that names the file that the child failed on.
    """
    _try(folder, _texts(folder))


def _texts(folder: Path) -> tuple[tuple[Path, int, int], ...]:
    """The files that are read as texts, with the time of their last change and their size."""
    files = sorted(p for p in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")) if p.is_file())
    read = (p for p in files if p.suffix in (".json", ".jinja", ".txt", ".model"))
    return tuple((p, p.stat().st_mtime_ns, p.stat().st_size) for p in read)


def _check_ends(config: object) -> None:
    ends = config.get("eos_token_id") if isinstance(config, dict) else None
    if isinstance(ends, list) and len(ends) > MOST_ENDS:
        raise ValueError(f"eos_token_id has {len(ends):,} tokens, and at most {MOST_ENDS:,} end a completion")


@cache
def _try(folder: Path, _files: tuple[tuple[Path, int, int], ...]) -> None:
    # -I: neither the working folder nor the user's environment may put modules into the child.
    command = [sys.executable, "-I", str(trying.__file__), str(folder), str(SECONDS), str(MEMORY)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)  # noqa: S603 - ours
    except subprocess.TimeoutExpired as late:
        _give_up(folder, late.stdout or b"", f"it takes more than {PATIENCE} s")
        return
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"code {done.returncode}"]
        # A negative code is a signal: SIGXCPU or SIGKILL from the limit on CPU time.
        why = f"it takes more than {SECONDS} s" if done.returncode < 0 else said[0][:200]
        _give_up(folder, done.stdout, why)


def _give_up(folder: Path, tried: bytes, why: str) -> None:
    # The child prints each file's name before it tries it, so the last name is the file to blame.
    name = (tried.decode(errors="replace").splitlines() or ["its files"])[-1]
    raise ValueError(
        f"{folder / name} cannot be used: {why}. It was tried in a process of its own with {SECONDS} s and "
        f"{MEMORY >> 30} GB"
    )

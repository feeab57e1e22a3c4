"""Tell the user's own runs, begun under this account, from those of somebody else.

The settings of a run are marked when they are written: `.marks` in its folder gets an HMAC of them. Its key
lies where only this user can read it, never in a run folder. Settings without a mark are somebody else's, or
somebody changed them. The functions and addresses that they name are used only after the user has been told
and has passed `--trust`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from covey.config.load import ResolvedConfig, resolved_values
from covey.config.python_objects import strings_in
from covey.config.start import Start, read_start
from covey.errors import START_FILE
from covey.runs.atomic import write_file
from covey.system.cache import cache_candidates, cache_folder, read_private_file, write_private_file
from covey.system.opening import RECORD_BYTES, read_below
from covey_verify.errors import ConfigError, CoveyError

KEY_FILE = "runs.key"
MARKS = ".marks"
MAX_MARKS = 100
CODE_NAME = re.compile(r"[^\s:]+:[^\W\d]\w*")
"""The form in which a config names a user's function: folder/file.py:function, package.module:function."""
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)


def write_own(folder: Path, name: str, content: str) -> None:
    """Write settings into a run's folder, marked as this user's. Without a place for a key they get no mark.

    The mark comes first: a kill between the two writes leaves the old settings marked as well.
    """
    key = _key(make=True)
    marks = _marks(folder)
    mark = _mark(content.encode(), key) if key is not None else ""
    # Marks of earlier settings stay: they are still needed if the write below does not happen. The oldest are
    # dropped, since every resume with other settings adds one.
    if mark and mark not in marks:
        write_file(folder / MARKS, "".join(f"{m}\n" for m in (*marks[-MAX_MARKS:], mark)))
    write_file(folder / name, content)


def is_own(folder: Path, name: str = "config.yaml") -> bool:
    """Whether this user wrote the settings in a run's folder and nobody has changed them."""
    key = _key(make=False)
    if key is None:
        return False
    try:
        content = read_below(folder, name, RECORD_BYTES)
    except (OSError, CoveyError):
        return False
    return _mark(content, key) in _marks(folder)


def start_of(
    run: Path, trust: bool, settings: Sequence[str] = (), values: Mapping[str, object] | None = None
) -> Start:
    """Return the command that started a run, with further settings, to start it again.

    Raises as ``read_start``. Without ``trust``, raises ConfigError too if the record is somebody else's and
    names code or addresses.
    """
    start = read_start(run).with_settings(settings, values)
    if not (trust or is_own(run, START_FILE)):
        refuse_others_code(start.load(names_only=True), run, trust)
    return start


def refuse_others_code(resolved: ResolvedConfig, run: Path, trust: bool, algorithm: bool = True) -> None:
    """Raise ConfigError, unless ``trust``, if somebody else's record names code or an address.

    ``resolved`` was read by names only: nothing has been imported. Pass ``algorithm`` False if the functions
    of the algorithm stay names, so that none of them will run.
    """
    if trust:
        return
    texts = set(_texts_of(resolved, algorithm))
    code = sorted(_format_spec(text, resolved.folder) for text in texts if CODE_NAME.fullmatch(text))
    addresses = sorted(text for text in texts if ADDRESS.fullmatch(text))
    if not (code or addresses):
        return
    uses = [f"runs the code of {', '.join(code)}"] if code else []
    uses += [f"asks {', '.join(addresses)}"] if addresses else []
    raise ConfigError(
        f"{run} was not started here by you, and continuing {' and '.join(uses)}. Read that first; if you "
        "trust it, add --trust (in Python: trust=True)"
    )


def _texts_of(resolved: ResolvedConfig, algorithm: bool) -> Iterator[str]:
    """Yield the names and values of a config that may be code or an address."""
    for stage in resolved.stages():
        values = resolved_values(stage)
        # Only these sections can name a function or a server; the others hold numbers and paths.
        sections = ("rewards", "rollout", "sandbox", "launch", *(["algorithm"] if algorithm else []))
        yield from strings_in([values.get(section) for section in sections])


def _format_spec(spec: str, folder: Path) -> str:
    file, _, name = spec.partition(":")
    return f"{(folder / file).resolve()} ({name})" if file.endswith(".py") else spec


def _marks(folder: Path) -> list[str]:
    try:
        # A file that somebody else damaged or enlarged proves nothing: then no settings count as marked.
        return read_below(folder, MARKS, RECORD_BYTES).decode("ascii", "replace").split()
    except (OSError, CoveyError):
        return []


def _mark(content: bytes, key: bytes) -> str:
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def _key(make: bool) -> bytes | None:
    """Return the user's key, or None. With ``make`` a missing key is made, if a folder is safe to keep it."""
    for folder in cache_candidates():  # to read it, nothing has to be writable
        with suppress(OSError):
            return read_private_file(folder / KEY_FILE) or None
    with suppress(OSError):
        if make:
            path = cache_folder() / KEY_FILE
            write_private_file(path, secrets.token_bytes(32))
            # Read back: another process may have made the key a moment earlier, and the first one stays.
            return read_private_file(path) or None
    return None

"""Integrity of covey's files when they are read back: records have a checksum, folders a manifest.

Any damage, from an emptied file to one flipped bit, is an error that names the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from covey.errors import CheckpointError
from covey.system.opening import RECORD_BYTES, digest_below, load_json, name_file_in_errors, read_below

T = TypeVar("T")
MANIFEST = "manifest.json"
SEAL = "sha256"
"""Key of a record's checksum."""
LINE_SEAL = f', "{SEAL}": "'.encode()


def digest_of(path: Path) -> str:
    """Return the sha256 of a file, read in chunks."""
    with path.open("rb") as file, name_file_in_errors(path):
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(values: Mapping[str, object]) -> str:
    """Return a record as JSON, with a checksum of itself."""
    # To JSON and back first: a reader will see tuples as lists and keys as strings.
    plain = json.loads(json.dumps(values))
    return json.dumps({**plain, SEAL: _seal(plain)}, indent=1)


def unsealed(content: bytes) -> dict[str, object]:
    """Return the values of a record that ``sealed`` has written. Raises ValueError if they have changed."""
    values = load_json(content)
    if not isinstance(values, dict) or values.pop(SEAL, None) != _seal(values):
        raise ValueError("not as it was written")
    return values


def sealed_line(record: Mapping[str, object]) -> str:
    """Return a record as a line of JSON whose last field is the sha256 of the line without it."""
    text = json.dumps(record, ensure_ascii=False)
    # The field takes the place of the closing brace, which follows it again.
    return f'{text[:-1]}, "{SEAL}": "{hashlib.sha256(text.encode()).hexdigest()}"}}\n'


def unsealed_line(line: bytes, parse_int: Callable[[str], object] | None = None) -> dict[str, object]:
    """Return the record of a line that ``sealed_line`` has written, without its line break.

    Raises ValueError if it is not, byte for byte, as it was written.
    """
    text, _, digest = line.rpartition(LINE_SEAL)
    if digest != hashlib.sha256(text + b"}").hexdigest().encode() + b'"}':
        raise ValueError("not as it was written")
    record = load_json(text + b"}", parse_int)
    if not isinstance(record, dict):
        raise ValueError("not an object")  # noqa: TRY004 - a line of another kind, such as a damaged one
    return record


def sealed_text(text: str) -> str:
    """Return a text with one more line: a comment with the sha256 of all before it."""
    return f"{text}# {SEAL}: {hashlib.sha256(text.encode()).hexdigest()}\n"


def unsealed_text(content: bytes) -> bytes:
    """Return the text that ``sealed_text`` was given. Raises ValueError if it has changed."""
    text, _, digest = content.rpartition(f"# {SEAL}: ".encode())
    if digest != hashlib.sha256(text).hexdigest().encode() + b"\n":
        raise ValueError("not as it was written")
    return text


def read_sealed(path: Path, schema: type[T], remedy: str) -> T:
    """Read a record that ``sealed`` has written, as ``schema``.

    Raises CheckpointError naming the file if it is not as it was written.
    """
    try:
        return TypeAdapter(schema).validate_python(unsealed(read_below(path.parent, path.name, RECORD_BYTES)))
    # First, because pydantic's error is a ValueError too: unchanged, but of another version of covey.
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
    except FileNotFoundError:
        problem = "missing"
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {remedy}".removesuffix(" ")) from None
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValueError:
        problem = "damaged: it is not as it was written"
    raise CheckpointError(f"{path}: {problem}. {remedy}")


def manifest_of(folder: Path) -> str:
    """Return the manifest of a folder: size and checksum of every file."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return sealed({"files": {str(p.relative_to(folder)): _fingerprint(p) for p in files}})


def damage(folder: Path, required: Collection[str] = ()) -> str | None:
    """Return how a folder differs from its manifest, with the file's name; None if it does not.

    The manifest must list all ``required`` files. Pages for people may be edited.
    """
    try:
        files = read_sealed(folder / MANIFEST, dict[str, dict[str, dict[str, object]]], "")["files"]
    except (CheckpointError, KeyError):
        return f"{folder / MANIFEST} is missing or damaged"
    for name in required:
        if name not in files:
            return f"{folder / MANIFEST} does not list {name}"
    for name, expected in files.items():
        path = folder / name
        try:
            fits = path.is_file() and (path.suffix == ".md" or _digest(folder, name) == expected["sha256"])
        except FileNotFoundError:  # removed between two looks
            fits = False
        except CheckpointError as error:
            return str(error)
        if not fits:
            return f"{path} is {'not as it was written' if path.is_file() else 'missing'}"
    return None


def _digest(folder: Path, name: str) -> str:
    """Return the sha256 of a file of the folder; the links of a hub's cache are followed."""
    cached = folder.parent.name == "snapshots" and Path(name).name == name
    return digest_of(folder / name) if cached else digest_below(folder, name)


def _seal(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _fingerprint(path: Path) -> dict[str, object]:
    return {"size": path.stat().st_size, "sha256": digest_of(path)}


def changes(before: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str]:
    """Return name -> what happened to that file, for each file that differs.

    >>> changes({"a.py": "1", "b.py": "2"}, {"a.py": "3", "c.py": "4"})
    {'a.py': 'changed', 'b.py': 'is gone', 'c.py': 'is new'}
    """
    change_of = {}
    for name in sorted({**before, **current}):
        if name not in before:
            change_of[name] = "is new"
        elif name not in current:
            change_of[name] = "is gone"
        elif before[name] != current[name]:
            change_of[name] = "changed"
    return change_of

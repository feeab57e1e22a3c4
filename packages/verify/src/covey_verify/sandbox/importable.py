"""What a model's programs may import: the standard library and the packages that a config names.

Everything else that is installed, verifiers and makers of problems among it, would hand out answers. It
is kept from them by the file system where a backend can, and by the import itself everywhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from covey_verify.sandbox.confine import installed, python_folders

OWN = Path(__file__).resolve().parents[1]
"""This package. A fork server needs one room of it."""
PACKAGES = ("numpy", "sympy")


def package_paths(names: Sequence[str]) -> list[str]:
    """Folders and files of packages and of those that these need; what is not installed has none."""
    left, found, done = list(names), list[str](), set[str]()
    while left:
        name = left.pop()
        if name in done:
            continue
        done.add(name)
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # it may be imported by another name
            left += metadata.packages_distributions().get(name, []) if name in names else []
            continue
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        found += [str(package.locate_file(top)) for top in tops if not top.endswith(".dist-info")]
        needs = [need for need in package.requires or () if "extra ==" not in need]
        left += [match[0] for need in needs if (match := re.match(r"[\w.-]+", need))]
    return sorted(set(found))


def hidden_folders() -> list[Path]:
    """Where packages are installed, of every Python whose libraries can be seen, and this one."""
    found = [Path(folder) for folder in installed()] + [OWN]
    for root in dict.fromkeys((sys.prefix, sys.base_prefix, sys.exec_prefix, "/usr", "/usr/local")):
        for kind in ("site-packages", "dist-packages"):
            found += Path(root).glob(f"lib*/python3*/{kind}")
    return sorted({folder.resolve() for folder in found if folder.is_dir()})


def libraries() -> list[str]:
    """What Python itself has to read, packages included; without this one."""
    return [folder for folder in python_folders() if Path(folder) != OWN]


def without(folders: Iterable[str], hidden: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Paths that cover ``folders`` but for what is hidden in them, and folders that may only be listed."""
    readable, listed = list[str](), list[str]()
    for folder in folders:
        real = Path(folder).resolve()
        if any(real.is_relative_to(one) for one in hidden):
            listed += [folder] if real in hidden and real != OWN else []
            continue
        inside = [one for one in hidden if one.is_relative_to(real)]
        if not inside:
            readable.append(folder)
            continue
        listed.append(folder)
        # A link grants nothing: what it points to is in one of the folders, or is not to be read.
        entries = [str(entry) for entry in sorted(real.iterdir()) if not entry.is_symlink()]
        more_readable, more_listed = without(entries, inside)
        readable += more_readable
        listed += more_listed
    return readable, listed

"""The packages that a model's programs may import: the standard library and the packages that a config names.

Everything else that is installed, such as verifiers and problem generators, would give answers away. The file
system hides it if the backend can, and the import refuses it everywhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from covey_verify.sandbox.confine import package_folders, python_folders

OWN = Path(__file__).resolve().parents[1]
"""The folder of this package; a fork server needs only its `sandbox`."""
PACKAGES = ("numpy", "sympy")


def package_paths(names: Sequence[str]) -> list[str]:
    """Return the folders and files of packages and of their dependencies, as far as they are installed."""
    waiting = list(names)
    paths = list[str]()
    visited = set[str]()
    while waiting:
        name = waiting.pop()
        # Dependencies may be circular.
        if name in visited:
            continue
        visited.add(name)
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # it may be the name by which a package is imported
            waiting += metadata.packages_distributions().get(name, []) if name in names else []
            continue
        # Top-level folders and files; ".." would be scripts outside of site-packages.
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        paths += [str(package.locate_file(top)) for top in tops if not top.endswith(".dist-info")]
        needs = [need for need in package.requires or () if "extra ==" not in need]
        # The name in a requirement such as "numpy>=1.26; python_version < '3.13'".
        matches = (re.match(r"[\w.-]+", need) for need in needs)
        waiting += [match[0] for match in matches if match is not None]
    return sorted(set(paths))


def hidden_folders() -> list[Path]:
    """Return this package's folder and all package folders of every Python whose libraries are visible."""
    folders = [Path(folder) for folder in package_folders()] + [OWN]
    for root in dict.fromkeys((sys.prefix, sys.base_prefix, sys.exec_prefix, "/usr", "/usr/local")):
        for kind in ("site-packages", "dist-packages"):
            folders += Path(root).glob(f"lib*/python3*/{kind}")
    return sorted({folder.resolve() for folder in folders if folder.is_dir()})


def libraries() -> list[str]:
    """Return the folders that Python itself has to read, including packages but not this one."""
    return [folder for folder in python_folders() if Path(folder) != OWN]


def paths_except(folders: Iterable[str], hidden: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Return the paths that cover ``folders`` except ``hidden``, and the folders that may only be listed."""
    readable = list[str]()
    listed = list[str]()
    for folder in folders:
        real = Path(folder).resolve()
        # The folder is hidden itself, or within a hidden folder. Python still has to list a package folder
        # that is on sys.path.
        if any(real.is_relative_to(path) for path in hidden):
            listed += [folder] if real in hidden and real != OWN else []
            continue
        inside = [path for path in hidden if path.is_relative_to(real)]
        if not inside:
            readable.append(folder)
            continue
        # Something within it is hidden. Landlock has no exceptions, so the entries are granted one by one.
        listed.append(folder)
        # Links are skipped: their targets are in one of the folders anyway, or must not be read.
        entries = [str(entry) for entry in sorted(real.iterdir()) if not entry.is_symlink()]
        more_readable, more_listed = paths_except(entries, inside)
        readable += more_readable
        listed += more_listed
    return readable, listed

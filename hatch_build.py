"""Builds covey's distributions: compiled operations in the wheel, and links that work on an index page.

A wheel holds a library for each of `models/kernels/compiler.LEVELS` of the machine that builds it, and its
tag names that machine. COVEY_LIBRARIES says which are wanted:

    unset   those that gcc can make here; without gcc the wheel is for any machine and holds none
    all     every one, or the build fails: what a release sets
    none    a wheel for any machine: a user's compiler makes the library on first use, or torch does the work

COVEY_REPOSITORY, such as `https://github.com/OWNER/covey`, becomes the address of the project in the metadata
and the start of the README's links, which are relative in the repository.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "packages" / "verify" / "src")]
from covey.models.kernels.compiler import LEVELS, c_sources, compile_library  # noqa: E402

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<path>[^)]+)\)")


class Libraries(BuildHookInterface):
    """Compiles the libraries, puts them beside the operations' sources and tags the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Runs before the wheel is written. An editable installation gets no library: its sources change."""
        wanted = os.environ.get("COVEY_LIBRARIES", "")
        if wanted not in {"", "all", "none"}:
            raise ValueError(f"COVEY_LIBRARIES={wanted}: write all or none, or leave it out")
        if version == "editable" or wanted == "none" or platform.system() != "Linux":
            return
        folder = ROOT / "build" / "prebuilt"
        folder.mkdir(parents=True, exist_ok=True)
        machine = platform.machine()
        for level in (level for level in LEVELS if level.machine == machine):
            try:
                content = compile_library(shutil.which("gcc") or "gcc", level.flags, c_sources())
            except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                reason = getattr(error, "stderr", None) or str(error).encode()
                message = f"{level.name} cannot be compiled: {reason.decode(errors='replace')[-300:]}"
                if wanted == "all":
                    raise RuntimeError(message) from error
                self.app.display_warning(f"{message}: it is not in this wheel")
                continue
            file = folder / f"{level.name}.so"
            file.write_bytes(content)
            build_data["force_include"][str(file)] = f"covey/models/kernels/prebuilt/{file.name}"
            # No Python interface is compiled, so one wheel serves every Python 3 on this machine.
            build_data["tag"] = f"py3-none-linux_{machine}"
            build_data["pure_python"] = False
            self.app.display_info(f"{level.name}: {len(content):,} bytes, {level.instructions}")


class Addresses(MetadataHookInterface):
    """Writes the repository's address into the metadata and into the README's links."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Runs before the metadata is checked; ``urls`` and ``readme`` are dynamic for it."""
        text = (ROOT / "README.md").read_text("utf-8")
        repository = os.environ.get("COVEY_REPOSITORY", "").rstrip("/")
        if repository:
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{repository}/blob/main/docs/README.md",
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
            text = LINK.sub(lambda found: absolute(found, repository), text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(link: re.Match[str], repository: str) -> str:
    """Return a relative Markdown link or image with its address in the repository."""
    view = "raw" if link["image"] else "blob"
    return f"{link['image']}[{link['text']}]({repository}/{view}/main/{link['path']})"

"""Compiled operations for the wheel: a library for each of `models/kernels/compiler.LEVELS` it can make.

`python -m build --wheel` and `pip wheel .` run this. For processors like this machine's it needs gcc, for
arm64 aarch64-linux-gnu-gcc (`apt-get install gcc-aarch64-linux-gnu`). What cannot be made is left out and
said; a user's compiler does it on first use, or torch does the work.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "packages" / "verify" / "src")]
from covey.models.kernels.compiler import LEVELS, built, c_sources  # noqa: E402

CROSS = "{machine}-linux-gnu-gcc"


class Libraries(BuildHookInterface):
    """Compiles, and puts the libraries beside the operations' sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the wheel is written. An editable installation gets none: its sources change."""
        if version == "editable" or platform.system() != "Linux":
            return
        made = Path(self.directory) / "prebuilt"
        made.mkdir(parents=True, exist_ok=True)
        for level in LEVELS:
            native = level.machine == platform.machine()
            compiler = shutil.which("gcc" if native else CROSS.format(machine=level.machine))
            if compiler is None:
                self.app.display_warning(f"no compiler for {level.name}: not in this wheel")
                continue
            try:
                content = built(compiler, level.flags, c_sources())
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                reason = (error.stderr or str(error).encode()).decode(errors="replace")[-300:]
                self.app.display_warning(f"{compiler} cannot make {level.name}: not in this wheel: {reason}")
                continue
            file = made / f"{level.name}.so"
            file.write_bytes(content)
            build_data["force_include"][str(file)] = f"covey/models/kernels/prebuilt/{file.name}"
            self.app.display_info(f"{level.name}: {len(content):,} bytes, {level.instructions}")

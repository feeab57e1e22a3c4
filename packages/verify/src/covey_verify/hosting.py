"""Processes that call a user's functions: forked from a server that has imported their code once.

Rewards, tools and attacks on rewards differ in what they send and in the rights that they leave to the code.
Where the code is, what the server imports, and what one call may use are the same for all, and decided here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from covey_verify.errors import ConfigError
from covey_verify.sandbox.base import SandboxBackend
from covey_verify.sandbox.client import ForkServer
from covey_verify.sandbox.confine import Limits
from covey_verify.sandbox.process import ProcessSandbox
from covey_verify.usercode import code_folder

MEMORY = 8 << 30
"""Bytes of address space of a process that runs a user's function."""


class UserCode:
    """A user's modules, as another process imports them."""

    def __init__(self, caller: str, modules: Sequence[str], folder: Path | None = None) -> None:
        """Name the modules by absolute path or by import name; ``folder`` is searched for the latter.

        ``caller`` is the module of ours that calls the user's functions.
        """
        self.caller = caller
        self.modules = list(dict.fromkeys(modules))
        self.preload = [caller, *self.modules]
        """The server imports these, so that a call costs a fork and not an import."""
        beside_files = [str(Path(module).parent) for module in self.modules if module.endswith(".py")]
        self.path = [*beside_files, *([] if folder is None else [str(folder)]), *sys.path]

    def limited_server(self) -> ForkServer:
        """Return a server whose children see what this process sees; only their resources are limited."""
        return ForkServer(preload=self.preload, path=self.path, landlock=False, syscalls=False)

    def trusted_server(self, at_once: int) -> ForkServer:
        """Return a server whose children have the rights, the environment and the folder of this process."""
        return ForkServer(
            preload=self.preload,
            path=self.path,
            confined=False,
            at_once=at_once,
            folder=str(Path.cwd()),
        )

    def sandboxed_server(self, sandbox: ProcessSandbox, at_once: int | None = None) -> ForkServer:
        """Return a server whose children are confined by the sandbox and may read the user's code."""
        ours = code_folder(self.caller)
        theirs = [code_folder(module) for module in self.modules]
        return sandbox.host(self.preload, ours, theirs, self.path, at_once)


def module_of(spec: str, folder: Path) -> str:
    """Return the module of a function named `file.py:function` or `package.module:function`.

    A file is returned as an absolute path, relative to ``folder``, which is the config's.

    >>> module_of("my.rewards:exact", Path("/config")), module_of("my.py:exact", Path("/config"))
    ('my.rewards', '/config/my.py')
    """
    module = spec.partition(":")[0]
    return str((folder / module).resolve()) if module.endswith(".py") else module


def call_limits(seconds: float, output: int = Limits.output) -> Limits:
    """Return the limits of one call of a user's function."""
    return Limits(wall=seconds, cpu=math.ceil(seconds), memory=MEMORY, output=output)


def sandbox_for_functions(sandbox: SandboxBackend, setting: str) -> ProcessSandbox:
    """Return the sandbox if functions can be called in it. Raises ConfigError, which names the setting."""
    if not isinstance(sandbox, ProcessSandbox):
        raise ConfigError(
            f"{setting} needs sandbox.backend bwrap or landlock: {sandbox.name} runs programs only"
        )
    return sandbox

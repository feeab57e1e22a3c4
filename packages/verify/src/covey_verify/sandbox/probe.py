"""The probe of a sandbox: a program that attacks it before use. Any success disqualifies the sandbox."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from covey_verify.sandbox.base import SandboxBackend
from covey_verify.sandbox.confine import Limits

PROBE_LIMITS = Limits(wall=20.0, cpu=10, memory=512 << 20)
# Each attack succeeds unless it raises or returns False; the names of successful attacks are printed.
ATTACKS = """
import json, sys
setup = json.loads(sys.stdin.read())
done = []
def attempt(name):
    def run(attack):
        try:
            if attack() is not False:
                done.append(name)
        except BaseException:
            pass
    return run
@attempt("read a private file")
def _(): return setup["secret"] in open(setup["file"]).read()
@attempt("read the source of the verifiers")
def _(): return len(open(setup["source"]).read()) > 0
@attempt("overwrite a file")
def _(): open(setup["file"], "w").write("taken")
@attempt("make a file")
def _(): open(setup["folder"] + "/new", "w").close()
@attempt("read the environment of another process")
def _(): return setup["secret"] in open("/proc/%d/environ" % setup["pid"]).read()
@attempt("see the trainer's environment")
def _():
    import os
    return setup["variable"] in os.environ
@attempt("connect to the host")
def _():
    import socket
    socket.create_connection(("127.0.0.1", setup["port"]), 2)
@attempt("send a datagram")
def _():
    import socket
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", setup["port"]))
@attempt("start a process")
def _():
    import os
    if os.fork() == 0:
        os._exit(0)
@attempt("run a program")
def _():
    import subprocess
    return subprocess.run(["/bin/true"]).returncode == 0
@attempt("signal the trainer")
def _():
    import os
    os.kill(setup["pid"], 0)
@attempt("take 2 GB of memory")
def _(): return len(bytearray(2 << 30)) > 0
sys.stdout.write("probed " + json.dumps(done))
"""


def holes(sandbox: SandboxBackend) -> list[str]:
    """Return the forbidden things that a program can do in the sandbox; ['does not run'] if nothing works."""
    with _bait() as (setup, witness):
        result = sandbox.script(ATTACKS, json.dumps(setup), PROBE_LIMITS)
        output = str(result.value or "")
        if result.kind != "ok" or not output.startswith("probed "):
            return [f"does not run: {result.kind} {result.text}".strip()]
        try:
            successes = list(json.loads(output.removeprefix("probed ")))
        except ValueError:
            return ["does not run: its output is garbled"]
        return [*successes, *witness()]


@contextlib.contextmanager
def _bait() -> Iterator[tuple[dict[str, object], Callable[[], list[str]]]]:
    """Set up a private file, a listening port and a variable, and a function that names what was touched.

    The effects are checked from outside as well, in case the sandbox hides them from the program.
    """
    secret = os.urandom(16).hex()
    variable = f"COVEY_PROBE_{secret[:8]}"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        file = Path(folder) / "secret"
        file.write_text(secret)
        os.environ[variable] = secret
        listener.settimeout(0)

        def witness() -> list[str]:
            effects = []
            if file.read_text() != secret or len(list(Path(folder).iterdir())) != 1:
                effects.append("changed files")
            # Without a timeout, accept raises at once if nothing has connected.
            with contextlib.suppress(OSError):
                listener.accept()[0].close()
                effects.append("reached the host's port")
            return effects

        port = listener.getsockname()[1]
        source = str(Path(__file__).resolve().parents[1] / "machine.py")
        setup = {
            "secret": secret,
            "variable": variable,
            "file": str(file),
            "folder": folder,
            "source": source,
        }
        try:
            yield {**setup, "port": port, "pid": os.getpid()}, witness
        finally:
            del os.environ[variable]

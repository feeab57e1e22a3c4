"""Programs as people write them run as under plain Python, and see nothing that would give answers away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from covey_verify.programs.code import bad_tests, code_tests
from covey_verify.sandbox.confine import Limits
from covey_verify.sandbox.importable import OWN, hidden_folders, package_paths, paths_except
from covey_verify.sandbox.process import ProcessSandbox

LIMITS = Limits(wall=10.0, cpu=6)
PROGRAMS = {
    "exit": "print(3)\nexit()",
    "quit": "print(3)\nquit()",
    "sys.exit": "import sys\nprint(3)\nsys.exit(0)",
    "deep recursion in a thread": """
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(2**26)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
def main(): print(depth(50_000))
thread = threading.Thread(target=main)
thread.start()
thread.join()
""",
    "a thread that nobody waits for": """
import threading, time
def main(): time.sleep(0.05); print(5)
threading.Thread(target=main).start()
""",
    "an executor": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool: print(sum(pool.map(lambda x: x * x, range(10))))
""",
    "an executor that nobody ends": """
from concurrent.futures import ThreadPoolExecutor
print(ThreadPoolExecutor().submit(lambda: 5).result())
""",
    "a large integer": "print(len(str(10**5000)), int('9' * 5000) % 7)",
    "output that is written at exit": """
import atexit, io, sys
buffer = io.StringIO()
sys.stdout = buffer
atexit.register(lambda: sys.__stdout__.write(buffer.getvalue()))
print(9)
""",
    "files": """
import os, tempfile
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("x"); file.flush(); print(open(file.name).read())
with tempfile.TemporaryDirectory() as folder:
    open(folder + "/a", "w").write("y"); print(os.listdir(folder))
open("out.txt", "w").write("z"); os.rename("out.txt", "in.txt"); print(open("in.txt").read(), os.listdir())
""",
    "readline for input": "import sys\ninput = sys.stdin.readline\nprint(int(input()) + int(input()))",
    "all of its input": "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
    "input as descriptor 0": "print(sum(map(int, open(0).read().split())))",
    "messages beside the output": """
import sys
for n in range(3): print("debug", n, file=sys.stderr, flush=True)
sys.stderr.write("x" * 9999); print(3)
""",
    "itself as a module": """
import __main__, pickle, sys
class Point: pass
print(type(pickle.loads(pickle.dumps(Point()))).__name__, __main__.Point is Point, len(sys.argv))
""",
    "an object that ends with the program": """
class Log:
    def __del__(self): print("the end")
log = Log()
""",
    "a closed output": "import sys\nprint(1, flush=True)\nsys.stdout.close()",
    "input as a device": "print(open('/dev/stdin').read().split())",
    "ends of lines as they are": "import io, sys\nprint(repr(sys.stdin.newlines), sys.stdin.readlines())",
    "numpy": "import numpy as np\nprint(np.arange(4).sum())",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_what_it_prints_under_plain_python(
    sandbox: ProcessSandbox, name: str, tmp_path: Path
) -> None:
    plain = subprocess.run(
        [sys.executable, "-X", "int_max_str_digits=0", "-c", PROGRAMS[name]],
        input="4\n5\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert plain.returncode == 0, plain.stderr
    found = sandbox.script(PROGRAMS[name], "4\n5\n", LIMITS)
    assert (found.kind, found.value) == ("ok", plain.stdout), found.text


def test_a_program_that_exits_with_an_error_has_failed(sandbox: ProcessSandbox) -> None:
    assert [sandbox.script(f"print(3)\nexit({code})", "", LIMITS).kind for code in ("1", "'no'")] == [
        "crashed"
    ] * 2


@pytest.mark.parametrize("ending", ["exit()", "quit()", "import sys; sys.exit()", "raise SystemExit"])
def test_a_right_solution_may_end_in_exit(sandbox: ProcessSandbox, ending: str) -> None:
    function = f"```python\ndef f(x): return x + 1\n{ending}\n```"
    stdio = f"```python\nprint(int(input()) + 1)\n{ending}\n```"
    test = "def check(f):\n    assert f(1) == 2"
    scores = [
        code_tests(function, sandbox=sandbox, tests=[{"input": [1], "output": 2}], entry_point="f"),
        code_tests(function, sandbox=sandbox, mode="check", test=test, entry_point="f"),
        code_tests(stdio, sandbox=sandbox, mode="stdio", tests=[{"input": "1\n", "output": "2\n"}]),
    ]
    assert [s.value for s in scores] == [1.0] * 3, scores
    early = f"```python\n{ending}\ndef f(x): return x + 1\n```"
    assert (
        code_tests(early, sandbox=sandbox, tests=[{"input": [1], "output": 2}], entry_point="f").value == 0.0
    )


def test_more_threads_or_files_than_a_program_needs_end_it(sandbox: ProcessSandbox) -> None:
    threads = """
import threading, time
threading.stack_size(32768)
while True: threading.Thread(target=time.sleep, args=(9,)).start()
"""
    files = "for n in range(10**6): open(str(n), 'wb').write(b'x' * 10**6)"
    empty = "for n in range(10**6): open(str(n), 'wb').close()"
    assert [sandbox.script(p, "", LIMITS).kind for p in (threads, files, empty)] == ["crashed"] * 3
    fork = "import os\nif os.fork() == 0: print('child')"
    assert sandbox.script(fork, "", LIMITS).value == ""


def test_what_a_program_wrote_is_gone_for_the_next_one(sandbox: ProcessSandbox) -> None:
    assert sandbox.script("open('left', 'w').write('x')\nprint(1)", "", LIMITS).kind == "ok"
    look = "import os\nprint(os.listdir())\nprint(os.listdir('..'))"
    found = sandbox.script(look, "", LIMITS)
    assert (found.kind, found.value) == ("crashed", "[]\n")
    assert not list(Path(sandbox.scratch_root).iterdir())


LOOKS = {
    "imports the verifiers": "import covey_verify.machine\nprint('TAKEN')",
    "imports a neighbour": "import torch\nprint('TAKEN')",
    "reads the verifiers' source": f"open({str(OWN / 'machine.py')!r}).read()\nprint('TAKEN')",
    "reads a neighbour's source": f"""
import os
for folder in {[str(f) for f in hidden_folders()]!r}:
    for name in ("torch", "transformers", "reasoning_gym", "pytest"):
        try:
            open(os.path.join(folder, name, "__init__.py")).read(); print("TAKEN")
        except OSError: pass
""",
    "imports around the hook": f"""
import sys
sys.meta_path.pop(0)
sys.path += {[str(f) for f in hidden_folders()] + [str(OWN.parent)]!r}
for name in ("torch", "covey_verify.machine", "reasoning_gym", "pytest"):
    try:
        __import__(name); print("TAKEN", name)
    except (ImportError, OSError): pass
""",
    "makes the module itself": f"""
import sys, types
module = types.ModuleType("covey_verify"); module.__path__ = [{str(OWN)!r}]
sys.modules["covey_verify"] = module
sys.meta_path.pop(0)
from covey_verify.machine import available_cpus
print("TAKEN")
""",
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_is_installed_gives_no_answers_away(sandbox: ProcessSandbox, name: str) -> None:
    assert "TAKEN" not in str(sandbox.script(LOOKS[name], "", LIMITS).value)


def test_a_package_that_the_config_names_can_be_imported() -> None:
    sandbox = ProcessSandbox("landlock", ["yaml"])
    try:
        if sandbox.server.start():
            pytest.skip("no landlock")
        assert sandbox.script("import yaml\nprint(yaml.safe_load('[1]'))", "", LIMITS).value == "[1]\n"
        refused = sandbox.script("try: import numpy\nexcept ImportError as error: print(error)", "", LIMITS)
        assert "sandbox.packages" in str(refused.value)
    finally:
        sandbox.server.close()


def test_a_package_comes_with_what_it_needs() -> None:
    names = {Path(path).name for path in package_paths(["sympy"])}
    assert {"sympy", "mpmath"} <= names and "numpy" not in names
    assert package_paths(["no_such_package"]) == []


def test_hidden_folders_are_taken_out_of_what_may_be_read(tmp_path: Path) -> None:
    for name in ("lib/a", "lib/python/site-packages/secret", "lib/python/json", "share"):
        (tmp_path / name).mkdir(parents=True)
    hidden = [tmp_path / "lib/python/site-packages"]
    readable, listed = paths_except([str(tmp_path / "lib"), str(tmp_path / "share")], hidden)
    assert {Path(p).name for p in readable} == {"a", "json", "share"}
    assert {Path(p).name for p in listed} == {"lib", "python", "site-packages"}


def test_a_row_whose_own_solution_fails_is_named_before_training(sandbox: ProcessSandbox) -> None:
    tests = [{"input": "1\n", "output": "2\n"}]
    rows = [
        {"tests": tests, "solution": "print(int(input()) + 1)\nexit()"},
        {"tests": tests, "solution": "print(int(input()) + 2)"},
        {"tests": tests},
    ]
    found = bad_tests(rows, "stdio", sandbox=sandbox)
    assert [f is None for f in found] == [True, False, True]
    assert "its own solution gets 0" in str(found[1])

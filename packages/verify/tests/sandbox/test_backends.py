"""What users of a sandbox rely on: results, limits, refusal, and honesty when it dies."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_children import gone

from covey_verify.errors import SandboxUnavailable
from covey_verify.programs.code import code_tests
from covey_verify.sandbox import choice
from covey_verify.sandbox.choice import SandboxChoice, choose
from covey_verify.sandbox.client import ForkServer
from covey_verify.sandbox.confine import Limits
from covey_verify.sandbox.probe import holes
from covey_verify.sandbox.process import ProcessSandbox
from covey_verify.sandbox.wire import decode_value

LIMITS = Limits(wall=3.0, cpu=2)


def test_a_program_reads_its_input_and_its_output_comes_back(sandbox: ProcessSandbox) -> None:
    result = sandbox.script("print(int(input()) + 1)", "41\n", LIMITS)
    assert (result.kind, result.value) == ("ok", "42\n")
    assert sandbox.script("raise SystemExit(3)", "", LIMITS).kind == "crashed"
    assert sandbox.script("1 / 0", "", LIMITS).kind == "crashed"
    assert sandbox.script("import numpy; print(numpy.arange(3).sum())", "", LIMITS).value == "3\n"


def test_what_a_program_can_learn_of_a_private_file_is_said(sandbox: ProcessSandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    looks = f"import os\nprint(os.path.exists({str(tmp_path / 'secret')!r}))"
    seen = sandbox.script(looks, "", LIMITS).value == "True\n"
    assert seen == ("visible" in SandboxChoice(sandbox).record()), "docs/sandbox.md says for which backends"
    assert sandbox.script(f"open({str(tmp_path / 'secret')!r})", "", LIMITS).kind == "crashed"


def test_a_program_that_builds_writes_into_its_own_folder_only(
    sandbox: ProcessSandbox, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    script = f"""read -r line < given; echo "$line" > made
for file in ../made {tmp_path}/made /tmp/covey-made; do echo escaped > $file; done
read -r line < {tmp_path}/secret && echo "$line" >> made
for file in ../*/given; do echo "$file"; done
exit $1"""
    asked = ["/usr/bin/sh", "-c", script, "sh"]
    for status, kind in (("0", "ok"), ("3", "crashed")):
        ended, made = sandbox.build([*asked, status], {"given": b"input\n"}, LIMITS, "made")
        assert (ended.kind, made) == (kind, b"input\n")
    assert not (tmp_path / "made").exists() and not Path("/tmp/covey-made").exists()
    assert "../*/given" in str(ended.value), "folders of other programs are not to be seen"
    ended, made = sandbox.build(["/usr/bin/sh", "-c", ":"], {}, LIMITS, "made")
    assert (ended.kind, ended.text, made) == ("crashed", "it made no made", b"")
    full = ["/usr/bin/sh", "-c", "while :; do echo 0123456789abcdef; done > made"]
    assert sandbox.build(full, {}, LIMITS, "made")[0].kind != "ok"


def test_calls_keep_the_types_of_values_and_survive_one_that_hangs(sandbox: ProcessSandbox) -> None:
    code = """
import time
def f(x):
    if x == "hang": time.sleep(60)
    if x == "raise": raise KeyError("no")
    if x == "die": import os; os._exit(1)
    return (x, {1: {2}}, 2.0)
"""
    inputs = [([x], {}) for x in (1, "hang", "raise", "die", [])]
    results = list(sandbox.calls(code, "f", inputs, LIMITS, call_seconds=0.3))
    assert [r.kind for r in results] == ["ok", "timeout", "error", "crashed", "ok"]
    assert decode_value(results[0].value) == (1, {1: {2}}, 2.0)
    assert results[2].text.startswith("KeyError")


def test_code_that_does_not_load_fails_every_call(sandbox: ProcessSandbox) -> None:
    for code in ("def g(): pass", "1 / 0", "def f(:", "import os; os._exit(0)", "f = 3"):
        results = list(sandbox.calls(code, "f", [([], {})] * 3, LIMITS, call_seconds=1.0))
        assert [r.kind == "ok" for r in results] == [False] * 3, code


def test_many_programs_at_once_from_threads_and_an_event_loop(sandbox: ProcessSandbox) -> None:
    def run(n: int) -> str:
        return sandbox.script(f"print({n} ** 2)", "", LIMITS).value

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(asyncio.to_thread(run, n) for n in range(20)))

    expected = [f"{n * n}\n" for n in range(20)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(20))) == expected
    assert asyncio.run(all_of_them()) == expected


def test_a_killed_server_is_a_lost_result_and_comes_back(sandbox: ProcessSandbox) -> None:
    server = sandbox.server
    assert sandbox.script("", "", LIMITS).kind == "ok"
    started, results = server.process, []
    waiting = threading.Thread(
        target=lambda: results.append(
            sandbox.script("import time; time.sleep(30)", "", replace(LIMITS, wall=30))
        )
    )
    waiting.start()
    assert started is not None
    serving = psutil.Process(started.pid)
    while serving.name() == "bwrap":
        (serving,) = serving.children()
    while not (family := serving.children(recursive=True)):
        time.sleep(0.02)
    serving.kill()
    waiting.join(20.0)
    assert [r.kind for r in results] == ["lost"]
    assert psutil.wait_procs(family, timeout=5.0)[1] == []  # nothing goes on without its clock
    later = sandbox.script("print(1)", "", LIMITS)
    assert (later.kind, later.value) == ("ok", "1\n")


def test_a_server_that_is_killed_between_calls_loses_none() -> None:
    server = ForkServer(landlock=False, syscalls=False)
    for _ in range(4):
        assert server.call("covey_verify.isolated:python_accepts", "x = 1", limits=LIMITS).value is True
        assert server.process is not None
        server.process.kill()
    server.close()


def test_a_dead_backend_is_no_verdict_and_no_weaker_backend() -> None:
    class Dead(ProcessSandbox):
        def __init__(self) -> None:
            super().__init__("landlock")
            self.server = ForkServer(prefix=["/bin/false"])

    row = {"tests": [{"input": [1], "output": 1}], "entry_point": "f"}
    score = code_tests("```python\ndef f(x): return x\n```", sandbox=Dead(), **row)
    assert (score.value, score.status) == (None, "infra_error")
    score = code_tests("```python\nprint(1)\n```", sandbox=Dead(), mode="stdio",
                       tests=[{"input": "", "output": "1"}])  # fmt: skip
    assert (score.value, score.status) == (None, "infra_error")


def test_a_missing_layer_is_found_by_the_probe() -> None:
    unsafe = ProcessSandbox("unsafe_local")
    found = holes(unsafe)
    assert {"read a private file", "connect to the host", "start a process", "signal the trainer"} <= set(
        found
    )
    without_files, without_calls = ProcessSandbox("landlock"), ProcessSandbox("landlock")
    without_files.server = ForkServer(landlock=False)
    without_calls.server = ForkServer(syscalls=False)
    assert "read a private file" in holes(without_files)
    assert "start a process" in holes(without_calls)
    for sandbox in (unsafe, without_files, without_calls):
        sandbox.server.close()


def test_without_a_sandbox_that_holds_model_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    leaky = {"landlock": lambda *_: ProcessSandbox("unsafe_local")}
    monkeypatch.setattr(choice, "MAKERS", leaky)
    fresh = choose.__wrapped__
    with pytest.raises(SandboxUnavailable, match=r"landlock: .*read a private file") as caught:
        fresh("landlock")
    assert "unsafe_local: true runs it with your rights" in str(caught.value)
    chosen = fresh("landlock", unsafe_local=True)
    assert chosen.sandbox.name == "unsafe_local"
    assert "read a private file" in chosen.record()["rejected"]["landlock"]


def test_the_verdict_is_the_same_in_forked_and_spawned_workers(tmp_path: Path) -> None:
    program = """
import multiprocessing
from covey_verify.mathematics.answers import math_answer
ASKED = [(r"\\boxed{1/\\sqrt{2}}", r"\\frac{\\sqrt{2}}{2}"), (r"\\boxed{\\sin(2)}", r"\\cos(2)")]
def values(_):
    return [math_answer(*pair).value for pair in ASKED]
if __name__ == "__main__":
    assert values(0) == [1.0, 0.0]
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(values, range(2)) == [[1.0, 0.0]] * 2, method
    print("same")
"""
    pytest.importorskip("sympy")
    file = tmp_path / "workers.py"
    file.write_text(program)
    done = subprocess.run([sys.executable, "-W", "ignore", file], capture_output=True, text=True, timeout=60)
    assert done.stdout == "same\n", done.stderr


def test_a_server_starts_under_a_low_limit_of_open_files() -> None:
    program = """
import resource
from covey_verify.sandbox.process import ProcessSandbox
from covey_verify.sandbox.confine import Limits
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
print(ProcessSandbox("landlock").script("print(6 * 7)", "", Limits()).value)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "42", done.stderr


def test_a_server_ends_with_its_parent() -> None:
    program = """
import os
from covey_verify.sandbox.process import ProcessSandbox
from covey_verify.sandbox.confine import Limits
sandbox = ProcessSandbox("landlock")
sandbox.script("", "", Limits())
print(sandbox.server.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert gone(int(done.stdout))


def test_a_server_ends_with_its_parent_in_an_import_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("open('/dev/fd/2', 'w').write('hangs')\nwhile True: pass\n")
    program = f"""
import os, threading, time
from covey_verify.sandbox.client import ForkServer
server = ForkServer(preload=[{str(tmp_path / "hangs.py")!r}], landlock=False, syscalls=False)
threading.Thread(target=server.start, daemon=True).start()
while server.process is None or "hangs" not in open(f"/proc/{{server.process.pid}}/fd/2").read():
    time.sleep(0.01)
print(server.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert gone(int(done.stdout)), done.stderr

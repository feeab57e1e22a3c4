"""Programs are judged by hidden tests in a sandbox; no program can talk its way to a verdict."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from covey_verify.attacks import HACKS
from covey_verify.errors import SandboxUnavailable
from covey_verify.programs.code import bad_tests, cases_of, code_tests, compiles, same_output
from covey_verify.sandbox.base import Outcome, SandboxBackend
from covey_verify.sandbox.choice import choose
from covey_verify.sandbox.confine import Limits
from covey_verify.types import Score

SQUARE = [{"input": [n], "output": n * n} for n in range(4)]
RIGHT = "def f(x):\n    return x * x"


@pytest.fixture(scope="module")
def sandbox() -> SandboxBackend:
    try:
        return choose().sandbox
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def fenced(code: str) -> str:
    return f"<think>hm</think>Here:\n```python\n{code}\n```\n"


def judged(sandbox: SandboxBackend, code: str, tests: Any = SQUARE, **settings: Any) -> Score:
    return code_tests(fenced(code), sandbox=sandbox, tests=tests, **{"entry_point": "f", **settings})


def test_all_tests_have_to_pass_unless_points_say_otherwise(sandbox: SandboxBackend) -> None:
    almost = "def f(x):\n    return x * x if x < 3 else 0"
    weighted = [{**t, "weight": 1.0 if i < 3 else 7.0} for i, t in enumerate(SQUARE)]
    assert judged(sandbox, RIGHT).value == 1.0
    assert judged(sandbox, almost).value == 0.0
    assert judged(sandbox, almost, points="fraction").value == 0.75
    assert judged(sandbox, almost, weighted, points="weighted").value == 0.3


def test_the_whole_check_has_one_clock_and_a_hang_is_nothing(sandbox: SandboxBackend) -> None:
    stuck = [(([n], {})) for n in range(12)]
    limits = Limits(wall=1.0, cpu=2)
    found = list(sandbox.calls("def f(x):\n    while True: pass", "f", stuck, limits, 0.4))
    assert [r.kind for r in found] == ["timeout"] * 12
    assert sum("not tried" in r.text for r in found) >= 8

    class Slow:
        """Uses up all the time it is given."""

        name, given = "slow", 0.0

        def script(self, code: str, stdin: str, limits: Limits) -> Outcome:
            self.given += limits.wall
            return Outcome("timeout", seconds=limits.wall)

    slow, tests = Slow(), [{"input": "1", "output": "2", "visible": n < 4} for n in range(8)]
    for points in ("fraction", "weighted"):
        slow.given = 0.0
        settings = {"mode": "stdio", "points": points, "seconds": 0.1, "total_seconds": 0.25}
        score = judged(slow, "hang", tests, **settings)
        assert (score.value, score.status) == (0.0, "timeout")
        assert slow.given < 0.26


@contextmanager
def one_busy_processor(others: int) -> Iterator[None]:
    """Leave this process and its children one processor, on which other programs compute as well."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
        for one in busy:
            one.kill()
            one.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a process had to wait")
def test_a_busy_machine_costs_no_right_program_its_reward() -> None:
    work = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    square = f"def f(x):\n    {work.replace(chr(10), chr(10) + '    ')}\n    return x * x"
    cases = [{"input": f"{n}", "output": f"{n * n}"} for n in (2, 3)]
    with one_busy_processor(others=4):
        try:
            sandbox = choose().sandbox
        except SandboxUnavailable as error:
            pytest.skip(str(error))
        limits = {"seconds": 0.6, "total_seconds": 1.2}
        assert judged(sandbox, f"{work}\nprint(int(input()) ** 2)", cases, mode="stdio", **limits).value == 1
        assert judged(sandbox, square, SQUARE[2:], **limits).value == 1
        assert judged(sandbox, square, ["assert f(2) == 4"], **limits).value == 1
        # A program that waits by itself is late all the same.
        assert (
            judged(sandbox, "import time\ntime.sleep(60)", cases, mode="stdio", **limits).status == "timeout"
        )


def test_every_end_has_its_status(sandbox: SandboxBackend) -> None:
    for code, status in (
        (RIGHT, "ok"),
        ("def f(x): return 7", "ok"),
        ("def f(x): return 1 / 0", "ok"),
        ("def f(x:", "ok"),
        ("def g(x): return x", "ok"),
        ("def f(x):\n    while True: pass", "timeout"),
        ("import os\ndef f(x): os._exit(0)", "crashed"),
        ("def f(x): return 'x' * 10**8", "too_large"),
    ):
        score = judged(sandbox, code, seconds=0.5 if "while" in code else 6.0)
        assert (score.status, score.value) == (status, float(code == RIGHT)), code
    for text in ("", RIGHT, f"<think>```python\n{RIGHT}\n```", "```c\nint f;\n```"):
        score = code_tests(text, sandbox=sandbox, tests=SQUARE, entry_point="f")
        assert (score.value, score.status) == (0.0, "no_answer")


def test_the_last_block_counts(sandbox: SandboxBackend) -> None:
    both = fenced("def f(x): return 0") + fenced(RIGHT).partition("</think>")[2]
    for text in (both, both.replace("```python", "```python3")):
        assert code_tests(text, sandbox=sandbox, tests=SQUARE, entry_point="f").value == 1.0


def test_types_are_part_of_the_answer(sandbox: SandboxBackend) -> None:
    identity = "def f(x): return x"
    for given, expected, value in (
        (9, 9, 1.0),
        (9.0, 9, 0.0),
        (True, 1, 0.0),
        ("9", 9, 0.0),
        (0.1 + 0.2, 0.3, 1.0),
        ([1, [2]], [1, [2]], 1.0),
        ({"a": 1}, {"a": 1}, 1.0),
        ([1, 2], [2, 1], 0.0),
        (None, None, 1.0),
    ):
        assert judged(sandbox, identity, [{"input": [given], "output": expected}]).value == value, expected
    assert (
        judged(sandbox, "def f(a, b): return a - b", [{"input": {"b": 1, "a": 3}, "output": 2}]).value == 1.0
    )
    assert judged(sandbox, "def f(): return (1, 2)", [{"input": [], "output": [1, 2]}]).value == 1.0


def test_special_casing_the_visible_tests_shows_as_a_gap(sandbox: SandboxBackend) -> None:
    tests = [{**t, "visible": i < 2} for i, t in enumerate(SQUARE)]
    cheat = "def f(x): return {0: 0, 1: 1}.get(x)"
    score = judged(sandbox, cheat, tests, points="fraction")
    assert score.value == 0.0
    assert score.metrics == {"visible": 1.0, "hidden": 0.0, "gap": 1.0, "suspicious": 0.0}
    assert judged(sandbox, RIGHT, tests).metrics["gap"] == 0.0


@pytest.mark.parametrize("hack", HACKS.strip().split("\n\n"), ids=lambda h: h.partition("\n")[0])
def test_no_verdict_can_be_forged(sandbox: SandboxBackend, hack: str) -> None:
    code = hack.partition("\n")[2].replace("FUNCTION", "f")
    assert judged(sandbox, code).value == 0.0
    test = "def check(candidate):\n    for n in range(4): assert candidate(n) == n * n\n"
    score = judged(sandbox, code, None, mode="check", test=test, seconds=2.0)
    assert score.value == 0.0
    stdio = [{"input": "3", "output": "9"}]
    assert judged(sandbox, code + "\nf(3)", stdio, mode="stdio").value == 0.0


def test_programs_talk_by_standard_input_and_output(sandbox: SandboxBackend) -> None:
    tests = json.dumps([{"input": "1 2\n", "output": "3\n"}, {"input": "5 6", "output": "11"}])
    assert judged(sandbox, "print(sum(map(int, input().split())))", tests, mode="stdio").value == 1.0
    assert judged(sandbox, "print(3)", tests, mode="stdio").value == 0.0
    assert judged(sandbox, "print(3)", tests, mode="stdio", points="fraction").value == 0.5
    assert judged(sandbox, "input()\nwhile True: pass", tests, mode="stdio", seconds=0.4).status == "timeout"
    assert judged(sandbox, "while True: print('x' * 9999)", tests, mode="stdio").status == "too_large"


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("1\n2", "1\n2\n\n", True),
        ("1 2", "1   2  ", True),
        ("1\n2", "1", False),
        ("1", "1\n2", False),
        ("1 2", "1\n2", False),
        ("0.5", "0.5000000000001", True),
        ("1", "1.0", False),
        ("yes", "YES", False),
        ("1.5", "nan", False),
        ("0.0", "1e-12", True),
        ("6.6e-34", "0.0", False),
        ("1.5", "1" * 500, False),
    ],
)
def test_outputs_are_compared_word_by_word_and_whole(expected: str, got: str, same: bool) -> None:
    assert same_output(expected, got, 1e-9) is same


HUMAN = {
    "setup": "from typing import List\n\ndef near(numbers: List[float], gap: float) -> bool:\n"
    "    '''Whether two are closer.'''\n",
    "solution": "    return any(abs(a - b) < gap for i, a in enumerate(numbers) for b in numbers[:i])\n",
    "entry_point": "near",
    "test": "def check(candidate):\n    assert candidate([1.0, 2.0], 0.5) == False\n"
    "    assert candidate([1.0, 1.2], 0.5) is True\n"
    "    try:\n        candidate(None, 1)\n        assert False\n    except TypeError:\n        pass\n",
}


def test_tests_written_as_code_see_values_and_exceptions(sandbox: SandboxBackend) -> None:
    settings = {
        "sandbox": sandbox,
        "mode": "check",
        **{k: HUMAN[k] for k in ("setup", "entry_point", "test")},
    }
    whole = fenced(HUMAN["setup"] + HUMAN["solution"])
    assert code_tests(whole, **settings).value == 1.0
    assert code_tests(HUMAN["solution"], form="continue", **settings).value == 1.0
    assert code_tests("    return False\n", form="continue", **settings).value == 0.0
    hang = code_tests("    while True: pass\n", form="continue", seconds=0.5, **settings)
    assert (hang.value, hang.status) == (0.0, "timeout")


def test_a_test_that_never_calls_the_function_judges_nobody(sandbox: SandboxBackend) -> None:
    score = judged(sandbox, RIGHT, None, mode="check", test="def check(candidate): pass")
    assert (score.value, score.status) == (None, "bad_reference")


@pytest.mark.parametrize(
    ("row", "mode", "says"),
    [
        ({"entry_point": "f"}, "function", "non-empty"),
        ({"tests": [], "entry_point": "f"}, "function", "non-empty"),
        ({"tests": [{"input": [1]}], "entry_point": "f"}, "function", "test 1"),
        ({"tests": SQUARE}, "function", "entry_point"),
        ({"tests": b"\x80\x04K\x01.", "entry_point": "f"}, "function", ""),
        ({"tests": [{"input": 1, "output": 1}], "entry_point": "f"}, "function", "list of arguments"),
        ({"tests": [{"input": [1], "output": math.nan}], "entry_point": "f"}, "function", "equal itself"),
        ({"tests": [{"input": [1], "output": 1, "weight": 0}], "entry_point": "f"}, "function", "positive"),
        (
            {"tests": [{"input": [1], "output": 1, "visible": "no"}], "entry_point": "f"},
            "function",
            "visible",
        ),
        ({"tests": SQUARE}, "stdio", "texts"),
        ({"test": "", "entry_point": "f"}, "check", "empty"),
        ({"test": "def check(:", "entry_point": "f"}, "check", ""),
    ],
)
def test_tests_that_decide_nothing_are_found_before_training(row: Any, mode: Any, says: str) -> None:
    (complaint,) = bad_tests([row], mode)
    assert complaint is not None and says in complaint


def test_test_code_needs_a_backend_that_can_talk() -> None:
    class Batch:
        name, layers = "batch", ()

        def script(self, code, stdin, limits):
            return Outcome("ok", "")

        def calls(self, code, entry, inputs, limits, each):
            yield from [Outcome("lost", text="no service")] * len(inputs)

    with pytest.raises(SandboxUnavailable, match="cannot run in the batch sandbox"):
        judged(Batch(), RIGHT, None, mode="check", test="def check(c): pass")
    score = judged(Batch(), RIGHT)
    assert (score.value, score.status) == (None, "infra_error")


def test_weights_and_visibility_are_read() -> None:
    (case,) = cases_of([{"input": [1], "output": 1, "weight": 2, "visible": True}], "function")
    assert (case.weight, case.visible) == (2.0, True)


def test_a_candidate_cannot_end_the_loops_of_its_test(sandbox: SandboxBackend) -> None:
    tests = (
        "for got, want in zip(map(candidate, [1, 2]), [1, 4]):\n    assert got == want",
        "assert all(got == 1 for got in map(candidate, [1]))",
        "assert list(map(candidate, [])) == list(map(candidate, [1, 2]))",
    )
    for test in tests:
        for kind in ("StopIteration", "StopAsyncIteration", "type('Mine', (StopIteration,), {})"):
            score = judged(sandbox, f"def f(x): raise {kind}", None, mode="check", test=test)
            assert score.value == 0.0, (test, kind)
    assert judged(sandbox, RIGHT, None, mode="check", test=tests[0]).value == 1.0
    catches = "try:\n    candidate(1)\n    assert False\nexcept ValueError: pass"
    assert judged(sandbox, "def f(x): raise ValueError", None, mode="check", test=catches).value == 1.0


def test_a_deep_reply_is_a_wrong_answer_and_no_fault_of_the_judge(sandbox: SandboxBackend) -> None:
    forged = """
import os, struct
def f(x):
    body = b'{{"id":0,"value":' + b'[' * 20 + b'{{"d":[' + b'[' * {0}
    body += b']' * {0} + b']}}' + b']' * 20 + b'}}'
    os.write(3, struct.pack('>I', len(body)) + body)
"""
    expected: object = {"a": 1}
    for _ in range(20):
        expected = [expected]
    for levels in (1, 200, *range(880, 980, 10), 5000):  # the window is some 40 levels wide
        score = judged(sandbox, forged.format(levels), [{"input": [1], "output": expected}])
        assert score.value == 0.0, (levels, score)


def test_a_compiler_accepts_or_refuses_and_nothing_is_run(sandbox: SandboxBackend, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    for code, value in ((RIGHT, 1.0), ("def f(:", 0.0), ("(" * 5000, 0.0), (f"open('{witness}', 'w')", 1.0)):
        assert compiles(fenced(code), sandbox=sandbox).value == value
    for code in (
        "",
        "\n  \n",
        "# only a comment",
        "return 5",
        "break",
        "nonlocal x",
        "await x",
        "x = yield 1",
    ):
        assert compiles(fenced(code), sandbox=sandbox).value == 0.0, code
    assert not witness.exists()
    assert compiles("no code", sandbox=sandbox).status == "no_answer"


def test_c_is_checked_by_a_compiler_in_the_sandbox(sandbox: SandboxBackend) -> None:
    def value(code: str) -> float | None:
        try:
            return compiles(f"```c\n{code}\n```", sandbox=sandbox, language="c").value
        except SandboxUnavailable as error:
            pytest.skip(str(error))

    assert value("#include <stdio.h>\nint main(void) { return 0; }") == 1.0
    assert value("int main(void) { return ; x }") == 0.0
    for nothing in ("", "// only a comment", "/* open", "#include <stdio.h>\n/* and */"):
        assert value(nothing) == 0.0
    assert value('#include "/etc/passwd"\nint main(void) { return 0; }') == 0.0


MBPP = [
    "assert set(similar((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))",
    "assert set(similar((1, 2, 3, 4),(5, 4, 3, 7))) == set((3, 4))",
]
SIMILAR = "def similar(a, b):\n    return tuple(set(a) & set(b))"


@pytest.mark.parametrize("column", ["tests", "test_list"])
def test_a_list_of_asserts_has_to_hold_whole(sandbox: SandboxBackend, column: str) -> None:
    def paid(code: str, tests: object = MBPP, **settings: Any) -> tuple[float | None, str]:
        score = code_tests(fenced(code), sandbox=sandbox, **{column: tests}, **settings)
        return score.value, score.status

    assert paid(SIMILAR) == paid(SIMILAR, json.dumps(MBPP)) == (1.0, "ok")
    assert paid("def similar(a, b):\n    return (4, 5)") == (0.0, "ok")  # one of two
    close = ["assert isclose(half(3), 1.5)", "assert not half(0)"]
    setup = "from math import isclose"
    assert paid("def half(x):\n    return x / 2", close, setup=setup) == (1.0, "ok")


@pytest.mark.parametrize(
    "code",
    [
        (
            "class similar(tuple):\n    def __new__(c, *a): return super().__new__(c)\n"
            "    def __eq__(self, other): return True\n    __hash__ = tuple.__hash__"
        ),
        "import builtins\nbuiltins.set = lambda *a: 1\ndef similar(a, b): return (1,)",
        "import os\ndef similar(a, b): os._exit(0)",
        "def similar(a, b): raise SystemExit(0)",
        "def similar(a, b): raise StopIteration",
        "import sys\ndef similar(a, b):\n    sys._getframe(1).f_globals['passed'] = True\n    return ()",
        "assert False",
        "",
    ],
)
def test_no_program_talks_its_way_past_asserts(sandbox: SandboxBackend, code: str) -> None:
    assert code_tests(fenced(code), sandbox=sandbox, test_list=MBPP).value == 0.0


def test_asserts_that_decide_nothing_are_told_with_their_reason(sandbox: SandboxBackend) -> None:
    rows = [
        {"test_list": MBPP, "solution": SIMILAR},
        {"test_list": MBPP, "solution": "def similar(a, b): return ()"},
        {"test_list": ["assert f(1) ==", "assert f(2)"]},
        {"test_list": ["f(1)"]},
        {"test_list": ["assert f(1)", 3]},
        {"test_list": ["assert f(g(1))"]},
        {"test_list": ["assert f(g(1))"], "entry_point": "f"},
        {"test_list": ["assert True"]},
    ]
    said = bad_tests(rows, sandbox=sandbox)
    assert [said[0], said[6]] == [None, None]
    for row, reason in (
        (1, "its own solution gets 0"),
        (2, "test 1 is not Python"),
        (3, "no assert"),
        (4, "test 2 has no assert"),
        (5, "call f, g; name the tested function"),
        (7, "call no function"),
    ):
        assert reason in str(said[row])
    assert "points: all" in str(bad_tests(rows[:1], points="fraction")[0])

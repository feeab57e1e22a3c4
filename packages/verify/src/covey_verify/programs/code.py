"""Rewards for programs, judged by hidden tests in a sandbox that never sees the expected results.

Inputs go in, values come out, and the comparison happens here. Tests written as code run in another process
than the candidate, and only plain values pass between the two.
"""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from covey_verify.contract import FULL, fault, in_subprocess, reward
from covey_verify.errors import SandboxUnavailable
from covey_verify.extract import TextOrMessages, after_reasoning, code_block, text_of
from covey_verify.machine import available_cpus
from covey_verify.programs.asserts import asserts_of, function_of
from covey_verify.sandbox.base import MIN_SECONDS, Outcome, SandboxBackend, too_long
from covey_verify.sandbox.confine import Limits
from covey_verify.sandbox.process import ProcessSandbox
from covey_verify.sandbox.wire import encode_value, numbers_agree, same
from covey_verify.types import Score

Mode = Literal["function", "stdio", "check"]
Form = Literal["block", "continue"]
Points = Literal["all", "fraction", "weighted"]
SUSPICIOUS = re.compile(
    r"os\._exit|sys\.exit|_getframe|\batexit\b|unittest|__eq__|excepthook|\bgc\.|settrace"
)
"""Signs of a program that manipulates its tester; they are logged and never change the score."""
MAX_SECONDS = 300.0
"""Longest check in seconds: well below the reward's own limit, so a check that hangs gets 0, not None."""
MAX_SOLUTIONS = 1_000
"""Number of solutions that are tried before a run, so that it takes seconds and not minutes."""
NO_CODE = re.compile(r"/\*(?:.*?\*/|.*)|//[^\n]*|^[ \t]*#[^\n]*", re.DOTALL | re.MULTILINE)
"""Comments of C, and lines of its preprocessor."""


@dataclass(frozen=True)
class Case:
    """A test: its input and the expected result."""

    args: Sequence[object]
    settings: Mapping[str, object]
    expected: object
    """The expected value, encoded (``wire``); for `stdio` the text of the output."""
    weight: float = 1.0
    visible: bool = False


def cases_of(tests: object, mode: Mode) -> list[Case]:
    """Return the tests of a row. Raises ValueError naming the first faulty one."""
    rows = json.loads(tests) if isinstance(tests, str) else tests
    if not isinstance(rows, Sequence) or not rows:
        raise ValueError("column 'tests' must be a non-empty list of {input, output}, not pickled")
    return [_case(row, f"test {number}", mode) for number, row in enumerate(rows, start=1)]


def _case(row: object, where: str, mode: Mode) -> Case:
    """Return a test. Raises ValueError if it decides nothing; ``where`` names it."""
    if not isinstance(row, Mapping) or not {"input", "output"} <= set(row):
        raise ValueError(f"{where} has no 'input' or no 'output'")
    arguments = row["input"]
    expected = row["output"]
    if mode == "stdio" and not (isinstance(arguments, str) and isinstance(expected, str)):
        raise ValueError(f"{where}: with mode stdio 'input' and 'output' must be texts")
    if mode == "function" and not isinstance(arguments, list | Mapping):
        raise ValueError(f"{where}: 'input' must be the list of arguments, or a mapping by name")
    encoded = expected if mode == "stdio" else encode_value(expected)
    # NaN and objects of unknown types never compare equal, so such a test could not be passed.
    if not same(encoded, encoded) and mode == "function":
        raise ValueError(f"{where}: the expected output does not equal itself (NaN?)")
    weight = float(row.get("weight", 1.0))
    visible = row.get("visible", False)
    if not (0 < weight < math.inf and isinstance(visible, bool)):
        raise ValueError(f"{where}: 'weight' must be a positive number, and 'visible' true or false")
    if mode == "stdio":
        return Case([arguments], {}, encoded, weight, visible)
    # A list holds positional arguments, a mapping keyword arguments.
    if isinstance(arguments, Mapping):
        return Case([], arguments, encoded, weight, visible)
    return Case(arguments, {}, encoded, weight, visible)


def bad_tests(
    rows: Sequence[Mapping[str, object]],
    mode: Mode = "function",
    sandbox: SandboxBackend | None = None,
    **settings: object,
) -> list[str | None]:
    """Return the fault of each row's tests: they decide nothing, or refuse the row's own solution."""
    complaints: list[str | None] = []
    for row in rows:
        try:
            _check_form(row, mode, settings.get("points", "all"))
            complaints.append(None)
        except (ValueError, TypeError, SyntaxError, RecursionError) as error:
            complaints.append(str(error)[:200])
    # Without a sandbox the tests' form is all that can be checked.
    if sandbox is None:
        return complaints
    solved = [n for n, row in enumerate(rows) if complaints[n] is None and _example(row)][:MAX_SOLUTIONS]
    settings = {**settings, "mode": mode, "sandbox": sandbox}
    with ThreadPoolExecutor(available_cpus()) as pool:
        faults = pool.map(lambda n: _solution_fault(rows[n], settings), solved)
        for n, fault in zip(solved, faults, strict=True):
            complaints[n] = fault
    return complaints


def _check_form(row: Mapping[str, Any], mode: Mode, points: object) -> None:
    """Raise an error if a row's tests cannot decide anything."""
    asserts = asserts_of(row.get("test_list") or row.get("tests"))
    if asserts:
        if not row.get("entry_point"):
            function_of(asserts, row.get("setup") or "")  # raises if the asserts do not tell the function
        if points != "all":
            raise ValueError("all asserts must hold, so they need points: all")
        return
    if mode != "stdio" and not row.get("entry_point"):
        raise ValueError("there is no 'entry_point' that names the function")
    if mode != "check":
        cases_of(row.get("tests"), mode)
        return
    ast.parse(row.get("setup") or "")
    if not ast.parse(row.get("test") or "").body:
        raise ValueError("column 'test' is empty")


def _solution_fault(row: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    """Return the fault of a row whose own solution does not pass its own tests, or None."""
    names = ("tests", "test_list", "test", "setup", "entry_point")
    columns = {name: row[name] for name in names if row.get(name)}
    score = code_tests(str(_example(row, **settings)), **columns, **settings)
    if score.value is None or score.value >= FULL:
        return None
    return f"its own solution gets {score.value:g} ({score.status}): {score.detail[:150]}"


def _example(row: Mapping[str, object], form: Form = "block", **_: object) -> str | None:
    """Return the row's own solution, if it has a solution, as a completion."""
    solution = row.get("solution") or row.get("canonical_solution")
    if not isinstance(solution, str):
        return None
    return solution if form == "continue" else f"```python\n{row.get('setup') or ''}{solution}\n```"


def _counterexample(row: Mapping[str, object], form: Form = "block", **_: object) -> str:
    """Return a completion with a program that passes no test."""
    if form == "continue":
        return "    return 'canary'\n"
    name = str(row.get("entry_point") or "f").partition(".")[0]
    return f"```python\nprint('canary')\nclass {name}:\n    def __init__(self, *_, **__): pass\n```"


@reward(
    concurrent=True,
    verdict=True,
    timeout=600.0,
    check_references=bad_tests,
    example=_example,
    counterexample=_counterexample,
)
def code_tests(
    completion: TextOrMessages,
    *,
    sandbox: SandboxBackend,
    tests: object = None,
    test_list: object = None,
    test: str = "",
    setup: str = "",
    entry_point: str = "",
    mode: Mode = "function",
    points: Points = "all",
    form: Form = "block",
    tolerance: Annotated[float, Ge(0)] = 1e-9,
    seconds: Annotated[float, Gt(0)] = 6.0,
    total_seconds: Annotated[float, Gt(0), Le(MAX_SECONDS)] = 30.0,
    memory_mb: Annotated[int, Gt(0)] = 1024,
) -> Score:
    """Return 1 if the program passes all tests, 0 otherwise; ``points`` may give a fraction instead.

    `function` calls ``entry_point`` with each input of ``tests``, `stdio` runs the program on each,
    `check` runs the code in ``test`` against it. If ``tests`` or ``test_list`` is a list of asserts, all of
    them have to hold, whatever the mode. If some tests are marked `visible`, only the others count, and the
    visible minus the hidden fraction is logged as `gap`. The whole check takes at most ``total_seconds``;
    tests that it does not reach count as failed. Seconds in which the machine kept the
    program waiting do not count.
    """
    asserts = [] if test else asserts_of(test_list or tests)
    if asserts:
        mode = "check"
        test = "\n".join(asserts)
        entry_point = entry_point or function_of(asserts, setup)
    code = _candidate(completion, setup, mode, form)
    if code is None:
        return Score(0.0, "no_answer")
    limits = Limits(wall=seconds, cpu=math.ceil(seconds), memory=memory_mb << 20)
    suspicious = {"suspicious": float(SUSPICIOUS.search(code) is not None)}
    if mode == "check":
        return _check(sandbox, code, entry_point, setup, test, limits, suspicious)

    def run(cases: Sequence[Case], remaining: float) -> Iterator[tuple[bool, Outcome]]:
        if mode == "stdio":
            return _scripts(sandbox, code, cases, limits, remaining, tolerance)
        overall = Limits(remaining, math.ceil(total_seconds), limits.memory)
        return _calls(sandbox, code, entry_point, cases, overall, seconds, tolerance)

    fractions, worst = _visible_then_hidden(run, cases_of(tests, mode), total_seconds, points)
    # The prompt shows the visible tests, so they count only if there are no others.
    value = fractions["hidden"] if "hidden" in fractions else fractions["visible"]
    return score_of(worst, value, code, {**fractions, **suspicious})


def _candidate(completion: TextOrMessages, setup: str, mode: Mode, form: Form) -> str | None:
    """Return the program to test, or None if the completion has none."""
    if form == "continue":
        return setup + text_of(completion)
    code = program(completion, "python")
    if code is None or mode != "check":
        return code
    # The tests run after the setup, so a candidate may rely on its imports too.
    return f"{setup}\n{code}"


def _visible_then_hidden(
    run: Callable[[Sequence[Case], float], Iterator[tuple[bool, Outcome]]],
    cases: Sequence[Case],
    seconds: float,
    points: Points,
) -> tuple[dict[str, float], Outcome]:
    """Return the fractions earned by `visible` and by `hidden` tests, their `gap`, and the first failure."""
    kinds = {
        "visible": [c for c in cases if c.visible],
        "hidden": [c for c in cases if not c.visible],
    }
    fractions = dict[str, float]()
    worst = Outcome("ok")
    for name, cases_of_kind in kinds.items():
        if cases_of_kind:
            fractions[name], result = _tally(run(cases_of_kind, seconds), cases_of_kind, points)
            seconds -= result.seconds
            worst = result if worst.kind == "ok" else worst
    if len(fractions) == 2:
        fractions["gap"] = fractions["visible"] - fractions["hidden"]
    return fractions, worst


def _check(
    sandbox: SandboxBackend,
    code: str,
    entry: str,
    setup: str,
    test: str,
    limits: Limits,
    metrics: Mapping[str, float],
) -> Score:
    """Score a program by code that tests it. Raises SandboxUnavailable if such code cannot run."""
    if not isinstance(sandbox, ProcessSandbox):
        raise SandboxUnavailable(f"tests written as code cannot run in the {sandbox.name} sandbox")
    result = sandbox.check(code, entry, setup, test, limits)
    if result.kind == "ok" and not result.value:
        # A test that passes without a call would pay every program.
        return Score(None, "bad_reference", detail="the test never calls the function")
    return score_of(result, float(result.kind == "ok"), code, metrics)


def program(completion: TextOrMessages, language: str) -> str | None:
    """Return the last complete fenced block after the reasoning, or None."""
    answer = after_reasoning(text_of(completion))
    return None if answer is None else code_block(answer, language)


def _calls(
    sandbox: SandboxBackend,
    code: str,
    entry: str,
    cases: Sequence[Case],
    limits: Limits,
    call_seconds: float,
    tolerance: float,
) -> Iterator[tuple[bool, Outcome]]:
    if limits.wall < MIN_SECONDS:
        yield from [(False, too_long())] * len(cases)
        return
    results = sandbox.calls(code, entry, [(c.args, c.settings) for c in cases], limits, call_seconds)
    for case, result in zip(cases, results, strict=False):
        yield result.kind == "ok" and same(case.expected, result.value, tolerance), result


def _scripts(
    sandbox: SandboxBackend,
    code: str,
    cases: Sequence[Case],
    limits: Limits,
    seconds: float,
    tolerance: float,
) -> Iterator[tuple[bool, Outcome]]:
    for case in cases:
        if seconds < MIN_SECONDS:
            yield False, too_long()
            continue
        result = sandbox.script(code, str(case.args[0]), replace(limits, wall=min(limits.wall, seconds)))
        seconds -= result.seconds
        passed = result.kind == "ok" and same_output(str(case.expected), str(result.value), tolerance)
        yield passed, result


def _tally(
    outcomes: Iterator[tuple[bool, Outcome]], cases: Sequence[Case], points: Points
) -> tuple[float, Outcome]:
    """Return the fraction that the passed tests earn, and the outcome of the first failed test.

    The outcome's seconds are the time of all tests.
    """
    weights = [c.weight if points == "weighted" else 1.0 for c in cases]
    earned = 0.0
    seconds = 0.0
    worst = Outcome("ok")
    for (passed, result), weight in zip(outcomes, weights, strict=False):
        earned += weight * passed
        seconds += result.seconds
        if not passed and worst.kind == "ok":
            worst = result._replace(value=None, text=result.text or "an incorrect answer")
        # Stop at the first failure if it decides; the generator then runs no further test.
        if (points == "all" and not passed) or result.kind == "lost":
            break
    worst = worst._replace(seconds=seconds)
    if points == "all":
        return float(earned >= sum(weights)), worst
    return earned / sum(weights), worst


def score_of(result: Outcome, value: float, code: str, metrics: Mapping[str, float]) -> Score:
    """Return a program's score: its value with the status of its end, or None if the machinery failed."""
    if result.kind == "lost":
        return Score(None, "infra_error", code[:2000], detail=result.text)
    status = fault(result) if result.kind not in ("ok", "error") else "ok"
    return Score(value, status, code[:2000], metrics, detail=result.text)


def same_output(expected: str, got: str, tolerance: float = 0.0) -> bool:
    r"""Return whether two outputs have the same words in all lines; numbers up to a relative tolerance.

    >>> same_output("1 2\n3.0", "1 2 \n3.0000000001\n", 1e-9), same_output("1\n2", "1")
    (True, False)
    """
    ours, theirs = ([line.split() for line in text.strip().splitlines()] for text in (expected, got))
    if [len(line) for line in ours] != [len(line) for line in theirs]:
        return False
    words = zip(chain.from_iterable(ours), chain.from_iterable(theirs), strict=True)
    return all(a == b or _close(a, b, tolerance) for a, b in words)


def _close(expected: str, got: str, tolerance: float) -> bool:
    # Integers have to be equal as text; float() of a very long text would be slow.
    if "." not in expected or len(got) > 400:
        return False
    try:
        return numbers_agree(float(expected), float(got), tolerance)
    except ValueError:
        return False


@reward(concurrent=True, format_only=True)
def compiles(
    completion: TextOrMessages, *, sandbox: SandboxBackend, language: Literal["python", "c"] = "python"
) -> Score:
    """Return 1 if a compiler accepts the last code block, 0 otherwise. The code is never run."""
    code = program(completion, language)
    if code is None:
        return Score(0.0, "no_answer")
    limits = Limits(wall=10.0, cpu=8)
    if language == "c" and not NO_CODE.sub("", code).strip():
        return Score(0.0, "no_answer", detail="there is no code in the block")
    if language == "python":
        result = in_subprocess("python_accepts", code)
        value = float(result.value is True)
    else:
        if not isinstance(sandbox, ProcessSandbox) or shutil.which("gcc") is None:
            raise SandboxUnavailable("compiling C needs gcc and a bwrap or landlock sandbox")
        gcc = [str(shutil.which("gcc")), "-fsyntax-only", "-x", "c", "-"]
        result = sandbox.compile(gcc, code, limits)
        value = float(result.kind == "ok")
        if result.kind == "crashed":  # a compiler refuses a text by its exit status
            result = Outcome("error", text=str(result.value)[:500])
    return score_of(result, value, code, {})

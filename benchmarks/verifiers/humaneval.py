"""HumanEval's canonical solutions must be paid, and the same with a broken line must not.

python benchmarks/verifiers/humaneval.py PROBLEMS.jsonl [backend]

Rows as in openai/human-eval: prompt, canonical_solution, entry_point, test. Each is judged in both
forms, as a continuation of the prompt and as a fenced program. A backend that cannot run tests written
as code gets the calls that the tests compare with a literal; problems without one are left out.
"""

from __future__ import annotations

import argparse
import ast
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from covey_verify.programs.code import code_tests
from covey_verify.sandbox.choice import choose
from covey_verify.sandbox.process import ProcessSandbox


def broken(solution: str) -> str:
    """The solution with the opposite of its last `return`: also what a test of truth alone must notice."""
    before, _, value = solution.rpartition("return")
    return f"{before}return not ({value.strip()})\n"


def literal_calls(test: str) -> list[dict[str, Any]]:
    """The `assert candidate(...) == ...` of a test, as inputs and outputs."""
    found = []
    for node in ast.walk(ast.parse(test)):
        match node:
            case ast.Assert(
                test=ast.Compare(
                    left=ast.Call(func=ast.Name("candidate"), args=args, keywords=[]),
                    ops=[ast.Eq()],
                    comparators=[expected],
                )
            ):
                try:
                    given = [ast.literal_eval(a) for a in args]
                    found.append({"input": given, "output": ast.literal_eval(expected)})
                except ValueError:
                    continue
    return found


def main(file: Path, backend: str) -> None:
    """Judge all problems and print the result."""
    sandbox = choose(backend).sandbox
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    runs_tests = isinstance(sandbox, ProcessSandbox)
    if not runs_tests:
        rows = [{**row, "tests": calls} for row in rows if (calls := literal_calls(row["test"]))]
    result: dict[str, object] = {"backend": backend, "problems": len(rows)}
    began, runs = time.monotonic(), 0
    for form in ("continue", "block"):
        for name, make in (("canonical", str), ("broken", broken), ("empty", lambda _: "    pass\n")):
            values: Counter[float | None] = Counter()
            unexpected = []
            for row in rows:
                body = make(row["canonical_solution"])
                text = body if form == "continue" else f"```python\n{row['prompt']}{body}\n```"
                settings = {k: row[k] for k in ("test", "tests", "entry_point") if k in row}
                score = code_tests(
                    text,
                    sandbox=sandbox,
                    mode="check" if runs_tests else "function",
                    form=form,
                    setup=row["prompt"],
                    **settings,
                )
                values[score.value] += 1
                runs += 1
                if score.value != float(name == "canonical"):
                    unexpected.append([row["task_id"], score.value, score.status, score.detail[:100]])
            result[f"{form}, {name}"] = {
                "values": {str(k): v for k, v in values.items()},
                "unexpected": unexpected,
            }
    result["ms_per_check"] = round(1000 * (time.monotonic() - began) / runs, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problems", type=Path)
    parser.add_argument("backend", nargs="?", default="auto")
    given = parser.parse_args()
    main(given.problems, given.backend)

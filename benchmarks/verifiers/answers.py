"""Which pairs of answers graders call equal: the pairs of the test suite, and the solutions of GSM8K.

python benchmarks/verifiers/answers.py [gsm8k.jsonl ...]      (math-verify and TRL where they are installed)
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from covey_verify.mathematics.answers import bad_references, math_answer
from speed import boxed, graders

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "packages/verify/tests"))
from answer_pairs import DIFFERENT, EQUAL, pairs  # noqa: E402 - the tests are no package

Judge = Callable[[str, str], object]


def accepted(judge: Judge, answer: str, reference: str) -> bool:
    """Return whether a grader pays an answer; one that fails on it does not."""
    try:
        found = judge(boxed(answer), reference)
    except Exception:
        return False
    if isinstance(found, list):
        found = found[0]
    return getattr(found, "value", found) in (1.0, True)


def main() -> None:
    """Print how many equal and different pairs each grader accepts, and what it says of GSM8K."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    given = parser.parse_args()
    tables = {"equal": pairs(EQUAL), "different": pairs(DIFFERENT)}
    for name, judge in graders().items():
        began = time.process_time()
        found = {}
        for kind, table in tables.items():
            count = sum(accepted(judge, answer, reference) for _, reference, answer in table)
            found[kind] = f"{count} of {len(table)}"
        print(name, json.dumps(found), f"{time.process_time() - began:.1f} s")
    for file in given.files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        solutions = [str(row.get("answer")) for row in rows]
        bad = [fault for fault in bad_references([{"answer": s} for s in solutions]) if fault]
        paid = sum(math_answer(s, s, rule="hash4").value == 1.0 for s in solutions)
        print(f"{file}: {paid} of {len(rows)} solutions equal themselves, {len(bad)} bad references")


if __name__ == "__main__":
    main()

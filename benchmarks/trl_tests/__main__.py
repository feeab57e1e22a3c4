"""Measure covey.trl by TRL's own tests.

    python benchmarks/trl_tests CHECKOUT --python VENV_WITH_TRL/bin/python [grpo rloo sft dpo kto reward]

CHECKOUT is a clone of huggingface/trl. Each file runs twice in the same environment, with TRL's trainers and
with covey's, on tiny random models and local rows (``stand_ins``). A test counts if TRL itself passes it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "src", HERE.parents[1] / "packages/verify/src"
TRAINERS = ("grpo", "rloo", "sft", "dpo", "kto", "reward")
CLASSES = {"grpo": "GRPO", "rloo": "RLOO", "sft": "SFT", "dpo": "DPO", "reward": "Reward", "kto": "KTO"}
Results = dict[str, tuple[str, str]]
"""Test -> its outcome and the reason of a failure."""


def measure(args: argparse.Namespace, folder: Path, trainer: str, way: str) -> Results:
    """Run a test file with covey's trainers or TRL's."""
    results = folder / f"{trainer}_{way}.tsv"
    environment = {
        **os.environ,
        "TRL_TESTS_WITH": way,
        "TRL_TESTS_RESULTS": str(results),
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, *SOURCES))),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    file = Path(args.checkout).resolve() / "tests" / f"test_{trainer}_trainer.py"
    own = f"{file}::Test{CLASSES[trainer]}Trainer"
    command = [args.python, "-m", "pytest", own, "-q", "--tb=short", *(["-x"] if args.first else [])]
    command += ["-p", "plugin", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", args.checkout]
    command += ["--timeout", "300", *(["-k", args.only] if args.only else [])]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=not args.verbose, text=True, check=False
    )
    if not results.is_file():
        raise SystemExit(
            f"{trainer} with {way}: no test ran\n{(done.stdout or '')[-3000:]}{done.stderr or ''}"
        )
    lines = (line.split("\t") for line in results.read_text("utf-8").splitlines() if line)
    return {name: (outcome, why) for outcome, name, why in lines}


NO_ERROR = "DID NOT RAISE"
"""pytest's reason where a test expects an error and none comes."""


def report(trainer: str, theirs: Results, ours: Results) -> str:
    """Return a line of the table, and the tests that only TRL passes.

    A test that expects an error where covey works counts in the first fraction alone.
    """
    passed_by_trl = [name for name, (outcome, _) in theirs.items() if outcome == "passed"]
    reasons = {name: ours.get(name, ("", "not run")) for name in passed_by_trl}
    failed = {name: reason for name, (outcome, reason) in reasons.items() if outcome != "passed"}
    works = [name for name, reason in failed.items() if NO_ERROR in reason]
    passed = len(passed_by_trl) - len(failed)
    line = f"{trainer}: covey passes {_fraction(passed, len(passed_by_trl))} tests that TRL passes"
    if works:
        fair = len(passed_by_trl) - len(works)
        line += f", {_fraction(passed, fair)} that do not expect an error where covey works"
    return "\n".join([line, *(f"  {name}: {reason}" for name, reason in failed.items())])


def _fraction(part: int, whole: int) -> str:
    return f"{part} of the {whole} ({part / max(whole, 1):.0%})"


def main() -> None:
    """Run the tests and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout")
    parser.add_argument("trainers", nargs="*", default=list(TRAINERS))
    parser.add_argument("--python", default=sys.executable, help="of an environment with trl and datasets")
    parser.add_argument("--folder", help="for models, rows and results; kept and used again")
    parser.add_argument("--only", help="pytest's -k")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--again", action="store_true", help="measure TRL again where results are kept")
    args = parser.parse_intermixed_args()
    folder = Path(args.folder or tempfile.mkdtemp(prefix="trl_tests_")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([args.python, str(HERE / "stand_ins.py"), str(folder)], check=True, capture_output=True)
    for trainer in args.trainers:
        found = {}
        for way in ("trl", "covey"):
            kept = folder / f"{trainer}_{way}.json"
            if way == "trl" and kept.is_file() and not args.again:
                found[way] = json.loads(kept.read_text("utf-8"))
                continue
            found[way] = measure(args, folder, trainer, way)
            if not args.only and not args.first:
                kept.write_text(json.dumps(found[way], indent=1), "utf-8")
        print(report(trainer, found["trl"], found["covey"]), flush=True)


if __name__ == "__main__":
    main()

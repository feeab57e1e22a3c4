"""Mistakes planted in scripts for TRL's GRPOTrainer, and sound runs of many kinds: what `covey audit` says.

    pip install 'covey[bench,lora]'
    python benchmarks/audit.py                    # the table
    python benchmarks/audit.py --only mask_rolled # one case, with the findings in words
    python benchmarks/audit.py --write            # and keep it in benchmarks/results/audit.md

Every script runs for real: TRL's own trainer on a model of random weights, on the CPU, a second each. Records
are kept in covey-benchmarks/audit of the temporary folder; remove them after a change of scripts or writer.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import io
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
try:
    import trl
except ImportError:
    sys.exit("trl is not installed; pip install 'covey[bench,lora]' brings it")

import torch
import trl.trainer.grpo_trainer as module
from datasets import Dataset
from transformers import AutoTokenizer
from transformers.utils import logging

from audit_cases import MISTAKES, SOUND, Case, Script, base, save_model
from covey.audit.table import CHECKS, audit
from covey.audit.writers.trl import record_run
from covey.insight.findings.finding import Finding

RESULT = Path(__file__).parent / "results/audit.md"
KEPT = Path(tempfile.gettempdir()) / "covey-benchmarks" / "audit"
"""Records that were made; they are read again when the checks change."""

AUTHOR = (
    "Mistakes and checks have the same author, and checks were changed after these runs were seen: this is "
    "no estimate for scripts of others. All models are small, with random weights."
)


@dataclass(frozen=True)
class Outcome:
    """What was found in one run."""

    case: Case
    seed: int
    found: list[Finding]
    problem: str = ""
    """Why the script did not run."""

    @property
    def names(self) -> list[str]:
        """Names of the findings in their order."""
        return [finding.id for finding in self.found]

    @property
    def first(self) -> bool:
        """Whether the mistake was named first."""
        return self.names[:1] == [self.case.expected]


def run(script: Script, folder: Path) -> Path:
    """Run a script with the recorder; return the record."""
    save_model(script, folder / "model")
    arguments = trl.GRPOConfig(output_dir=str(folder / "out"), **script.arguments)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    with contextlib.ExitStack() as stack:
        for name, value in script.patches.items():
            stack.enter_context(patch.object(module, name, value))
        trainer = script.trainer(
            model=str(folder / "model"),
            reward_funcs=script.rewards,
            args=arguments,
            train_dataset=Dataset.from_list(script.rows),
            eval_dataset=None if script.held_out is None else Dataset.from_list(script.held_out),
            processing_class=tokenizer,
            **script.others,
        )
        script.prepare(trainer)
        record_run(trainer, folder / "run.jsonl")
        # A run that breaks off has a record all the same.
        with contextlib.suppress(RuntimeError):
            trainer.train()
    return folder / "run.jsonl"


def outcomes(cases: Sequence[Case], seeds: Sequence[int], loud: bool) -> Iterator[Outcome]:
    """Audit all cases under all seeds; those without a record are run first."""
    KEPT.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for case in cases:
            record = KEPT / f"{case.name.replace(' ', '_')}-{seed}.jsonl"
            try:
                if not record.exists():
                    make(case, seed, record)
                yield Outcome(case, seed, audit(record)[1].findings)
            except Exception as error:
                if loud:
                    raise
                yield Outcome(case, seed, [], f"{type(error).__name__}: {error}"[:80])


def make(case: Case, seed: int, record: Path) -> None:
    """Run a case's script, and move its record to where it is kept."""
    script = base(seed)
    case.change(script)
    said = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            made = run(script, Path(folder))
        shutil.move(made, record)


def described(case: Case) -> str:
    """A case's mistake in words."""
    return (case.change.__doc__ or case.name).strip().rstrip(".")


def table(results: Sequence[Outcome], seeds: int) -> list[str]:
    """The results as a page."""
    planted = [r for r in results if r.case.expected]
    sound = [r for r in results if not r.case.expected]
    seen = [r for r in planted if r.case.expected in r.names]
    first = [r for r in planted if r.first]
    alarms = [r for r in sound if r.found]
    version = torch.__version__.partition("+")[0]
    made = f"TRL {trl.__version__}, torch {version}, {dt.date.today():%Y-%m-%d};"
    made += f" `python benchmarks/audit.py --seeds {seeds} --write`."
    sizes = (
        f"{len(MISTAKES)} mistakes and {len(SOUND)} sound scripts, {seeds} seeds each; {len(CHECKS)} checks."
    )
    counts = f"Named first: {len(first)} of {len(planted)}. Named: {len(seen)} of {len(planted)}."
    lines = [
        "# What `covey audit` finds in TRL scripts",
        "",
        f"{made} {sizes}",
        "",
        f"**{counts} False alarms: {len(alarms)} of {len(sound)} sound runs.**",
        "",
        AUTHOR,
        "",
        "| mistake | finding | named first | also said |",
        "|---|---|---|---|",
    ]
    for case in MISTAKES:
        own = [r for r in planted if r.case is case]
        also = dict.fromkeys(name for r in own for name in r.names if name != case.expected)
        fault = next((r.problem for r in own if r.problem), "")
        count = f"{sum(r.first for r in own)} of {len(own)}"
        lines.append(f"| {described(case)} | `{case.expected}` | {count} | {', '.join(also)}{fault} |")
    lines += ["", "| sound run | said |", "|---|---|"]
    for case in SOUND:
        own = [r for r in sound if r.case is case]
        said = dict.fromkeys(name for r in own for name in r.names)
        fault = next((r.problem for r in own if r.problem), "")
        lines.append(f"| {case.name} | {', '.join(said) or fault or 'nothing'} |")
    return lines


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    cases = [case for case in (*MISTAKES, *SOUND) if not given.only or case.name in given.only]
    results = []
    for outcome in outcomes(cases, range(given.seeds), bool(given.only)):
        results.append(outcome)
        print(
            f"{outcome.case.name}: {outcome.case.expected or 'sound'} -> {outcome.names} {outcome.problem}",
            flush=True,
        )
        if given.only:
            print(*outcome.found, sep="\n")
    if not given.only:
        text = "\n".join(table(results, given.seeds)) + "\n"
        print(text)
        if given.write:
            RESULT.write_text(text)


if __name__ == "__main__":
    main()

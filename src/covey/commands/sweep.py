"""`covey sweep`: make the runs of a grid of settings, one after the other; each is an ordinary run.

Folders are named after settings, so the same command continues after an interruption: a run that has ended is
not repeated, an interrupted run is resumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from covey.config.grid import Grid, PlannedRun
from covey.errors import EXIT_FILE, CheckpointError, Stopped
from covey.insight.cells import Cell, Sweep, write_sweep
from covey.runs.folder import RESULT
from covey.runs.reader import read_conclusion, stages_in
from covey.system.console import RunConsole
from covey.system.fault_injection import Faults
from covey.system.opening import RECORD_BYTES, load_json, read_below
from covey.system.signals import StopSignal
from covey.training.options import RunOptions
from covey.training.pipeline import run_in_folder
from covey.training.refusals import refuse_file
from covey.training.stage_folders import folder_name
from covey_verify.errors import ConfigError, CoveyError


def cells_of(grid: Grid) -> Sweep:
    """Return the grid cell by cell. Raises ConfigError if its folder holds a run or is a file."""
    refuse_file(grid.home)
    if (grid.home / "config.yaml").exists() or stages_in(grid.home):
        raise ConfigError(
            f"{grid.home} holds a run, but a sweep needs a folder for its runs. Choose another --output"
        )
    runs_of = dict[tuple[str, ...], list[PlannedRun]]()
    for run in grid.runs:
        runs_of.setdefault(run.cell, []).append(run)
    cells = [
        Cell(cell, {run.seed: run.folder for run in runs}, _last_stage(runs[0]))
        for cell, runs in runs_of.items()
    ]
    return Sweep(grid.home, grid.keys, cells)


def _last_stage(run: PlannedRun) -> str:
    """Return the name of the folder of a pipeline's last stage; empty if there are no stages."""
    stages = run.resolved.stages()
    return folder_name(len(stages), stages[-1]) if len(stages) > 1 else ""


def sweep(
    grid: Grid, console: RunConsole, stop: StopSignal, strict: bool, faults: Faults
) -> tuple[Sweep, dict[Path, str]]:
    """Make the missing runs, and write the results so far to `sweep.json` and `sweep.svg` after each.

    Returns the cells, and why runs failed, by folder; the others are still made. Raises Stopped.
    """
    plan = cells_of(grid)
    runs = grid.runs
    failed = dict[Path, str]()
    for number, run in enumerate(_failed_last(runs), start=1):
        console.say(f"run {number} of {len(runs)}: {run.folder.name}")
        before = _ends(run.folder)
        try:
            stop.check()
            options = RunOptions(strict=strict, start=run.start.record(), home=run.folder, faults=faults)
            results = run_in_folder(run.resolved, console, stop, options)
        except Stopped as stopped:
            complete = number - 1 - len(failed)
            raise Stopped(
                f"{stopped}. {complete} of {len(runs)} runs are complete; repeat the command to continue"
            ) from None
        except CoveyError as error:
            failed[run.folder] = str(error)
            console.say(f"{run.folder.name} failed: {error}", "red")
        else:
            # No result file is newer than before the call: nothing was trained.
            if before.items() >= _ends(results[-1].folder).items():
                console.say(f"already complete: {read_conclusion(results[-1].folder)}")
        write_sweep(plan, failed)
    return plan, failed


def _ends(folder: Path) -> dict[Path, int]:
    """Return the result files of a run and its stages, with their times of writing."""
    return {p: p.stat().st_mtime_ns for p in (*folder.glob(RESULT), *folder.glob(f"*/{RESULT}"))}


def _failed_last(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Put failed runs last: a run that kills the process must not block the others."""

    def has_failed(run: PlannedRun) -> bool:
        try:
            record = load_json(read_below(run.folder, EXIT_FILE, RECORD_BYTES))
        except (OSError, ValueError, CheckpointError):
            return False
        return isinstance(record, dict) and record.get("exit_code") != Stopped.code

    return sorted(runs, key=has_failed)

"""The commands `covey new`, `covey recommend` and `covey sweep`: a task, a method and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from covey.cli.commands import PLAIN, Json, RunFlags, Settings, _print, _tell, app
from covey.cli.groups import BEFORE, TRAIN


@app.command(name="new", group=BEFORE)
def command_new(folder: Path, *, model: str = "", as_json: Json = False) -> int:
    """Write a task that runs as it is: problems, a reward, its tests, a config. Replace it by yours.

    :param folder: A folder that does not exist yet, or is empty.
    :param model: Hub id, folder or GGUF file for the config, in place of SmolLM2-135M-Instruct.
    """
    from covey.commands.new_task import FILES, write_task
    from covey.insight.sample_command import shell_word

    write_task(folder, model)
    lines = [
        f"{folder} has {', '.join(FILES)}",
        f"next    cd {shell_word(str(folder))} && python rows.py && covey train run.yaml",
        "read    README.md says what each file is for, and what to change",
    ]
    _print(as_json, {"folder": str(folder), "files": list(FILES)}, lines)
    return 0


@app.command(name="sweep", group=TRAIN)
def command_sweep(
    config: Path,
    *settings: Settings,
    sets: Annotated[list[str] | None, Parameter(name="--set")] = None,
    seeds: int = 1,
    manner: RunFlags = PLAIN,
    as_json: Json = False,
) -> int:
    """Train with every combination of some settings, and say which is best and how sure that is.

    Each is an ordinary run in a folder below --output, named by its settings. The same command again goes on
    where it was interrupted and makes the runs that failed once more. Exit code 1 if any failed.

    :param config: A YAML file.
    :param sets: A setting and its values, as train.lr=1e-4,2e-4; may be repeated.
    :param seeds: Runs of each combination, with seeds that all combinations share.
    """
    from covey.config.grid import planned_runs
    from covey.config.start import Start
    from covey.system.fault_injection import Faults

    grid = planned_runs(Start(config, settings), sets or (), seeds)
    faults = Faults(manner.inject)
    _tell(as_json, dict.fromkeys(f"note: {note}" for run in grid.runs for note in run.loaded.notes))
    from covey.commands.sweep import sweep
    from covey.insight.cells import CHART_NAME, sweep_lines, sweep_record
    from covey.system.console import RunConsole
    from covey.system.signals import StopSignal

    stop = StopSignal(manner.max_minutes)
    plan, failed = sweep(grid, RunConsole(quiet=as_json), stop, manner.strict, faults)
    lines = [*sweep_lines(plan, failed), f"chart   {plan.home / CHART_NAME}"]
    _print(as_json, sweep_record(plan, failed), lines)
    return int(bool(failed))


@app.command(name="recommend", group=BEFORE)
def command_recommend(
    *,
    verifier: bool = False,
    pairs: int = 0,
    judged: int = 0,
    steps: bool = False,
    worked: int = 0,
    budget: Literal["tight", "ample"] = "tight",
    parameters: float = 0.0,
    memory: float = 0.0,
    as_json: Json = False,
) -> int:
    """Say which method suits what you have, why, and what each takes in memory; with a config to begin from.

    :param verifier: A program can say whether an answer is correct.
    :param pairs: Pairs of answers, one preferred.
    :param judged: Answers judged good or bad, each alone.
    :param steps: Single steps of answers are labelled, or a program can judge them.
    :param worked: Worked answers to imitate.
    :param budget: What may be spent: ample allows a reward model and a critic.
    :param parameters: Of the model, in billions.
    :param memory: Of the device, in GB.
    """
    from covey.insight.recommendation import Resources, recommend

    _print(as_json, *recommend(Resources(worked, pairs, judged, verifier, steps, budget), parameters, memory))
    return 0

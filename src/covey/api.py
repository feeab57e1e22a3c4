"""The Python API: the commands of the command line as functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from covey.config.load import ResolvedConfig, load_config
from covey.config.python_objects import ModelObject, with_objects
from covey.config.start import Start
from covey.config.usercode import refuse_while_importing
from covey.errors import Stopped
from covey.system.processes import environment_rank, started_together
from covey_verify.errors import ConfigError

if TYPE_CHECKING:
    from covey.insight.findings.finding import Findings
    from covey.insight.result import Result
    from covey.runs.estimates import Evaluation
    from covey.training.observer import Observer


def train(
    config: str | Path | None = None, *, quiet: bool = False, overwrite: bool = False, **settings: object
) -> Result:
    """Train as a YAML file says, as keyword arguments say, or both (these win).

    Settings are the config's keys; sections are dicts. What a file names may be an object: a transformers
    model, which is trained in place, with its tokenizer; rows; rewards; the functions of the algorithm.

        covey.train(model="tiny", data={"task": "sums"}, train={"steps": 50}, rewards=[mine])
        covey.train(model=model, tokenizer=tokenizer, data={"train": rows, "test": others}, rewards=[mine])

    Resumes an interrupted run of the same output folder, and returns the result of one that has ended. If
    functions or data differ from the earlier run's, covey refuses and names the difference; ``overwrite``
    removes that run and begins anew. Returns the last stage's result; its `folder / "final"` is a Hugging
    Face model. Raises CoveyError; Ctrl-C, or a notebook's interrupt, raises `covey.errors.Stopped`.
    """
    file = Path(config) if config is not None else None
    return run_start(Start(file, (), with_objects(settings)), quiet=quiet, overwrite=overwrite)


def resume(
    run: str | Path | Result,
    *,
    quiet: bool = False,
    strict: bool = False,
    trust: bool = False,
    **settings: object,
) -> Result:
    """Resume an interrupted run; settings given here are changed, as by `covey resume`.

    Pass the run's objects again, except functions that a file defines:

        covey.resume("runs/quick", rewards=[mine])

    ``trust``: run the code that the run names, though you did not start it here.
    """
    from covey.runs.trust import start_of

    start = start_of(_path(run), trust, values=with_objects(settings))
    return run_start(start, _path(run), quiet=quiet, strict=strict)


def evaluate(run: object, *, quiet: bool = False, trust: bool = False, **settings: object) -> Evaluation:
    """Held-out accuracy of a run's model, of a config's, or of a model with `data` and `rewards` given here.

    ``run`` is the folder of a run, its result, a YAML file, a model's folder or hub id, or a model, with its
    `tokenizer`.
    ``trust``: run rewards that a run names although it was not begun here by you.
    The result's `summary()` has greedy accuracy, pass@k and majority vote, each with its interval.
    """
    refuse_while_importing()
    from covey.commands.inference import evaluate_once
    from covey.learner.process import default_torch_modes
    from covey.runs.reader import load_run
    from covey.system.console import RunConsole

    source = getattr(run, "folder", run)  # of a result
    path = Path(source) if isinstance(source, str | Path) else None
    # A folder with a config.json is a model; any other existing folder should be a run's.
    if path is not None and path.suffix in (".yaml", ".yml"):
        resolved = load_config(path, values=with_objects(settings))
    elif path is not None and path.is_dir() and not (path / "config.json").is_file():
        resolved = load_run(path, values=with_objects(settings), trust=trust)
    else:
        resolved = load_config(values=with_objects({"model": run, **settings}))
    with default_torch_modes():
        return evaluate_once(resolved, RunConsole(quiet))


def _path(run: str | Path | Result) -> Path:
    """Return the folder of a run, or of its result."""
    return Path(run) if isinstance(run, str | Path) else run.folder


def explain(run: str | Path | Result) -> Findings:
    """Return the findings of a run, a folder or a result: what went wrong, and the config line that helps."""
    from covey.insight.findings.finding import Findings
    from covey.insight.findings.watch import explain_run

    return Findings(explain_run(_path(run)).findings)


def sample(
    model: object,
    prompts: Sequence[str],
    n: int = 1,
    max_tokens: int = 256,
    temperature: float = 1.0,
    chat: bool = False,
    seed: int = 0,
    system: str = "",
    chat_template_kwargs: Mapping[str, object] | None = None,
    *,
    tokenizer: object = None,
    tools: Sequence[str] = (),
    precision: str = "auto",
    quiet: bool = False,
) -> list[list[str]]:
    """``n`` completions of each prompt by a model: its folder or hub id, or an object with its ``tokenizer``.

    With ``chat`` each prompt is a user's message, after ``system`` if that is given; the template gets
    ``chat_template_kwargs``, for example {"enable_thinking": False}. ``tools``: what the model may call, as
    in ``rollout.tools``; their results are not in the returned text. With ``precision="auto"`` a run's model
    computes as in its run, if this machine can; otherwise a note on standard error says so, unless ``quiet``.
    """
    from covey.commands.inference import sample_once
    from covey.learner.process import default_torch_modes
    from covey.system.console import say_aside

    values = {"model": model, "tokenizer": tokenizer, "seed": seed, "precision": precision}
    rollout = {"rollout": {"tools": list(tools)}} if tools else {}
    say = (lambda _: None) if quiet else say_aside
    resolved = load_config(values=with_objects({**values, **rollout}))
    with default_torch_modes():
        return sample_once(
            resolved,
            prompts,
            n,
            max_tokens,
            temperature,
            chat=chat,
            system=system,
            chat_template_kwargs=chat_template_kwargs,
            say=say,
        )


def run_start(
    start: Start,
    resumed: Path | None = None,
    *,
    quiet: bool = False,
    strict: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
) -> Result:
    """Run what a start says, in the folder of an earlier run if it is ``resumed``.

    ``observer`` learns of each step and may end the run. Raises CoveyError.
    """
    refuse_while_importing()
    from covey.system.console import RunConsole
    from covey.system.signals import StopSignal
    from covey.training.options import RunOptions
    from covey.training.pipeline import run_together

    resolved = _with_absolute_output(
        start.with_settings(("--output", str(resumed)) if resumed is not None else ()).load()
    )
    several = started_together()
    if several and isinstance(resolved.config.model, ModelObject):
        raise ConfigError("model: an object is trained in one process; save it to a folder, and name that")
    if resolved.config.launch.processes > 1 and not several:
        processes = resolved.config.launch.processes
        raise ConfigError(
            f"launch.processes {processes}: start this script by torchrun, or train by `covey train`"
        )
    resumes = resumed is not None
    options = RunOptions(
        strict=strict,
        changes=resumes,
        same_inputs=not resumes,
        start=start.record(),
        home=resolved.config.output,
    )
    if observer is not None:
        options = replace(options, observer=observer)
    # Under torchrun every rank runs this script; one of them prints.
    console = RunConsole(quiet or environment_rank() > 0)
    for note in resolved.notes:
        console.say(f"note: {note}")
    try:
        return run_together(resolved, console, StopSignal(), options, overwrite=overwrite)[-1]
    except Stopped as stopped:
        if observer is not None:  # a trainer of covey.trl, which is continued in TRL's way
            raise
        call = f"covey.resume({str(options.home)!r})"
        raise Stopped(f"{stopped}. Continue with: {call}, given the same objects") from None


def _with_absolute_output(resolved: ResolvedConfig) -> ResolvedConfig:
    """Return a config whose run stays in one folder, though a reward may change the working directory."""
    config = resolved.config.model_copy(update={"output": resolved.config.output.absolute()})
    return replace(resolved, config=config, of_stages=tuple(map(_with_absolute_output, resolved.of_stages)))

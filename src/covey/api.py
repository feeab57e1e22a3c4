"""The Python API: what the command line does, as functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.config.load import load
from covey.config.start import Start, read_start
from covey.config.usercode import refuse_while_importing

if TYPE_CHECKING:
    from covey.estimates import Evaluation
    from covey.insight.explain import Remark
    from covey.training.pipeline import Result


def train(config: str | Path | None = None, *, quiet: bool = False, **settings: Any) -> Result:
    """Train as a YAML file says, as keyword arguments say, or both (these win).

    Settings are the config's keys; sections are dicts, rewards may be functions:

        covey.train(model="tiny", data={"task": "sums"}, train={"steps": 50}, rewards=[mine])

    Goes on where an interrupted run of the same output folder stopped. Returns the last stage's
    result; its `folder / "final"` is a Hugging Face model. Raises CoveyError.
    """
    file = Path(config) if config is not None else None
    return _run(Start(file, (), settings), None, quiet)


def resume(run: str | Path, *, quiet: bool = False, strict: bool = False, **settings: Any) -> Result:
    """Go on with an interrupted run; settings given here are changed, as by `covey resume`.

    Rewards that the run was given as objects, and that no file defines by name, are given again:

        covey.resume("runs/quick", rewards=[mine])
    """
    return _run(read_start(Path(run)).changed(values=settings), Path(run), quiet, strict)


def evaluate(run: str | Path, *, quiet: bool = False, **settings: Any) -> Evaluation:
    """Held-out accuracy of a run's model, of a config's, or of a model with `data` and `rewards` given here.

    ``run`` is the folder of a run, a YAML file, or a model's folder or hub id. The result's
    `summary()` has greedy accuracy, pass@k and majority vote, each with its interval.
    """
    refuse_while_importing()
    from covey.console import RunConsole
    from covey.inference import evaluate_once
    from covey.runs.reader import load_run

    path = Path(run)
    if path.suffix in (".yaml", ".yml"):
        loaded = load(path, values=settings)
    elif path.is_dir() and not (path / "config.json").is_file():
        loaded = load_run(path, values=settings)
    else:
        loaded = load(values={"model": str(run), **settings})
    return evaluate_once(loaded, RunConsole(quiet))


def explain(run: str | Path) -> list[Remark]:
    """What stands out in a run's metrics, and which setting to change."""
    from covey.insight.recorded import explain_run

    return explain_run(Path(run))[1]


def sample(model: str, prompts: Sequence[str], **settings: Any) -> list[list[str]]:
    """Completions of each prompt.

    Settings: n, max_tokens, temperature, seed, chat, system, chat_template_kwargs.
    """
    from covey.inference import sample_once

    return sample_once(model, prompts, **settings)


def _run(start: Start, resumed: Path | None, quiet: bool, strict: bool = False) -> Result:
    refuse_while_importing()
    from covey.console import RunConsole
    from covey.signals import StopSignal
    from covey.training.pipeline import run_pipeline
    from covey.training.run import RunOptions

    loaded = start.changed(("--output", str(resumed)) if resumed is not None else ()).load()
    session = RunOptions(strict, resumed is not None, start.record(), loaded.config.output)
    console = RunConsole(quiet)
    for note in loaded.notes:
        console.say(f"note: {note}")
    with StopSignal().listening() as stop:
        return run_pipeline(loaded, console, stop, session)[-1]

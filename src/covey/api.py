"""The Python API: what the command line does, as functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.config.load import load

if TYPE_CHECKING:
    from covey.training.pipeline import Result


def train(config: str | Path | None = None, *, quiet: bool = False, **settings: Any) -> Result:
    """Train as a YAML file says, as keyword arguments say, or both (these win).

    Settings are the config's keys; sections are dicts, rewards may be functions:

        covey.train(model="tiny", data={"task": "sums"}, train={"steps": 50}, rewards=[mine])

    Goes on where an interrupted run of the same output folder stopped. Returns the last stage's
    result; its `folder / "final"` is a Hugging Face model. Raises CoveyError.
    """
    from covey.console import RunConsole
    from covey.stopping import StopSignal
    from covey.training.pipeline import run_pipeline

    loaded = load(Path(config) if config is not None else None, values=settings)
    with StopSignal().listening() as stop:
        return run_pipeline(loaded, RunConsole(quiet), stop)[-1]


def sample(model: str, prompts: Sequence[str], **settings: Any) -> list[list[str]]:
    """Completions of each prompt; settings: n, max_tokens, temperature, chat, seed."""
    from covey.training.once import sample_once

    return sample_once(model, prompts, **settings)

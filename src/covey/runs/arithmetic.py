"""Compute as a run did when its model is loaded again: its record names the product kernels and rounding.

The record also has the time at which prompts were first rendered: chat templates may print the date.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import torch

from covey.config.load import ResolvedConfig
from covey.config.schema import Config
from covey.models.chat import render_at, rendered_at
from covey.models.kernels.build import processor
from covey.models.kernels.calls import follow, followed_choices, rounding_pays
from covey.models.policy import Policy
from covey.models.template import template_facts
from covey.runs.reader import read_environment
from covey.system.processes import on_rank_zero


def source_run(resolved: ResolvedConfig) -> Path | None:
    """Return the folder of the run that a config records, or that made its model; None if there is none."""
    model = resolved.config.model
    if resolved.recorded_run is not None or not isinstance(model, str):
        return resolved.recorded_run
    return enclosing_run(resolved.folder / model)


def enclosing_run(model: Path) -> Path | None:
    """Return the run in whose folder a model lies: in `final`, `checkpoints/...` or `sync/...`."""
    above = list(model.resolve().parents)[:2] if model.is_dir() else []
    return next((p for p in above if all((p / name).is_file() for name in ("config.yaml", "env.json"))), None)


def follow_run(run: Path | None, device: torch.device) -> None:
    """Compute from now on as the run in this folder did; without a record, as is fastest on this machine.

    The recorded kernels are used on the same processor only; the recorded rounding on every one. A GPU needs
    neither, so that nothing is compiled or measured for it.
    """
    before = (read_environment(run) if run is not None else None) or {}
    recorded = _was_rounded(run) if device.type == "cpu" else False
    # The first process measures, or reads the clock below, for all: others might come to another result.
    rounding = on_rank_zero(lambda: rounding_pays() if recorded is None else recorded)
    follow(before.get("products") if before.get("machine") == processor() else None, rounding)
    date = datetime.now().isoformat(timespec="seconds")
    render_at(datetime.fromisoformat(on_rank_zero(lambda: str(before.get("rendered", date)))))


@contextmanager
def compute_as_run(run: Path | None, device: torch.device) -> Iterator[None]:
    """Apply ``follow_run`` inside the block and undo it afterwards: the process belongs to the caller."""
    before = followed_choices()
    time = rendered_at()
    follow_run(run, device)
    try:
        yield
    finally:
        follow(*before)
        render_at(time)


def arithmetic_notes(policy: Policy, config: Config, run: Path | None) -> Iterator[str]:
    """Yield notes on what cannot be as it was in the run: rounded products, and the date in the prompts."""
    if _was_rounded(run) and config.precision == "auto" and not policy.rounds:
        yield (
            f"note: {run} rounded its products to bfloat16, which cannot be done here: these are computed "
            "in float32, and differ a little from its own"
        )
    if template_facts(policy.tokenizer).dated and rendered_at().date() != datetime.now().date():
        name = policy.tokenizer.name_or_path or "the model"
        yield (
            f"note: the chat template of {name} prints the date; here it is that of the run's first "
            f"rendering, {rendered_at():%Y-%m-%d}, so that prompts stay as they were"
        )


def any_step_rounded(run: Path, policy: Policy, resumes: bool) -> bool:
    """Whether this process or an earlier one computed some of a run's steps with less than float32."""
    before = (read_environment(run) or {}).get("rounded", False) if resumes else False
    return before or policy.rounded


def _was_rounded(run: Path | None) -> bool | None:
    """Whether a run's products were rounded; None if unknown, or on a GPU, which has no such setting."""
    record = (read_environment(run) if run is not None else None) or {}
    return record.get("rounds_products") if record.get("device", "cpu") == "cpu" else None

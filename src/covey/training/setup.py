"""Setup of a run from its config: it finds every error that it can, cheap checks first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from covey.config.load import ResolvedConfig
from covey.config.python_objects import ModelObject
from covey.learner.memory import program_bytes
from covey.learner.optimizer import optimizer_class
from covey.learner.process import set_process
from covey.models.generation import sample_as_trained
from covey.models.live_memory import alive_bytes
from covey.models.load import speed_notes
from covey.models.policy import Policy
from covey.models.reference import Reference
from covey.models.value_head import ValueModel
from covey.objective.controllers import first_coefficients
from covey.rollouts.learned import reward_model_bytes
from covey.runs.arithmetic import arithmetic_notes, follow_run
from covey.runs.checkpoint import RunState
from covey.runs.clock import Clock
from covey.runs.folder import RunFolder
from covey.runs.inputs import contents_of
from covey.runs.journal import Journal
from covey.runs.trackers import check_tracker
from covey.runs.watchdog import Watchdog
from covey.sampling.notes import unseen_by_model
from covey.sampling.prompts import EncodedProblem, dropped_rows, encode
from covey.sampling.tools.reader import reader_by
from covey.sampling.tools.use import unexplained_tools, with_tools
from covey.system.console import RunConsole
from covey.system.device import pick_device
from covey.system.processes import run_on_all
from covey.system.signals import StopSignal
from covey.training.memory import plan_memory
from covey.training.models import (
    critic_learner,
    critic_network,
    load_trained,
    policy_learner,
    reference_model,
    sampler_of,
)
from covey.training.monitor import RunMonitor
from covey.training.options import DEFAULTS, RunOptions
from covey.training.resume import resume_run
from covey.training.run import Run
from covey.training.task import RunTask, checked_task


class EncodedTask(NamedTuple):
    """Problems and examples as the model's tokens."""

    train: list[EncodedProblem]
    test: list[EncodedProblem]
    held_out: list[EncodedProblem]


class LoadedTask(NamedTuple):
    """A task with the models of its run."""

    task: RunTask
    encoded: EncodedTask
    policy: Policy
    reference: Reference | None
    critic: ValueModel | None
    program: int
    """Bytes of program and libraries."""


def set_up(
    resolved: ResolvedConfig, console: RunConsole, stop: StopSignal, options: RunOptions = DEFAULTS
) -> Run:
    """Build a run; if its folder holds an unfinished run of the same config, resume that.

    Raises ConfigError, DataError or RewardError before any model is loaded where that is possible.
    """
    config = resolved.config
    # These two refuse a config before anything is loaded or written.
    check_tracker(config.tracker)
    optimizer_class(config.train)
    # Taken before any of the user's functions is called, because a call may change the function's data.
    contents = contents_of(resolved)
    loaded = _load_models(checked_task(resolved, console, options), resolved, console)
    journal = Journal(run_on_all(lambda: RunFolder(config.output)), console, Clock(loaded.policy.device))
    try:
        watchdog = Watchdog(config.output, config.guards.stall_minutes)
        monitor = RunMonitor(resolved, journal, stop, watchdog, options.faults)
        run = _build_run(loaded, contents, monitor, options)
        resume_run(run, plan_memory(run, loaded.program))
    # The folder is locked by now; the handler of the error may want to open it again.
    except BaseException:
        journal.folder.close()
        raise
    return run


def _load_models(task: RunTask, resolved: ResolvedConfig, console: RunConsole) -> LoadedTask:
    """Load the models of a run and encode its task."""
    config = resolved.config
    console.loading(f"loading the model {config.model if isinstance(config.model, str) else ''}".rstrip())
    set_process(config)
    # This chooses the arithmetic that the run began with, on which the loading of a model depends.
    follow_run(resolved.recorded_run or config.output, pick_device(config.device))
    policy, encoded = load_and_encode(task, resolved, console)
    # Measured before further models reuse the memory that loading has freed, since a run leaves about as
    # much unused.
    tensors = alive_bytes(policy.model.parameters()) + reward_model_bytes(task.rewards)
    program = program_bytes(policy.device, tensors)
    # The reference is copied before a critic puts a value head on the policy.
    reference = reference_model(policy, resolved)
    critic = critic_network(policy, resolved)
    return LoadedTask(task, encoded, policy, reference, critic, program)


def _build_run(
    loaded: LoadedTask, contents: Mapping[str, str], monitor: RunMonitor, options: RunOptions
) -> Run:
    """Build a run at its first step."""
    resolved = monitor.resolved
    task, encoded, policy, reference, critic, _ = loaded
    learner = policy_learner(policy, resolved, reference, monitor)
    sampler = sampler_of(policy.unsharded, resolved.config, encoded.train, monitor)
    return Run(
        resolved=resolved,
        learner=learner,
        sampler=with_tools(sampler, policy.unsharded, task.toolbox),
        # The rewards were loaded before the model, whose texts only this reader knows.
        rewards=replace(task.rewards, reader=reader_by(policy)),
        train_set=encoded.train,
        test_set=encoded.test,
        held_out=encoded.held_out,
        contents=contents,
        journal=monitor.journal,
        monitor=monitor,
        options=options,
        state=RunState(coefficients=first_coefficients(resolved.algorithm)),
        critic=None if critic is None else critic_learner(critic, resolved, monitor),
        first_policy=_first_policy(resolved, task),
    )


@contextmanager
def scratch_run(
    resolved: ResolvedConfig, console: RunConsole, stop: StopSignal, options: RunOptions = DEFAULTS
) -> Iterator[Run]:
    """Set up a run in a temporary folder, which measures something; the user's folder is never touched."""
    with TemporaryDirectory() as folder:
        config = resolved.config.model_copy(update={"output": Path(folder) / "run", "tracker": None})
        run = set_up(replace(resolved, config=config), console, stop, options)
        try:
            yield run
        finally:
            run.journal.close()


def load_and_encode(
    task: RunTask, resolved: ResolvedConfig, console: RunConsole
) -> tuple[Policy, EncodedTask]:
    """Load the model, encode the task with its tokenizer, and print what the model does not see of it."""
    config = resolved.config
    source = task.source
    policy, encode_learned = load_trained(resolved, source)
    if config.rollout.sampler is not None or config.launch.samplers:
        # A server may draw any id that has an embedding, so the trainer allows the same ids.
        policy.draw_from_all()
    held_out = encode_learned(source.held_out)
    train = encode_learned(source.examples) or encode(policy, source.train, config)
    test = encode(policy, source.test, config)
    notes = [*speed_notes(policy, config), *arithmetic_notes(policy, config, resolved.recorded_run)]
    notes += sample_as_trained(policy.model, config.rollout)
    notes += unseen_by_model(policy, [*source.train, *source.test], config, source.examples)
    notes += dropped_rows(source.rows, [*train, *held_out, *test])
    notes += unexplained_tools(policy, source, task.toolbox, config.method)
    for note in notes:
        console.say(note, "yellow")
    return policy, EncodedTask(train, test, held_out)


def _first_policy(resolved: ResolvedConfig, task: RunTask) -> Callable[[], Policy] | None:
    """Return a function that loads the run's first model again; None for a model given as an object."""
    if isinstance(resolved.config.model, ModelObject):
        return None
    return lambda: load_trained(resolved, task.source)[0]

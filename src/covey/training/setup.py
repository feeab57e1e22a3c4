"""Setup of a run from its config: it finds every error that it can, cheap checks first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def set_up(
    resolved: ResolvedConfig, console: RunConsole, stop: StopSignal, options: RunOptions = DEFAULTS
) -> Run:
    """Build a run; if its folder holds an unfinished run of the same config, resume that.

    Raises ConfigError, DataError or RewardError before any model is loaded where that is possible.
    """
    config = resolved.config
    check_tracker(config.tracker)
    optimizer_class(config.train)  # refused before anything is loaded or written
    contents = contents_of(resolved)  # before any user function is called, which may change its own data
    task = checked_task(resolved, console, options)
    console.loading(f"loading the model {config.model if isinstance(config.model, str) else ''}".rstrip())
    set_process(config)
    # Before the model is loaded: it chooses the arithmetic that the run was begun with.
    follow_run(resolved.recorded_run or config.output, pick_device(config.device))
    policy, encoded = load_and_encode(task, resolved, console)
    # Before further models take what loading has freed: a run leaves about as much unused.
    held = alive_bytes(policy.model.parameters()) + reward_model_bytes(task.rewards)
    program = program_bytes(policy.device, held)
    reference = reference_model(policy, resolved)  # before a critic puts a value head on the policy
    critic = critic_network(policy, resolved)
    journal = Journal(run_on_all(lambda: RunFolder(config.output)), console, Clock(policy.device))
    try:
        watchdog = Watchdog(config.output, config.guards.stall_minutes)
        monitor = RunMonitor(resolved, journal, stop, watchdog, options.faults)
        learner = policy_learner(policy, resolved, reference, monitor)
        sampler = sampler_of(policy.unsharded, config, encoded.train, monitor)
        run = Run(
            resolved=resolved,
            learner=learner,
            sampler=with_tools(sampler, policy.unsharded, task.toolbox),
            # They were loaded before the model, whose texts the reader knows.
            rewards=replace(task.rewards, reader=reader_by(policy)),
            train_set=encoded.train,
            test_set=encoded.test,
            held_out=encoded.held_out,
            contents=contents,
            journal=journal,
            monitor=monitor,
            options=options,
            state=RunState(coefficients=first_coefficients(resolved.algorithm)),
            critic=None if critic is None else critic_learner(critic, resolved, monitor),
            first_policy=_first_policy(resolved, task),
        )
        resume_run(run, plan_memory(run, program))
    # The folder is locked by now; the handler of the error may want to open it again.
    except BaseException:
        journal.folder.close()
        raise
    return run


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

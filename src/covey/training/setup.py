"""Setup of a run from its config: it finds every error that it can, cheap checks first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from covey.config.load import ResolvedConfig, resolved_yaml
from covey.config.python_objects import ModelObject
from covey.errors import RECORD, START, CheckpointError
from covey.learner.process import set_process
from covey.models.chat import rendered_at
from covey.models.generation import sample_as_trained
from covey.models.load import pick_device, speed_notes
from covey.models.policy import Policy
from covey.objective.controllers import first_coefficients
from covey.runs.arithmetic import any_step_rounded, arithmetic_notes, follow_run
from covey.runs.atomic import write_file
from covey.runs.checkpoint import State
from covey.runs.clock import Clock
from covey.runs.compatibility import differences_to_record, environment
from covey.runs.folder import INEXACT, RunFolder, checkpoints
from covey.runs.inventory import fingerprint, inventory
from covey.runs.journal import Journal
from covey.runs.origin import write_own
from covey.runs.pending import forget_completions
from covey.runs.trackers import check_tracker
from covey.runs.watchdog import Watchdog
from covey.sampling.notes import unseen_by_model
from covey.sampling.prompts import Prompted, dropped_rows, encode
from covey.sampling.tools.reader import reader_by
from covey.sampling.tools.use import unexplained_tools, with_tools
from covey.system.console import RunConsole
from covey.system.integrity import sealed
from covey.system.processes import is_rank_zero, on_rank_zero, run_on_all
from covey.system.signals import StopSignal
from covey.training.hooks import connect
from covey.training.memory import plan_memory
from covey.training.models import load_critic, load_trained, policy_learner, reference_of, sampler_of
from covey.training.run import DEFAULTS, Run, RunOptions
from covey.training.task import RunTask, checked_task


class EncodedTask(NamedTuple):
    """Problems and examples as the model's tokens."""

    train: list[Prompted]
    test: list[Prompted]
    held_out: list[Prompted]


def set_up(
    loaded: ResolvedConfig, console: RunConsole, stop: StopSignal, options: RunOptions = DEFAULTS
) -> Run:
    """Build a run; if its folder holds an unfinished run of the same config, resume that.

    Raises ConfigError, DataError or RewardError before any model is loaded where that is possible.
    """
    config = loaded.config
    check_tracker(config.tracker)
    task = checked_task(loaded, console, options)
    console.loading(f"loading the model {config.model if isinstance(config.model, str) else ''}".rstrip())
    set_process(config)
    # Before the model is loaded: it chooses the arithmetic that the run was begun with.
    follow_run(loaded.run or config.output, pick_device(config.device))
    policy, encoded = load_and_encode(task, loaded, console)
    reference = reference_of(policy, loaded)  # before a critic puts a value head on the policy
    critic = load_critic(policy, loaded)
    learner = policy_learner(policy, loaded, reference)
    sampler = sampler_of(policy.unsharded, config, encoded.train, options)
    run = Run(
        loaded=loaded,
        learner=learner,
        sampler=with_tools(sampler, policy.unsharded, task.toolbox),
        rewards=task.rewards,
        train_set=encoded.train,
        test_set=encoded.test,
        held_out=encoded.held_out,
        journal=Journal(run_on_all(lambda: RunFolder(config.output)), console, Clock(policy.device)),
        stop=stop,
        watchdog=Watchdog(config.output, config.guards.stall_minutes),
        options=options,
        state=State(coefficients=first_coefficients(loaded.algorithm)),
        critic=critic,
        first_policy=_first_policy(loaded, task),
    )
    try:
        connect(run)
        resume_run(run, plan_memory(run))
    # The folder is locked by now; the handler of the error may want to open it again.
    except BaseException:
        run.journal.folder.close()
        raise
    return run


@contextmanager
def scratch_run(
    loaded: ResolvedConfig, console: RunConsole, stop: StopSignal, options: RunOptions = DEFAULTS
) -> Iterator[Run]:
    """Set up a run in a temporary folder, which measures something; the user's folder is never touched."""
    with TemporaryDirectory() as folder:
        config = loaded.config.model_copy(update={"output": Path(folder) / "run", "tracker": None})
        run = set_up(replace(loaded, config=config), console, stop, options)
        try:
            yield run
        finally:
            run.journal.close()


def load_and_encode(task: RunTask, loaded: ResolvedConfig, console: RunConsole) -> tuple[Policy, EncodedTask]:
    """Load the model, encode the task with its tokenizer, and print what the model does not see of it."""
    config = loaded.config
    source = task.source
    rewards = task.rewards
    policy, encode_learned = load_trained(loaded, source)
    # Rewards were loaded before the model; they get the reader of its texts here.
    rewards.reader = reader_by(policy)
    if config.rollout.sampler is not None or config.launch.samplers:
        # A server may draw any id that has an embedding, so the trainer allows the same ids.
        policy.draw_from_all()
    held_out = encode_learned(source.held_out)
    train = encode_learned(source.examples) or encode(policy, source.train, config)
    test = encode(policy, source.test, config)
    notes = [*speed_notes(policy, config), *arithmetic_notes(policy, config, loaded.run)]
    notes += sample_as_trained(policy.model, config.rollout)
    notes += unseen_by_model(policy, [*source.train, *source.test], config, source.examples)
    notes += dropped_rows(source.rows, [*train, *held_out, *test])
    notes += unexplained_tools(policy, source, task.toolbox, config.method)
    for note in notes:
        console.say(note, "yellow")
    return policy, EncodedTask(train, test, held_out)


def _first_policy(loaded: ResolvedConfig, task: RunTask) -> Callable[[], Policy] | None:
    """Return a function that loads the run's first model again; None for a model given as an object."""
    if isinstance(loaded.config.model, ModelObject):
        return None
    return lambda: load_trained(loaded, task.source)[0]


def process_record(run: Run, memory: Mapping[str, int], begun: bool) -> dict[str, object]:
    """Return the record of this process, to compare with that of the one that left a checkpoint."""
    config = run.loaded.config
    policy = run.learner.policy.unsharded
    reference = run.learner.reference
    return {
        **environment(run.loaded),
        "rounds_products": policy.rounds,
        "rendered": rendered_at().isoformat(),
        "rounded": any_step_rounded(config.output, policy, begun),
        "sandbox": run.rewards.sandbox,
        "tokenizer": policy.vocabulary_hash,
        "known_tokens": policy.drawable_ids,
        "data": fingerprint((*run.train_set, *run.held_out, *run.test_set)),
        "reference": reference.fingerprint() if reference is not None else None,
        "files": inventory(run.loaded, run.rewards),
        "memory": memory,
        "micro_tokens": {
            "configured": config.train.tokens_per_micro_batch,
            "planned": run.learner.micro_tokens,
        },
    }


def resume_run(run: Run, memory: Mapping[str, int]) -> None:
    """Restore the newest checkpoint, if there is one, and print the differences from its process."""
    loaded = run.loaded
    options = run.options
    journal = run.journal
    folder = journal.folder
    begun = bool(checkpoints(folder.path))
    now = process_record(run, memory, begun)
    differences = on_rank_zero(lambda: differences_to_record(loaded, begun, now))
    harmful = [d for d in differences if d.effect != "safe"]
    if options.strict and loaded.config.rollout.staleness and begun:
        raise CheckpointError(
            f"{folder.path}: --strict cannot hold with rollout.staleness, under which no run repeats "
            "exactly. Remove it"
        )
    if harmful and options.strict:
        raise CheckpointError(
            f"{folder.path}: {'; '.join(map(str, harmful))}. Resume the run with its first settings, or "
            "remove --strict"
        )
    # Completions drawn ahead by a process that differs are not used.
    if harmful:
        on_rank_zero(lambda: forget_completions(folder.path))
    if run.restore():
        journal.say(f"resuming after step {run.state.step} of {loaded.config.train.steps}")
        for difference in differences:
            journal.say(f"  {difference}", "yellow" if difference in harmful else "")
        if harmful:
            journal.event(run.state.step, INEXACT, because=[str(d) for d in harmful])
    # Last, so that a refused resume leaves the files as they were.
    if is_rank_zero():
        write_own(folder.path, "config.yaml", resolved_yaml(loaded))
        write_file(folder.path / "env.json", sealed(now))
        if options.start:
            write_own(options.home, START, sealed(options.start))
        (folder.path / RECORD).unlink(missing_ok=True)

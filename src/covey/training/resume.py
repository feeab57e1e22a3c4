"""Resume: a run goes back to its newest good checkpoint and names what differs from the process before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from covey.config.load import resolved_yaml
from covey.errors import EXIT_FILE, START_FILE, CheckpointError
from covey.models.chat import rendered_at
from covey.objective.controllers import resumed_coefficients
from covey.runs.arithmetic import any_step_rounded
from covey.runs.atomic import sync, write_file
from covey.runs.checkpoint import load_checkpoint, newest_checkpoint
from covey.runs.compatibility import differences_to_record, environment
from covey.runs.folder import IN_CHECKPOINT, INEXACT, RESULT, LogState, checkpoint_at, checkpoints
from covey.runs.inputs import contents_record, files_of, problems_hash
from covey.runs.pending import forget_completions
from covey.runs.trust import write_own
from covey.system.integrity import damage, sealed
from covey.system.processes import is_rank_zero, on_rank_zero
from covey.training.run import Run


def resume_run(run: Run, memory: Mapping[str, int]) -> None:
    """Restore the newest checkpoint, if there is one, and print the differences from its process."""
    resolved = run.resolved
    options = run.options
    journal = run.journal
    folder = journal.folder
    has_begun = bool(checkpoints(folder.path))
    current = process_record(run, memory, has_begun)
    differences = on_rank_zero(lambda: differences_to_record(resolved, has_begun, current))
    harmful = [d for d in differences if d.effect != "safe"]
    if options.strict and resolved.config.rollout.staleness and has_begun:
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
    if _restore(run):
        journal.say(f"resuming after step {run.state.step} of {resolved.config.train.steps}")
        for difference in differences:
            journal.say(f"  {difference}", "yellow" if difference in harmful else "")
        if harmful:
            journal.log_event(run.state.step, INEXACT, because=[str(d) for d in harmful])
    # Last, so that a refused resume leaves the files as they were.
    if is_rank_zero():
        write_own(folder.path, "config.yaml", resolved_yaml(resolved))
        write_file(folder.path / "env.json", sealed(current))
        if options.start:
            write_own(options.home, START_FILE, sealed(options.start))
        (folder.path / EXIT_FILE).unlink(missing_ok=True)


def process_record(run: Run, memory: Mapping[str, int], has_begun: bool) -> dict[str, object]:
    """Return the record of this process, to compare with that of the one that left a checkpoint."""
    config = run.resolved.config
    policy = run.learner.network.unsharded
    reference = run.learner.reference
    return {
        **environment(run.resolved),
        "rounds_products": policy.rounds,
        "rendered": rendered_at().isoformat(),
        "rounded": any_step_rounded(config.output, policy, has_begun),
        "sandbox": run.rewards.sandbox,
        "tokenizer": policy.vocabulary_hash,
        "known_tokens": policy.drawable_ids,
        "data": problems_hash((*run.train_set, *run.held_out, *run.test_set)),
        "reference": reference.fingerprint() if reference is not None else None,
        "files": files_of(run.resolved, run.rewards),
        "contents": contents_record(run.resolved, run.contents),
        "memory": memory,
        "micro_tokens": {
            "configured": config.train.tokens_per_micro_batch,
            "planned": run.learner.micro_tokens,
        },
    }


def _restore(run: Run) -> bool:
    """Go back to the newest good checkpoint; False if there is none. Raises CheckpointError."""
    journal = run.journal
    checkpoint, complaints = on_rank_zero(lambda: newest_checkpoint(journal.folder, run.options.strict))
    for complaint in complaints:
        journal.say(f"skipping damaged checkpoint: {complaint}", "yellow")
    logs = LogState()
    if checkpoint is not None:
        saved = load_checkpoint(checkpoint, run.learner, run.critic)
        guard_raises_kl = run.resolved.config.guards.kl_action == "raise_coef"
        coefficients = resumed_coefficients(saved.state.coefficients, run.resolved.algorithm, guard_raises_kl)
        run.state = replace(saved.state, coefficients=coefficients)
        logs = saved.logs
    # Without a checkpoint too: the sampler may hold other weights, as after another stage.
    run.sampler.sync(run.learner)
    journal.clock.before = run.state.seconds
    on_rank_zero(lambda: _rewind(run, logs))
    times = on_rank_zero(lambda: journal.folder.read("timings.jsonl"))
    journal.clock.recall(times)
    run.progress.begin(run.state.step, checkpoint is not None)
    return checkpoint is not None


def _rewind(run: Run, logs: LogState) -> None:
    """Remove later log entries. Raises CheckpointError for damage; a strict run accepts none."""
    folder = run.journal.folder
    step = run.state.step
    complaints = folder.damaged_streams(logs, step)
    run.journal.console.show_work("checking the rollout log")
    complaints += folder.damaged_rollouts(logs, step, every=run.options.strict)
    if complaints and run.options.strict:
        raise CheckpointError(f"{'; '.join(complaints)}. Restore the files, or remove --strict")
    # An earlier result is of fewer steps, or of a model that was lost. It goes before the logs are changed,
    # whose hashes it has: with them a run that is killed here would seem to be damaged.
    (folder.path / RESULT).unlink(missing_ok=True)
    sync(folder.path)
    repeated = folder.rewind(logs, step)
    if repeated:
        steps = "1 step was" if repeated == 1 else f"{repeated} steps were"
        run.journal.say(f"{steps} not saved; repeating from step {step + 1}")
    for complaint in complaints:
        run.journal.say(complaint, "yellow")
    if complaints:
        run.journal.log_event(step, "log damaged", because=complaints)


def load_weights_of(run: Run, step: int) -> None:
    """Load the weights of an earlier step's checkpoint; the run's step does not change.

    Raises CheckpointError if the checkpoint is damaged or gone.
    """
    checkpoint = checkpoint_at(run.journal.folder.path, step)
    problem = on_rank_zero(lambda: damage(checkpoint, (IN_CHECKPOINT,)))
    if problem:
        raise CheckpointError(f"{problem}. Restore it, or resume with --train.final last")
    load_checkpoint(checkpoint, run.learner, run.critic)

"""The pipeline of a run: its stages in order, each evaluated before and after."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from covey.cluster.connect import release
from covey.config.contradictions import notes_on
from covey.config.load import ResolvedConfig, resolved_values
from covey.config.methods import EXAMPLE_SAMPLERS, METHODS, Loop
from covey.config.rows import flatten
from covey.errors import EXIT_FILE, FolderBusy, GuardStop, Stopped, as_error, record_exit, resume_command
from covey.insight.result import (
    Result,
    better_step_hint,
    stage_table,
)
from covey.learner.process import default_torch_modes, freeze_existing_objects, restore_process_settings
from covey.models.model_objects import restore_model_object, take_weights
from covey.runs.folder import (
    checkpoints,
    read_numbers,
)
from covey.runs.inputs import record_end
from covey.runs.removal import remove_run
from covey.system.console import RunConsole
from covey.system.parent import tell_run_folder
from covey.system.processes import (
    as_peers_lost,
    environment_rank,
    is_rank_zero,
    join_processes,
    on_rank_zero,
    record_job_end,
    reported_by_another,
    run_on_all,
)
from covey.system.signals import StopSignal
from covey.tasks.pipeline_check import refuse_missing
from covey.training import example_sampling, examples_loop, preference, reward_model, rl
from covey.training.finish import evaluate_again, finish_examples, finish_run, write_result
from covey.training.options import DEFAULTS, RunOptions
from covey.training.refusals import check_resume
from covey.training.rollback import run_with_rollbacks, severe
from covey.training.run import Run
from covey.training.select import select
from covey.training.setup import set_up
from covey.training.stage_folders import placed_stages
from covey.training.time_estimate import hours_line
from covey_verify.errors import ConfigError

STEP_BUILDERS: Mapping[Loop, Callable[[Run], examples_loop.StepBuilder]] = {
    "imitation": examples_loop.imitation,
    "preference": preference.preferences,
    "reward_model": reward_model.judgements,
}
"""Builders of the steps of each loop over given examples."""
LOOPS: Mapping[Loop, Callable[[Run], None]] = {
    "reinforcement": rl.train,
    "example_sampling": example_sampling.sample_completions,
    **{name: partial(examples_loop.train, builder_of) for name, builder_of in STEP_BUILDERS.items()},
}
"""The loop of a method, ``METHODS[method].loop``."""


def run_pipeline(
    resolved: ResolvedConfig, console: RunConsole, stop: StopSignal, options: RunOptions = DEFAULTS
) -> list[Result]:
    """Run all stages, each from the last one's final model, and continue where an earlier try stopped.

    Raises Stopped, with everything saved, if a stop was requested.
    """
    refuse_missing(resolved.stages())
    stages = placed_stages(resolved.stages())
    earlier_results = check_resume(resolved.config.output, stages, console, options)
    results = list[Result]()
    for stage, result in zip(stages, earlier_results, strict=True):
        if results and result is None:
            # A stop may have been requested while the previous stage was being written.
            run_on_all(stop.check)
        # Each stage changes process-wide settings; the caller's are restored after it.
        with (
            restore_process_settings(),
            freeze_existing_objects(),
            restore_model_object(stage.config.model),
        ):
            results.append(result or run_with_rollbacks(_run_stage, stage, console, stop, options))
    last = earlier_results[-1]
    if last is not None:
        console.say(f"{last.folder} is complete after {last.steps} steps; there is nothing left to do")
        take_weights(stages[-1].config.model, last.folder / "final")
    if len(results) > 1:
        for line in stage_table([r.folder for r in results]):
            console.say(line)
    return results


def run_in_folder(
    resolved: ResolvedConfig, console: RunConsole, stop: StopSignal, options: RunOptions
) -> list[Result]:
    """Call ``run_pipeline`` and record a failure in the run's folder. Raises CoveyError."""
    home = resolved.config.output
    tell_run_folder(home)
    try:
        results = run_pipeline(resolved, console, stop, options)
    except Exception as error:
        covey_error = as_error(as_peers_lost(error))
        # Config errors and busy folders say nothing about the run. Another process may already have
        # recorded the error.
        if (
            home.is_dir()
            and not isinstance(covey_error, ConfigError | FolderBusy)
            and not reported_by_another(covey_error)
        ):
            record_exit(home, covey_error)
        if covey_error is error:
            raise
        raise covey_error from error
    # Without the file nothing is touched, because the folder may not be writable.
    if environment_rank() == 0 and (home / EXIT_FILE).exists():
        (home / EXIT_FILE).unlink()
    return results


def run_together(
    resolved: ResolvedConfig,
    console: RunConsole,
    stop: StopSignal,
    options: RunOptions,
    *,
    overwrite: bool = False,
    ends_job: bool = False,
) -> list[Result]:
    """Run the stages as a user starts them: on every process that was started with this one.

    ``overwrite`` removes an earlier run from the folder. With ``ends_job`` torchrun is told of a run
    that failed, whose exit code would otherwise make it start the job again. Raises CoveyError.
    """
    config = resolved.config
    # ``join_processes`` does nothing for a single process; under torchrun it sets up the process group.
    process_group = join_processes(config.guards.stall_minutes, config.device)
    # Torch has its first default dtype, device and modes inside the block, and the caller's again after it.
    with default_torch_modes(), process_group:
        if overwrite:
            on_rank_zero(partial(remove_run, config.output))
        results = run_in_folder(resolved, console, stop, options)
        if ends_job and results[-1].failed:
            record_job_end(1)
        return results


def _select_rows(resolved: ResolvedConfig, console: RunConsole) -> Result:
    """Run a stage that needs no model: select rows, and write the result."""
    folder = resolved.config.output
    began = time.monotonic()
    example = on_rank_zero(lambda: select(resolved, console))
    result = Result(folder, 0, round(time.monotonic() - began, 1), example.prompt, None, example.template)
    on_rank_zero(lambda: write_result(result, {}))
    return result


def _run_stage(
    resolved: ResolvedConfig, console: RunConsole, stop: StopSignal, options: RunOptions
) -> Result:
    """Run one stage: evaluate, train, evaluate, write the model and the conclusion."""
    config = resolved.config
    loop = METHODS[config.method].loop
    if loop is None:
        return _select_rows(resolved, console)
    run = set_up(resolved, console, stop, options)
    try:
        if config.method == "rl":
            for note in notes_on(resolved.algorithm, config.train.updates_per_rollout_batch):
                console.say(f"note: {note}")
        estimate = hours_line(run)
        if estimate:
            console.say(estimate)
        stops_early = config.train.stop_at is not None and config.eval.every > 0
        title = f"{config.output.name} ({config.method})"
        console.begin(title, config.train.steps, run.state.step, stops_early, left=run.seconds_left)
        console.recall(*(read_numbers(config.output, f"{name}.jsonl") for name in ("metrics", "evals")))
        run.journal.track_by(config.tracker, dict(flatten(resolved_values(resolved))), run.state.step)
        home = resolved.pipeline_folder or config.output
        with stop.listening(partial(_answer_stop, run), partial(_describe_loss, run, home)):
            return _train_and_finish(run, LOOPS[loop])
    finally:
        console.end()
        record_end(resolved, run.contents)
        run.journal.close()
        release()


def _answer_stop(run: Run, second_signal: str) -> None:
    """Tell the user at a signal when the run will end, and what the second signal would do."""
    if is_rank_zero():
        run.journal.console.answer(run.progress.describe_stop(second_signal))


def _describe_loss(run: Run, home: Path) -> str:
    """Return what a second signal loses, and the command that continues the run."""
    return f"{run.progress.describe_loss()}. Continue with: {resume_command(home)}"


def _train_and_finish(run: Run, train: Callable[[Run], None]) -> Result:
    """Train a stage to its end; if it ends early, add to the error what is saved."""
    config = run.resolved.config
    try:
        with run.monitor.watchdog.watching():
            return _evaluate_and_train(run, train)
    # Everything up to the last complete step is saved; the message tells the user where.
    except Stopped as stopped:
        run.save()
        raise Stopped(
            f"{stopped}; saved after step {run.state.step} of {config.train.steps} in {config.output}"
        ) from None
    except GuardStop as reason:
        saved = checkpoints(config.output)
        last = f"The last checkpoint is {saved[-1]}" if saved else "There is no checkpoint yet"
        better = better_step_hint(on_rank_zero(run.journal.folder.best), config.output)
        raise GuardStop(f"{reason}. {last}{better and f'. The {better}'}") from None


def _evaluate_and_train(run: Run, train: Callable[[Run], None]) -> Result:
    """Evaluate, train, evaluate, and write the model, or the examples of a stage that makes them."""
    config = run.resolved.config
    evaluations = {}
    if run.evaluates:
        evaluations["before"] = run.evaluator.at(0)
    run.options.observer.run_begins(run.state.step)
    # A resumed stage first does what a stop left undone, which may end it.
    if not (run.state.step and run.evaluate_and_save()):
        train(run)
    if config.method in EXAMPLE_SAMPLERS:
        return finish_examples(run)
    if run.state.updates:
        # With this checkpoint more steps can follow, and a lost final/ can be written again.
        run.save()
    if run.evaluates:
        # If an evaluation was due after the last step, this reads it from the log.
        evaluations["after"] = run.evaluator.at(run.state.step)
    confirmation = evaluate_again(run) if run.evaluates else None
    if config.method == "rl" and run.state.step:
        findings = run.supervisor.report_findings(run.state.step)
        run.supervisor.roll_back_for(severe(findings), run.state.step)
    run.journal.console.show_work("writing the model")
    with run.journal.clock("final"):
        return finish_run(run, evaluations, confirmation)

"""The end of a stage: its model or examples, card, curve, conclusion and result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from covey.errors import GuardStop
from covey.insight.card import CardFacts, write_cards
from covey.insight.conclusion import Conclusion, conclude_run
from covey.insight.findings.settings import settings_of
from covey.insight.findings.table import gravest, likely
from covey.insight.result import (
    Result,
    better_step_clause,
    better_step_hint,
    held_out_ranking,
    write_curve,
)
from covey.insight.sample_command import example_of
from covey.models.policy import save_policy
from covey.models.readback import check_folder
from covey.models.sharded import full_weights
from covey.runs.atomic import committed_folder, write_file
from covey.runs.estimates import Evaluation
from covey.runs.folder import (
    CURVE,
    RESULT,
    WRITTEN,
)
from covey.runs.pending import forget_completions
from covey.system.integrity import digest_of, sealed
from covey.system.processes import (
    on_rank_zero,
)
from covey.system.text import duration, percent
from covey.tasks.source import EXAMPLES_FILE
from covey.training.example_sampling import write_examples
from covey.training.memory import in_megabytes, memory_measured
from covey.training.resume import load_weights_of
from covey.training.rollback import tell_outcomes
from covey.training.run import Run


def finish_examples(run: Run) -> Result:
    """Write the examples and the result of a stage that samples them."""
    on_rank_zero(lambda: write_examples(run))
    seconds = round(run.journal.clock.total(), 1)
    example = example_of([p.problem for p in run.train_set])
    folder = run.journal.folder.path
    result = Result(folder, run.state.step, seconds, example.prompt, None, example.template)
    on_rank_zero(lambda: _conclude(run, result))
    return result


def _conclude(run: Run, result: Result) -> None:
    """Write the result, last of all: its existence marks the stage as complete."""
    streams = run.journal.folder.sync().streams
    logs = {name: list(length_and_hash) for name, length_and_hash in streams.items()}
    write_result(result, logs)


def write_result(result: Result, logs: Mapping[str, object]) -> None:
    """Write the result, with bytes and sha256 of each log (``logs``) and of the examples."""
    path = result.folder / EXAMPLES_FILE
    examples = {EXAMPLES_FILE: [path.stat().st_size, digest_of(path)]} if path.is_file() else {}
    write_file(result.folder / RESULT, sealed({**result.record(), WRITTEN: {**logs, **examples}}))


def evaluate_again(run: Run) -> Evaluation | None:
    """Evaluate a stage that ended at ``train.stop_at`` on problems that did not decide its end."""
    train = run.resolved.config.train
    problems = run.evaluator.spare_problems
    if train.stop_at is None or run.state.step >= train.steps or not problems:
        return None
    evaluation = run.evaluator.measure(problems)
    estimates = {name: estimate.value for name, estimate in evaluation.summary().items()}
    run.journal.log_event(run.state.step, "measured again", problems=len(problems), **estimates)
    return evaluation


def finish_run(
    run: Run, evaluations: Mapping[str, Evaluation], confirmation: Evaluation | None = None
) -> Result:
    """Write `final/`, the learning curve and the result. Raises GuardStop if nothing was trained."""
    if not run.state.updates:
        why = "Every gradient was 0; check the settings of `loss`"
        if run.resolved.config.method == "rl":
            why = f"No group had a nonzero advantage: {run.supervisor.why_no_signal()}"
        steps = "1 step" if run.state.step == 1 else f"{run.state.step} steps"
        raise GuardStop(f"trained {steps} without changing a single weight. {why}")
    best = on_rank_zero(run.journal.folder.best) if run.resolved.config.train.final == "best" else None
    # The best model and its evaluation are of an earlier step.
    if best is not None and best.step != run.state.step:
        load_weights_of(run, best.step)
        evaluations = {**evaluations, "after": best.evaluation}
    run.learner.check_finite(str(run.journal.folder.path / "final"))
    # All processes have to take part; only the first one writes.
    critic = full_weights(run.critic.network.model) if run.critic is not None else {}
    return on_rank_zero(lambda: _write_final(run, evaluations, critic, confirmation))


def _write_final(
    run: Run,
    evaluations: Mapping[str, Evaluation],
    critic: Mapping[str, Tensor],
    confirmation: Evaluation | None,
) -> Result:
    """Write the model, its card and the curve of a run that has ended, and print the conclusion."""
    config = run.resolved.config
    records = run.journal.folder
    # Rounded once, so that the card, the console and the record show the same number.
    seconds = round(run.journal.clock.total(), 1)
    conclusion = _conclusion(run, evaluations, confirmation, seconds)
    best = records.best() if config.train.final == "best" else None
    steps = run.state.step if best is None else best.step
    metrics = records.read("metrics.jsonl")
    ranking = held_out_ranking(metrics, run.held_out, steps) or CardFacts.ranking
    example = example_of([p.problem for p in run.test_set or run.train_set])
    loader = run.learner.network.loader_name
    _write_model(
        run, critic, CardFacts(run.resolved, steps, conclusion, evaluations, example, loader, ranking)
    )
    run.journal.say(f"memory used (MB): {in_megabytes(memory_measured(run)) or 'below 1'}")
    title = conclusion.sentence.partition(", on ")[0] if conclusion else config.output.name
    write_curve(records.path / CURVE, title, metrics, records.read("evals.jsonl"))
    # Completions drawn ahead are of no use after the last step.
    forget_completions(records.path)
    result = Result(records.path, run.state.step, seconds, example.prompt, conclusion, example.template)
    _conclude(run, result)
    _say_outcome(run, result, ranking)
    return result


def _conclusion(
    run: Run, evaluations: Mapping[str, Evaluation], confirmation: Evaluation | None, seconds: float
) -> Conclusion | None:
    """Return the conclusion on a run, None if it was not evaluated; it names a better step if one exists."""
    if not evaluations:
        return None
    train = run.resolved.config.train
    conclusion = conclude_run(evaluations["before"], evaluations["after"], seconds)
    sentence = conclusion.sentence
    if confirmation is not None and train.stop_at is not None:
        rate = confirmation.summary()["pass@1"]
        bar = percent(train.stop_at, "g")
        sentence += f"; stopped at {bar} sampled; on {len(confirmation.greedy)} other problems {rate}"
    best = run.journal.folder.best()
    if best is not None:
        sentence += better_step_clause(best, run.state.step, train.final == "best")
    return replace(conclusion, sentence=sentence)


def _write_model(run: Run, critic: Mapping[str, Tensor], facts: CardFacts) -> None:
    """Write `final/`: the model, its critic and its card. It appears under its name once it is complete."""
    with committed_folder(run.journal.folder.path / "final") as final:
        save_policy(run.learner.network.unsharded, final)
        if run.critic is not None:
            run.critic.network.model.save_pretrained(final / "critic", state_dict=critic)
            check_folder(final / "critic", critic)
        write_cards(final, facts)


def _say_outcome(run: Run, result: Result, ranking: str) -> None:
    """Print the conclusion, how to get the best step, and the likely cause if the run did not learn."""
    conclusion = result.conclusion
    config = run.resolved.config
    words = conclusion.sentence if conclusion else f"done in {duration(result.seconds)}"
    scores = "" if conclusion and not run.held_out else f". {ranking}"
    run.journal.say(f"{config.output.name}: {words}{scores}")
    tell_outcomes(run.journal)
    better = better_step_hint(run.journal.folder.best(), result.folder)
    if better and config.train.final != "best":
        run.journal.say(f"the {better}, or train with train.final: best", "yellow")
    if conclusion is None or not conclusion.failed:
        return
    # The gravest finding names the cause; without findings the logs are searched for a likely one.
    streams = (run.journal.folder.read("metrics.jsonl"), run.journal.folder.read("evals.jsonl"))
    cause = gravest(run.supervisor.findings()) or likely(*streams, settings_of(run.resolved))
    if cause is not None:
        run.journal.say(f"likely cause: {cause}", "yellow")

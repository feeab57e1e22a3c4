"""A run from start to verdict: its stages in order, each measured before and after."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from covey.config.contradictions import notes_on, updates_of
from covey.config.load import Loaded
from covey.console import RunConsole, duration
from covey.endings import GuardStop
from covey.estimates import Evaluation
from covey.insight.card import Trained, write_cards
from covey.insight.curve import write_curve
from covey.insight.explain import explain, no_signal, settings_of
from covey.insight.usage import example_of
from covey.insight.verdict import Verdict, judge
from covey.models.load import save_policy
from covey.stopping import Stopped, StopSignal
from covey.store.commit import committed_folder, write_file
from covey.training import rl, supervised
from covey.training.guards import check_weights
from covey.training.resume import refuse_other_config
from covey.training.run import Run, Session
from covey.training.setup import ALONE, caller_restored, set_up
from covey.types import Messages

LOOPS: Mapping[str, Callable[[Run], None]] = {"rl": rl.train, "sft": supervised.train}
RESULT = "result.json"


@dataclass(frozen=True)
class Result:
    """How a run, or a stage of it, ended."""

    folder: Path
    """`final/` in it is the model."""
    steps: int
    seconds: float
    example: str | Messages
    """A prompt to try the model with, and in ``template`` what its chat template gets besides."""
    verdict: Verdict | None = None
    """None where there were no held-out problems."""
    template: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "folder": str(self.folder)}


def run_pipeline(
    loaded: Loaded, console: RunConsole, stop: StopSignal, session: Session = ALONE
) -> list[Result]:
    """Run all stages, each from the last one's final model, going on where an earlier try stopped.

    Raises Stopped, with everything saved, if a stop was requested.
    """
    stages, results = loaded.stages(), list[Result]()
    for number, stage in enumerate(stages, start=1):
        placed = _in_pipeline(stage, number, results) if len(stages) > 1 else stage
        done = _finished(placed)
        refuse_other_config(placed, changes=session.changes)
        with caller_restored():
            results.append(done or run_stage(placed, console, stop, session))
    return results


def _in_pipeline(stage: Loaded, number: int, before: list[Result]) -> Loaded:
    """A stage's config with a folder of its own and the model the stage before it left."""
    changes: dict[str, object] = {"output": stage.config.output / f"{number}-{stage.config.method}"}
    if before:
        changes["model"] = str((before[-1].folder / "final").resolve())
    return replace(stage, config=stage.config.model_copy(update=changes))


def _finished(stage: Loaded) -> Result | None:
    path = stage.config.output / RESULT
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    verdict = Verdict(**record["verdict"]) if record["verdict"] else None
    return Result(**{**record, "folder": stage.config.output, "verdict": verdict})


def run_stage(loaded: Loaded, console: RunConsole, stop: StopSignal, session: Session = ALONE) -> Result:
    """One stage: measure, train, measure, write the model and the verdict."""
    config = loaded.config
    run = set_up(loaded, console, stop, session)
    try:
        for note in notes_on(loaded.algorithm, updates_of(config)) if config.method == "rl" else ():
            console.say(f"note: {note}")
        stops_early = config.train.stop_at is not None and config.eval.every > 0
        title = f"{config.output.name} ({config.method})"
        console.begin(title, config.train.steps, run.state.step, stops_early)
        evaluations = {}
        with run.watchdog.watching():
            if run.test_set:
                evaluations["before"] = run.first_evaluation()
            if not (run.state.step and run.housekeeping()):
                LOOPS[config.method](run)
            if run.test_set:
                evaluations["after"] = run.evaluate()
            return finish(run, evaluations)
    except Stopped as stopped:
        run.save()
        raise Stopped(
            f"{stopped}; saved after step {run.state.step} of {config.train.steps} in {config.output}"
        ) from None
    except GuardStop as reason:
        kept = run.folder.checkpoints()
        last = f"The last checkpoint is {kept[-1]}" if kept else "There is no checkpoint yet"
        raise GuardStop(f"{reason}. {last}") from None
    finally:
        console.end()
        run.folder.close()


def finish(run: Run, evaluations: Mapping[str, Evaluation]) -> Result:
    """Write `final/`, the learning curve and the result. Raises GuardStop if nothing was trained."""
    folder, config = run.folder.path, run.loaded.config
    if not run.state.updates:
        raise GuardStop(
            f"{run.state.step} steps were done and not one changed a weight: no group had anything to teach: "
            f"{no_signal(run.folder.read('metrics.jsonl'), settings_of(run.loaded))}"
        )
    check_weights(run.policy, str(folder / "final"))
    seconds = run.clock.total()
    verdict = judge(evaluations["before"], evaluations["after"], seconds) if evaluations else None
    example = example_of([p.problem for p in run.test_set or run.train_set])
    with committed_folder(folder / "final") as final:
        save_policy(run.policy, final)
        write_cards(final, Trained(run.loaded, run.state.step, verdict, evaluations, example))
    title = verdict.sentence.partition(", on ")[0] if verdict else config.output.name
    write_curve(
        folder / "curve.svg",
        title,
        run.folder.read("metrics.jsonl"),
        run.folder.read("evals.jsonl"),
    )
    run.folder.sync()
    result = Result(folder, run.state.step, round(seconds, 1), example.prompt, verdict, example.template)
    write_file(folder / RESULT, json.dumps(result.record(), indent=1))
    words = (
        verdict.sentence if verdict else f"done in {duration(seconds)}; no held-out problems to judge it by"
    )
    run.console.say(f"{config.output.name}: {words}")
    if verdict and verdict.word in ("did not learn", "got worse"):
        streams = (run.folder.read("metrics.jsonl"), run.folder.read("evals.jsonl"))
        for remark in explain(*streams, settings_of(run.loaded))[:1]:
            run.console.say(f"likely why: {remark}", "yellow")
    return result

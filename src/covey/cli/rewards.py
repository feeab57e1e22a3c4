"""The commands that check rewards: score, stress, rescore."""

from __future__ import annotations

import math
from pathlib import Path

from covey.cli.groups import REWARDS
from covey.cli.options import (
    Json,
    RewardArguments,
    Trust,
    app,
    print_remarks,
    print_result,
)
from covey.system.text import json_line
from covey_verify.errors import ConfigError


@app.command(name="score", group=REWARDS)
def command_score(file: Path, *rewards: RewardArguments, trust: Trust = False, as_json: Json = False) -> int:
    """Apply rewards to a JSONL file of completions. Exit code 1 if any reward judged no row.

    :param file: Rows with a `completion` and the columns that the rewards ask for.
    """
    from covey.commands.scoring import score_file
    from covey_verify.scoring import table

    notes = list[str]()
    rows, means = score_file(file, rewards, trust, notes.append)
    print_remarks(as_json, (f"note: {note}" for note in notes))
    print_result(as_json, {"means": means, "rows": rows, "notes": notes}, map(json_line, rows))
    names = [name for name in means if name != "reward"]
    print_remarks(as_json, table(rows, names))
    if len(names) > 1:
        print_remarks(as_json, [f"reward: mean {means['reward']:.3f}"])
    return int(any(map(math.isnan, means.values())))


@app.command(name="stress", group=REWARDS)
def command_stress(file: Path, *rewards: RewardArguments, trust: Trust = False, as_json: Json = False) -> int:
    """Attack rewards before training: list incorrect texts that they pay. Exit code 1 if there are any.

    :param file: A config with rewards, tools and data; or a data file, followed by rewards.
    """
    from covey.commands.scoring import load_for_stress
    from covey.commands.stress import attack_rewards

    report = attack_rewards(*load_for_stress(file, rewards, trust))
    print_remarks(as_json, (f"not tested: {note}" for note in report.notes))
    accepted = [vars(f) for f in report.findings]
    value = {"tried": report.tried, "accepted": accepted, "notes": report.notes}
    print_result(as_json, value, map(str, report.findings))
    print_remarks(as_json, [report.summary])
    return int(bool(report.findings))


@app.command(name="rescore", group=REWARDS)
def command_rescore(
    run: Path,
    *rewards: RewardArguments,
    steps: int = 8,
    trust: Trust = False,
    as_json: Json = False,
) -> int:
    """Apply other rewards to the completions of a run, and show whose advantages change sign or vanish.

    :param run: Folder of the run, whose data give the columns; or whatever `covey audit` reads, if it has
        texts and columns.
    :param steps: Number of last steps to score.
    """
    if steps < 1:
        raise ConfigError(f"--steps {steps} must be at least 1")
    from covey.audit.readers.sources import is_foreign
    from covey.commands.scoring import named_rewards
    from covey.insight import rescore

    notes = list[str]()
    named = named_rewards(rewards, trust)
    if is_foreign(run):
        from covey.audit.views import rescore_record

        rescored = rescore_record(run, named, steps, notes.append)
    else:
        rescored = rescore.rescore(run, named, steps, notes.append, trust=trust)
    note_lines = [f"note: {note}" for note in notes]
    print_result(
        as_json, {**rescore.record(rescored), "notes": notes}, [*note_lines, *rescore.lines(run, rescored)]
    )
    return 0

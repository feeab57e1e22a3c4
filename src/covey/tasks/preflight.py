"""Checks of a run's problems and rewards before its model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from covey.config.load import ResolvedConfig
from covey.config.schema import Config, Data
from covey.config.unread import reads
from covey.rewards.reward_checks import check_columns, check_references, check_steps, rehearse
from covey.rewards.scorer import Rewards
from covey.system.console import RunConsole
from covey.system.text import percent
from covey.tasks.source import Source, prompt_key
from covey.types import Problem
from covey_verify.errors import ConfigError, DataError


def check_problems(
    source: Source,
    rewards: Rewards,
    resolved: ResolvedConfig,
    console: RunConsole,
    environment: Callable[[Problem], Mapping[str, object] | None],
) -> Source:
    """Check problems and rewards, print notes for the user, and return the usable problems.

    ``environment`` returns the initial state of a problem's environment. Raises DataError or RewardError.
    """
    config = resolved.config
    source = _without_unmeasured(source, rewards, config, console)
    if config.data.train is not None and config.data.train_size != Data().train_size:
        console.say(
            "data.train_size is for generated tasks; all rows of data.train are trained on. To train on "
            "fewer, shorten the file",
            "yellow",
        )
    _note_leaks(source, console)
    if not len(rewards):
        return source
    _check_minimums(rewards, config)
    # With examples, rewards only measure: they are never called on training rows.
    train = [] if source.examples else source.train
    judged = [*train, *source.test]
    _note_rewards(rewards, config, console, judged)
    if judged:
        scores = rehearse(judged[0], rewards, environment(judged[0]))
        if config.method == "rl" and resolved.algorithm.credit == "step":
            check_steps(scores, rewards, resolved.algorithm.advantage.name)
    most_bad = config.scoring.max_bad_references
    usable_train, skipped_train = check_references(train, rewards, most_bad)
    usable_test, skipped_test = check_references(source.test, rewards, most_bad)
    for row, why in {**skipped_train, **skipped_test}.items():
        console.say(f"skipping {row}: {why}", "yellow")
    _note_empty_answers([*usable_train, *usable_test], rewards, console)
    return replace(source, train=source.train if source.examples else usable_train, test=usable_test)


def _check_minimums(rewards: Rewards, config: Config) -> None:
    names = [reward.name for reward in rewards]
    unknown = set(config.keep.least) - set(names)
    if config.method == "rejection_sampling" and unknown:
        raise ConfigError(f"keep.least: there is no reward {min(unknown)!r}; there are: {', '.join(names)}")


def _note_empty_answers(problems: Sequence[Problem], rewards: Rewards, console: RunConsole) -> None:
    """Print a note if a reference answer is empty, since every completion contains it."""
    readers = [r.name for r in rewards if {"answer", "ground_truth"} & set(r.parameters)]
    empty = [p for p in problems if not str(p.columns.get("answer", "given") or "").strip()]
    if readers and empty:
        count = len(empty) - 1
        others = f", as in {count:,} other {'row' if count == 1 else 'rows'}" if count else ""
        console.say(
            f"{empty[0].id}: the answer is empty{others}, and {readers[0]} judges by it. Remove such rows, "
            "or fill in their answers",
            "yellow",
        )


def _note_leaks(source: Source, console: RunConsole) -> None:
    """Print a note if held-out problems are trained on."""
    leaks = find_leaks(source)
    if leaks:
        held_out, trained = next(iter(leaks.items()))
        others = "" if len(leaks) == 1 else f"; so do {len(leaks) - 1:,} others"
        console.say(
            f"held-out problem {held_out} has the prompt of training problem {trained}{others}. "
            "Memorised answers would count as accuracy there",
            "yellow",
        )


def _note_rewards(rewards: Rewards, config: Config, console: RunConsole, problems: Sequence[Problem]) -> None:
    """Print what counts as correct, and where rewards run. Raises DataError for a missing column."""
    console.say(rewards.criterion)
    check_columns(problems, rewards)
    if rewards.sandbox and "not_blocked" in rewards.sandbox:
        console.say(
            f"model code runs without a sandbox; not blocked: {rewards.sandbox['not_blocked']}", "red"
        )
    elif rewards.sandbox:
        visible = rewards.sandbox.get("visible")
        note = f"model code runs in the {rewards.sandbox['backend']} sandbox"
        console.say(note + (f"; it can learn {visible}" if visible else ""))
    for note in _always_open(rewards):
        console.say(note, "yellow")
    if rewards.inline:
        runs = "runs" if len(rewards.inline) == 1 else "run"
        console.say(
            f"{', '.join(rewards.inline)} {runs} in this process, where a call that hangs in C code (such as "
            "a regular expression) cannot be stopped. A function named as module.py:function gets a process "
            "of its own",
            "yellow",
        )
    if rewards.noise and config.method == "rl":
        console.say(f"{percent(rewards.noise, 'g')} of the labels are flipped (scoring.noise)", "yellow")


def _always_open(rewards: Rewards) -> list[str]:
    """Return a note for each gate on a user's function, since it also opens for a value of 0."""
    user_functions = {reward.name for reward in rewards if not reward.ours}
    return [
        f"{reward.name} counts wherever {reward.gated_by} gives a number, also 0; for correct answers only: "
        f"gated_by: '{reward.gated_by}:correct'"
        for reward in rewards
        if reward.gated_by in user_functions
    ]


def find_leaks(source: Source) -> dict[str, str]:
    """Return id of a held-out problem -> id of a training problem with the same prompt.

    Case and white space are ignored.
    """
    learned = [example.problem for example in source.examples] or source.train
    held_out = [*source.test, *(example.problem for example in source.held_out)]
    # Reversed, so that the first problem with a prompt is named.
    first = {prompt_key(problem): problem.id for problem in reversed(learned)}
    return {p.id: first[prompt_key(p)] for p in held_out if prompt_key(p) in first}


def _without_unmeasured(source: Source, rewards: Rewards, config: Config, console: RunConsole) -> Source:
    """Return the source without held-out problems whose answers no reward can judge.

    Raises DataError if a setting needs them.
    """
    if config.method == "reward_model":
        source = replace(source, test=[])  # a reward model gives no answers
    elif not len(rewards):
        console.say("there are no rewards, so accuracy on held-out problems is not measured")
        source = replace(source, test=[])
    measured = source.test or source.held_out
    needs_best = config.train.final == "best" and reads(config.method, "train.final")
    for key, value, rows in (
        ("eval.every", config.eval.every, measured),
        ("train.stop_at", config.train.stop_at, source.test),
        ("train.final best", needs_best, source.test),
    ):
        if value and not rows:
            raise DataError(
                f"{key} needs held-out problems: set data.test to a file of them, or leave {key} out"
            )
    return source

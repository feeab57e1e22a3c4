"""The problems of a run that can be used, after every check that needs no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from covey.config.load import Loaded
from covey.config.schema import Config
from covey.config.unread import reads
from covey.console import RunConsole
from covey.errors import ConfigError, DataError
from covey.rewards.audit import check_columns, check_references, check_steps, rehearse
from covey.rewards.base import Rewards
from covey.tasks.source import Source, prompt_key
from covey.types import Problem


def usable_problems(
    source: Source,
    rewards: Rewards,
    loaded: Loaded,
    console: RunConsole,
    environment: Callable[[Problem], Mapping[str, object] | None],
) -> Source:
    """Check problems and rewards; say what a user should know of them, and leave out what cannot be used.

    ``environment``: how that of a problem's completions begins. Raises DataError or RewardError.
    """
    config = loaded.config
    source = _measurable(source, rewards, config, console)
    if known := trained_on(source):
        held_out, trained = next(iter(known.items()))
        others = "" if len(known) == 1 else f"; so do {len(known) - 1:,} others"
        console.say(
            f"held-out problem {held_out} has the prompt of training problem {trained}{others}. "
            "Memorised answers would count as accuracy there",
            "yellow",
        )
    if not len(rewards):
        return source
    names = [r.name for r in rewards]
    if config.method == "rejection_sampling" and (strange := set(config.keep.least) - set(names)):
        raise ConfigError(f"keep.least: no reward is called {min(strange)!r}; there are: {', '.join(names)}")
    console.say(rewards.criterion)
    everything = source.test if source.examples else source.train + source.test
    check_columns(everything, rewards)
    if rewards.sandbox and "not_blocked" in rewards.sandbox:
        console.say(
            f"model code runs without a sandbox; not blocked: {rewards.sandbox['not_blocked']}", "red"
        )
    elif rewards.sandbox:
        visible = rewards.sandbox.get("visible")
        held = f"model code runs in the {rewards.sandbox['backend']} sandbox"
        console.say(held + (f"; it can learn {visible}" if visible else ""))
    if rewards.inline:
        console.say(
            f"{', '.join(rewards.inline)} runs in this process, where a call that hangs in C code (such as a "
            "regular expression) cannot be ended. Name it as module.py:function to run it in its own process",
            "yellow",
        )
    if rewards.noise and config.method == "rl":
        console.say(f"{100 * rewards.noise:g} % of the labels are flipped (scoring.noise)", "yellow")
    train, bad = source.train, dict[str, str]()
    if everything:
        tried = rehearse(everything[0], rewards, environment(everything[0]))
        if config.method == "rl" and loaded.algorithm.credit == "step":
            check_steps(tried, rewards, loaded.algorithm.advantage.name)
    if not source.examples:
        train, bad = check_references(source.train, rewards, config.scoring.max_bad_references)
    test, bad_too = check_references(source.test, rewards, config.scoring.max_bad_references)
    for row, why in {**bad, **bad_too}.items():
        console.say(f"skipping {row}: {why}", "yellow")
    return replace(source, train=train, test=test)


def trained_on(source: Source) -> dict[str, str]:
    """Held-out problems whose prompt is trained on too: id -> that problem's id.

    Case and white space make no difference.
    """
    learned = [example.problem for example in source.examples] or source.train
    held_out = [*source.test, *(example.problem for example in source.held_out)]
    first = {prompt_key(problem): problem.id for problem in reversed(learned)}
    return {p.id: first[prompt_key(p)] for p in held_out if prompt_key(p) in first}


def _measurable(source: Source, rewards: Rewards, config: Config, console: RunConsole) -> Source:
    """The problems without those that nothing could judge. Raises DataError where that leaves too few."""
    if config.method == "reward_model":
        source = replace(source, test=[])  # it answers nothing that could be judged
    elif not len(rewards):
        console.say("no rewards are configured, so accuracy on held-out problems is not measured")
        source = replace(source, test=[])
    measured = source.test or source.held_out
    wants_best = config.train.final == "best" and reads(config.method, "train.final")
    for key, value, there in (
        ("eval.every", config.eval.every, measured),
        ("train.stop_at", config.train.stop_at, source.test),
        ("train.final best", wants_best, source.test),
    ):
        if value and not there:
            raise DataError(f"{key}: there are no held-out problems; set data.test to a file of them")
    return source

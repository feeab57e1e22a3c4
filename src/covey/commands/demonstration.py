"""The end of the demo: answers to held-out problems before and after RL, token by token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from covey.commands.inference import one_answer_each
from covey.config.load import ResolvedConfig
from covey.rewards.scorer import Scorer
from covey.rollouts.learned import rewards_of
from covey.runs.reader import load_for_reading, load_run, stages_in
from covey.system.console import RunConsole
from covey.system.text import Say, escape_controls
from covey.tasks.source import load_problems
from covey.types import Problem
from covey_verify.extract import last_text

PROBLEMS = 3
PAUSE = 0.02
"""Seconds between tokens on a terminal, so that they appear one by one."""


def demonstrate(home: Path, console: RunConsole, greedily: bool = True) -> None:
    """Show how the last two stages answer the first held-out problems, which nobody selected."""
    stages = stages_in(home)
    after = load_run(stages[-1] if stages else home)
    # Before RL is the cold start, or else the model that the run's config names.
    before = load_run(stages[-2]) if stages else replace(load_for_reading(home), recorded_run=None)
    source = load_problems(after)
    problems = source.test[:PROBLEMS]
    answers = [
        judged_answers(resolved, problems, source.rewards, console.say, greedily)
        for resolved in (before, after)
    ]
    how = "greedy" if greedily else "sampled"
    console.say(f"the first {len(problems)} held-out problems, {how}, before reinforcement and after:")
    for number, problem in enumerate(problems):
        question = "" if problem.chat else last_text(problem.prompt)
        if problem.chat:
            # A chat's question may be long, so its first line stands above the answers.
            console.say(f"  {last_text(problem.prompt).splitlines()[0]}")
        for name, answer in zip(("before", "after "), answers, strict=True):
            tokens, correct = answer[number]
            write_tokens(console, f"  {question if name == 'before' else '':<10} {name} ", tokens, correct)


def judged_answers(
    resolved: ResolvedConfig, problems: Sequence[Problem], named: Sequence[object], say: Say, greedily: bool
) -> list[tuple[list[str], bool]]:
    """Return the tokens of an answer to each problem, and whether it is correct."""
    rewards = rewards_of(resolved, resolved.config.rewards or named)
    scorer = Scorer(rewards)
    judged = []
    for problem, tokens in zip(problems, one_answer_each(resolved, problems, say, greedily), strict=True):
        score = scorer.score(rewards.verdict, problem, "".join(tokens))
        judged.append((tokens, (score.value or 0.0) > 0.5))
    return judged


def write_tokens(console: RunConsole, label: str, tokens: Sequence[str], correct: bool) -> None:
    """Print a line that grows token by token on a terminal, with dots between tokens."""
    show = console.console.print
    slow = console.console.is_terminal
    show(Text(escape_controls(label), style="dim"), end="", soft_wrap=True)
    for number, token in enumerate(tokens):
        dot = ("·", "bright_black") if number else ""
        show(Text.assemble(dot, escape_controls(token).replace("\n", "⏎")), end="", soft_wrap=True)
        time.sleep(PAUSE if slow else 0)
    show(Text("  correct" if correct else "  incorrect", style="green" if correct else "red"), soft_wrap=True)

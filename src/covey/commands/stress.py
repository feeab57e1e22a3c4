"""`covey stress`: attack a run's rewards with texts, conversations and the model's own marks of thoughts.

A function is called as in training, with its gate. A user's function runs in a worker, so that an attack that
kills, hangs or breaks it becomes a finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from covey.commands.played_conversations import Attack, made_up, play_conversations
from covey.models.wording import NO_WORDING, ModelTexts
from covey.rewards.contract import Reward
from covey.rewards.environments import lacks_environment
from covey.rewards.scorer import GroupScoring, Rewards, Scorer, completion_of
from covey.types import Completion, Problem
from covey_verify.contract import FULL
from covey_verify.errors import RewardError
from covey_verify.extract import TAGS, THINK_CLOSE, Thoughts
from covey_verify.mathematics.answers import reference_of
from covey_verify.stress import (
    SECONDS,
    STUCK,
    Correct,
    Report,
    StressFinding,
    battery,
    correct_completion,
    different,
    find_paid_attacks,
    findings_of,
    unavailable,
)
from covey_verify.types import Row, Score

if TYPE_CHECKING:
    from covey.sampling.tools.running import Toolbox

EVERYWHERE = ", on every problem"
"""End of the name of an attack that may deserve its reward, unless all problems pay it."""
OF_TURNS = {"turns", "environment", "environments"}
"""Arguments through which a function sees the effects of tools."""


def attack_rewards(
    problems: Sequence[Problem],
    rewards: Rewards,
    toolbox: Toolbox | None = None,
    wording: ModelTexts = NO_WORDING,
) -> Report:
    """Attack every reward function on a few problems. Raises RewardError if one cannot be called at all.

    ``toolbox``: the run's tools, if any; conversations are played with them and the environment. ``wording``:
    the wording of the run's model; truncated thoughts are written with the model's own marks.
    """
    by_id = {p.id: p for p in problems}
    # A few problems with different answers: an attack may pay on one of them only.
    rows = different([Row(p.id, p.prompt, p.columns) for p in problems])
    chosen = [by_id[row.id] for row in rows]
    marked_problems = {p.id: wording.with_thoughts(p) for p in chosen}
    plays = _Plays(toolbox)
    tried = 0
    findings = list[StressFinding]()
    notes = [wording.note] if wording.note else list[str]()
    for reward in rewards:
        gate = [r for r in rewards if reward.gate and r.name == reward.gate.reward]
        absent = [why for why in map(unavailable, (*gate, reward)) if why]
        if absent:
            notes.append(f"{reward.name} was not attacked: {absent[0]}")
            continue
        tested = _isolate_rewards(rewards, [*gate, reward])
        reports = [_attack(tested, reward, by_id[r.id], marked_problems[r.id], rows, plays) for r in rows]
        tried += sum(report.tried for report in reports)
        findings += _truly_paid(findings_of(reward, rows, reports), len(rows))
        notes += [note for report in reports for note in report.notes]
    return Report(tried, tuple(findings), tuple(dict.fromkeys([*notes, *plays.left_out()])))


def _isolate_rewards(rewards: Rewards, tested: Sequence[Reward]) -> Rewards:
    """Return a reward, after its gate if it has one, apart from the others, whose failures must not count."""
    apart = [replace(r, isolate="worker") if r.place == "inline" else r for r in tested]
    timeout = rewards.timeout if tested[-1].ours else min(rewards.timeout, SECONDS)
    return Rewards(apart, timeout, reader=rewards.reader)


def _truly_paid(findings: Sequence[StressFinding], problems: int) -> Iterator[StressFinding]:
    """Yield the findings, without those ``EVERYWHERE`` that are not.

    The player knows no problem. If one plausible call, such as to leave at once, is paid in full on each of
    several problems, then none has to be solved.
    """
    often = Counter(finding.attack for finding in findings if (finding.value or 0.0) >= FULL)
    for finding in findings:
        if not finding.attack.endswith(EVERYWHERE) or often[finding.attack] == problems > 1:
            yield finding


def _attack(
    tested: Rewards,
    reward: Reward,
    problem: Problem,
    marked_problem: Problem,
    rows: Sequence[Row],
    plays: _Plays,
) -> Report:
    """Make all attacks on one function with one problem.

    ``marked_problem`` is the same problem with the model's marks of thoughts.
    """
    row = next(row for row in rows if row.id == problem.id)
    judge = partial(_judge, tested, reward, problem)
    # Such a function judges an environment, which a text alone does not have.
    elsewhere = lacks_environment(reward, problem, completion_of(""))
    correct = Correct() if elsewhere else correct_completion(reward, row, judge)
    report = battery(reward, row, rows, judge, correct, gated=len(tested) > 1)
    in_turns = _in_turns(reward, marked_problem, correct.form, plays)
    thoughts = marked_problem.thoughts
    unopened = replace(problem, thoughts=thoughts._replace(begun=False))
    unfinished = list[tuple[str, str]]()
    # The battery of covey_verify covers models with <think> tags.
    if correct.text is not None and thoughts != TAGS:
        unfinished.append(_inside_unfinished_reasoning(thoughts, correct.text))
    unfinished_scores = _judge(tested, reward, marked_problem, [text for _, text in unfinished])
    findings = [
        *_failures(tested, reward, unopened, in_turns),
        *report.findings,
        *find_paid_attacks(reward, row, unfinished, unfinished_scores),
    ]
    tried = report.tried + len(in_turns) + len(unfinished)
    # Conversations may be all that such a function judges.
    judged = report.judged or elsewhere or bool(in_turns)
    return Report(tried, tuple(findings), report.notes, judged)


class _Plays:
    """Conversations with a run's tools and environment, played once per problem."""

    def __init__(self, toolbox: Toolbox | None) -> None:
        self.toolbox = toolbox
        self.attacks: dict[str, list[Attack]] = {}

    @property
    def names(self) -> list[str]:
        return [] if self.toolbox is None else list(self.toolbox.functions)

    def of(self, problem: Problem) -> list[Attack]:
        """Return the conversations for one problem."""
        if self.toolbox is not None and problem.id not in self.attacks:
            self.attacks[problem.id] = list(play_conversations(self.toolbox, problem))
        return self.attacks.get(problem.id, [])

    def left_out(self) -> list[str]:
        """Return a note if there are tools but nothing was played."""
        if not self.names or self.attacks:
            return []
        names = ", ".join(self.names)
        why = "no attacked reward asks for `turns` or `environment`"
        return [f"rollout.tools: {names} were not called, because {why}"]


def _in_turns(reward: Reward, problem: Problem, form: str | None, plays: _Plays) -> list[Attack]:
    """Return conversations with tools, for a reward that reads them."""
    parameters = set(reward.parameters)
    attacks = list[Attack]()
    if "turns" in parameters and not reward.options.format_only:
        reference = reference_of(problem.columns["answer"]) if "answer" in problem.columns else None
        answer = None if reference is None else (form or "{}").format(reference)
        attacks += made_up(answer, plays.names, problem.thoughts)
    turn_parameters = {"environment", "environments"} if reward.options.format_only else OF_TURNS
    return attacks + (plays.of(problem) if turn_parameters & parameters else [])


def _failures(
    tested: Rewards, reward: Reward, problem: Problem, attacks: Sequence[Attack]
) -> Iterator[StressFinding]:
    """Yield conversations that were paid, or paid more when repeated, or that broke the environment."""
    scores = _score_completions(tested, reward, problem, [a.completion for a in attacks])
    values = {a.name: score.value or 0.0 for a, score in zip(attacks, scores, strict=True)}
    for attack, score in zip(attacks, scores, strict=True):
        text = attack.completion.text
        finding = StressFinding(
            reward.name, "paid", attack.name, problem.id, score.value, score.status, text, score.detail
        )
        once = values.get(attack.repeats, 0.0)
        # One plausible call may change the environment in a way that deserves a reward.
        played = attack.completion.transcript
        honest = played.environment is not None and attack.name.endswith(", once")
        if played.fault:
            name = f"{attack.name} (the environment failed)"
            yield replace(finding, kind="failed", text=played.fault, attack=name)
        elif finding.status in (STUCK[:1] if reward.ours else STUCK):
            yield replace(finding, kind="failed", attack=f"{attack.name} (the function failed)")
        elif values[attack.name] > once:
            yield replace(finding, attack=attack.name + EVERYWHERE) if honest else finding


def _judge(rewards: Rewards, reward: Reward, problem: Problem, texts: Sequence[str]) -> list[Score]:
    """Return the score of ``reward`` for each text, with its gate applied."""
    return _score_completions(rewards, reward, problem, [completion_of(text, tokens=0) for text in texts])


def _score_completions(
    rewards: Rewards, reward: Reward, problem: Problem, completions: Sequence[Completion]
) -> list[Score]:
    """Return the score of ``reward`` for each completion; all are scored at once."""
    scorer = Scorer(rewards)
    scorings = list[GroupScoring]()
    for completion in completions:
        scorings.append(scorer.begin_group(problem, np.zeros(0, np.int64), 1))
        scorings[-1].add(0, completion)
    scores = list[Score]()
    for scoring in scorings:
        try:
            group = scoring.result()
        except RewardError as error:  # it returned what no reward may return
            scores.append(Score(None, "infra_error", detail=str(error)))
            continue
        component = group.components[reward.name]
        value = float(component.values[0])
        scores.append(replace(component.scores[0], value=None if np.isnan(value) else value))
    return scores


def _inside_unfinished_reasoning(marks: Thoughts, correct: str) -> tuple[str, str]:
    """Return the name and the text of an attack: a correct answer inside thoughts that never end."""
    answer = correct.rpartition(THINK_CLOSE)[2]
    if marks.begun:
        return "correct inside reasoning that the prompt opens, truncated", f"so it is {answer}"
    return f"correct inside unfinished reasoning ({marks.open})", f"{marks.open}so it is {answer}"

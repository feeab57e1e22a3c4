"""`covey rescore`: score a run's completions with other rewards, to see which groups would change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from covey.config.load import ResolvedConfig
from covey.models.wording import ModelTexts, model_texts_of
from covey.rewards.groups import with_credit
from covey.rewards.reading import ReplyReader
from covey.rewards.reward_checks import check_columns
from covey.rewards.scorer import GroupScoring, Rewards, Scorer
from covey.rng import key, permutation
from covey.runs.examples import same_prompt
from covey.runs.reader import last_stage, load_for_reading, with_own_model
from covey.runs.rollouts import RolloutLog, read_rollouts, recorded_steps
from covey.runs.trust import is_own, refuse_others_code
from covey.system.text import Say, percent, with_finite_numbers
from covey.tasks.source import load_problems
from covey.types import Completion, Credit, Group, Problem
from covey_verify.errors import DataError
from covey_verify.extract import last_text

GROUPS_SHOWN = 12


@dataclass(frozen=True)
class RescoredGroup:
    """A group with its old rewards and its new ones."""

    step: int
    group: int
    problem: str
    old: np.ndarray
    new: np.ndarray
    """(G,) rewards; NaN for a completion without one."""
    statuses: Mapping[tuple[str, str], int]
    """(reward, status) -> number of completions with that status."""

    @property
    def flips(self) -> int:
        """Number of completions that were above their group's mean and are below it now, or vice versa."""
        return int((_signs(self.old) * _signs(self.new) < 0).sum())

    @property
    def change(self) -> str:
        """The change of the group, in a word or two."""
        dead = not _signs(self.old).any()
        now_dead = not _signs(self.new).any()
        if dead != now_dead:
            return "dies" if now_dead else "comes alive"
        if self.flips:
            return "changes sign"
        return "stays dead" if dead else "same"


def _signs(rewards: np.ndarray) -> np.ndarray:
    """Return (G,) of -1, 0, 1: below, at or above the mean of the group; equal rewards are all 0."""
    scored = rewards[~np.isnan(rewards)]
    # Compared exactly: a mean of equal rewards may differ from them by rounding.
    if len(scored) < 2 or (scored == scored[0]).all():
        return np.zeros(len(rewards))
    centred = np.nan_to_num(rewards - scored.mean())
    return np.where(np.abs(centred) < 1e-12, 0.0, np.sign(centred))


def rescore(
    run: Path,
    rewards: Rewards,
    steps: int,
    say: Say | None = None,
    permuted: bool = False,
    trust: bool = False,
) -> list[RescoredGroup]:
    """Score the groups of the last ``steps`` logged steps again, with the columns of the run's data.

    If ``permuted``, each problem gets the columns, and so the answer, of another row. ``say`` is called with
    the reason if the run's chat template is unknown. Raises DataError if a problem of the run is no longer in
    the data, ConfigError without ``trust`` if a reward needs the schemas of somebody else's tools.
    """
    stage = last_stage(run)
    resolved = load_for_reading(stage)
    source = load_problems(resolved)
    logged = recorded_steps(stage)[-steps:]
    if not logged:
        raise DataError(f"{stage}: no completions in its rollout log")
    check_columns(source.train, rewards)
    wording = model_texts_of(with_own_model(resolved, stage))
    if wording.note and say is not None:
        say(wording.note)
    noise = resolved.config.scoring.noise
    if noise and resolved.config.method == "rl" and say is not None:
        say(
            f"the run has flipped {percent(noise, 'g')} of its labels (scoring.noise): the recorded rewards "
            "have these flips, the new ones have none"
        )
    # No model is loaded: tool calls are read from texts, tokens decoded by the tokenizer alone.
    rewards = replace(rewards, reader=ReplyReader(wording.decode))
    in_data = {p.id: p for p in (_with_columns_of_others(source.train) if permuted else source.train)}
    tools = resolved.config.rollout.tools
    resets = tools is not None and tools.environment is not None
    with_tools = tools_shown(resolved, rewards, trust or is_own(stage))
    groups = list[RescoredGroup]()
    for step in logged:
        log = read_rollouts(stage, step)
        location = f"{stage}, step {step}"
        problems = [with_tools(_problem_of(log, n, in_data, wording, location, resets)) for n in log.groups]
        completions = [log.completion(n) for n in range(len(log.rows))]
        groups += rescored_step(log, step, problems, completions, rewards, resolved.algorithm.credit)
    return groups


def _with_columns_of_others(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems, each with the columns of another one."""
    order = permutation(key("answers of other rows"), len(problems))
    pairs = zip(order, np.roll(order, 1), strict=True)
    return [replace(problems[row], columns=problems[donor].columns) for row, donor in pairs]


def rescored_step(
    log: RolloutLog,
    step: int,
    problems: Sequence[Problem],
    completions: Sequence[Completion],
    rewards: Rewards,
    credit: Credit = "completion",
) -> list[RescoredGroup]:
    """Score the groups of one step again: a problem for each group, a completion for each row of the log.

    ``credit`` is the unit that the run's algorithm credits; it decides the reward of a completion with steps.
    """
    scorer = Scorer(rewards, step - 1)  # as in training, where the first step has index 0
    # All groups are submitted first, then awaited: rewards run in parallel.
    pending = [
        _submit(scorer, problem, [completions[row] for row in rows])
        for problem, rows in zip(problems, log.groups.values(), strict=True)
    ]
    scored = [with_credit(group.result(), credit) for group in pending]
    return [_result(log, step, number, group) for number, group in zip(log.groups, scored, strict=True)]


def tools_shown(
    resolved: ResolvedConfig, rewards: Rewards, trust: bool = True
) -> Callable[[Problem], Problem]:
    """Return the function that adds a config's tools to a problem's chat, if a reward reads them there.

    Raises ConfigError if somebody else's run names code, without ``trust``.
    """
    if resolved.config.rollout.tools is None or not any(
        "template_arguments" in r.parameters for r in rewards
    ):
        return lambda problem: problem
    from covey.sampling.tools.use import showing_tools, toolbox_of  # these load torch

    refuse_others_code(resolved, resolved.recorded_run or Path(), trust, algorithm=False)
    toolbox = toolbox_of(resolved)
    return lambda problem: problem if toolbox is None else showing_tools(problem, toolbox)


def _problem_of(
    log: RolloutLog,
    number: int,
    problems: Mapping[str, Problem],
    wording: ModelTexts,
    location: str,
    resets: bool,
) -> Problem:
    """Return the problem of a group, which notes whether its prompt opens thoughts. Raises DataError.

    ``resets``: the run had environments, whose `reset` may have added a text to the prompt.
    """
    row = log.rows[log.groups[number][0]]
    problem = problems.get(row["problem"])
    if problem is not None and resets and _begins(problem.prompt, row["prompt"]):
        problem = replace(problem, prompt=row["prompt"])
    if problem is None or not same_prompt(problem.prompt, row["prompt"]):
        raise DataError(
            f"{location}: problem {row['problem']} is not in the run's data any more, or has another prompt. "
            "Put the data back"
        )
    # The logged prompt decides, since a chat template may have been changed.
    logged = wording.with_thoughts(replace(problem, prompt=row["prompt"]), log.prompts[number].tolist())
    return replace(problem, thoughts=logged.thoughts)


def _begins(prompt: object, logged: object) -> bool:
    """Whether a logged prompt is a problem's prompt with more text at its end."""
    if isinstance(prompt, str) and isinstance(logged, str):
        return logged.startswith(prompt)
    if not (isinstance(prompt, Sequence) and isinstance(logged, list) and len(prompt) == len(logged)):
        return False
    last, longer = (last_text(turns[-1:]) for turns in (prompt, logged))
    return longer.startswith(last) and same_prompt([*prompt[:-1], {**prompt[-1], "content": longer}], logged)


def _submit(scorer: Scorer, problem: Problem, completions: Sequence[Completion]) -> GroupScoring:
    """Submit the completions of a group to the rewards."""
    # Rewards do not see prompt tokens, so none are given.
    group = scorer.begin_group(problem, np.zeros(0, np.int64), len(completions))
    for sample, completion in enumerate(completions):
        group.add(sample, completion)
    return group


def _result(log: RolloutLog, step: int, number: int, new: Group) -> RescoredGroup:
    old = np.array([log.rows[row]["reward"] for row in log.groups[number]], dtype=np.float64)
    statuses = Counter[tuple[str, str]](
        (name, s.status) for name, component in new.components.items() for s in component.scores
    )
    return RescoredGroup(step, number, new.problem.id, old, new.rewards, statuses)


def record(groups: Sequence[RescoredGroup]) -> Mapping[str, object]:
    """Return the groups as JSON."""
    return {
        "groups": len(groups),
        "changes": _count_changes(groups),
        "completions_that_change_sign": sum(g.flips for g in groups),
        "statuses": {f"{name}/{status}": part for (name, status), part in _statuses(groups).items()},
        "of_groups": [
            {
                "step": g.step,
                "group": g.group,
                "problem": g.problem,
                "change": g.change,
                "old": with_finite_numbers(g.old),
                "new": with_finite_numbers(g.new),
            }
            for g in groups
        ],
    }


def lines(run: Path, groups: Sequence[RescoredGroup]) -> list[str]:
    """Return lines for people: the changes, and the groups that change the most."""
    counts = ", ".join(f"{count} {change}" for change, count in _count_changes(groups).items())
    old = np.concatenate([g.old for g in groups])
    new = np.concatenate([g.new for g in groups])
    flips = sum(g.flips for g in groups)
    text = [f"{len(groups)} groups: {counts}"]
    text.append(f"{flips} of {len(old)} completions change sign; mean reward {_mean(old)} -> {_mean(new)}")
    text += [f"{name}: {percent(part)} {status}" for (name, status), part in _statuses(groups).items()]
    return [*text, "", *_changed_lines(run, groups)]


def _changed_lines(run: Path, groups: Sequence[RescoredGroup]) -> Iterator[str]:
    """Yield a line for each group that changes, those with the most sign changes first."""
    changed = sorted((g for g in groups if g.change not in ("same", "stays dead")), key=lambda g: -g.flips)
    for g in changed[:GROUPS_SHOWN]:
        yield f"covey show {run} {g.step} {g.group}  {g.change}: {_few(g.old)} -> {_few(g.new)}"
    if len(changed) > GROUPS_SHOWN:
        yield f"and {len(changed) - GROUPS_SHOWN} more"


def _mean(rewards: np.ndarray) -> str:
    return "-" if np.isnan(rewards).all() else f"{np.nanmean(rewards):.3f}"


def _count_changes(groups: Sequence[RescoredGroup]) -> dict[str, int]:
    counts = Counter(g.change for g in groups)
    kinds = ("same", "changes sign", "comes alive", "dies", "stays dead")
    return {kind: counts[kind] for kind in kinds if counts[kind]}


def _statuses(groups: Sequence[RescoredGroup]) -> dict[tuple[str, str], float]:
    """Return the fraction of completions that a reward could not read or score, by its status.

    A reward named without the run's settings may look for another answer format and find nothing.
    """
    counts = sum((Counter(g.statuses) for g in groups), Counter[tuple[str, str]]())
    total = sum(len(g.new) for g in groups)
    return {key: count / total for key, count in sorted(counts.items()) if key[1] != "ok"}


def _few(rewards: np.ndarray) -> str:
    return " ".join("-" if np.isnan(r) else f"{r:.3g}" for r in rewards)

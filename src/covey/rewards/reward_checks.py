"""The audit of rewards, which looks for faults before a model is loaded and then in every step.

A canary is a completion whose reward is known. A verifier that pays an incorrect one, or no longer pays
a correct one, has been taken over or has broken; training against it would be worse than stopping.
Deliberate attacks on a reward are in ``covey_verify.stress``.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from covey.rewards.contract import Reward
from covey.rewards.scorer import Rewards, Scorer, completion_of
from covey.system.text import percent
from covey.types import Group, Problem, Transcript
from covey_verify.contract import FULL, PROVIDED, canaries
from covey_verify.errors import ConfigError, DataError, RewardError
from covey_verify.extract import TAGS
from covey_verify.types import Score

MAX_LISTED_ROWS = 5
"""Number of bad rows that an error lists."""
# Refusals of a correct canary in a row that end the run.
MAX_REFUSALS = 3
WINDOW_STEPS = 5
"""Number of steps over which completions that could not be judged are counted."""
GROUPS_PER_TRIAL = 8
"""Groups per correct completion that is tried on another problem; at least four are tried."""
PROBLEM_ARGUMENTS = {"prompt", "prompts", "ground_truth", "data_source", "extra_info"}
"""Arguments that tell problems apart, besides columns."""
Failures = Sequence[tuple[int, int]]
"""(completions that could not be judged, all completions) of each of the last steps."""


def check_columns(problems: Sequence[Problem], rewards: Rewards) -> None:
    """Check that every row has the columns that the rewards ask for.

    Raises DataError naming row and column.
    """
    # Rows of one file mostly share their columns, so each set of columns is checked once.
    checked: set[tuple[str, ...]] = set()
    for problem in problems:
        columns = tuple(problem.columns)
        if columns in checked:
            continue
        checked.add(columns)
        for reward in rewards:
            complaint = reward.problem_with(columns)
            if complaint:
                raise DataError(
                    f"{problem.id}: reward {reward.name} {complaint}; "
                    f"the row has {', '.join(map(repr, columns)) or 'no columns'}. data.columns copies a "
                    "column to another name"
                )


def check_references(
    problems: Sequence[Problem], rewards: Rewards, most: float
) -> tuple[list[Problem], dict[str, str]]:
    """Return the problems whose reference answers can be met, and the reason for each of the others, by id.

    Raises DataError where more than the fraction ``most`` is bad.
    """
    bad: dict[str, str] = {}
    rows = [p.columns for p in problems]
    for reward in rewards:
        if reward.options.check_references is not None:
            complaints = reward.options.check_references(rows, **reward.settings)
            for problem, complaint in zip(problems, complaints, strict=True):
                if complaint:
                    # The first reward that complains gives the reason.
                    bad.setdefault(problem.id, f"{reward.name}: {complaint}")
    if len(bad) > most * len(problems):
        first = "".join(f"\n  {row}: {why}" for row, why in list(bad.items())[:MAX_LISTED_ROWS])
        raise DataError(
            f"{len(bad)} of {len(problems)} rows have a reference answer that no completion can match "
            f"(scoring.max_bad_references allows {percent(most, 'g')}):{first}\nRepair these answers, or "
            "choose the rule and the reward that fit them"
        )
    return [p for p in problems if p.id not in bad], bad


def rehearse(problem: Problem, rewards: Rewards, environment: Mapping[str, object] | None = None) -> Group:
    """Call the rewards on canned completions, so that a broken one fails now. Raises RewardError.

    ``environment`` is the state in which a completion's environment begins. Raises ConfigError if there is
    none and a reward asks for it.
    """
    # A column of that name is data of the problem, so a reward that asks for it gets the column.
    state_arguments = {"environment", "environments"} - set(problem.columns)
    for reward in rewards if environment is None else ():
        if state_arguments & set(reward.parameters):
            raise ConfigError(
                f"reward {reward.name} asks for the completion's environment, but there is none: set "
                "rollout.tools.environment"
            )
    transcript = Transcript(environment=environment)
    canned = [replace(completion_of(t), transcript=transcript) for t in ("", "<answer>0</answer>")]
    return rewards.score_group(problem, canned[0].tokens, canned, strict=True)


def check_steps(tried: Group, rewards: Rewards, advantage: str) -> None:
    """Raise ConfigError if an algorithm needs scores of steps and no reward gives any.

    A reward counts as giving them if it did so in the rehearsal, or if it asks for ``token_ends`` (and its
    ``split_by`` is set, where it has one). A reward that did not apply to the rehearsal gets the benefit of
    the doubt.
    """
    splits = [r for r in rewards if "token_ends" in r.parameters]
    may_give = any(
        "split_by" not in r.parameters or _setting_value(r, "split_by") is not None for r in splits
    )
    # NaN for every canned completion: the reward did not apply, so it has not shown whether it gives steps.
    unknown = any(np.isnan(c.values).all() for c in tried.components.values())
    gave = any(c.steps for c in tried.components.values())
    if not (gave or may_give or unknown):
        raise ConfigError(
            f"algorithm.advantage {advantage} needs scores of steps, but no reward judges steps "
            f"({', '.join(r.name for r in rewards)}). Add one: calculations, step_labels, judge with "
            "split_by, process_reward_model, or your own that returns StepRewards(values, ends); or use an "
            "algorithm without steps, such as grpo"
        )


def _setting_value(reward: Reward, name: str) -> object:
    return reward.settings.get(name, reward.parameters[name].default)


def ask_canaries(scorer: Scorer, problem: Problem, refused: Mapping[str, int]) -> dict[str, int]:
    """Ask each verifier about a correct and an incorrect completion of a problem.

    ``refused`` counts how often in a row each verifier has refused a correct one; the updated counts are
    returned. Raises RewardError if one pays the incorrect completion, or refuses the correct one MAX_REFUSALS
    times in a row: a single refusal may be the row's fault. Scores that could not be computed are ignored.
    """
    counts = dict(refused)
    problem = replace(problem, thoughts=TAGS)  # canaries are written with tags, from the first one on
    for reward in scorer.rewards:
        for kind, text in canaries(reward, problem.columns) if not reward.options.format_only else ():
            score = scorer.score(reward, problem, text)
            if score.value is None:
                continue
            if kind == "correct":
                # An accepted correct canary resets the count.
                counts[reward.name] = counts.get(reward.name, 0) + 1 if score.value < FULL else 0
            if (kind == "incorrect" and score.value > 0) or counts.get(reward.name, 0) >= MAX_REFUSALS:
                raise reward.error_in_row(
                    problem.id,
                    f"gives {score.value:g} ({score.status}) to a completion known to be {kind}: "
                    f"{text[:200]!r}. The verifier cannot be trusted, so training stops",
                )
    return counts


def paid_elsewhere(scorer: Scorer, groups: Sequence[Group]) -> dict[str, float]:
    """Return the fraction of some correct completions that the verdict calls correct for another problem too.

    An honest verdict does so as often as two problems have the same answer. A value near 1 means that it is
    fooled, for example by a text that lists every answer. A verdict is not asked if its calls are slow or
    cost money, or if it looks at the completion only and so cannot tell problems apart.
    """
    verdict = scorer.rewards.verdict
    if verdict.is_async or verdict.place in ("process", "sandbox") or "sandbox" in verdict.parameters:
        return {}
    if not _reads_rows(verdict, groups[0].problem.columns):
        return {}
    # (group, its first correct completion), for the groups that have one.
    paid = [(n, int(g.correct.argmax())) for n, g in enumerate(groups) if g.correct.any()]
    trials = max(4, len(groups) // GROUPS_PER_TRIAL)
    payments = list[bool]()
    for number, sample in paid[:trials]:
        other = _next_problem(groups, number)
        if other is None:
            continue
        score = scorer.score(verdict, other, groups[number].completions[sample].text)
        if score.value is not None:
            payments.append(score.value > 0.5)
    return {"reward/paid_elsewhere": sum(payments) / len(payments)} if payments else {}


def _next_problem(groups: Sequence[Group], number: int) -> Problem | None:
    """Return the next problem, cyclically, that is not this group's; None if all groups have the same."""
    for shift in range(1, len(groups)):
        other = groups[(number + shift) % len(groups)].problem
        if other.id != groups[number].problem.id:
            return other
    return None


def _reads_rows(reward: Reward, columns: Iterable[str]) -> bool:
    """Return whether a reward's score can depend on the problem."""
    row_columns = PROBLEM_ARGUMENTS | (set(columns) - PROVIDED)
    row_arguments = {
        name
        for name, parameter in reward.parameters.items()
        if name in row_columns or parameter.kind is inspect.Parameter.VAR_KEYWORD
    }
    # A signature proves little, as TRL's takes all columns and may read none: the function's bytecode has to
    # load one of these names. The signature decides only where there is no bytecode (C functions, objects).
    code = getattr(inspect.unwrap(reward.function), "__code__", None)
    if code is None:
        return bool(row_arguments)
    for instruction in dis.get_instructions(code):
        # From Python 3.13 on, some instructions load two names.
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if not row_arguments.isdisjoint(names):
            return True
    return False


def count_failures(
    before: Failures, groups: Sequence[Group], max_infra: float, window: int = WINDOW_STEPS
) -> list[tuple[int, int]]:
    """Return the failures of the last ``window`` steps, including this one.

    A completion has failed if any score that its reward needs has failed, so that no reward hides behind
    others. Raises RewardError if scoring fails too often: for every completion of a step, or for more than
    the fraction ``max_infra`` of a full window.
    """
    unknown = [(g, int(i)) for g in groups for i in np.flatnonzero(~g.scorable)]
    # A completion is also unscorable when no reward applied to it; only those with an infra_error count.
    failures = list[Score]()
    for group, sample in unknown:
        scores = [component.scores[sample] for component in group.components.values()]
        failures += [score for score in scores if score.status == "infra_error"][:1]
    count = sum(len(g.completions) for g in groups)
    recent = [*before, (len(failures), count)][-window:]
    # Sums over the window of (failures, completions).
    failed, total = (sum(column) for column in zip(*recent, strict=True))
    often = len(recent) == window and failed > max_infra * total
    if failures and (len(failures) == count or often):
        raise RewardError(
            f"{failed} of {total} completions of the last {len(recent)} steps could not be judged "
            f"(scoring.max_infra {max_infra:g}); the last error: {failures[-1].detail or '?'}"
        )
    return recent

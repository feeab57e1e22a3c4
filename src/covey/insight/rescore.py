"""`covey rescore`: score a run's completions with other rewards, to see which groups would change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from covey.models.wording import Wording, wording_of
from covey.rewards.audit import check_columns
from covey.rewards.scorer import Rewards, Scorer
from covey.runs.harvest import same_prompt
from covey.runs.reader import last_stage, look_at, with_own_model
from covey.runs.rollouts import RolloutLog, read_rollouts, recorded_steps
from covey.sampling.tools.texts import calls_by_text
from covey.tasks.source import load_problems
from covey.types import Completion, Problem, Transcript
from covey_verify.errors import DataError

GROUPS_SHOWN = 12


@dataclass(frozen=True)
class Rescored:
    """A group with its old rewards and its new ones."""

    step: int
    group: int
    problem: str
    old: np.ndarray
    new: np.ndarray
    """(G,) rewards; NaN for a completion without one."""
    judged: Mapping[tuple[str, str], int]
    """(reward, status) -> number of completions with that status."""

    @property
    def flips(self) -> int:
        """Number of completions whose advantage changes its sign: above the group's mean before, below now,
        or vice versa.
        """
        return int((_signs(self.old) * _signs(self.new) < 0).sum())

    @property
    def change(self) -> str:
        """How the group changes, in a word."""
        dead, now_dead = (not _signs(r).any() for r in (self.old, self.new))
        if dead != now_dead:
            return "dies" if now_dead else "comes alive"
        return "changes sign" if self.flips else "same" if not dead else "stays dead"


def _signs(rewards: np.ndarray) -> np.ndarray:
    """Return (G,) of -1, 0, 1: below, at or above the mean of the group; equal rewards are all 0."""
    known = rewards[~np.isnan(rewards)]
    # Compared exactly: a mean of equal rewards may differ from them by rounding.
    if len(known) < 2 or (known == known[0]).all():
        return np.zeros(len(rewards))
    centred = np.nan_to_num(rewards - known.mean())
    return np.where(np.abs(centred) < 1e-12, 0.0, np.sign(centred))


def rescore(
    run: Path, rewards: Rewards, steps: int, say: Callable[[str], object] = lambda _: None
) -> list[Rescored]:
    """Score the groups of the last ``steps`` logged steps again, with the columns of the run's data.

    ``say`` is called with the reason if the run's chat template is unknown. Raises DataError if a problem of
    the run is no longer in the data.
    """
    stage = last_stage(run)
    loaded = look_at(stage)
    source = load_problems(loaded)
    problems = {p.id: p for p in source.train}
    logged = recorded_steps(stage)[-steps:]
    if not logged:
        raise DataError(f"{stage}: no completions in its rollout log")
    check_columns(source.train, rewards)
    wording = wording_of(with_own_model(loaded, stage))
    if wording.note:
        say(wording.note)
    # No model is loaded: tool calls are read from texts, tokens decoded by the tokenizer alone.
    rewards.calls = calls_by_text
    rewards.decode = wording.decode
    found = []
    for step in logged:
        log = read_rollouts(stage, step)
        scorer = Scorer(rewards, step)
        begun = []
        for number, places in log.groups.items():
            name, prompt = (log.rows[places[0]][key] for key in ("problem", "prompt"))
            problem = problems.get(name)
            if problem is None or not same_prompt(problem.prompt, prompt):
                raise DataError(
                    f"{stage}: problem {name} of step {step} is not in the run's data any more, or has "
                    "another prompt: put the data back"
                )
            # The logged prompt decides, since a chat template may have been changed.
            asked = _with_thoughts(replace(problem, prompt=prompt), log, number, wording)
            problem = replace(problem, thoughts=asked.thoughts)
            # Rewards do not see prompt tokens, so none are given.
            group = scorer.group(problem, np.zeros(0, np.int64), len(places))
            for sample, place in enumerate(places):
                group.add(sample, _completion(log, place))
            begun.append((number, problem, places, group))
        # All groups of a step are submitted first, then awaited: rewards run in parallel.
        for number, problem, places, group in begun:
            old = np.array([log.rows[p]["reward"] for p in places], dtype=np.float64)
            new = group.result()
            judged = Counter[tuple[str, str]](
                (name, s.status) for name, component in new.components.items() for s in component.scores
            )
            found.append(Rescored(step, number, problem.id, old, new.rewards, judged))
    return found


def _with_thoughts(problem: Problem, log: RolloutLog, group: int, wording: Wording) -> Problem:
    """Return a group's problem with the note whether its prompt, by its recorded tokens, opens thoughts."""
    place = list(log.groups).index(group)
    ends = log.arrays["prompt_ends"]
    first = int(ends[place - 1]) if place else 0
    return wording.with_thoughts(problem, log.arrays["prompt_tokens"][first : int(ends[place])].tolist())


def _completion(log: RolloutLog, place: int) -> Completion:
    row = log.rows[place]
    arrays = log.of_completion(place)
    fault = str(row.get("environment_fault", ""))
    return Completion(
        arrays["tokens"],
        arrays["logprobs"],
        row["completion"],
        row["finish"],
        sampled=arrays.get("sampled"),
        transcript=Transcript(tuple(row.get("turns", ())), row.get("environment"), fault),
    )


def record(found: Sequence[Rescored]) -> Mapping[str, object]:
    """Return the groups as JSON."""
    return {
        "groups": len(found),
        "changes": _counted(found),
        "completions_that_change_sign": sum(g.flips for g in found),
        "statuses": {f"{name}/{status}": part for (name, status), part in _statuses(found).items()},
        "of_groups": [
            {
                "step": g.step,
                "group": g.group,
                "problem": g.problem,
                "change": g.change,
                "old": _plain(g.old),
                "new": _plain(g.new),
            }
            for g in found
        ],
    }


def lines(run: Path, found: Sequence[Rescored]) -> list[str]:
    """Return lines for people: the changes, and the groups that change the most."""
    counts = ", ".join(f"{count} {change}" for change, count in _counted(found).items())
    old, new = (np.concatenate([getattr(g, which) for g in found]) for which in ("old", "new"))
    means = " -> ".join(f"{r[~np.isnan(r)].mean():.3f}" if not np.isnan(r).all() else "-" for r in (old, new))
    flips = f"{sum(g.flips for g in found)} of {len(old)} completions change sign"
    said = [f"{len(found)} groups: {counts}", f"{flips}; mean reward {means}"]
    said += [f"{name}: {100 * part:.0f} % {status}" for (name, status), part in _statuses(found).items()]
    said += [""]
    # Most sign changes first.
    moved = sorted((g for g in found if g.change not in ("same", "stays dead")), key=lambda g: -g.flips)
    said += [
        f"covey show {run} {g.step} {g.group}  {g.change}: {_few(g.old)} -> {_few(g.new)}"
        for g in moved[:GROUPS_SHOWN]
    ]
    return [*said, f"and {len(moved) - GROUPS_SHOWN} more"] if len(moved) > GROUPS_SHOWN else said


def _counted(found: Sequence[Rescored]) -> dict[str, int]:
    kinds = ("same", "changes sign", "comes alive", "dies", "stays dead")
    return {kind: count for kind in kinds if (count := sum(g.change == kind for g in found))}


def _statuses(found: Sequence[Rescored]) -> dict[tuple[str, str], float]:
    """Return the fraction of completions that a reward could not read or score, by its status.

    A reward named without the run's settings may look for another answer format and find nothing.
    """
    counts = sum((Counter(g.judged) for g in found), Counter[tuple[str, str]]())
    total = sum(len(g.new) for g in found)
    return {key: count / total for key, count in sorted(counts.items()) if key[1] != "ok"}


def _few(rewards: np.ndarray) -> str:
    return " ".join("-" if np.isnan(r) else f"{r:.3g}" for r in rewards)


def _plain(rewards: np.ndarray) -> list[float | None]:
    return [None if np.isnan(r) else float(r) for r in rewards]

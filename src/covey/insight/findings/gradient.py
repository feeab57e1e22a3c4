"""Rules about how rewards become gradients: the critic, the baseline, the std, rewards against each other."""

from __future__ import annotations

import math

from covey.insight.findings.completions import near_tie, outlier
from covey.insight.findings.remedies import (
    DIVIDES_BY_STD,
    GATED,
    WITHOUT_STD,
    ChangeTo,
    ScaleBy,
    at_least,
    largest,
)
from covey.insight.findings.rule import OUTCOMES, STILL, Rule
from covey.insight.findings.view import RunView
from covey.system.text import percent


def the_critic_diverges(run: RunView) -> str | None:
    """The critic's explained variance is below 0, and its error is more than 1.5 times the error of the first
    steps.
    """
    error = run.late("value/error")
    explained = run.late("value/explained_variance")
    if not (explained < 0 and error > 1.5 * run.early("value/error")):
        return None
    return f"the critic diverges: its error rose to {error:.3g}, its explained variance is {explained:.2g}"


def groups_nearly_tie(run: RunView) -> str | None:
    """In more than a third of the live groups, rewards differ by less than 5 % of their range, and the
    advantage divides by their std.
    """
    ties = run.late("groups/near_ties")
    if not (ties > 1 / 3 and run.setting("algorithm.advantage") in DIVIDES_BY_STD):
        return None
    return (
        f"{percent(ties)} of the groups that train nearly tie, and dividing by the std magnifies their "
        "differences"
    )


def one_outlier_decides(run: RunView) -> str | None:
    """In groups of at most four completions, one reward differs from all others in more than half of the live
    groups.
    """
    size = run.setting("rollout.group_size")
    alone = run.late("groups/one_against_all")
    if not (isinstance(size, int) and 1 < size <= 4 and alone > 0.5):
        return None
    # The largest z-score that one of n values can have, with the std over n - 1.
    largest = (size - 1) / math.sqrt(size)
    return (
        f"in {percent(alone)} of the groups that train one outlier of {size} decides: it gets {largest:.2g}, "
        "by luck or not"
    )


def std_moves_the_gradient(run: RunView) -> str | None:
    """In groups of more than eight completions, under an estimator that divides by the std, more than a tenth
    of the gradient goes to other groups than it would if rewards were only centred. Over all steps together
    this is beyond chance.
    """
    moved = run.late("gradient_share/overweight")
    size = run.setting("rollout.group_size")
    share, doubt = run.whole("gradient_share/overweight")
    is_certain = min(moved, share - doubt) > 0.1 and isinstance(size, int) and size > 8
    if not (is_certain and run.setting("algorithm.advantage") in DIVIDES_BY_STD):
        return None
    return f"the std moves {percent(moved)} of the gradient to prompts that are very easy or very hard"


def rewards_pull_apart(run: RunView) -> str | None:
    """Two rewards have a correlation below -.3 and do not both rise, and less than 90 % are correct."""
    strengths = {
        name: -r
        for name, r in run.names("reward/correlation/").items()
        # Two rewards that both rise are not earned at each other's cost.
        if not all(run.rose(f"reward/{part}/mean", 0.0) for part in name.split("/"))
    }
    name, strength = largest(strengths)
    if not (strength > 0.3 and run.late("accuracy") < 0.9):
        return None
    return f"rewards {' and '.join(name.split('/'))} pull apart (r {-strength:.2f})"


RULES = (
    Rule(
        "critic",
        the_critic_diverges,
        after=5,
        severity="severe",
        reason="A critic that is worse than the mean of the returns adds noise to every advantage.",
        remedies=(ScaleBy("algorithm.critic.lr", 1 / 3, 1e-5),),
        silences=OUTCOMES,
    ),
    Rule(
        "near_ties",
        groups_nearly_tie,
        after=5,
        reason="Dividing by the std makes .95 against .96 weigh as much as 0 against 1.",
        remedies=(WITHOUT_STD, ChangeTo("algorithm.advantage.eps", 0.1)),
        silences=("std_overweight", "small_group", *STILL),
        shown_by=near_tie,
    ),
    Rule(
        "small_group",
        one_outlier_decides,
        after=5,
        severity="note",
        reason="The one of four then gets +1.5, however lucky it was. In a group of 16 it is compared with "
        "more siblings.",
        remedies=(ChangeTo("rollout.group_size", 16, at_least(5)),),
        silences=("std_overweight", *STILL),
        shown_by=outlier,
    ),
    Rule(
        "std_overweight",
        std_moves_the_gradient,
        after=5,
        severity="note",
        reason="Dividing by the std multiplies the gradient by 4.6 at a pass rate of .05 and by 2 at .5. In "
        "a group of eight with one success the factor is 3.",
        remedies=(WITHOUT_STD,),
        silences=("flat",),
        shown_by=outlier,
    ),
    Rule(
        "conflict",
        rewards_pull_apart,
        after=15,
        reason="Each is then earned at the cost of the other, and their sum moves less than either. Weaker "
        "correlations come and go. Once nearly all answers are correct, a correlation says little.",
        remedies=(GATED,),
        silences=("flat",),
    ),
)

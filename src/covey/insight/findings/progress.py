"""Rules about runs that make little progress: groups without a signal, updates without an effect."""

from __future__ import annotations

import math

from covey.insight.evidence import errors_needed, noise
from covey.insight.findings.completions import first_of_dead
from covey.insight.findings.remedies import (
    FRONTIER,
    INFORMATIVE,
    ChangeTo,
    ScaleBy,
    faint_adapter,
    half_solving_size,
    larger_alpha,
    raised_lr,
    weaker_pull,
    with_reward,
)
from covey.insight.findings.rule import STILL, Rule
from covey.insight.findings.view import RunView, mean_of
from covey.system.text import percent

LITTLE = 0.05
"""Gain of accuracy below which a run is not learning."""


def wasted_beyond_luck(run: RunView) -> bool:
    """Whether more than half of the problems are always or never solved, an eighth of each, beyond chance.

    Groups of the other problems are dead by luck. How often follows from their size and the accuracy.
    """
    size = run.setting("rollout.group_size")
    rate = run.whole("accuracy")[0]
    # Chances that a group of a problem that is solved sometimes is all correct, and all incorrect.
    all_correct = rate**size if isinstance(size, int) else 0.0
    all_incorrect = (1 - rate) ** size if isinstance(size, int) else 0.0
    _, dead_error = run.whole("groups/dead")
    correct, correct_error = run.whole("groups/dead_correct")
    incorrect, incorrect_error = run.whole("groups/dead_incorrect")
    if not run.patient:
        # The likeliest cause of a whole run needs no proof.
        dead_error = correct_error = incorrect_error = 0.0
    # With a fraction ``mixed`` of problems that are solved sometimes, correct = always + mixed p^G,
    # incorrect = never + mixed (1 - p)^G and always + never + mixed = 1.
    mixed = min(1.0, (1 - correct - incorrect) / max(1e-9, 1 - all_correct - all_incorrect))
    least_always = correct - correct_error - mixed * all_correct
    least_never = incorrect - incorrect_error - mixed * all_incorrect
    return 1 - mixed - dead_error > 0.5 and min(least_always, least_never) > 0.125


def problems_are_uneven(run: RunView) -> str | None:
    """More than half of the groups are all correct or all incorrect, at least an eighth of each kind, beyond
    chance and beyond what luck adds in small groups. Fewer than a quarter are one text, and accuracy has not
    risen by five points, beyond chance. If there is a curriculum, it has tried every problem.
    """
    easy = run.late("groups/dead_correct")
    hard = run.late("groups/dead_incorrect")
    uneven = easy + hard > 0.5 and min(easy, hard) > 0.125 and run.late("groups/collapsed") < 0.25
    early = run.late("difficulty/tried") < 1
    if early or not (uneven and wasted_beyond_luck(run)) or run.rose("accuracy", 0.05):
        return None
    parts = f"always ({percent(easy)}) or never ({percent(hard)}) solved"
    return f"{percent(easy + hard)} of the samples are wasted on prompts that are {parts}"


def every_answer_is_incorrect(run: RunView) -> str | None:
    """More than half of the groups are all incorrect although their texts differ, and accuracy will not rise
    by five points at its present pace. Both hold beyond chance.
    """
    tied = run.late("groups/dead_incorrect")
    cliff = run.late("groups/cliff")
    one_text = cliff < 0.5  # the texts are the same: exploration has ended, whatever the task
    certain = run.least("groups/dead_incorrect") if run.patient else tied
    learns = run.patient and not run.outlook("accuracy")[1] < LITTLE
    if not certain > 0.5 or one_text or learns:
        return None
    texts = ", though their texts differ (a cliff)" if cliff >= 0.5 else ""
    return f"{percent(tied)} of the groups are dead because every answer is incorrect{texts}"


def every_answer_is_correct(run: RunView) -> str | None:
    """More than half of the groups are all correct, now and in the first steps."""
    tied = run.late("groups/dead_correct")
    from_the_start = run.early("groups/dead_correct") > 0.5 or not run.patient
    if not (tied > 0.5 and from_the_start):
        return None
    return (
        f"{percent(tied)} of the groups are dead because every answer is correct: these problems are solved"
    )


def groups_tie_over_mixed_answers(run: RunView) -> str | None:
    """More than half of the groups tie although some of their answers are correct and some are not."""
    kinds = ("correct", "incorrect", "unscored")
    part = run.late("groups/dead") - sum(run.late(f"groups/dead_{kind}") for kind in kinds)
    if not part > 0.5:
        return None
    return f"{percent(part)} of the groups tie though only some of their answers are correct (a cliff)"


def every_advantage_is_zero(run: RunView) -> str | None:
    """Nothing was trained although at least half of the groups have different rewards."""
    waits = run.late("optimizer/updates") == 0  # for a critic that learns first
    # Stages that only sample completions have no gradient.
    moving = waits or run.late("optimizer/grad_norm") != 0 or run.late("optimizer/skipped") > 0
    all_equal = run.late("reward/std") == 0  # groups that a critic gives advantages by token are never dead
    if not run.late("groups/dead") < 0.5 or moving or all_equal:
        return None
    if run.setting("rollout.mask_truncated") is True and run.late("length/truncated") > 0.5:
        return "most completions are truncated, and rollout.mask_truncated trains none of these"
    return "rewards differ within groups, so it is algorithm.advantage that gives every answer 0"


def the_policy_does_not_move(run: RunView) -> str | None:
    """Although groups differ, the policy has hardly moved from where it began: by less than a millionth of a
    nat per completion five steps after the warm-up, or by less than .001 nats from step 20 on.
    """
    moved = abs(run.late("kl/start"))
    updates = run.late("optimizer/updates")
    warm = run.setting("train.warmup_steps")
    # Updates during the warm-up are small on purpose.
    patience = 5 + (warm if isinstance(warm, int) else 0)
    # Right after the warm-up only rounding-sized motion counts; later on the bound is wider.
    is_still = (run.after(20) and moved < 1e-3) or (run.after(patience) and moved < 1e-6)
    if not (is_still and updates > 0 and run.late("groups/dead") < 0.9):
        return None
    if faint_adapter(run):
        alpha = run.setting("lora.alpha")
        rank = run.setting("lora.rank")
        cause = f"lora.alpha {alpha:g} over rank {rank} scales every update by {alpha / rank:.1e}"
    else:
        cause = f"train.lr {run.late('optimizer/lr'):.1e} has no effect"
    return (
        f"after {run.steps} steps the policy is {moved:.1e} nats per completion from where it began: {cause}"
    )


def the_reward_does_not_move(run: RunView) -> str | None:
    """At its pace the reward will have moved by less than a fifth of its std when the run ends, beyond
    chance, though most groups differ and less than 90 % are correct.
    """
    changes = run.outlook("reward/mean")
    std = run.early("reward/std")
    is_still = max(map(abs, changes)) < 0.2 * std and run.late("groups/dead") < 0.5
    if not (is_still and run.late("accuracy") < 0.9):
        return None
    return f"the reward has not moved ({abs(run.rise('reward/mean')):.3f}), although groups differ"


def held_out_problems_are_of_another_kind(run: RunView) -> str | None:
    """In the first two steps, accuracy on training problems and on held-out ones differs by a quarter, beyond
    chance.
    """
    first = run.beginning[:2]
    if not run.evals or run.setting("rollout.curriculum") == "frontier":
        return None
    rate = mean_of(first, "accuracy")
    held_out = run.evals[0].pass_rate
    # The two errors are independent: training batches and held-out problems.
    training = noise([first], "accuracy").error(len(first))
    doubt = math.hypot(training, float(held_out.std()) / math.sqrt(len(held_out)))
    distance = abs(rate - float(held_out.mean()))
    if not (distance > 0.25 and distance > errors_needed(math.inf, 1) * doubt):
        return None
    return (
        f"at first {percent(rate)} are correct in training and {percent(float(held_out.mean()))} on held-out "
        "problems: the two are of different kinds"
    )


RULES = (
    Rule(
        "dead_weight",
        problems_are_uneven,
        after=10,
        reason="The data is uneven then, not the task: some prompts always waste their rollouts. At a pass "
        "rate of .5, one in eight groups of four is dead by luck.",
        remedies=(FRONTIER, INFORMATIVE),
        silences=("too_hard", "too_easy", *STILL),
        shown_by=first_of_dead,
    ),
    Rule(
        "too_hard",
        every_answer_is_incorrect,
        after=10,
        reason="At a pass rate of 8 % half of the groups of eight are dead. A run that learns slowly begins "
        "like this too, and a few steps of few groups do not tell the two apart.",
        remedies=(half_solving_size, FRONTIER),
        advice="a cold start (a stage with method: sft), or easier problems",
        silences=STILL,
        shown_by=first_of_dead,
    ),
    Rule(
        "too_easy",
        every_answer_is_correct,
        after=10,
        reason="A run that has learned ends like this too. Only a run that began like this has nothing to "
        "learn from these problems.",
        remedies=(INFORMATIVE, FRONTIER),
        advice="harder problems, since these are solved",
        silences=STILL,
        shown_by=first_of_dead,
    ),
    Rule(
        "tied",
        groups_tie_over_mixed_answers,
        after=10,
        reason="Rewards that follow the verdict cannot tie in such groups.",
        remedies=(with_reward("exact_answer", 1.0),),
        advice="weights that pay a correct answer more than an incorrect one",
        silences=STILL,
        shown_by=first_of_dead,
    ),
    Rule(
        "zero_advantage",
        every_advantage_is_zero,
        after=3,
        severity="severe",
        reason="Then the estimator gives every answer 0, or rollout.mask_truncated leaves out every "
        "completion that the rewards tell apart.",
        remedies=(
            ChangeTo("rollout.mask_truncated", False),
            ChangeTo("algorithm.advantage", "group_centered"),
        ),
        silences=STILL,
    ),
    Rule(
        "no_motion",
        the_policy_does_not_move,
        after=5,
        reason="A step that changes what is sampled moves the policy further. Below a millionth there is "
        "only rounding.",
        remedies=(weaker_pull, larger_alpha, raised_lr),
        silences=("flat", "too_hard", "dead_weight"),
    ),
    Rule(
        "flat",
        the_reward_does_not_move,
        after=25,
        severity="note",
        reason="The number of steps alone says little: published runs take hundreds of steps to raise the "
        "reward by two std.",
        remedies=(weaker_pull, ScaleBy("train.lr", 3, 3e-6)),
        advice="more train.steps",
    ),
    Rule(
        "other_problems",
        held_out_problems_are_of_another_kind,
        after=2,
        severity="note",
        reason="Problems of one kind are solved alike before anything is learned. Otherwise the held-out "
        "ones are of another kind, or the model knows one of the two sets.",
        remedies=(ChangeTo("data.test", None),),
        advice="problems of one kind in data.train and data.test, or reading held-out accuracy as a "
        "measure of transfer",
    ),
)

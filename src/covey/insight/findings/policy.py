"""Rules about what training does to the policy and its texts; most of it follows from a cause above."""

from __future__ import annotations

import math

from covey.insight.conclusion import course
from covey.insight.evidence import errors_needed
from covey.insight.findings.completions import (
    first_of_dead,
    last_token,
    long_incorrect,
    of_status,
    repeated_fraction,
    reward_of,
    shared_tokens,
    was_truncated,
)
from covey.insight.findings.remedies import (
    ENTROPY_BONUS,
    FEWER_UPDATES,
    HOTTER,
    PULL,
    SMALLER_LR,
    ChangeTo,
    at_least,
    largest,
    longer_limit,
    with_reward,
)
from covey.insight.findings.rule import NO_SIGNAL, STILL, Rule
from covey.insight.findings.view import RunView
from covey.runs.estimates import gains
from covey.system.text import percent

CREDITED = ("prefix_tree", "process_zscore", "optimal_token_baseline", "gae")
"""Estimators whose advantages differ from token to token."""


def shared_prefixes_are_blamed(run: RunView) -> str | None:
    """More than four fifths of the blame lies on tokens with which better siblings begin as well."""
    shared = run.late("gradient_share/shared_prefix")
    if not shared > 0.8 or run.setting("algorithm.advantage") in CREDITED:
        return None
    return (
        f"{percent(shared)} of the blame for bad completions lies on tokens that good siblings begin with too"
    )


def incorrect_completions_grow(run: RunView) -> str | None:
    """Incorrect completions grew by 30 % and by four tokens, while correct ones grew by less than half as
    much or accuracy rose by less than three points, under a loss that divides by the length. Less than 80 %
    are correct, and no reward other than the verdict rose.
    """
    incorrect = run.late("length/incorrect")
    incorrect_before = run.early("length/incorrect")
    correct = run.late("length/correct")
    correct_before = run.early("length/correct")
    # The last few incorrect completions may be longer only because their problems are the hardest.
    enough = run.late("accuracy") < 0.8
    growth = incorrect - incorrect_before
    grew = growth > max(4, 0.3 * incorrect_before) and enough
    others_do_not = correct - correct_before < growth / 2 or run.rise("accuracy") < 0.03
    divides = run.setting("algorithm.reduce") not in ("constant_length", "token_mean")
    if not (grew and others_do_not and divides) or run.other_reward_rose:
        return None
    comparison = "none is correct" if math.isnan(correct) else f"correct ones have {correct:.0f}"
    return (
        f"incorrect completions grew from {incorrect_before:.0f} to {incorrect:.0f} tokens, {comparison}: "
        "their length dilutes the penalty"
    )


def the_policy_is_far_away(run: RunView) -> str | None:
    """The policy is more than 10 nats per completion from where it began or from its reference, accuracy has
    not risen by five points, and a graded verdict does not pay clearly more either.
    """
    distances = {"where it began": run.late("kl/start"), "its reference": run.late("kl/completion_k1")}
    # With no distance above 10, `largest` gives NaN, which fails the comparison.
    origin, kl = largest({name: value for name, value in distances.items() if value > 10})
    if not (kl > 10 and run.accuracy_gain < 0.05) or run.grades_rose:
        return None
    gain = f"correct answers changed by {100 * run.accuracy_gain:+.0f} points"
    return f"the policy is {kl:.0f} nats per completion from {origin}, and {gain}"


def completions_reach_the_limit(run: RunView) -> str | None:
    """More than half of the completions reach the limit, or from step 10 more than a tenth, and the fraction
    is not falling: over the run, or to half of it in the last step.
    """
    part = run.late("length/truncated")
    ended = run.late("length/ended_q90")
    newest = run.last[-1].get("length/truncated", part) if run.last else part
    improves = newest < 0.5 * part or (run.steps > 5 and run.is_falling("length/truncated"))
    if not (part > 0.1 and run.after(5 if part > 0.5 else 10)) or improves:
        return None
    remark = f"; 90 % of the ended ones have up to {ended:.0f} tokens" if ended > 0 else ""
    return f"{percent(part)} of the completions are truncated at rollout.max_tokens{remark}"


def answers_cannot_be_read(run: RunView) -> str | None:
    """A function finds no answer that it can read in more than a third of the completions, and that fraction
    is not falling. If it has grown, the rule waits until step 20.
    """
    rates: dict[str, float] = {}
    improves = has_grown = False
    for status in ("no_answer", "unparsable"):
        for name, rate in run.names("reward/", f"/{status}").items():
            rates[name] = rates.get(name, 0.0) + rate
            # One status that improves is enough to wait; rates of both add up per function.
            improves |= rate > 0.1 and run.is_falling(f"reward/{name}/{status}")
            has_grown |= run.rise(f"reward/{name}/{status}") > 0.1
    name, rate = largest(rates)
    if not (run.after(20 if has_grown else 10) and rate > 1 / 3) or improves:
        return None
    return f"{name} finds no readable answer in {percent(rate)} of the completions"


def exploration_ends(run: RunView) -> str | None:
    """Entropy fell below a third of its value in the first steps, more than a quarter of the groups have
    become one text each, less than 90 % are correct, and a graded verdict does not pay more.
    """
    entropy = run.late("entropy/sampled")
    before = run.early("entropy/sampled")
    collapsed = run.late("groups/collapsed")
    grown = run.rise("groups/collapsed")
    ended = entropy < before / 3 and collapsed > 0.25 and grown > 0.15
    if not (ended and run.late("accuracy") < 0.9) or run.grades_rose:
        return None
    return (
        f"entropy fell from {before:.2g} to {entropy:.2g} nats and {percent(collapsed)} of the groups are "
        "one text: exploration has ended"
    )


def chosen_answers_are_unlearned(run: RunView) -> str | None:
    """The loss on preferences is below .02, and chosen answers have become less likely than they were under
    the reference, by more than 2 nats.
    """
    chosen = run.late("preference/chosen")
    loss = run.late("loss")
    if not (chosen < -2 and loss < 0.02):
        return None
    return (
        f"the pairs are learned (loss {loss:.2g}), and chosen answers become less likely too: {chosen:.1f} "
        "nats against the reference"
    )


def the_policy_got_worse(run: RunView) -> str | None:
    """Fewer held-out problems are solved, beyond chance in all evaluations so far, and twice in a row if
    there were several. Without evaluations: accuracy in training fell by a tenth, beyond chance.
    """
    estimator = ""
    if run.setting("algorithm.advantage.written_by_user") is True:
        estimator = f", with your own estimator {run.setting('algorithm.advantage')}"
    if len(run.evals) > 1:
        if not run.got_worse:
            return None
        return f"the run made the policy worse: {course(run.evals[0], run.evals[-1])}{estimator}"
    late = run.late("accuracy")
    before = run.early("accuracy")
    if not run.fell("accuracy", 0.1) or run.setting("rollout.curriculum") == "frontier":
        return None
    return (
        f"the run made the policy worse: {percent(before)} correct in training at first, {percent(late)} now"
        f"{estimator}"
    )


def held_out_problems_gain_nothing(run: RunView) -> str | None:
    """The reward rose by .3 of its std, beyond chance, but held-out accuracy by less than two points, and
    chance does not hide a gain of five points in the evaluations so far. Held-out problems do not earn more
    from a graded verdict either.
    """
    if len(run.evals) < 2:
        return None
    rise = run.rise("reward/mean")
    gain = run.accuracy_gain
    errors = errors_needed(math.inf, len(run.evals) - 1)
    unlikely = gains(run.evals[0], run.evals[-1], errors)["sampled"].high < 0.05
    # Nearly solved from the start: there is little left to gain.
    solved = bool(run.evals[0].pass_rate.mean() > 0.9)
    rose = run.rose("reward/mean", 0.3 * run.early("reward/std"))
    if not (rose and gain < 0.02 and unlikely) or solved or run.grades_rose:
        return None
    return f"the reward rose by {rise:.2f} in training, held-out accuracy changed by {100 * gain:+.0f} points"


def texts_repeat_themselves(run: RunView) -> str | None:
    """More than half of the four-word windows occurred before in their text, a fifth more than at first, and
    accuracy has not risen by a tenth.
    """
    part = run.late("text/repetition")
    before = run.early("text/repetition")
    if not (part > 0.5 and part - before > 0.2) or run.accuracy_gain > 0.1:
        return None
    return f"{percent(part)} of the text repeats itself"


def completions_become_copies(run: RunView) -> str | None:
    """Copies rose by three tenths to more than half of the completions, less than 90 % are correct, accuracy
    has not risen by a tenth, and no reward pays clearly more.
    """
    copies = run.late("text/duplicates")
    before = run.early("text/duplicates")
    if not (copies > 0.5 and copies - before > 0.3 and run.late("accuracy") < 0.9):
        return None
    if run.accuracy_gain > 0.1 or run.grades_rose or run.other_reward_rose:
        return None
    return f"{percent(copies)} of the completions are copies of another, {percent(before)} were at first"


RULES = (
    Rule(
        "blame_on_prefix",
        shared_prefixes_are_blamed,
        after=5,
        severity="note",
        reason="Tokens that siblings share cannot be what made one of them worse. In short answers, half of "
        "the blame lies there as a rule.",
        remedies=(ChangeTo("algorithm.advantage", "prefix_tree", lambda name: name in CREDITED),),
        silences=("flat",),
        shown_by=shared_tokens,
        token=shared_tokens,
    ),
    Rule(
        "length_bias",
        incorrect_completions_grow,
        after=10,
        reason="Where thinking helps, correct completions grow too and more answers are correct. A loss that "
        "divides by the length rewards growth that does not help.",
        remedies=(ChangeTo("algorithm.reduce", "constant_length"),),
        silences=("truncated", "repetition"),
        shown_by=long_incorrect,
        token=last_token,
    ),
    Rule(
        "kl_growth",
        the_policy_is_far_away,
        after=10,
        reason="Alarms are usually set at 5 to 10 nats. Distance that buys correct answers is learning.",
        remedies=(PULL, SMALLER_LR),
        silences=(
            *("truncated", "unparsable", "held_out_flat", "worse", "repetition", "duplicates"),
            *("entropy_collapse", "too_hard"),
        ),
    ),
    Rule(
        "truncated",
        completions_reach_the_limit,
        after=5,
        reason="A truncated completion counts as incorrect whatever it was about to say. Long runs "
        "tolerate a tenth.",
        remedies=(longer_limit, with_reward("soft_overlong", {"limit": 512, "buffer": 64})),
        silences=("unparsable", *NO_SIGNAL),
        shown_by=was_truncated,
        token=last_token,
    ),
    Rule(
        "unparsable",
        answers_cannot_be_read,
        after=10,
        reason="A base model begins like this and learns the form in a few steps; a model whose prompt asks "
        "for another form does not. A form that is lost in training is lost because something pays for it, "
        "and by step 20 that cause has a finding of its own.",
        remedies=(
            ChangeTo("data.template", "{prompt}\nEnd with <answer>the answer</answer>.\n", bool),
            with_reward("answer_format", 0.1),
        ),
        advice="a cold start that shows the form",
        silences=NO_SIGNAL,
        shown_by=of_status("no_answer", "unparsable"),
    ),
    Rule(
        "entropy_collapse",
        exploration_ends,
        reason="Entropy also falls when a task is learned, but then groups are all correct, not all the "
        "same.",
        remedies=(
            ChangeTo("algorithm.surrogate.clip_high", 0.28, at_least(0.28)),
            ENTROPY_BONUS,
            SMALLER_LR,
        ),
        silences=("duplicates", *NO_SIGNAL, *STILL),
        shown_by=first_of_dead,
    ),
    Rule(
        "unlearned",
        chosen_answers_are_unlearned,
        after=5,
        reason="Where the loss is nearly 0, a pair teaches nothing more. Further updates make both of its "
        "answers less likely, and all texts that resemble them.",
        remedies=(SMALLER_LR,),
        advice="fewer `train.steps`, or more pairs",
        silences=("worse",),
    ),
    Rule(
        "worse",
        the_policy_got_worse,
        severity="severe",
        reason="With 20 evaluations of a policy that does not change, one run in three has a result outside "
        "of a 95 % interval.",
        remedies=(SMALLER_LR, *FEWER_UPDATES, PULL),
        silences=("too_hard", "repetition", *STILL),
    ),
    Rule(
        "held_out_flat",
        held_out_problems_gain_nothing,
        after=10,
        reason="What a model has learned shows on problems that it was not trained on.",
        remedies=(PULL, ChangeTo("eval.every", 10, bool)),
        advice="more training problems, if they are few; `covey stress`, if something else is paid",
        shown_by=reward_of,
    ),
    Rule(
        "repetition",
        texts_repeat_themselves,
        after=15,
        reason="Prose repeats a few percent, long derivations a tenth, degenerate text nearly all.",
        remedies=(PULL, with_reward("repetition", 0.5), SMALLER_LR),
        shown_by=repeated_fraction,
        token=last_token,
    ),
    Rule(
        "duplicates",
        completions_become_copies,
        after=15,
        reason="Short correct answers are copies of each other. Incorrect copies mean that exploration has "
        "stopped, unless another reward pays for them.",
        remedies=(HOTTER, ENTROPY_BONUS),
    ),
)

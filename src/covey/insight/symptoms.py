"""Rules that name what training does: after the causes, since much of it follows from one."""

from __future__ import annotations

import math

from covey.estimates import gains
from covey.insight.causes import NO_SIGNAL, STILL, percent
from covey.insight.evidence import errors_needed, noise
from covey.insight.findings import FindingRule, Seen, collector, mean_of
from covey.insight.remedies import (
    FEWER_UPDATES,
    FRONTIER,
    HOTTER,
    INFORMATIVE,
    PULL,
    SMALLER_LR,
    at_least,
    dead,
    faint_adapter,
    group_size,
    largest,
    last_token,
    long_incorrect,
    of_status,
    raised_lr,
    reward_of,
    room,
    scaled,
    scaled_adapter,
    shared_tokens,
    to,
    was_truncated,
    weaker_pull,
    with_reward,
)
from covey.insight.verdict import course
from covey.objective.signs import repeated_windows

LITTLE = 0.05
"""Share of the answers that a run may come to get right at its pace, and still not be learning."""
CREDITED = ("prefix_tree", "process_zscore", "optimal_token_baseline", "gae")
"""Estimators whose advantages differ from token to token."""
SYMPTOMS: list[FindingRule] = []
_rule = collector(SYMPTOMS)


@_rule(
    "blame_on_prefix",
    to("algorithm.advantage", "prefix_tree", lambda own: own in CREDITED),
    severity="note",
    explains=("flat",),
    shows=shared_tokens,
    token=shared_tokens,
)
def _(seen: Seen) -> str | None:
    """From the fifth step, four fifths of the blame lie on tokens that praised siblings begin with as well.
    Because what siblings share cannot be what made one of them worse; half of it is usual in short answers.
    """
    shared = seen.late("gradient_share/shared_prefix")
    if not (seen.after(5) and shared > 0.8 and seen.setting("algorithm.advantage") not in CREDITED):
        return None
    return (
        f"{percent(shared)} of the blame for bad completions lies on tokens that good siblings begin with too"
    )


@_rule(
    "length_bias",
    to("algorithm.reduce", "constant_length"),
    explains=("truncated", "repetition"),
    shows=long_incorrect,
    token=last_token,
)
def _(seen: Seen) -> str | None:
    """From the tenth step, incorrect completions grew by 30 % and four tokens while correct ones grew by
    less than half as much or not more is correct (three points), under a loss that divides by the
    length, and no reward beside the verdict rose. Because both grow where thinking helps, and more is
    correct then; the division pays without.
    """
    now, before = seen.late("length/incorrect"), seen.early("length/incorrect")
    correct, first = seen.late("length/correct"), seen.early("length/correct")
    enough = seen.late("accuracy") < 0.8  # of a few that are left, the hardest may be longer
    grew = seen.after(10) and now - before > max(4, 0.3 * before) and enough
    alone = correct - first < (now - before) / 2 or seen.rise("accuracy") < 0.03
    divides = seen.setting("algorithm.reduce") not in ("constant_length", "token_mean")
    if not (grew and alone and divides) or seen.bought:
        return None
    said = (
        f"incorrect completions grew from {before:.0f} to {now:.0f} tokens, "
        f"{'none is correct' if math.isnan(correct) else f'correct ones have {correct:.0f}'}"
    )
    return f"{said}: their length dilutes the penalty"


@_rule(
    "kl_growth",
    PULL,
    SMALLER_LR,
    explains=(
        *("truncated", "unparsable", "held_out_flat", "worse", "repetition", "duplicates"),
        *("entropy_collapse", "too_hard"),
    ),
)
def _(seen: Seen) -> str | None:
    """From the tenth step, the policy is 10 nats a completion from where it began, or from its reference,
    not more is correct, and a verdict that grades does not pay clearly more either. Because 5 to 10 nats is
    where alarms are usually set; distance that buys answers is learning.
    """
    far = {"where it began": seen.late("kl/start"), "its reference": seen.late("kl/completion_k1")}
    what, kl = largest({name: value for name, value in far.items() if value > 10})
    if not (seen.after(10) and kl > 10 and seen.accuracy_gain < 0.05) or seen.graded_higher:
        return None
    gain = f"correct answers changed by {100 * seen.accuracy_gain:+.0f} points"
    return f"the policy is {kl:.0f} nats a completion from {what}, and {gain}"


@_rule(
    "truncated",
    room,
    with_reward("soft_overlong", {"limit": 512, "buffer": 64}),
    explains=("unparsable", *NO_SIGNAL),
    shows=was_truncated,
    token=last_token,
)
def _(seen: Seen) -> str | None:
    """More than half of the completions reach the limit in five steps, or a tenth in ten, and it is not
    getting better. Because what is truncated counts as incorrect whatever it was about to say; a tenth is
    what long runs live with.
    """
    part, ended = seen.late("length/truncated"), seen.late("length/ended_q90")
    better = seen.steps > 5 and seen.falling("length/truncated")
    if not (part > 0.1 and seen.after(5 if part > 0.5 else 10)) or better:
        return None
    rest = f"; 90 % of those that ended have up to {ended:.0f} tokens" if ended > 0 else ""
    return f"{percent(part)} of the completions are truncated at rollout.max_tokens{rest}"


@_rule(
    "unparsable",
    to("data.template", "{prompt}\nEnd with <answer>the answer</answer>.\n", bool),
    with_reward("answer_format", 0.1),
    advice="a cold start that shows the form",
    explains=NO_SIGNAL,
    shows=of_status("no_answer", "unparsable"),
)
def _(seen: Seen) -> str | None:
    """From the tenth step, a function finds no answer that it can read in a third of the completions, and
    that is not getting better; from the twentieth, where it has become so. Because a base model begins so
    and learns the form in a few steps, one that is asked for another form does not; and what comes in
    training is paid for by something, which has a name by then.
    """
    rates: dict[str, float] = {}
    better = grown = False
    for status in ("no_answer", "unparsable"):
        for name, rate in seen.names("reward/", f"/{status}").items():
            rates[name] = rates.get(name, 0.0) + rate
            better |= rate > 0.1 and seen.falling(f"reward/{name}/{status}")
            grown |= seen.rise(f"reward/{name}/{status}") > 0.1
    name, rate = largest(rates)
    if not (seen.after(20 if grown else 10) and rate > 1 / 3) or better:
        return None
    return f"{name} finds no answer that it can read in {percent(rate)} of the completions"


@_rule(
    "entropy_collapse",
    to("algorithm.surrogate.clip_high", 0.28, at_least(0.28)),
    to("algorithm.entropy.coef", 0.01, at_least(0.001)),
    SMALLER_LR,
    explains=("duplicates", *NO_SIGNAL, *STILL),
    shows=dead,
)
def _(seen: Seen) -> str | None:
    """Entropy fell below a third of the first steps', a quarter of the groups have become one text each, 90
    % are not correct, and a verdict that grades does not pay more. Because entropy also falls where a task
    is learned; then groups are all correct, not all the same.
    """
    entropy, before = seen.late("entropy/sampled"), seen.early("entropy/sampled")
    collapsed, grown = seen.late("groups/collapsed"), seen.rise("groups/collapsed")
    ended = entropy < before / 3 and collapsed > 0.25 and grown > 0.15
    if not (ended and seen.late("accuracy") < 0.9) or seen.graded_higher:
        return None
    said = f"entropy fell from {before:.2g} to {entropy:.2g} nats"
    return f"{said} and {percent(collapsed)} of the groups are one text: exploration has ended"


@_rule(
    "worse",
    SMALLER_LR,
    *FEWER_UPDATES,
    PULL,
    severity="severe",
    explains=("too_hard", "repetition", *STILL),
)
def _(seen: Seen) -> str | None:
    """Fewer held-out problems are solved, beyond what chance does in all evaluations so far, where there were
    several twice running; or without these a tenth fewer are correct in training, beyond chance. Because of
    twenty looks at a policy that stays as it is one in three runs has one outside of a 95 % interval.
    """
    own = seen.setting("algorithm.advantage.own") is True
    whose = f", with your own estimator {seen.setting('algorithm.advantage')}" if own else ""
    said = "the run made the policy worse: "
    if len(seen.evals) > 1:
        return f"{said}{course(seen.evals[0], seen.evals[-1])}{whose}" if seen.got_worse else None
    now, before = seen.late("accuracy"), seen.early("accuracy")
    if not seen.fell("accuracy", 0.1) or seen.setting("rollout.curriculum") == "frontier":
        return None
    return f"{said}{percent(before)} correct in training at first, {percent(now)} now{whose}"


@_rule(
    "held_out_flat",
    PULL,
    to("eval.every", 10, bool),
    advice="more training problems, if they are few; `covey stress`, if something else is paid",
    shows=reward_of,
)
def _(seen: Seen) -> str | None:
    """From the tenth step, the reward rose by .3 of its std, beyond chance, and held-out accuracy by less
    than two points, five being beyond what chance hides in all evaluations so far; nor do held-out problems
    earn more from a verdict that grades. Because what is learned shows on problems that were not trained on.
    """
    if len(seen.evals) < 2 or not seen.after(10):
        return None
    rise, gain = seen.rise("reward/mean"), seen.accuracy_gain
    errors = errors_needed(math.inf, len(seen.evals) - 1)
    unlikely = gains(seen.evals[0], seen.evals[-1], errors)["sampled"].high < 0.05
    solved = bool(seen.evals[0].pass_rate.mean() > 0.9)
    rose = seen.rose("reward/mean", 0.3 * seen.early("reward/std"))
    if not (rose and gain < 0.02 and unlikely):
        return None
    if solved or seen.graded_higher:
        return None
    return f"the reward rose by {rise:.2f} in training, held-out accuracy changed by {100 * gain:+.0f} points"


@_rule(
    "repetition",
    PULL,
    with_reward("repetition", 0.5),
    SMALLER_LR,
    shows=lambda group, i: repeated_windows(group.completions[i].text),
    token=last_token,
)
def _(seen: Seen) -> str | None:
    """From the fifteenth step, half of the four-word windows occurred before in their text, a fifth more
    than at first, and no tenth more is correct. Because prose repeats a few percent and long derivations a
    tenth; degenerate text nearly all.
    """
    part, before = seen.late("text/repetition"), seen.early("text/repetition")
    if not (seen.after(15) and part > 0.5 and part - before > 0.2) or seen.accuracy_gain > 0.1:
        return None
    return f"{percent(part)} of what is written repeats itself"


@_rule("duplicates", HOTTER, to("algorithm.entropy.coef", 0.01, at_least(0.001)))
def _(seen: Seen) -> str | None:
    """From the fifteenth step, copies rose by three tenths to more than half of the completions, 90 % are
    not correct and no tenth more than at first. Because short correct answers are copies of each other;
    incorrect ones that are have stopped exploring, unless another reward pays for them.
    """
    copies, before = seen.late("text/duplicates"), seen.early("text/duplicates")
    if not (seen.after(15) and copies > 0.5 and copies - before > 0.3 and seen.late("accuracy") < 0.9):
        return None
    if seen.accuracy_gain > 0.1 or seen.graded_higher or seen.bought:
        return None
    return f"{percent(copies)} of the completions are copies of another, {percent(before)} were at first"


def _wasted_beyond_luck(seen: Seen) -> bool:
    """Whether half of the problems are always or never solved, an eighth at least of either, beyond chance.

    Groups of the others are dead by luck, as often as their size says at the run's accuracy.
    """
    size, rate = seen.setting("rollout.group_size"), seen.whole("accuracy")[0]
    lucky, unlucky = (rate**size, (1 - rate) ** size) if isinstance(size, int) else (0.0, 0.0)
    shares = [seen.whole(f"groups/dead{kind}") for kind in ("", "_correct", "_incorrect")]
    (_, doubt), (solved, solved_doubt), (never, never_doubt) = shares
    others = min(1.0, (1 - solved - never) / max(1e-9, 1 - lucky - unlucky))
    if not seen.patient:
        doubt = solved_doubt = never_doubt = 0.0
    either = min(solved - solved_doubt - others * lucky, never - never_doubt - others * unlucky)
    return 1 - others - doubt > 0.5 and either > 0.125


@_rule("dead_weight", FRONTIER, INFORMATIVE, explains=("too_hard", "too_easy", *STILL), shows=dead)
def _(seen: Seen) -> str | None:
    """From the tenth step, half of the groups are all correct or all incorrect, an eighth at least of
    either, beyond chance and beyond what luck adds in small groups, and not one text each, and accuracy does
    not rise beyond chance; a curriculum has met every problem. Because then the data is uneven, not the task:
    some prompts always waste their rollouts, while one group of four in eight is dead at a pass rate of .5.
    """
    easy, hard = seen.late("groups/dead_correct"), seen.late("groups/dead_incorrect")
    uneven = easy + hard > 0.5 and min(easy, hard) > 0.125 and seen.late("groups/collapsed") < 0.25
    early = not seen.after(10) or seen.late("difficulty/tried") < 1
    if early or not (uneven and _wasted_beyond_luck(seen)) or seen.rose("accuracy", 0.05):
        return None
    parts = f"always solved ({percent(easy)}) or never ({percent(hard)})"
    return f"{percent(easy + hard)} of what is sampled is wasted on prompts that are {parts}"


@_rule(
    "too_hard",
    group_size,
    FRONTIER,
    advice="a cold start (a stage with method: sft), or easier problems",
    explains=STILL,
    shows=dead,
)
def _(seen: Seen) -> str | None:
    """From the tenth step, more than half of the groups are all incorrect, beyond chance, with texts that
    differ, and at its pace the run would not come to five points more correct answers, beyond chance.
    Because at a pass rate of 8 % half of the groups of eight are dead; a run that learns slowly begins so as
    well, and what a few steps of few groups show does not tell them apart.
    """
    tied, cliff = seen.late("groups/dead_incorrect"), seen.late("groups/cliff")
    same = cliff < 0.5  # their texts are the same: not the task, but the policy has ended exploration
    surely = seen.least("groups/dead_incorrect") if seen.patient else tied
    learns = seen.patient and not seen.outlook("accuracy")[1] < LITTLE
    if not (seen.after(10) and surely > 0.5) or same or learns:
        return None
    texts = ", though their texts differ (a cliff)" if cliff >= 0.5 else ""
    return f"{percent(tied)} of the groups are dead because every answer is incorrect{texts}"


@_rule(
    "too_easy", INFORMATIVE, FRONTIER, advice="harder problems, these are solved", explains=STILL, shows=dead
)
def _(seen: Seen) -> str | None:
    """From the tenth step, more than half of the groups are all correct, as in the first steps. Because a
    run that has learned ends so as well: only one that began so has nothing to learn from these problems.
    """
    tied = seen.late("groups/dead_correct")
    if not (seen.after(10) and tied > 0.5 and (seen.early("groups/dead_correct") > 0.5 or not seen.patient)):
        return None
    return (
        f"{percent(tied)} of the groups are dead because every answer is correct: these problems are solved"
    )


@_rule(
    "tied",
    with_reward("exact_answer", 1.0),
    advice="weights that pay a correct answer more than an incorrect one",
    explains=STILL,
    shows=dead,
)
def _(seen: Seen) -> str | None:
    """From the tenth step, more than half of the groups tie though some of their answers are correct and
    some are not. Because rewards that follow the verdict cannot tie there.
    """
    kinds = ("correct", "incorrect", "unscored")
    part = seen.late("groups/dead") - sum(seen.late(f"groups/dead_{kind}") for kind in kinds)
    if not (seen.after(10) and part > 0.5):
        return None
    return f"{percent(part)} of the groups tie though only some of their answers are correct (a cliff)"


@_rule(
    "zero_advantage",
    to("rollout.mask_truncated", False),
    to("algorithm.advantage", "group_centered"),
    severity="severe",
    explains=STILL,
)
def _(seen: Seen) -> str | None:
    """For three steps nothing was trained though half of the groups have different rewards. Because then it
    is the estimator that gives every answer 0, or rollout.mask_truncated where most is truncated.
    """
    waits = seen.late("optimizer/updates") == 0  # for a critic that learns first
    moving = waits or seen.late("optimizer/grad_norm") > 0 or seen.late("optimizer/skipped") > 0
    alike = seen.late("reward/std") == 0  # groups that a critic gives advantages by token are never dead
    if not (seen.after(3) and seen.late("groups/dead") < 0.5) or moving or alike:
        return None
    if seen.setting("rollout.mask_truncated") is True and seen.late("length/truncated") > 0.5:
        return "most completions are truncated, and rollout.mask_truncated trains none of these"
    return "rewards differ within groups, so it is algorithm.advantage that gives every answer 0"


@_rule("no_motion", weaker_pull, scaled_adapter, raised_lr, explains=("flat", "too_hard", "dead_weight"))
def _(seen: Seen) -> str | None:
    """After 20 steps the policy is less than .001 nats a completion from where it began, or after five and
    the warm-up less than a millionth, though groups differ. Because a step that changes what is sampled
    leaves more than that, and below a millionth nothing but rounding differs.
    """
    moved, updates = abs(seen.late("kl/start")), seen.late("optimizer/updates")
    warm = seen.setting("train.warmup_steps")
    begun = 5 + (warm if isinstance(warm, int) else 0)
    still = (seen.after(20) and moved < 1e-3) or (seen.after(begun) and moved < 1e-6)
    if not (still and updates > 0 and seen.late("groups/dead") < 0.9):
        return None
    said = f"after {seen.steps} steps the policy is {moved:.1e} nats a completion from where it began"
    if faint_adapter(seen):
        alpha, rank = seen.setting("lora.alpha"), seen.setting("lora.rank")
        return f"{said}: lora.alpha {alpha:g} over rank {rank} scales every update by {alpha / rank:.1e}"
    return f"{said}: train.lr {seen.late('optimizer/lr'):.1e} has no effect"


@_rule("flat", weaker_pull, scaled("train.lr", 3, 3e-6), severity="note", advice="more train.steps")
def _(seen: Seen) -> str | None:
    """From the 25th step, at its pace the reward will have moved by less than a fifth of its std when the run
    ends, beyond chance, though groups differ and a tenth is incorrect. Because what counts is not the number
    of steps: published runs take hundreds for what is two std.
    """
    ends, std = seen.outlook("reward/mean"), seen.early("reward/std")
    still = max(map(abs, ends)) < 0.2 * std and seen.late("groups/dead") < 0.5
    if not (seen.after(25) and still and seen.late("accuracy") < 0.9):
        return None
    return f"the reward has not moved ({abs(seen.rise('reward/mean')):.3f}), although groups differ"


@_rule(
    "other_problems",
    to("data.test", None),
    severity="note",
    advice="problems of one kind in data.train and data.test, or a verdict that is read as one of transfer",
)
def _(seen: Seen) -> str | None:
    """In the first steps, training problems and held-out ones are solved to shares that differ by a quarter,
    beyond chance. Because problems of one kind are solved alike before anything is learned: those that are
    measured are of another kind, or the model knows the others.
    """
    first = seen.beginning[:2]
    if not seen.evals or not seen.after(2) or seen.setting("rollout.curriculum") == "frontier":
        return None
    rate, held_out = mean_of(first, "accuracy"), seen.evals[0].pass_rate
    training = noise([first], "accuracy").error(len(first))
    doubt = math.hypot(training, float(held_out.std()) / math.sqrt(len(held_out)))
    apart = abs(rate - float(held_out.mean()))
    if not (apart > 0.25 and apart > errors_needed(math.inf, 1) * doubt):
        return None
    return (
        f"{percent(rate)} are correct in training at first, {percent(float(held_out.mean()))} on held-out "
        "problems: these are of another kind"
    )

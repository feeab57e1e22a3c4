"""Rules that name causes in rewards, sampling and data. Thresholds are for tasks with 0/1 rewards.

A rule reads means over the last steps (`late`) and the first ones (`early`). Its docstring is the threshold
and, after "Because", the reason; docs/findings.md has the table that is made of them.
"""

from __future__ import annotations

import math

from covey.insight.findings import FindingRule, Seen, collector, unknown
from covey.insight.remedies import (
    BY_STD,
    LARGER_GROUPS,
    MODELS,
    PULL,
    QUIET,
    WITHOUT_STD,
    at_least,
    dead,
    gated,
    largest,
    near_tie,
    of_status,
    paid_differently,
    paid_incorrect,
    reading_last_number,
    reward_of,
    rewards,
    scaled,
    spec_name,
    spec_settings,
    specs_of,
    to,
    verified,
    where_failed,
    with_reward,
)
from covey.insight.verdict import course
from covey.objective.signs import lone, mixes_scripts

NO_SIGNAL = ("too_hard", "too_easy", "tied", "dead_weight", "zero_advantage")
STILL = ("flat", "no_motion", "held_out_flat")
OUTCOMES = (*NO_SIGNAL, *STILL, "worse", "entropy_collapse", "duplicates", "kl_growth", "length_bias")
"""What any bad reward ends in."""
CAUSES: list[FindingRule] = []
_rule = collector(CAUSES)


def percent(fraction: float) -> str:
    """As people read it."""
    return f"{100 * fraction:.0f} %"


@_rule(
    "scores_fail",
    where_failed("scoring.timeout", 600.0, models=False),  # a judge over the network has its own wait
    where_failed("scoring.max_infra", 0.05),
    severity="severe",
    advice="`covey score` on some completions: what do the functions say?",
    explains=OUTCOMES,
    shows=of_status("infra_error", "bad_reference"),
)
def _(seen: Seen) -> str | None:
    """More than 5 % of the completions have no score, or 5 % of one function's scores failed. Because what
    is left out is rarely left out at random; a loaded machine alone fails less often.
    """
    name, failed = largest(seen.names("reward/", "/infra_error"))
    if failed > 0.05:
        return f"{percent(failed)} of the scores of {name} failed (infra_error)"
    unscored = seen.late("reward/unscored")
    if not unscored > 0.05:
        return None
    name, silent = largest(seen.names("reward/", "/not_applicable"))
    whose = f": {name} says nothing of {percent(silent)} (not_applicable)" if silent > 0.05 else ""
    return f"{percent(unscored)} of the completions could not be scored{whose}"


@_rule(
    "paid_by_model",
    PULL,
    severity="note",
    advice="a verdict that a program can check, or tuning on preferences where none can",
    explains=("held_out_flat", "kl_growth", "worse", "near_ties"),
    shows=reward_of,
)
def _(seen: Seen) -> str | None:
    """From the first step, where a model gives at least half of the reward and nothing gates it. Because a
    policy that is trained against a model finds what it overrates; a smaller part is outvoted.
    """
    free = [s for s in specs_of(seen) if "gated_by" not in spec_settings(s)]
    weights = {spec_name(s): float(str(spec_settings(s).get("weight", 1.0))) for s in free}
    learned = [name for name in weights if name in MODELS]
    part = sum(abs(weights[n]) for n in learned) / (sum(map(abs, weights.values())) or 1.0)
    if part < 0.5:
        return None
    said = f"{percent(part)} of the reward is what a model says ({', '.join(learned)})"
    return f"{said}: it has blind spots, and training finds them"


@_rule(
    "overoptimised",
    PULL,
    advice="a reward model refreshed on this run's completions: covey pairs, then method: reward_model",
    explains=("held_out_flat", "kl_growth", "worse", "paid_by_model", "flat"),
    shows=reward_of,
)
def _(seen: Seen) -> str | None:
    """From the fifteenth step, a learned reward has risen and ranks a correct answer above an incorrect one
    in a tenth fewer of the cases than at first. Because it then pays for what it overrates; where the
    policy gets better by it, its ranking of right and wrong stays.
    """
    for name in MODELS:
        before, now = (f(f"reward/{name}/agreement") for f in (seen.early, seen.late))
        rise = seen.rise(f"reward/{name}/mean")
        if seen.after(15) and rise > 0 and now < before - 0.1:
            said = f"{name} is over-optimised: it gives {rise:+.2g} more than at first, and ranks a correct"
            return (
                f"{said} answer above an incorrect one in {percent(now)} of the cases, not {percent(before)}"
            )
    return None


@_rule(
    "cancelled",
    rewards(gated),
    severity="severe",
    advice="other weights",
    explains=(*OUTCOMES, "constant_reward", "conflict"),
)
def _(seen: Seen) -> str | None:
    """For three steps every completion was paid the same in all, though two of the rewards differ from one to
    another. Because weights that add up to the same for every answer leave nothing to tell them apart.
    """
    varied = [n for n, std in seen.names("reward/", "/std").items() if "/" not in n and std > 0.01]
    if not (seen.after(3) and seen.late("reward/std") < 1e-6 and len(varied) > 1):
        return None
    said = f"{' and '.join(varied)} cancel out: each differs from answer to answer"
    return f"{said}, their weighted sum is always {seen.late('reward/mean'):.3g}"


@_rule(
    "constant_reward",
    rewards(verified),
    to("guards.dead_steps", 5),
    severity="severe",
    advice="`covey score` on some completions",
    explains=OUTCOMES,
    shows=dead,
)
def _(seen: Seen) -> str | None:
    """For five steps every completion got the same from your own function, or a value that is neither 0 nor
    1. Because built-in verdicts are asked about a known answer in each step: there a constant 0 is a hard
    task.
    """
    value, own = seen.late("reward/mean"), [n for n in map(spec_name, specs_of(seen)) if ":" in n]
    if not (seen.after(5) and seen.late("reward/std") == 0 and seen.late("groups/dead") == 1):
        return None
    cut = value == 0 and seen.late("length/truncated") > 0.5  # nothing was there to be paid
    if cut or (value in (0.0, 1.0) and not own):
        return None
    whose = f" from {own[0]}" if own else ""
    return f"every completion of the last steps got the reward {value:g}{whose}: it tells nothing apart"


@_rule(
    "unread",
    rewards(reading_last_number),
    advice="`covey score` on some completions: which form does the function read?",
    explains=(*OUTCOMES, "unparsable", "constant_reward"),
    shows=reward_of,
)
def _(seen: Seen) -> str | None:
    """Less than a twentieth is correct, and the right answer stands in a fifth more of the texts, beyond
    chance, counted against how often another problem's answer stands there. Because what the model knows
    and the verdict does not read is a matter of form: no harder training mends it.
    """
    inside, right = seen.least("text/reference"), seen.late("accuracy")
    by_chance = seen.late("text/reference_elsewhere")
    if not (right < 0.05 and inside > by_chance + right + 0.2):
        return None
    said = f"the right answer stands in {percent(seen.late('text/reference'))} of the completions"
    return f"{said}, and {percent(right)} are correct: the verdict does not read what is written"


@_rule(
    "answers_by_chance",
    to("data.answer", "answer", lambda own: own is None),
    advice="look at some rows: do the answers belong to their prompts?",
    explains=(*NO_SIGNAL, *STILL),
)
def _(seen: Seen) -> str | None:
    """From the tenth step, the problem's own answer stands in the texts no more often than another problem's,
    or by less than half as often again, beyond chance, and not more is correct. Because a model that knows
    anything of its problems says their answers first; where it does not, the rows may be mixed up.
    """
    (own, doubt), (other, more) = (seen.whole(f"text/reference{where}") for where in ("", "_elsewhere"))
    close = own - other + math.hypot(doubt, more) < 0.5 * other
    if not (seen.after(10) and other > 0.02 and close) or seen.rise("accuracy") > 0.05:
        return None
    said = f"the right answer stands in {percent(own)} of the completions, another problem's in"
    return (
        f"{said} {percent(other)}: the model knows nothing of these problems, or the answers are not theirs"
    )


@_rule(
    "outweighed",
    to("algorithm.advantage", "group_zscore"),
    scaled("algorithm.kl.coef", 100, 1.0),
    advice="smaller weights of the rewards",
    explains=("kl_growth", "worse", "leaps", "wide_ratios"),
)
def _(seen: Seen) -> str | None:
    """From the second step, the rewards' std is 5000 times the KL's coefficient, under an estimator that does
    not divide by a std. Because published runs have 5 to 500: here the KL holds nothing, whatever it is.
    """
    std, coef = seen.late("reward/std"), seen.setting("algorithm.kl.coef")
    divides = seen.setting("algorithm.advantage") in BY_STD or seen.setting("algorithm.whiten") is not None
    held = isinstance(coef, int | float) and coef > 0 and std > 5000 * coef
    if not (seen.after(2) and held) or divides or seen.setting is unknown:
        return None
    return (
        f"rewards differ by {std:.3g} and the KL's coefficient is {coef:g}: the rewards' scale outweighs it"
    )


@_rule(
    "fooled",
    rewards(verified),
    to("rewards", ["exact_answer"]),
    severity="severe",
    advice="`covey stress`, which names the attack",
    explains=(*OUTCOMES, "farmed", "truncated", "repetition", "std_overweight"),
    shows=reward_of,
)
def _(seen: Seen) -> str | None:
    """From the fifth step, more than four in five of the correct completions that were tried are correct
    for another problem too, under a verdict of 0 or 1. Because an honest one agrees only where answers
    coincide: about half of the time for yes and no; one that grades calls much correct that is near.
    """
    elsewhere = seen.late("reward/paid_elsewhere")
    if not (seen.after(5) and elsewhere > 0.8 and seen.late("accuracy") > 0.05) or seen.grades:
        return None
    said = f"{percent(elsewhere)} of the correct completions are correct for another problem too"
    return f"{said}: the verdict can be fooled"


@_rule(
    "visible_gap",
    rewards(lambda own: [{"code_tests": {**spec_settings(s), "points": "all"}} for s in own]),
    severity="severe",
    advice="more hidden tests in the data, so that only these pay",
    explains=("held_out_flat", "farmed", "length_bias"),
    shows=reward_of,
)
def _(seen: Seen) -> str | None:
    """From the tenth step, visible tests pass a tenth more often than hidden ones (`gap`), and it is not
    getting less. Because chance differences of a batch are a few points; a tenth is programs that are
    written for the tests they see.
    """
    name, gap = largest(seen.names("reward/", "/gap"))
    if not (seen.after(10) and gap > 0.1) or seen.falling(f"reward/{name}/gap"):
        return None
    return f"{name}: visible tests pass {percent(gap)} more often than hidden ones: they are special-cased"


@_rule(
    "mixed_scripts",
    with_reward("language_consistency", 1.0),
    PULL,
    explains=("length_bias", "kl_growth", "truncated", "worse"),
    shows=lambda group, i: float(mixes_scripts(group.completions[i].text)),
)
def _(seen: Seen) -> str | None:
    """More than a tenth of the completions mix scripts, a twentieth more than at first, beyond chance.
    Because prompts may mix them too: what counts is that training does.
    """
    mixed, before = seen.late("text/mixed_scripts"), seen.early("text/mixed_scripts")
    if not (mixed > 0.1 and seen.rose("text/mixed_scripts", 0.05)):
        return None
    return f"{percent(mixed)} of the completions mix languages (scripts), {percent(before)} did at first"


@_rule(
    "farmed",
    rewards(gated),
    severity="severe",
    advice="other weights",
    explains=(*OUTCOMES, "conflict", "unparsable", "truncated"),
    shows=paid_incorrect,
)
def _(seen: Seen) -> str | None:
    """Fewer completions are correct than at first, or a verdict that grades gives less, beyond chance, while
    a reward rose by a tenth, beyond chance, or stays above .9 where a tenth fewer are; or it rose at all,
    where held-out problems earn more and fewer of them are solved, beyond chance. Nothing where held-out
    answers did not fall, or a verdict that grades gives clearly more. Because a format that is learned raises
    both; one that is farmed costs answers; and a weak model whose form is right scatters by as much from step
    to step.
    """
    lost = "accuracy" if seen.paid_for_worse else seen.lost
    if not lost or seen.graded_higher:
        return None
    now, before = seen.late(lost), seen.early(lost)
    means = {name: late for name, late in seen.names("reward/", "/mean").items() if "/" not in name}
    for name, late in means.items() if len(means) > 1 else ():
        mean = f"reward/{name}/mean"
        if mean == lost or seen.same(mean, "accuracy"):
            continue  # the verdict itself
        early = seen.early(mean)
        stays = late > 0.9 and late >= early > 0.5 and before - now > 0.1
        if stays or seen.rose(mean, 0.1) or (seen.paid_for_worse and late > early):
            answers = f"correct answers from {percent(before)} to {percent(now)}"
            if lost != "accuracy":
                answers = f"{lost.split('/')[1]} from {before:.2g} to {now:.2g}"
            if seen.paid_for_worse:
                answers = f"held-out answers {course(seen.evals[0], seen.evals[-1])}"
            return f"{name} went from {early:.2g} to {late:.2g} and {answers}: it is farmed"
    return None


@_rule(
    "noisy_steps",
    QUIET,
    LARGER_GROUPS,
    advice="a better judge of steps",
    explains=(*OUTCOMES, "inconsistent"),
    shows=paid_differently,
)
def _(seen: Seen) -> str | None:
    """From the fifth step, a twentieth of the steps that siblings have in common was not paid the same.
    Because the same tokens after the same tokens are the same step: any difference is the judge's noise.
    """
    noise = seen.late("steps/inconsistent")
    if not (seen.after(5) and noise > 0.05):
        return None
    return f"{percent(noise)} of the steps that siblings share were not paid the same: step rewards are noisy"


@_rule(
    "inconsistent",
    QUIET,
    LARGER_GROUPS,
    advice="the mean of several verdicts on a completion",
    explains=OUTCOMES,
    shows=paid_differently,
)
def _(seen: Seen) -> str | None:
    """From the fifth step, a twentieth of the completions that are copies of a sibling was paid
    differently. Because the same tokens for the same problem deserve the same: any difference is noise.
    """
    noise = seen.late("reward/inconsistent")
    if not (seen.after(5) and noise > 0.05):
        return None
    return f"{percent(noise)} of the copies of a sibling were paid differently: the reward is noisy"


@_rule("critic", scaled("algorithm.critic.lr", 1 / 3, 1e-5), severity="severe", explains=OUTCOMES)
def _(seen: Seen) -> str | None:
    """From the fifth step, the critic's explained variance is below 0 and its error half as large again as
    at first. Because a critic that is worse than the mean of the returns adds noise to every advantage.
    """
    off, explained = seen.late("value/error"), seen.late("value/explained_variance")
    if not (seen.after(5) and explained < 0 and off > 1.5 * seen.early("value/error")):
        return None
    return f"the critic diverges: its error rose to {off:.3g}, its explained variance is {explained:.2g}"


@_rule(
    "near_ties",
    WITHOUT_STD,
    to("algorithm.advantage.eps", 0.1),
    explains=("std_overweight", "small_group", *STILL),
    shows=near_tie,
)
def _(seen: Seen) -> str | None:
    """From the fifth step, a third of the groups that train differ by less than 5 % of the range of
    rewards, and the advantage divides by their std. Because .95 against .96 then weighs as much as 0
    against 1.
    """
    ties = seen.late("groups/near_ties")
    if not (seen.after(5) and ties > 1 / 3 and seen.setting("algorithm.advantage") in BY_STD):
        return None
    return f"{percent(ties)} of the groups that train nearly tie, and the std blows their differences up"


@_rule(
    "small_group",
    to("rollout.group_size", 16, at_least(5)),
    severity="note",
    explains=("std_overweight", *STILL),
    shows=lambda group, i: float(lone(group) == i),
)
def _(seen: Seen) -> str | None:
    """From the fifth step, with up to four completions a group, one stands against all others in half of
    the groups that train. Because one of four then gets +1.5, whatever luck it had; of 16 it is compared
    better.
    """
    size, alone = seen.setting("rollout.group_size"), seen.late("groups/one_against_all")
    if not (seen.after(5) and isinstance(size, int) and 1 < size <= 4 and alone > 0.5):
        return None
    most = (size - 1) / math.sqrt(size)
    said = f"in {percent(alone)} of the groups that train one outlier of {size} decides"
    return f"{said}: it gets {most:.2g}, by luck or not"


@_rule(
    "std_overweight",
    WITHOUT_STD,
    severity="note",
    explains=("flat",),
    shows=lambda group, i: float(lone(group) == i),
)
def _(seen: Seen) -> str | None:
    """From the fifth step, with more than eight completions a group, a tenth of the gradient lies in other
    groups than rewards less their mean would put it, in all steps beyond chance, under an estimator that
    divides by the std. Because 1 / sqrt(p(1 - p)) is 4.6 at p = .05 and 2 at one half; one success of eight
    gets 3.
    """
    moved, size = seen.late("gradient_share/overweight"), seen.setting("rollout.group_size")
    share, doubt = seen.whole("gradient_share/overweight")
    surely = min(moved, share - doubt) > 0.1 and isinstance(size, int) and size > 8
    if not (seen.after(5) and surely and seen.setting("algorithm.advantage") in BY_STD):
        return None
    return f"the std moves {percent(moved)} of the gradient to prompts that are very easy or very hard"


@_rule("conflict", rewards(gated), explains=("flat",))
def _(seen: Seen) -> str | None:
    """From the fifteenth step, two rewards have a correlation below -.3, do not both rise, and 90 % are not
    correct. Because each is then earned at the other's cost, and their sum moves less than either; weaker
    correlations come and go, and where all is correct only what is left differs.
    """
    found = {
        name: -r
        for name, r in seen.names("reward/correlation/").items()
        if not all(seen.rose(f"reward/{one}/mean", 0.0) for one in name.split("/"))
    }
    name, strength = largest(found)
    if not (seen.after(15) and strength > 0.3 and seen.late("accuracy") < 0.9):
        return None
    return f"rewards {' and '.join(name.split('/'))} pull apart (r {-strength:.2f})"

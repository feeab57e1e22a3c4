"""Rules about rewards and answers: what is paid, and whether it is what was meant."""

from __future__ import annotations

import math

from covey.insight.conclusion import course
from covey.insight.findings.completions import (
    first_of_dead,
    mixed_scripts,
    of_status,
    paid_differently,
    paid_incorrect,
    reward_of,
)
from covey.insight.findings.remedies import (
    DIVIDES_BY_STD,
    GATED,
    LARGER_GROUPS,
    MODELS,
    PULL,
    QUIET,
    VERIFIED,
    ChangeRewards,
    ChangeTo,
    IfRewardsFail,
    ScaleBy,
    all_points,
    largest,
    read_last_number,
    spec_name,
    spec_settings,
    specs_of,
    with_reward,
)
from covey.insight.findings.rule import NO_SIGNAL, OUTCOMES, STILL, Rule
from covey.insight.findings.settings import unknown
from covey.insight.findings.view import RunView
from covey.system.text import percent


def scores_are_missing(run: RunView) -> str | None:
    """More than 5 % of the completions have no score, or more than 5 % of one function's scores failed."""
    name, failed = largest(run.names("reward/", "/infra_error"))
    if failed > 0.05:
        return f"{percent(failed)} of the scores of {name} failed (infra_error)"
    unscored = run.late("reward/unscored")
    if not unscored > 0.05:
        return None
    name, silent = largest(run.names("reward/", "/not_applicable"))
    culprit = f": {name} says nothing about {percent(silent)} (not_applicable)" if silent > 0.05 else ""
    return f"{percent(unscored)} of the completions could not be scored{culprit}"


def models_give_most_of_the_reward(run: RunView) -> str | None:
    """Models give at least half of the reward, and no other reward gates them."""
    free = [s for s in specs_of(run) if "gated_by" not in spec_settings(s)]
    # Gated rewards are left out: a verdict decides whether they count.
    weights = {spec_name(s): float(str(spec_settings(s).get("weight", 1.0))) for s in free}
    learned = [name for name in weights if name in MODELS]
    part = sum(abs(weights[n]) for n in learned) / (sum(map(abs, weights.values())) or 1.0)
    if part < 0.5:
        return None
    return (
        f"{percent(part)} of the reward is a model's opinion ({', '.join(learned)}): it has blind spots, and "
        "training finds them"
    )


def learned_reward_ranks_worse(run: RunView) -> str | None:
    """A learned reward has risen, but it ranks a correct answer above an incorrect one less often: the
    fraction of such cases has dropped by more than .1.
    """
    for name in MODELS:
        before = run.early(f"reward/{name}/agreement")
        late = run.late(f"reward/{name}/agreement")
        rise = run.rise(f"reward/{name}/mean")
        if rise > 0 and late < before - 0.1:
            return (
                f"{name} is over-optimised: its mean rose by {rise:.2g}, but it ranks a correct answer above "
                f"an incorrect one in {percent(late)} of the cases, down from {percent(before)}"
            )
    return None


def rewards_cancel_out(run: RunView) -> str | None:
    """Every completion got the same total reward, although at least two reward functions vary."""
    varied = [n for n, std in run.names("reward/", "/std").items() if "/" not in n and std > 0.01]
    if not (run.late("reward/std") < 1e-6 and len(varied) > 1):
        return None
    return (
        f"{' and '.join(varied)} cancel out: each varies from answer to answer, but their weighted sum is "
        f"always {run.late('reward/mean'):.3g}"
    )


def every_reward_is_the_same(run: RunView) -> str | None:
    """Every completion got the same reward, which comes from a function of the user's or is neither 0 nor 1.
    The rule does not apply to a reward of 0 if more than half of the completions are truncated, nor if
    rewards differed at first and were lower.
    """
    value = run.late("reward/mean")
    of_user = [n for n in map(spec_name, specs_of(run)) if ":" in n]  # module.py:function
    if not (run.late("reward/std") == 0 and run.late("groups/dead") == 1):
        return None
    if run.early("reward/std") > 0 and value > run.early("reward/mean"):  # the task is solved
        return None
    truncated = value == 0 and run.late("length/truncated") > 0.5  # there was nothing to be paid
    if truncated or (value in (0.0, 1.0) and not of_user):
        return None
    source = f" from {of_user[0]}" if of_user else ""
    return (
        f"every completion of the last steps got the reward {value:g}{source}: it cannot tell answers apart"
    )


def answers_are_written_but_not_read(run: RunView) -> str | None:
    """Less than a twentieth of the completions are correct, but far more contain the reference answer: more
    than the correct ones and the ones with another problem's answer together, by a fifth of all completions,
    beyond chance.
    """
    inside = run.least("text/reference")
    correct = run.late("accuracy")
    by_chance = run.late("text/reference_elsewhere")
    if not (correct < 0.05 and inside > by_chance + correct + 0.2):
        return None
    return (
        f"{percent(run.late('text/reference'))} of the completions contain the correct answer, but "
        f"{percent(correct)} are correct: the verdict does not read it"
    )


def answers_are_no_better_than_chance(run: RunView) -> str | None:
    """Texts contain the answer to their problem hardly more often than the answer to another problem: less
    than 1.5 times as often, and by less than a tenth of the texts without that other answer. Both hold beyond
    chance, and accuracy has not risen by five points.
    """
    correct, correct_doubt = run.whole("text/reference")
    elsewhere, elsewhere_doubt = run.whole("text/reference_elsewhere")
    # Texts that work with few numbers contain most of them: a given digit is in three of four. Then even a
    # model that knows every answer stays below 1.5 times, and what it knows shows in the rest, 1 - other.
    doubt = math.hypot(correct_doubt, elsewhere_doubt)
    close = correct - elsewhere + doubt < min(0.5 * elsewhere, 0.1 * (1 - elsewhere))
    if not (elsewhere > 0.02 and close) or run.rise("accuracy") > 0.05:
        return None
    return (
        f"{percent(correct)} of the completions contain the correct answer, {percent(elsewhere)} another "
        "problem's: the model knows nothing about these problems, or the answers belong to others"
    )


def rewards_outweigh_the_kl(run: RunView) -> str | None:
    """The std of the rewards is more than 5000 times the coefficient of the KL, under an estimator that does
    not divide by a std.
    """
    std = run.late("reward/std")
    coef = run.setting("algorithm.kl.coef")
    whitens = run.setting("algorithm.whiten") is not None
    divides = whitens or run.setting("algorithm.advantage") in DIVIDES_BY_STD
    outweighed = isinstance(coef, int | float) and coef > 0 and std > 5000 * coef
    if not outweighed or divides or run.setting is unknown:
        return None
    return (
        f"the std of the rewards is {std:.3g} and the coefficient of the KL {coef:g}: the rewards outweigh "
        "the KL"
    )


def the_verdict_accepts_other_answers(run: RunView) -> str | None:
    """Under a verdict of 0 or 1, more than four in five of the correct completions that were tried are
    correct for another problem too, and more than a twentieth of all completions are correct.
    """
    elsewhere = run.late("reward/paid_elsewhere")
    if not (elsewhere > 0.8 and run.late("accuracy") > 0.05) or run.verdict_is_graded:
        return None
    return (
        f"{percent(elsewhere)} of the correct completions are correct for another problem too: the verdict "
        "can be fooled"
    )


def visible_tests_pass_more_often(run: RunView) -> str | None:
    """Visible tests pass more often than hidden ones, by more than a tenth (`gap`), and the gap is not
    closing.
    """
    name, gap = largest(run.names("reward/", "/gap"))
    if not gap > 0.1 or run.is_falling(f"reward/{name}/gap"):
        return None
    return f"{name}: visible tests pass {percent(gap)} more often than hidden ones: they are special-cased"


def more_texts_mix_scripts(run: RunView) -> str | None:
    """More than a tenth of the completions mix scripts, and a twentieth more than at first, beyond chance."""
    mixed = run.late("text/mixed_scripts")
    before = run.early("text/mixed_scripts")
    if not (mixed > 0.1 and run.rose("text/mixed_scripts", 0.05)):
        return None
    return f"{percent(mixed)} of the completions mix languages (scripts), {percent(before)} did at first"


def a_reward_rises_while_answers_are_lost(run: RunView) -> str | None:
    """Fewer completions are correct than at first, or a graded verdict pays less, beyond chance. Meanwhile
    another reward rose by a tenth, beyond chance, or stayed above .9 as accuracy fell by a tenth. The rule
    applies as well if held-out problems earn more although fewer of them are solved, beyond chance, and a
    reward rose at all. It does not apply if no fewer held-out problems are solved, or if a graded verdict
    pays clearly more.
    """
    lost = "accuracy" if run.paid_more_for_fewer_solved else run.fallen_metric
    if not lost or run.grades_rose:
        return None
    after = run.late(lost)
    before = run.early(lost)
    means = run.reward_means
    if len(means) < 2:
        return None
    for name, late in means.items():
        mean = f"reward/{name}/mean"
        if mean == lost or run.same(mean, "accuracy"):
            continue  # the verdict itself
        early = run.early(mean)
        # A reward that was nearly full from the start cannot rise any more.
        stays_full = late > 0.9 and late >= early > 0.5 and before - after > 0.1
        if stays_full or run.rose(mean, 0.1) or (run.paid_more_for_fewer_solved and late > early):
            answers = f"correct answers from {percent(before)} to {percent(after)}"
            if lost != "accuracy":
                answers = f"{lost.split('/')[1]} from {before:.2g} to {after:.2g}"
            if run.paid_more_for_fewer_solved:
                answers = f"held-out answers {course(run.evals[0], run.evals[-1])}"
            return (
                f"{name} went from {early:.2g} to {late:.2g} and {answers}: the policy exploits this reward"
            )
    return None


def shared_steps_are_paid_differently(run: RunView) -> str | None:
    """More than a twentieth of the steps that siblings share were not paid the same."""
    noise = run.late("steps/inconsistent")
    if not noise > 0.05:
        return None
    return f"{percent(noise)} of the steps that siblings share were not paid the same: step rewards are noisy"


def copies_are_paid_differently(run: RunView) -> str | None:
    """More than a twentieth of the completions that are copies of a sibling were paid differently."""
    noise = run.late("reward/inconsistent")
    if not noise > 0.05:
        return None
    return f"{percent(noise)} of the copies of a sibling were paid differently: the reward is noisy"


RULES = (
    Rule(
        "scores_fail",
        scores_are_missing,
        severity="severe",
        reason="Completions are rarely left out at random. A loaded machine alone causes fewer failures.",
        remedies=(
            # A judge over the network has its own time limit.
            IfRewardsFail(ChangeTo("scoring.timeout", 600.0), models=False),
            IfRewardsFail(ChangeTo("scoring.max_infra", 0.05)),
        ),
        advice="`covey score` on some completions, which shows what the functions say",
        silences=OUTCOMES,
        shown_by=of_status("infra_error", "bad_reference"),
    ),
    Rule(
        "paid_by_model",
        models_give_most_of_the_reward,
        severity="note",
        reason="A policy that is trained against a model finds what the model overrates. A model that gives "
        "less of the reward is outvoted.",
        remedies=(PULL,),
        advice="a verdict that a program can check; if there is none, preference tuning",
        silences=("held_out_flat", "kl_growth", "worse", "near_ties"),
        shown_by=reward_of,
    ),
    Rule(
        "overoptimised",
        learned_reward_ranks_worse,
        after=15,
        reason="The reward then pays for what it overrates. While it improves the policy, it ranks correct "
        "answers above incorrect ones as often as before.",
        remedies=(PULL,),
        advice="a reward model refreshed on this run's completions: covey pairs, then method: reward_model",
        silences=("held_out_flat", "kl_growth", "worse", "paid_by_model", "flat"),
        shown_by=reward_of,
    ),
    Rule(
        "cancelled",
        rewards_cancel_out,
        after=3,
        severity="severe",
        reason="Weights that add up to the same value for every answer leave nothing to tell answers apart.",
        remedies=(GATED,),
        advice="other weights",
        silences=(*OUTCOMES, "constant_reward", "conflict"),
    ),
    Rule(
        "constant_reward",
        every_reward_is_the_same,
        after=5,
        severity="severe",
        reason="Built-in verdicts are tested on a known answer in each step, so a constant 0 from them means "
        "a hard task.",
        remedies=(VERIFIED, ChangeTo("guards.dead_steps", 5)),
        advice="`covey score` on some completions",
        silences=OUTCOMES,
        shown_by=first_of_dead,
    ),
    Rule(
        "unread",
        answers_are_written_but_not_read,
        reason="If the model knows the answer and the verdict does not read it, the format does not match, "
        "and longer training does not help.",
        remedies=(read_last_number,),
        advice="`covey score` on some completions, which shows what form the function reads",
        silences=(*OUTCOMES, "unparsable", "constant_reward"),
        shown_by=reward_of,
    ),
    Rule(
        "answers_by_chance",
        answers_are_no_better_than_chance,
        after=10,
        reason="A model that knows anything about its problems gives their answers more often than others. "
        "If it does not, the rows may be mixed up.",
        remedies=(ChangeTo("data.answer", "answer", lambda column: column is None),),
        advice="look at some rows, to see whether the answers belong to their prompts",
        silences=(*NO_SIGNAL, *STILL),
    ),
    Rule(
        "outweighed",
        rewards_outweigh_the_kl,
        after=2,
        reason="In published runs the ratio is 5 to 500. Here the KL restrains nothing, however large it "
        "becomes.",
        remedies=(
            ChangeTo("algorithm.advantage", "group_zscore"),
            ScaleBy("algorithm.kl.coef", 100, 1.0),
        ),
        advice="smaller weights of the rewards",
        silences=("kl_growth", "worse", "leaps", "wide_ratios"),
    ),
    Rule(
        "fooled",
        the_verdict_accepts_other_answers,
        after=5,
        severity="severe",
        reason="An honest verdict accepts another problem's answer only if the answers coincide, about half "
        "of the time for yes and no. A verdict that grades counts many near misses as correct.",
        remedies=(VERIFIED, ChangeTo("rewards", ["exact_answer"])),
        advice="`covey stress`, which names the attack",
        silences=(*OUTCOMES, "farmed", "truncated", "repetition", "std_overweight"),
        shown_by=reward_of,
    ),
    Rule(
        "visible_gap",
        visible_tests_pass_more_often,
        after=10,
        severity="severe",
        reason="Differences by chance within a batch are a few points. A tenth means that programs are "
        "written for the tests that the model can see.",
        remedies=(ChangeRewards(all_points),),
        advice="more hidden tests in the data, so that only these pay",
        silences=("held_out_flat", "farmed", "length_bias"),
        shown_by=reward_of,
    ),
    Rule(
        "mixed_scripts",
        more_texts_mix_scripts,
        reason="Prompts may make a model mix scripts too. A rise shows that training does.",
        remedies=(with_reward("language_consistency", 1.0), PULL),
        silences=("length_bias", "kl_growth", "truncated", "worse"),
        shown_by=mixed_scripts,
    ),
    Rule(
        "farmed",
        a_reward_rises_while_answers_are_lost,
        severity="severe",
        reason="Learning a format raises rewards and accuracy; farming it costs correct answers. Both must "
        "change beyond chance, because the accuracy of a weak model varies from step to step.",
        remedies=(GATED,),
        advice="other weights",
        silences=(*OUTCOMES, "conflict", "unparsable", "truncated"),
        shown_by=paid_incorrect,
    ),
    Rule(
        "noisy_steps",
        shared_steps_are_paid_differently,
        after=5,
        reason="The same tokens after the same tokens are the same step: any difference is the judge's "
        "noise.",
        remedies=(QUIET, LARGER_GROUPS),
        advice="a better judge of steps",
        silences=(*OUTCOMES, "inconsistent"),
        shown_by=paid_differently,
    ),
    Rule(
        "inconsistent",
        copies_are_paid_differently,
        after=5,
        reason="The same tokens for the same problem deserve the same reward: any difference is noise.",
        remedies=(QUIET, LARGER_GROUPS),
        advice="the mean of several verdicts on a completion",
        silences=OUTCOMES,
        shown_by=paid_differently,
    ),
)

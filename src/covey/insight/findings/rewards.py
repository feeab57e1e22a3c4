"""Rules about rewards and answers: what is paid, and whether it is what was meant."""

from __future__ import annotations

import math

from covey.insight.findings.completions import (
    first_of_dead,
    mixed_scripts,
    of_status,
    paid_differently,
    paid_incorrect,
    reward_of,
)
from covey.insight.findings.remedies import (
    BY_STD,
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
    reading_last_number,
    spec_name,
    spec_settings,
    specs_of,
    with_reward,
)
from covey.insight.findings.rule import NO_SIGNAL, OUTCOMES, STILL, Rule
from covey.insight.findings.settings import unknown
from covey.insight.findings.view import RunView
from covey.insight.verdict import course
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
    said = f"{percent(part)} of the reward is a model's opinion ({', '.join(learned)})"
    return f"{said}: it has blind spots, and training finds them"


def learned_reward_ranks_worse(run: RunView) -> str | None:
    """A learned reward has risen, but the share of cases in which it ranks a correct answer above an
    incorrect one has dropped by more than .1.
    """
    for name in MODELS:
        before, now = (f(f"reward/{name}/agreement") for f in (run.early, run.late))
        rise = run.rise(f"reward/{name}/mean")
        if rise > 0 and now < before - 0.1:
            said = (
                f"{name} is over-optimised: its mean rose by {rise:.2g}, but it ranks a correct answer above"
            )
            return f"{said} an incorrect one in {percent(now)} of the cases, down from {percent(before)}"
    return None


def rewards_cancel_out(run: RunView) -> str | None:
    """Every completion got the same reward in all, though two reward functions or more vary."""
    varied = [n for n, std in run.names("reward/", "/std").items() if "/" not in n and std > 0.01]
    if not (run.late("reward/std") < 1e-6 and len(varied) > 1):
        return None
    said = f"{' and '.join(varied)} cancel out: each varies from answer to answer"
    return f"{said}, but their weighted sum is always {run.late('reward/mean'):.3g}"


def every_reward_is_the_same(run: RunView) -> str | None:
    """Every completion got the same reward: from a function of the user's own, or a value other than 0 and 1.
    It does not apply to a reward of 0 if more than half of the completions are truncated, nor if rewards
    differed at first and were lower.
    """
    value = run.late("reward/mean")
    own = [n for n in map(spec_name, specs_of(run)) if ":" in n]
    if not (run.late("reward/std") == 0 and run.late("groups/dead") == 1):
        return None
    if run.early("reward/std") > 0 and value > run.early("reward/mean"):  # the task is solved
        return None
    cut = value == 0 and run.late("length/truncated") > 0.5  # there was nothing to be paid
    if cut or (value in (0.0, 1.0) and not own):
        return None
    source = f" from {own[0]}" if own else ""
    return (
        f"every completion of the last steps got the reward {value:g}{source}: it cannot tell answers apart"
    )


def answers_are_written_but_not_read(run: RunView) -> str | None:
    """Less than a twentieth is correct, but the reference answer is in a fifth more of the texts, beyond
    chance, than are correct or contain the answer to another problem.
    """
    inside = run.least("text/reference")
    right = run.late("accuracy")
    by_chance = run.late("text/reference_elsewhere")
    if not (right < 0.05 and inside > by_chance + right + 0.2):
        return None
    said = f"{percent(run.late('text/reference'))} of the completions contain the correct answer"
    return f"{said}, but {percent(right)} are correct: the verdict does not read it"


def answers_are_no_better_than_chance(run: RunView) -> str | None:
    """The texts contain the problem's own answer less than half as often again as the answer to another
    problem, and less than a tenth of the texts without the other have their own, beyond chance, and accuracy
    has not risen by five points.
    """
    # own and other: fractions of texts that contain their own, or another problem's, answer. Texts that work
    # with few numbers have most of them (a digit of seven in three of four), so that even a model that knows
    # every answer has its own less than half as often again. What it knows shows in the rest, 1 - other.
    (own, doubt), (other, more) = (run.whole(f"text/reference{suffix}") for suffix in ("", "_elsewhere"))
    close = own - other + math.hypot(doubt, more) < min(0.5 * other, 0.1 * (1 - other))
    if not (other > 0.02 and close) or run.rise("accuracy") > 0.05:
        return None
    said = f"{percent(own)} of the completions contain the correct answer, {percent(other)} another problem's"
    return f"{said}: the model knows nothing about these problems, or the answers belong to others"


def rewards_outweigh_the_kl(run: RunView) -> str | None:
    """The std of the rewards is more than 5000 times the coefficient of the KL, under an estimator that does
    not divide by a std.
    """
    std = run.late("reward/std")
    coef = run.setting("algorithm.kl.coef")
    divides = run.setting("algorithm.advantage") in BY_STD or run.setting("algorithm.whiten") is not None
    held = isinstance(coef, int | float) and coef > 0 and std > 5000 * coef
    if not held or divides or run.setting is unknown:
        return None
    said = f"the std of the rewards is {std:.3g} and the coefficient of the KL {coef:g}"
    return f"{said}: the rewards outweigh the KL"


def the_verdict_accepts_other_answers(run: RunView) -> str | None:
    """More than four in five of the correct completions that were tried are correct for another problem too,
    under a verdict of 0 or 1, and more than a twentieth is correct.
    """
    elsewhere = run.late("reward/paid_elsewhere")
    if not (elsewhere > 0.8 and run.late("accuracy") > 0.05) or run.verdict_is_graded:
        return None
    said = f"{percent(elsewhere)} of the correct completions are correct for another problem too"
    return f"{said}: the verdict can be fooled"


def visible_tests_pass_more_often(run: RunView) -> str | None:
    """Visible tests pass a tenth more often than hidden ones (`gap`), and the gap is not closing."""
    name, gap = largest(run.names("reward/", "/gap"))
    if not gap > 0.1 or run.falling(f"reward/{name}/gap"):
        return None
    return f"{name}: visible tests pass {percent(gap)} more often than hidden ones: they are special-cased"


def more_texts_mix_scripts(run: RunView) -> str | None:
    """More than a tenth of the completions mix scripts, and a twentieth more than at first, beyond chance."""
    mixed, before = run.late("text/mixed_scripts"), run.early("text/mixed_scripts")
    if not (mixed > 0.1 and run.rose("text/mixed_scripts", 0.05)):
        return None
    return f"{percent(mixed)} of the completions mix languages (scripts), {percent(before)} did at first"


def a_reward_rises_while_answers_are_lost(run: RunView) -> str | None:
    """Fewer completions are correct than at first, or a verdict that grades gives less, beyond chance, while
    another reward rose by a tenth, beyond chance, or stayed above .9 as accuracy fell by a tenth. Or held-out
    problems earn more although fewer of them are solved, beyond chance, and a reward rose at all. It does not
    apply if held-out answers did not fall, or if a verdict that grades gives clearly more.
    """
    lost = "accuracy" if run.paid_more_for_fewer_solved else run.fallen_metric
    if not lost or run.grades_rose:
        return None
    now, before = run.late(lost), run.early(lost)
    means = run.reward_means
    for name, late in means.items() if len(means) > 1 else ():
        mean = f"reward/{name}/mean"
        if mean == lost or run.same(mean, "accuracy"):
            continue  # the verdict itself
        early = run.early(mean)
        # A reward that was nearly full from the start cannot rise any more.
        stays = late > 0.9 and late >= early > 0.5 and before - now > 0.1
        if stays or run.rose(mean, 0.1) or (run.paid_more_for_fewer_solved and late > early):
            answers = f"correct answers from {percent(before)} to {percent(now)}"
            if lost != "accuracy":
                answers = f"{lost.split('/')[1]} from {before:.2g} to {now:.2g}"
            if run.paid_more_for_fewer_solved:
                answers = f"held-out answers {course(run.evals[0], run.evals[-1])}"
            return (
                f"{name} went from {early:.2g} to {late:.2g} and {answers}: the policy exploits this reward"
            )
    return None


def shared_steps_are_paid_differently(run: RunView) -> str | None:
    """More than a twentieth of the steps that siblings share were not paid the same."""
    noise = run.late("steps/inconsistent")
    said = f"{percent(noise)} of the steps that siblings share were not paid the same"
    return f"{said}: step rewards are noisy" if noise > 0.05 else None


def copies_are_paid_differently(run: RunView) -> str | None:
    """More than a twentieth of the completions that are copies of a sibling were paid differently."""
    noise = run.late("reward/inconsistent")
    said = f"{percent(noise)} of the copies of a sibling were paid differently: the reward is noisy"
    return said if noise > 0.05 else None


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
        advice="`covey score` on some completions: what do the functions say?",
        silences=OUTCOMES,
        shown_by=of_status("infra_error", "bad_reference"),
    ),
    Rule(
        "paid_by_model",
        models_give_most_of_the_reward,
        severity="note",
        reason="A policy that is trained against a model finds what the model overrates. A smaller part is "
        "outvoted.",
        remedies=(PULL,),
        advice="a verdict that a program can check; if there is none, preference tuning",
        silences=("held_out_flat", "kl_growth", "worse", "near_ties"),
        shown_by=reward_of,
    ),
    Rule(
        "overoptimised",
        learned_reward_ranks_worse,
        after=15,
        reason="The reward then pays for what it overrates. If the policy improves by it, its ranking of "
        "correct and incorrect answers stays.",
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
        reason="Built-in verdicts are tested on a known answer in each step, so a constant 0 from them is a "
        "hard task.",
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
        remedies=(ChangeRewards(reading_last_number),),
        advice="`covey score` on some completions: which form does the function read?",
        silences=(*OUTCOMES, "unparsable", "constant_reward"),
        shown_by=reward_of,
    ),
    Rule(
        "answers_by_chance",
        answers_are_no_better_than_chance,
        after=10,
        reason="A model that knows anything about its problems gives their answers more often than others. "
        "If it does not, the rows may be mixed up.",
        remedies=(ChangeTo("data.answer", "answer", lambda own: own is None),),
        advice="look at some rows: do the answers belong to their prompts?",
        silences=(*NO_SIGNAL, *STILL),
    ),
    Rule(
        "outweighed",
        rewards_outweigh_the_kl,
        after=2,
        reason="In published runs the ratio is 5 to 500. Here the KL holds nothing, however large it is.",
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
        reason="Chance differences within a batch are a few points. A tenth means programs written for the "
        "tests that they can see.",
        remedies=(ChangeRewards(all_points),),
        advice="more hidden tests in the data, so that only these pay",
        silences=("held_out_flat", "farmed", "length_bias"),
        shown_by=reward_of,
    ),
    Rule(
        "mixed_scripts",
        more_texts_mix_scripts,
        reason="Prompts may mix scripts too. The rise shows that training does.",
        remedies=(with_reward("language_consistency", 1.0), PULL),
        silences=("length_bias", "kl_growth", "truncated", "worse"),
        shown_by=mixed_scripts,
    ),
    Rule(
        "farmed",
        a_reward_rises_while_answers_are_lost,
        severity="severe",
        reason="Learning a format raises both; farming one costs answers. A weak model whose format is "
        "correct varies by as much from step to step.",
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

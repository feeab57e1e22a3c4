"""The changes that a preview recommends before the run."""

from __future__ import annotations

import numpy as np

from covey.insight.answers import Advice, habits, quote_completion
from covey.insight.odds import reward_counts, tie_chances
from covey.insight.preview import MANY_TRUNCATED, MAX_DEAD, Longer, Preview
from covey.objective.diagnostics import sampled_entropy
from covey.objective.texts import answers_inside
from covey.runs.estimates import Estimate, gain
from covey.system.text import percent

MUCH_UNREAD = 0.2
"""Completions with the correct answer in the text, minus correct ones and ones with another's answer."""
LOOP = 8
"""Tokens of the window whose repetition shows that a completion loops."""
WIDE_ENTROPY = 3.0
"""Nats per token of an even choice among twenty tokens: such texts are correct only by accident."""
SIZES = (4, 8, 16, 32, 64)
"""Group sizes that are recommended."""


def advice(preview: Preview) -> list[Advice]:
    """Return the changes to make before the run, the most serious first."""
    groups = preview.samples.groups
    on_form = habits(groups, preview.readings, preview.wording, not preview.unfinished)
    on_reading = [*_present(_unscored_completions(preview)), *on_form]
    if preview.unfinished:
        return [*on_reading, _too_slow(preview)]
    # A habit of the model's already explains why its answers are not read.
    if not on_form:
        on_reading += _present(_unread_answers(preview))
    entropy = sampled_entropy(groups)
    # Other advice (limits, sizes, temperatures) would not help a model that writes noise.
    if entropy > WIDE_ENTROPY and preview.promise == "no":
        noise = f"entropy is {entropy:.1f} nats per token: the completions are close to noise"
        remedy = "a cold start (a stage with method: sft), or a model that can answer"
        return [*on_reading, Advice(noise, remedy)]
    # If no answer counts only because of its form, the measured groups say nothing about group sizes.
    size = None if on_form and preview.promise == "no" else _size(preview)
    temperature = _temperature(preview) or _one_text(preview)
    return [*on_reading, *_present(_limit(preview), temperature, size, _roomy(preview))]


def _present(*candidates: Advice | None) -> list[Advice]:
    """Return the advice that there is."""
    return [candidate for candidate in candidates if candidate is not None]


def _too_slow(preview: Preview) -> Advice:
    limit = preview.samples.limit
    running = percent(float(preview.truncated.mean()))
    return Advice(
        f"{running} of the completions had not ended at {limit} tokens, and at this speed a minute is not "
        "enough for more",
        "--groups 4, which samples them to the end however long that takes; a smaller model or "
        "rollout.max_tokens; or a GPU",
        quote_completion(preview.samples.groups[0].completions[0].text),
    )


def _unscored_completions(preview: Preview) -> Advice | None:
    unscored = np.isnan(preview.rewards).mean()
    if unscored <= 0.05:
        return None
    components = [c for group in preview.samples.groups for c in group.components.values()]
    details = [score.detail for component in components for score in component.scores if score.detail]
    example = f", the last because of {details[-1]!r}" if details else ""
    return Advice(
        f"{percent(unscored)} of the completions could not be scored{example}", "repair the rewards first"
    )


def _unread_answers(preview: Preview) -> Advice | None:
    """Advise if the texts contain the correct answer and the verdict does not read it."""
    groups = preview.samples.groups
    rates = answers_inside(groups)
    rate = preview.pass_rate().value
    containing = rates.get("text/reference", 0.0)
    by_chance = rates.get("text/reference_elsewhere", 0.0)
    if containing < by_chance + rate + MUCH_UNREAD:
        return None
    reader = "a verdict that reads it"
    if rates.get("text/reference_number") == 1:
        reader += ", such as rewards: [{math_answer: {rule: last_number}}]"
    return Advice(
        f"{percent(containing)} of the completions contain the correct answer, and {percent(rate)} are "
        "correct",
        f"{reader}, or a data.template that asks for the form that yours reads",
    )


def _limit(preview: Preview) -> Advice | None:
    """Advise on rollout.max_tokens if many completions are truncated, by what becomes of them later."""
    fraction = float(preview.truncated.mean())
    if fraction <= MANY_TRUNCATED or preview.samples.limit is not None:
        return None
    limit = preview.stage.config.rollout.max_tokens
    texts = [c for g in preview.samples.groups for c in g.completions if c.finish == "length"]
    looping = float(np.mean([_loops(c.tokens) for c in texts]))
    ended = preview.ended
    finding = f"{percent(fraction)} are truncated at {limit} tokens"
    if looping > MAX_DEAD:
        finding += f", and {percent(looping)} of these repeat themselves, so more tokens would not help"
    if len(ended):
        finding += f". 90 % of the others needed at most {np.quantile(ended, 0.9):.0f}"
    else:
        finding += ". None ended by itself: perhaps the end token is never produced"
    if looping > MAX_DEAD:
        return Advice(finding, _instead(preview), quote_completion(texts[0].text))
    if preview.longer is None:
        return Advice(finding, f"rollout.max_tokens {2 * limit}", quote_completion(texts[0].text))
    return _by_continuation(preview, preview.longer, finding)


def _by_continuation(preview: Preview, longer: Longer, finding: str) -> Advice:
    """Advise more tokens only if they let most of the truncated completions end, and earn something."""
    outcome = longer.outcome()
    verb = "were" if outcome["correct"] > 1 else "was"
    finding += f". Of {outcome['completions']} continued to {longer.limit} tokens, "
    if outcome["ended"]:
        finding += f"{outcome['ended']} ended and {outcome['correct'] or 'none'} {verb} correct"
    else:
        finding += "none ended"
    ended = [c for c in longer.completions if c.finish == "stop"]
    in_time = preview.rewards[~preview.truncated]
    # Most have to end, and then earn at least half of what those earn that end in time.
    most_ended = 2 * len(ended) >= outcome["completions"]
    usual_reward = np.nanmean(in_time) if len(in_time) else 0.0
    earns = outcome["earn_more"] and 2 * longer.reward >= usual_reward
    if most_ended and earns:
        needed = _round_up(float(np.quantile([len(c.tokens) for c in ended], 0.9)))
        return Advice(finding, f"rollout.max_tokens {needed}", quote_completion(ended[0].text))
    example = min(longer.completions, key=lambda c: c.finish == "stop")
    doubt = "their rewards are low" if most_ended else "more tokens would help little"
    return Advice(f"{finding}: {doubt}", _instead(preview), quote_completion(example.text))


def _instead(preview: Preview) -> str:
    """Return the remedy if more tokens would not help the truncated completions."""
    scored = ~np.isnan(preview.rewards)
    in_time = preview.rewards[scored & ~preview.truncated]
    truncated = preview.rewards[scored & preview.truncated]
    margin = preview.rewards[scored].std() / 4
    if len(in_time) and len(truncated) and in_time.mean() > truncated.mean() + margin:
        return (
            f"keep rollout.max_tokens: completions that end earn {in_time.mean():.2g} and truncated ones "
            f"{truncated.mean():.2g}, so training will teach the model to end"
        )
    wording = preview.wording
    chat = wording is not None and (wording.chat or not wording.template)
    alternatives = " or rollout.stop" if chat else ", rollout.stop, or the chat template (data.chat: true)"
    return f"a cold start (a stage with method: sft){alternatives}"


def _roomy(preview: Preview) -> Advice | None:
    """Advise if rollout.max_tokens is much larger than any completion needs."""
    limit = preview.stage.config.rollout.max_tokens
    if preview.truncated.any():
        return None
    longest = float(np.quantile(preview.lengths, 0.99))
    if 4 * longest >= limit:
        return None
    return Advice(
        f"99 % end within {longest:.0f} tokens, but memory is reserved for the limit of {limit}",
        f"rollout.max_tokens {_round_up(2 * longest)}",
    )


def _changes(preview: Preview, temperature: float) -> tuple[Estimate, Estimate]:
    """Estimate the changes of pass rate and of the probability of a tie with the temperature, by problem."""
    measured = {group.problem.id: group for group in preview.samples.groups}
    at_temperature = {group.problem.id: group for group in preview.others[temperature]}
    # Fewer problems may have been sampled at the other temperature.
    shared = [problem for problem in measured if problem in at_temperature]
    rates = []
    ties = []
    for by_problem in (measured, at_temperature):
        groups = [by_problem[problem] for problem in shared]
        rates.append(np.array([group.pass_rate for group in groups]))
        ties.append(tie_chances([reward_counts(group) for group in groups], preview.group_size))
    return gain(rates[0], rates[1]), gain(ties[0], ties[1])


def _temperature(preview: Preview) -> Advice | None:
    """Advise another temperature where the paired intervals exclude chance: fewer dead groups, or more
    correct answers without more dead groups.
    """
    rate = preview.pass_rate()
    changes = {t: _changes(preview, t) for t in preview.others}
    livelier = [t for t, (_, ties) in changes.items() if ties.high < 0]
    more_correct = [t for t, (rates, ties) in changes.items() if rates.low > 0 and not ties.low > 0]
    if livelier:
        best = min(livelier, key=lambda t: preview.at(t)[1].value)
        dead = preview.dead(preview.group_size)
        finding = f"{dead} of the groups are dead, against {preview.at(best)[1]} at temperature {best:g}"
        return Advice(finding, f"rollout.temperature {best:g}")
    if more_correct and rate.value < 0.5:
        best = max(more_correct, key=lambda t: preview.at(t)[0].value)
        finding = f"{rate} are correct, against {preview.at(best)[0]} at temperature {best:g}"
        finding += ", with as many live groups"
        return Advice(finding, f"rollout.temperature {best:g}")
    return None


def _one_text(preview: Preview) -> Advice | None:
    """Advise a larger temperature if the completions of most groups are one text, and not all are correct."""
    groups = preview.samples.groups
    copies = sum(g.dead and len({c.text for c in g.completions}) == 1 for g in groups)
    if copies <= MAX_DEAD * len(groups) or preview.pass_rate().value > 0.95:
        return None
    finding = f"in {copies} of {len(groups)} groups all completions are identical"
    is_cold = preview.stage.config.rollout.temperature < 1
    remedy = "rollout.temperature 1" if is_cold else "a larger rollout.temperature"
    return Advice(f"{finding} (entropy {sampled_entropy(groups):.2f} nats per token)", remedy)


def _size(preview: Preview) -> Advice | None:
    """Advise the smallest group size with enough live groups, or say why none has."""
    dead_share = preview.dead(preview.group_size)
    if dead_share.value <= MAX_DEAD:
        return None
    rate = preview.pass_rate().value
    finding = f"{dead_share} of the groups of {preview.group_size} are dead"
    # Larger groups are dead less often; the smallest of them is the cheapest.
    sufficient = [n for n in SIZES if n > preview.group_size and preview.dead(n).value <= MAX_DEAD]
    if sufficient and preview.promise != "no":
        comparison = f"{finding}, against {preview.dead(sufficient[0])} of groups of {sufficient[0]}"
        return Advice(comparison, f"rollout.group_size {sufficient[0]}")
    if rate > MAX_DEAD:
        return Advice(f"{finding} because all answers are correct", "harder problems")
    if rate > 0 or preview.promise != "no":
        return Advice(
            f"{finding}, and larger groups would change little: each problem is solved always or never",
            "easier problems in place of those never solved, and rollout.curriculum: frontier",
        )
    return Advice(
        f"{finding}: none of {len(preview.lengths)} completions was correct",
        "a cold start (a stage with method: sft), easier problems, or rewards that can read the answers",
        quote_completion(max((c.text for c in preview.samples.groups[0].completions), key=len)),
    )


def _loops(tokens: np.ndarray) -> bool:
    """Whether most windows of ``LOOP`` tokens occurred before in the text: it loops."""
    windows = [tuple(tokens[i : i + LOOP].tolist()) for i in range(len(tokens) - LOOP + 1)]
    return bool(windows) and len(set(windows)) < (1 - MAX_DEAD) * len(windows)


def _round_up(tokens: float) -> int:
    return int(-(-tokens // 16) * 16)

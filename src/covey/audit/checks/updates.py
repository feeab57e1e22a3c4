"""Checks of updates: their direction, learning rates, gradient norms, and settings without effect."""

from __future__ import annotations

import math
from itertools import pairwise, takewhile

from covey.audit.checks.check import Fault
from covey.audit.checks.logprobs import after, before, distance, pairs, ratios_are_wide, trainer
from covey.audit.checks.tokens import MIN_COMPLETIONS, location
from covey.audit.record import AuditRecord, Update, Use
from covey.system.text import percent

MIN_UPDATES = 2
"""Fewest updates for a check of all of them."""
FALLS = 4
"""Fewest updates over which a learning rate falls before it restarts."""
NO_GRADIENT = 1e-6
"""Largest gradient norm that may be float32's rounding in sums that cancel."""
MIN_ADVANTAGE = 0.1
"""Smallest advantage whose gradient must exceed rounding."""
MIN_MOVES = 4
"""Fewest earlier updates with which the motion of one is compared."""
LEAP_NATS = 1.0
"""Most nats per token by which a sound update moves a policy."""
IDLE_UPDATES = 4
"""Fewest updates without a learning rate that are more than the end of a schedule."""
MIN_ADAPTER_RATE = 1e-6
"""A lower learning rate is too small for LoRA, which needs ten times that of full fine-tuning."""
MIN_RATE = 1e-10
"""A lower learning rate moves no weight, whatever the precision."""


def step_goes_the_wrong_way(record: AuditRecord) -> Fault | None:
    """Over the first updates on rollouts, completions with a positive advantage become less likely and those
    with a negative one more likely: the sum of advantage times change is negative, beyond chance by 3.5
    standard errors.
    """
    terms = [(use, _gain(use)) for use in record.uses if use.first]
    gains = [gain for _, gain in terms if gain]
    # Independent terms of any size have a sum within a few such errors of 0 by chance.
    error = math.sqrt(sum(gain**2 for gain in gains))
    if len(gains) < 16 or not sum(gains) < -3.5 * error:
        return None
    use = min(terms, key=lambda term: term[1])[0]
    sentence = "updates make completions with positive advantages less likely and others more likely"
    return Fault(
        f"{sentence}, by {abs(sum(gains) / error):.1f} standard errors", use.update.step, location(use)
    )


def _gain(use: Use) -> float:
    """Return advantage times the change of its log-prob for one completion; 0 if it was not looked at."""
    if not isinstance(use.row.advantage, float):
        return 0.0
    return use.row.advantage * sum(y - x for _, x, y in pairs(use, before, after))


def policy_leaps(record: AuditRecord) -> Fault | None:
    """An update moves the log-probs of its completions by more than 1 nat per token, and by more than ten
    times as much as any of at least four earlier updates.
    """
    distances = [(distance(record.uses_of(update), trainer, after), update.step) for update in record.updates]
    moves = [(nats, step) for nats, step in distances if not math.isnan(nats)]
    for n, (nats, step) in enumerate(moves[MIN_MOVES:], MIN_MOVES):
        largest = max(earlier for earlier, _ in moves[:n])
        if nats > max(LEAP_NATS, 10 * largest):
            cause = ": in float16 Adam's small squares are 0" if record.setting("dtype") == "float16" else ""
            sentence = (
                f"an update moves log-probs by {nats:.2g} nats per token, and none before it by more than"
            )
            return Fault(f"{sentence} {largest:.2g}{cause}", step)
    return None


def rate_is_zero(record: AuditRecord) -> Fault | None:
    """The learning rate is at most 1e-10 in every update, or in the whole last quarter of the run, at least
    four updates.
    """
    rates = [(u.step, u.learning_rate) for u in record.updates if u.learning_rate is not None]
    idle = list(takewhile(lambda update: update[1] <= MIN_RATE, reversed(rates)))
    if len(rates) >= MIN_UPDATES and len(idle) == len(rates):
        most = max(rate for _, rate in rates)
        return Fault(f"the learning rate is at most {most:g} in all {len(rates)} updates", rates[0][0])
    if len(idle) < IDLE_UPDATES or len(idle) < 0.25 * len(rates):
        return None
    sentence = f"the learning rate is 0 in the last {len(idle)} of {len(rates)} updates"
    return Fault(f"{sentence}: its schedule ends before the run", idle[-1][0])


def warmup_is_longer_than_the_run(record: AuditRecord) -> Fault | None:
    """The warm-up takes at least as many steps as the run."""
    warmup, steps = record.number("warmup_steps", 0), record.number("max_steps", -1)
    rates = [u.learning_rate for u in record.updates if u.learning_rate is not None]
    if not 0 < steps <= warmup or not rates:
        return None
    due = record.number("learning_rate", 0.0)
    reached = f"the learning rate reaches {max(rates):.2g} and never {due:g}"
    return Fault(
        f"the warm-up takes {warmup:g} steps and the run {steps:g}: {reached}", record.updates[0].step
    )


def weights_do_not_move(record: AuditRecord) -> Fault | None:
    """Weights stay the same after updates with a gradient and a learning rate above 0. Where they are
    unknown, log-probs stay the same bit for bit after updates with advantages, outside of a warm-up. Or more
    than half of the tensors of an adapter require no gradient. Or at least four completions that are trained
    have tokens that the checkpoint lacks, and whose embeddings are frozen.
    """
    fresh = {*record.header.tokens.frozen}
    new = [use for use in record.uses if fresh and fresh & {*(use.sample.ids or ())}]
    if len(new) >= MIN_COMPLETIONS:
        names = record.header.tokens.names
        words = ", ".join(names.get(str(token), str(token)) for token in sorted(fresh)[:4])
        sentence = (
            f"{len(fresh)} new tokens ({words}) keep the embeddings that they were given: they are frozen"
        )
        return Fault(sentence, new[0].update.step, location(new[0]))
    frozen = [(u.step, u.adapter_frozen) for u in record.updates if u.adapter_frozen is not None]
    if frozen and min(part for _, part in frozen) > 0.5:
        step, part = frozen[0]
        return Fault(f"{percent(part)} of the adapter's tensors are frozen", step)
    steps = [
        u
        for u in record.updates
        if (u.learning_rate or 0) > MIN_RATE and (u.grad_norm or 0) > 0 and u.weights_changed is not None
    ]
    if len(steps) >= MIN_UPDATES and not any(u.weights_changed for u in steps):
        return Fault("no weight has changed, though the gradient is not 0", steps[0].step)
    updates = [u for u in record.updates if u.weights_changed is None and _motions(record, u)]
    if len(updates) < MIN_UPDATES or any(max(_motions(record, u)) > 0 for u in updates):
        return None
    return Fault(f"log-probs are the same after each of {len(updates)} updates, bit for bit", updates[0].step)


def _motions(record: AuditRecord, update: Update) -> list[float]:
    """Return the change of each log-prob by an update; [] if nothing should change them."""
    uses = record.uses_of(update)
    full = record.number("learning_rate", 0.0)
    warms_up = update.learning_rate is not None and update.learning_rate < 0.5 * full
    if warms_up or not any(use.row.advantage for use in uses):
        return []
    return [abs(x - y) for use in uses for _, x, y in pairs(use, before, after)]


def gradients_are_kept(record: AuditRecord) -> Fault | None:
    """After steps that moved a weight, its gradient is not set to 0 before the next one is computed. Or, in a
    run without a KL, an update whose advantages and loss are all 0 has a gradient above a thousandth of the
    largest.
    """
    without = _gradient_of_nothing(record)
    if without is not None:
        return without
    moved = {call.step for call in record.calls if call.moved}
    calls = [term.call for term in record.terms if term.call in moved and term.gradient_kept]
    if len(calls) < MIN_UPDATES:
        return None
    return Fault(f"the gradient of a step is added to earlier steps' gradients (call {calls[0]})")


def _gradient_of_nothing(record: AuditRecord) -> Fault | None:
    norms = [u.grad_norm for u in record.updates if u.grad_norm is not None and math.isfinite(u.grad_norm)]
    if record.number("beta", 0.0) or "ref_logprobs" in record.fields:
        return None
    for update in record.updates:
        uses = record.uses_of(update)
        nothing = update.loss == 0 and bool(uses) and len(uses) == len(update.rows)
        if nothing and all(use.row.advantage == 0 for use in uses) and (update.grad_norm or 0.0) > 0:
            if (update.grad_norm or 0.0) <= 1e-3 * max(norms):
                continue
            sentence = f"an update whose advantages are all 0 has a gradient of norm {update.grad_norm:.3g}"
            return Fault(f"{sentence}: earlier steps' gradients are still in it", update.step)
    return None


def rate_restarts(record: AuditRecord) -> Fault | None:
    """At least twice, the learning rate falls for at least four updates and is then a fifth higher or more,
    although the settings ask for no restarts.
    """
    rates = [(u.step, u.learning_rate) for u in record.updates if u.learning_rate]
    jumps = []
    falls = 0
    for (_, earlier), (step, rate) in pairwise(rates):
        if rate > 1.2 * earlier and falls >= FALLS:
            jumps.append((step, earlier, rate))
        falls = falls + 1 if rate < earlier else 0
    if len(jumps) < 2 or "restart" in str(record.setting("lr_scheduler_type", "")):
        return None
    step, low, high = jumps[0]
    sentence = f"the learning rate falls and restarts {len(jumps)} times"
    return Fault(f"{sentence}, first from {low:.3g} to {high:.3g}", step)


def weights_are_too_coarse(record: AuditRecord) -> Fault | None:
    """With weights in bfloat16 or float16, every update changes less than a fifth of them. Or an adapter is
    trained at less than 1e-6 in every update, at least four, a rate of full fine-tuning.
    """
    rates = [u.learning_rate or 0.0 for u in record.updates if u.adapter_frozen is not None]
    if len(rates) >= IDLE_UPDATES and 0 < max(rates) < MIN_ADAPTER_RATE:
        sentence = (
            f"the learning rate of the adapter is at most {max(rates):.2g}, as in full fine-tuning: B begins"
        )
        return Fault(f"{sentence} at 0, and moves too little to be seen", record.updates[0].step)
    dtype = str(record.setting("dtype", ""))
    changed = [
        u.weights_changed
        for u in record.updates
        if u.weights_changed is not None and (u.learning_rate or 0) > 0
    ]
    if dtype not in ("bfloat16", "float16") or len(changed) < MIN_UPDATES or max(changed) >= 0.2:
        return None
    rate = max(u.learning_rate or 0 for u in record.updates)
    part = percent(max(changed), ".2g")
    sentence = f"an update at the learning rate {rate:g} changes {part} of the {dtype} weights"
    return Fault(f"{sentence}: the others are rounded back", record.updates[0].step)


def gradient_is_zero(record: AuditRecord) -> Fault | None:
    """The gradient norm is 0 in every update, although not all advantages are 0; or it is at most 1e-6,
    although some advantages are above .1.
    """
    norms = [u.grad_norm for u in record.updates if u.grad_norm is not None]
    advantages = [use.row.advantage for use in record.uses if isinstance(use.row.advantage, float)]
    if len(norms) < MIN_UPDATES or (advantages and not any(advantages)):
        return None
    if not any(norms):
        return Fault("the gradient is 0 in every update", record.updates[0].step)
    if max(norms) > NO_GRADIENT or max(map(abs, advantages), default=0.0) <= MIN_ADVANTAGE:
        return None
    sentence = f"the gradient is at most {max(norms):.2g} in every update: advantages cancel in the loss"
    return Fault(sentence, record.updates[0].step)


def gradient_is_always_clipped(record: AuditRecord) -> Fault | None:
    """In every update, the gradient norm is more than a hundred times the bound to which it is clipped."""
    bound = record.number("max_grad_norm", math.inf)
    norms = [u.grad_norm for u in record.updates if u.grad_norm]
    if len(norms) < MIN_UPDATES or bound <= 0 or min(norms) <= 100 * bound:
        return None
    sentence = f"every gradient is clipped, from a norm of {min(norms):.3g} or more to {bound:g}"
    return Fault(f"{sentence}: its size says nothing", record.updates[0].step)


def betas_are_exchanged(record: AuditRecord) -> Fault | None:
    """Adam's first beta is larger than its second."""
    first, second = record.number("adam_beta1", 0.0), record.number("adam_beta2", 1.0)
    if first <= second:
        return None
    sentence = f"Adam's betas are {first:g} and {second:g}"
    return Fault(f"{sentence}: its mean of squares forgets faster than its mean of gradients")


def best_model_is_that_of_least_loss(record: AuditRecord) -> Fault | None:
    """The model of the lowest loss is kept as the best (`load_best_model_at_end` without a
    `metric_for_best_model` of its own), and the run has rewards.
    """
    metric = str(record.setting("metric_for_best_model") or "loss").removeprefix("eval_")
    if record.setting("load_best_model_at_end") is not True or metric != "loss" or not record.functions:
        return None
    return Fault("the best model is that of the lowest loss, which says nothing of the reward")


def upper_bound_is_below_1(record: AuditRecord) -> Fault | None:
    """TRL's `delta`, the upper bound of every ratio, is at most 1. The ratios of a first update are 1."""
    delta = record.number("delta", math.inf)
    if record.header.framework != "trl" or not 0 < delta <= 1:
        return None
    sentence = f"delta is {delta:g}: no ratio may exceed it, and in a first update all ratios are 1"
    return Fault(f"{sentence}, so completions with a positive advantage have no gradient")


def clipping_cannot_act(record: AuditRecord) -> Fault | None:
    """A clip bound of 1 or more lets every ratio pass."""
    for setting in ("epsilon", "eps_clip"):
        bound, name = record.number(setting, 0.0), record.own_name(setting)
        if bound >= 1 and str(record.setting("loss_type", "grpo")) not in ("cispo", "sapo", "vespo"):
            return Fault(f"{name} is {bound:g}: a ratio between 0 and {1 + bound:g} is never clipped")
    return None


def penalties_are_not_trained(record: AuditRecord) -> Fault | None:
    """Sampling has a repetition penalty or a top_p of at most .5. No trainer takes either into account."""
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        neutral = 1.0 if name == "repetition_penalty" else 0.0
        value = _number_of_sampling(record, name, neutral)
        if value != neutral:
            return Fault(f"tokens are sampled with {name} {value:g}, but log-probs are computed without it")
    top_p = _number_of_sampling(record, "top_p", 1.0)
    if 0 < top_p <= 0.5:
        name = record.own_name("top_p")
        return Fault(f"tokens are sampled with {name} {top_p:g}, but log-probs are over all tokens")
    return None


def _number_of_sampling(record: AuditRecord, name: str, default: float) -> float:
    """Return a setting of sampling; TRL's generation_kwargs override the others."""
    value = record.header.settings.get(f"generation_kwargs.{name}")
    return float(value) if isinstance(value, int | float) else record.number(name, default)


CHECKS = {
    "policy_leaps": policy_leaps,
    "wrong_way": step_goes_the_wrong_way,
    "rate_zero": rate_is_zero,
    "warmup_long": warmup_is_longer_than_the_run,
    "no_motion": weights_do_not_move,
    "gradient_kept": gradients_are_kept,
    "rate_restarts": rate_restarts,
    "too_coarse": weights_are_too_coarse,
    "gradient_zero": gradient_is_zero,
    "clip_idle": clipping_cannot_act,
    "betas_exchanged": betas_are_exchanged,
    "best_by_loss": best_model_is_that_of_least_loss,
    "delta_low": upper_bound_is_below_1,
    "penalty_untrained": penalties_are_not_trained,
    "clipped_always": gradient_is_always_clipped,
    "ratio_wide": ratios_are_wide,
}

"""The check of a config for settings that cannot work together, and for rules that cannot act."""

from __future__ import annotations

import math
from collections.abc import Iterator

from covey.config.methods import SAMPLING_METHODS
from covey.config.python_objects import ModelObject
from covey.config.schema import Config
from covey.config.unread import reads
from covey.objective.advantages import pass_at_k
from covey.objective.algorithms import Algorithm
from covey.objective.axes import is_built_in
from covey.objective.axis_function import has_trait
from covey.objective.filters import pass_rate_band
from covey.objective.penalties import KL, k1
from covey.objective.token_weights import future_influence
from covey.objective.value import Critic

MIN_TEMPERATURE = 0.01
"""Lowest temperature: below it logits are divided by almost 0, which is greedy sampling."""


def contradictions(algorithm: Algorithm, group_size: int, updates: int) -> list[str]:
    """Return messages about settings of an algorithm that cannot work together, with reason and remedy.

    ``updates`` is the number of optimizer steps per rollout batch.
    """
    rules = (
        _group_problems(algorithm, group_size),
        _subset_problems(algorithm, group_size),
        _filter_problems(algorithm, group_size),
        _ratio_problems(algorithm, updates),
        _idle_problems(algorithm, updates),
        _sampler_problems(algorithm),
        _kl_problems(algorithm),
        _bound_problems(algorithm),
        _token_problems(algorithm),
        _mean_problems(algorithm),
        _critic_problems(algorithm),
    )
    return [message for rule in rules for message in rule]


def config_problems(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Yield messages about contradictions in a reinforcement run's whole config."""
    rollout = config.rollout
    train = config.train
    yield from contradictions(algorithm, rollout.group_size, train.updates_per_rollout_batch)
    if algorithm.critic is not None and algorithm.critic.warmup >= train.steps:
        yield (
            f"algorithm.critic.warmup {algorithm.critic.warmup}: the run has only {train.steps} steps "
            "(train.steps), so the policy never learns; use fewer warm-up steps"
        )
    if algorithm.values_on_policy and train.lr == 0:
        yield (
            "train.lr 0: a critic on the policy's trunk has the policy's schedule, so it never learns; use "
            "trunk own to train only the critic"
        )
    if rollout.temperature < MIN_TEMPERATURE:
        yield (
            f"rollout.temperature {rollout.temperature:g}: all completions of a prompt would be the same, so "
            "there is nothing to compare; use 0.6 to 1.0"
        )
    if rollout.prepass and rollout.curriculum == "off" and not rollout.adapt_group_size:
        yield (
            "rollout.prepass measures pass rates that nothing uses; set rollout.curriculum: frontier or "
            "rollout.adapt_group_size: true, or set it to 0"
        )
    by_rates = {
        "curriculum": rollout.curriculum != "off",
        "adapt_group_size": rollout.adapt_group_size,
        "retire_after": rollout.retire_after > 0,
    }
    for name, is_on in by_rates.items():
        if is_on and rollout.staleness:
            yield (
                f"rollout.staleness {rollout.staleness}: rollout.{name} chooses problems by the pass rates "
                f"of steps that have not ended yet; use staleness 0, or leave {name} out"
            )
    if rollout.staleness and "segments" in algorithm.needs:
        yield (
            f"rollout.staleness {rollout.staleness}: {algorithm.advantage.name} must sample continuations "
            "with the weights that sampled the beginning; use staleness 0, or another advantage"
        )
    if rollout.tools is not None and "segments" in algorithm.needs:
        yield (
            f"rollout.tools: {algorithm.advantage.name} resamples completions from their middle, which may "
            "be inside a call; use another advantage, or no tools"
        )
    if rollout.top_k == 1:
        yield (
            "rollout.top_k 1: all completions of a prompt would be the same, so there is nothing to "
            "compare; use 0, which keeps all tokens"
        )
    if train.updates_per_batch > rollout.prompts_per_step:
        yield (
            f"train.updates_per_batch {train.updates_per_batch} exceeds rollout.prompts_per_step "
            f"{rollout.prompts_per_step}: an update trains on whole groups; use at most "
            f"{rollout.prompts_per_step}"
        )
    yield from _guard_problems(config, algorithm)


def _guard_problems(config: Config, algorithm: Algorithm) -> Iterator[str]:
    if config.guards.kl_action == "raise_coef" and algorithm.kl is None:
        yield "guards.kl_action raise_coef: algorithm.kl is not set, so there is no coefficient to raise"
    elif config.guards.kl_action == "raise_coef" and algorithm.kl and algorithm.kl.target is not None:
        yield "guards.kl_action raise_coef: algorithm.kl.target already adapts the coefficient"
    if config.guards.on_finding == "rollback" and isinstance(config.model, ModelObject):
        yield (
            "guards.on_finding rollback: a model given as an object is trained in place, so the run could "
            "not go back to its first weights; save the model to a folder, and give that"
        )


def example_problems(config: Config) -> Iterator[str]:
    """Yield messages about contradictions in stages that make examples or learn from them."""
    if config.method == "pairs" and config.rollout.group_size < 2:
        yield "rollout.group_size 1: a pair has two completions of a prompt; use 2 or more"
    if config.data.examples and config.method in SAMPLING_METHODS:
        yield (
            f"data.examples: method {config.method} does not learn from examples; remove them, or choose "
            "another method"
        )
    if config.train.final == "best" and not config.eval.every and reads(config.method, "train.final"):
        yield "train.final best: no evaluation runs during training; set eval.every, for example to 20"
    if config.data.replay < 1 and len(config.data.examples) < 2:
        yield "data.replay: data.examples has only one file, so there is no earlier one to replay; remove it"


def rules_of_ratio(algorithm: Algorithm) -> list[str]:
    """Return the built-in rules that act only if the ratio is not 1, with their settings.

    These are all settings of the ratio, of the surrogate, and of token weights that read the log-ratio: at a
    ratio of 1 neither the value of a function on these axes nor its gradient depends on them.
    """
    weights = [c for c in algorithm.token_weights if "log_ratio" in c.needs]
    rules = []
    surrogate = algorithm.surrogate
    surrogates = () if has_trait(surrogate.function, "acts_at_ratio_one") else (surrogate,)
    for part in (algorithm.ratio, *surrogates, *weights):
        settings = [f"{k} {v}" for k, v in part.all_settings.items() if v is not None]
        if settings and is_built_in(part):
            rules.append(f"{part.name} ({', '.join(settings)})")
    return rules


def notes_on(algorithm: Algorithm, updates: int) -> list[str]:
    """Return a note on the rules that cannot act, or only where sampler and trainer disagree."""
    rules = rules_of_ratio(algorithm)
    if updates > 1 or not rules:
        return []
    names = " and ".join(rules)
    note = f"with one update per batch every ratio is 1, so {names} cannot act"
    if algorithm.old == "sampler":
        note = f"with one update per batch {names} can act only where sampler and trainer disagree"
    return [f"{note}; train.updates_per_batch or train.inner_epochs above 1 changes that"]


def _group_problems(algorithm: Algorithm, group_size: int) -> Iterator[str]:
    advantage = algorithm.advantage.name
    # Such an advantage uses the plain reward for a group of one.
    alone = algorithm.advantage.all_settings.get("single") == "reward"
    if group_size == 1 and has_trait(algorithm.advantage.function, "compares_siblings") and not alone:
        yield (
            f"rollout.group_size 1: {advantage} compares siblings, so every advantage would be 0; use 2 or "
            "more (8 is usual), or algorithm reinforce or remax"
        )


def _subset_problems(algorithm: Algorithm, group_size: int) -> Iterator[str]:
    if algorithm.advantage.function is not pass_at_k:
        return
    k = algorithm.advantage.all_settings["k"]
    if k >= group_size > 1:
        yield (
            f"algorithm.advantage.k {k}: {group_size} completions (rollout.group_size) have at most one "
            "subset of that size, so there is nothing to compare; use a smaller k, or a larger group"
        )


def _filter_problems(algorithm: Algorithm, group_size: int) -> Iterator[str]:
    rule = algorithm.filter
    if rule is None or not is_built_in(rule):
        return
    settings = rule.all_settings
    if rule.function is not pass_rate_band:
        if group_size == 1 and algorithm.credit in ("completion", "component"):
            yield (
                f"rollout.group_size 1: the filter {rule.name} does nothing with a single completion; use "
                "filter: null"
            )
    elif settings["low"] == 0 and settings["high"] == 1:
        yield "algorithm.filter pass_rate_band from 0 to 1 keeps every group; use filter: null, or narrow it"
    # k correct of group_size completions.
    elif not any(settings["low"] <= k / group_size <= settings["high"] for k in range(group_size + 1)):
        yield (
            f"algorithm.filter pass_rate_band: no pass rate of {group_size} completions lies within "
            f"{settings['low']:g} to {settings['high']:g}; widen it, or raise rollout.group_size"
        )


def _ratio_problems(algorithm: Algorithm, updates: int) -> Iterator[str]:
    ratio = algorithm.ratio.name
    surrogate = algorithm.surrogate
    if updates > 1 and ratio == "on_policy":
        yield (
            f"algorithm.ratio on_policy: after the first of {updates} updates per batch the policy is no "
            "longer the policy that sampled, and on_policy does not correct for that; use ratio token, or "
            "one update"
        )
    if ratio == "on_policy" and has_trait(surrogate.function, "bounds_ratio"):
        yield (
            f"algorithm.surrogate {surrogate.name} bounds the ratio, but ratio on_policy is always 1; use "
            "surrogate unclipped, or ratio token"
        )
    if ratio != "token" and "ratio" not in surrogate.needs:
        yield (
            f"algorithm.ratio {ratio} has no effect: surrogate {surrogate.name} uses each token's own ratio; "
            "use ratio token"
        )


def _idle_problems(algorithm: Algorithm, updates: int) -> Iterator[str]:
    """Yield rules that depend only on the log-ratio, and so have no effect with one update per batch."""
    remedies = {algorithm.surrogate: "surrogate: unclipped with select_tokens: null"}
    remedies |= dict.fromkeys(algorithm.token_weights, "token_weights: null")
    # With old log-probs of the sampler, the log-ratio is the mismatch and not 0 even with one update.
    if updates > 1 or algorithm.old == "sampler":
        return
    for part, remedy in remedies.items():
        acts = has_trait(part.function, "acts_at_ratio_one")
        if "log_ratio" in part.needs and is_built_in(part) and not acts:
            yield (
                f"algorithm: {part.name} changes nothing with one update per batch, where every ratio is "
                f"1; use train.updates_per_batch or train.inner_epochs above 1, or {remedy}"
            )


def _sampler_problems(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.old == "sampler":
        for correction in algorithm.correction:
            if "log_ratio" not in correction.needs:
                yield (
                    f"algorithm.correction {correction.name} has nothing to correct: with old sampler the "
                    "ratio already compares with the sampler; use correction: null, or old trainer"
                )
        missing = algorithm.needs & {"old_entropy", "old_collision"}
        if missing:
            yield (
                f"algorithm.old sampler: {min(missing)} is known only if log-probs are recomputed; use old "
                "trainer"
            )


def _kl_problems(algorithm: Algorithm) -> Iterator[str]:
    kl = algorithm.kl
    entropy = algorithm.entropy
    needed = {n for c in algorithm.functions for n in c.needs} & {"ref_log_ratio", "ref_logprobs", "full_kl"}
    if needed and not algorithm.needs_reference:
        yield f"algorithm.kl is not set, so there is no reference model, but {min(needed)} needs one: set kl"
    if kl is not None:
        # E[grad log p] = 0: as a loss, k1 has no gradient on average.
        if kl.estimator.function is k1 and kl.place == "loss" and kl.gradient == "formula":
            yield (
                "algorithm.kl.estimator k1 in the loss has an expected gradient of zero; use k2 or k3, "
                "gradient ratio, or place reward"
            )
        exact = "full_kl" in kl.estimator.needs
        if kl.coef == 0:
            yield "algorithm.kl.coef 0 keeps a reference for nothing, and no target raises it; use kl: null"
        if kl.refresh_mix < 1 and kl.refresh_every is None:
            yield (
                "algorithm.kl.refresh_mix acts only with kl.refresh_every: set that too, or leave "
                "refresh_mix at 1"
            )
        if kl.refresh_every is not None and kl.refresh_mix == 0:
            yield "algorithm.kl.refresh_mix 0 never moves the reference; use refresh_every: null"
        if kl.place == "reward":
            yield from _kl_in_reward_problems(kl, algorithm)
        if kl.to == "sampler":
            yield from _kl_to_sampler_problems(kl)
        if exact and (kl.level != "token" or kl.gradient != "formula"):
            yield "algorithm.kl.estimator full is exact per token: use level token and gradient formula"
    if entropy is not None and entropy.coef == 0 and entropy.target is None:
        yield "algorithm.entropy.coef 0 has no effect; use entropy: null, or set a target"


def _kl_to_sampler_problems(kl: KL) -> Iterator[str]:
    if kl.place == "reward" or kl.refresh_every is not None or kl.target is not None:
        yield (
            "algorithm.kl.to sampler works only in the loss, without a reference model to move or a target "
            "to steer by: use place loss, refresh_every: null and target: null"
        )
    if "full_kl" in kl.estimator.needs:
        yield "algorithm.kl.estimator full needs the reference's distribution: use k2 with to sampler"


def _kl_in_reward_problems(kl: KL, algorithm: Algorithm) -> Iterator[str]:
    if "full_kl" in kl.estimator.needs:
        yield "algorithm.kl.estimator full is available only in the loss; use place loss, or estimator k1"
    if kl.gradient != "formula":
        yield "algorithm.kl.gradient has no effect in the reward, which has no gradient; use place loss"
    if kl.level == "completion" and not {"rewards", "token_rewards"} & set(algorithm.advantage.needs):
        yield (
            f"algorithm.kl.level completion has no effect: advantage {algorithm.advantage.name} does not "
            "read the completion's reward, from which this KL is subtracted; use level token"
        )


def _bound_problems(algorithm: Algorithm) -> Iterator[str]:
    surrogate = algorithm.surrogate.all_settings
    if surrogate.get("cap", 1) < 1:
        yield (
            "algorithm.surrogate.cap below 1 caps even on-policy weights, because it bounds the ratio: "
            "use 1 + eps_high, for example 5"
        )
    if surrogate.get("floor", 0) > 1:
        yield "algorithm.surrogate.floor above 1 raises even on-policy weights; use 1 - eps_low, or 0"
    # dual_clip bounds the ratio for negative advantages, beyond the range of the ordinary clip.
    if (surrogate.get("dual_clip") or math.inf) <= 1 + surrogate.get("clip_high", 0):
        yield "algorithm.surrogate.dual_clip must be greater than 1 + clip_high"
    for weights in algorithm.token_weights:
        settings = weights.all_settings
        if weights.function is future_influence and not settings["low"] <= 1 <= settings["high"]:
            yield (
                "algorithm.token_weights future_influence: low to high must include 1, which means no "
                "influence"
            )
    for part in algorithm.functions:
        if part is algorithm.filter:
            continue  # a pass rate may be asked for exactly, with low equal to high
        low = part.all_settings.get("low")
        high = part.all_settings.get("high")
        if low is not None and high is not None and low >= high:
            yield f"{part.name}: low {low:g} must be less than high {high:g}"


def _token_problems(algorithm: Algorithm) -> Iterator[str]:
    if "selected" in algorithm.needs and algorithm.select_tokens is None:
        yield (
            "algorithm.select_tokens is not set, but a function needs `selected`: name one, such as "
            "top_entropy"
        )
    if algorithm.select_tokens is not None and "selected" not in algorithm.needs:
        yield "algorithm.select_tokens marks tokens that nothing reads: add token_weights or remove it"


def _mean_problems(algorithm: Algorithm) -> Iterator[str]:
    advantage = algorithm.advantage
    absent = [name for name in ("decay", "by") if name not in advantage.all_settings]
    if "running_mean" in advantage.needs and absent:
        yield (
            f"algorithm.advantage {advantage.name} needs running_mean, but has no setting "
            f"{' and '.join(absent)}. Add keyword-only parameters that say which mean it gets, for example "
            "decay=0.95, by=None"
        )


def _critic_problems(algorithm: Algorithm) -> Iterator[str]:
    critic = algorithm.critic
    needed = "values" in algorithm.needs
    if needed and critic is None:
        yield f"algorithm.advantage {algorithm.advantage.name} needs the values of a critic: set critic: own"
    if critic is None:
        return
    if not needed:
        yield "algorithm.critic: no advantage reads its values; use advantage gae, or critic: null"
    if critic.trunk == "policy" and critic.model is not None:
        yield "algorithm.critic.model has no effect with trunk policy; use trunk own, or model: null"
    if critic.trunk == "own" and critic.pull != Critic().pull:
        yield "algorithm.critic.pull has no effect with trunk own, whose gradient never reaches the policy"

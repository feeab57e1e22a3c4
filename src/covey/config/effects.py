"""What `covey explain` says beyond the schema: usual values of settings, and what the algorithm's do."""

from __future__ import annotations

from collections.abc import Mapping

USUAL: Mapping[str, str] = {
    "rollout.group_size": "4 to 64; 8 or 16 in most papers",
    "rollout.prompts_per_step": "16 to 512",
    "rollout.max_tokens": "256 for short answers, 4,000 to 32,000 for long reasoning",
    "rollout.temperature": "0.6 to 1.0",
    "rollout.top_p": "1.0; 0.95 in few papers",
    "rollout.top_k": "0",
    "rollout.max_resampling_rounds": "2 to 4",
    "train.steps": "100 to 2,000",
    "train.lr": "1e-7 to 5e-6 for all weights of a large model, 1e-5 to 2e-4 with lora or for a tiny one",
    "train.warmup_steps": "0 to 20",
    "train.weight_decay": "0 to 0.1",
    "train.grad_clip": "0.1 to 1.0",
    "train.inner_epochs": "1; at most 4",
    "train.updates_per_batch": "1 to 16",
    "train.stop_at": "none",
    "eval.samples": "4 to 32",
    "guards.kl_stop": "10 to 50 nats per completion",
    "scoring.noise": "0",
    "lora.rank": "8 to 128",
    "lora.alpha": "one or two times the rank",
    "algorithm.advantage.eps": "1e-8 to 1e-4",
    "algorithm.surrogate.clip_low": "0.1 to 0.2; 3e-4 to 2e-3 with ratio sequence",
    "algorithm.surrogate.clip_high": "0.2 to 0.28; 4e-4 to 2.5e-3 with ratio sequence",
    "algorithm.surrogate.dual_clip": "3 to 10, or none",
    "algorithm.surrogate.threshold": "0.05 to 0.2",
    "algorithm.kl.coef": "0 (kl: null) to 0.05; 0.001 in long runs",
    "algorithm.kl.refresh_every": "none; 400 in DeepSeek-R1",
    "algorithm.entropy.coef": "0 to 0.01",
    "algorithm.entropy.target": "0.1 to 0.5",
    "algorithm.correction.cap": "2 to 5",
    "algorithm.select_tokens.share": "0.2 by entropy, 2e-4 to 2e-3 by covariance",
    "algorithm.filter.low": "0.1 to 0.2",
    "algorithm.filter.high": "0.8 to 0.9",
}
"""Setting -> values in papers and recipes; a start, not a limit."""

USUAL_SOURCES: Mapping[str, str] = {
    "rollout.group_size": "64 in DeepSeekMath (arXiv 2402.03300), 16 in DAPO (2503.14476)",
    "rollout.max_tokens": "1,024 in DeepSeekMath (arXiv 2402.03300), 20,480 in DAPO (2503.14476)",
    "rollout.temperature": "1.0 in DAPO (arXiv 2503.14476), 0.6 in evaluations of DeepSeek-R1 (2501.12948)",
    "rollout.mask_truncated": "DAPO's overlong filtering (arXiv 2503.14476)",
    "train.lr": "1e-6 in DeepSeekMath (arXiv 2402.03300) and DAPO (2503.14476)",
    "train.inner_epochs": "1 in DeepSeekMath (arXiv 2402.03300), 4 and more in PPO (1707.06347)",
    "train.updates_per_batch": "16 in DAPO (arXiv 2503.14476)",
    "guards.kl_stop": "5 to 10 nats are where explainers put the alarm",
    "algorithm.surrogate.clip_low": "0.2 in PPO (arXiv 1707.06347); 3e-4 in GSPO (2507.18071)",
    "algorithm.surrogate.clip_high": "0.28 in DAPO (arXiv 2503.14476); 4e-4 in GSPO (2507.18071)",
    "algorithm.kl.coef": "0.04 in DeepSeekMath (arXiv 2402.03300), 0.001 in DeepSeek-R1 (2501.12948)",
    "algorithm.advantage.eps": "from 1e-9 to 1e-4, by framework",
}
"""Setting -> where the usual values come from."""

_LOW = "Weights below this become 0."
_HIGH = "Weights above this become 0."
_DDOF = "1: the sample's standard deviation; 0: the population's, larger advantages in small groups."
_EPS = "Added to the divisor: a larger value weakens groups whose rewards hardly differ."

EFFECTS: Mapping[str, str] = {
    "ddof": _DDOF,
    "eps": _EPS,
    "process_zscore.credit": "Each step's reward: to it and earlier steps, to it alone, or only the worst's.",
    "prefix_tree.outcome": "Weight of the outcome's advantage, which is added; 1 is TEMPO.",
    "gae.gamma": "Discount of later rewards; 1 for reasoning.",
    "gae.lam": "1: returns, unbiased; less: trusts the critic more, less variance.",
    "gae.length_adaptive": "Sets lam to 1 - 1 / (this * length) for each completion, as VAPO does.",
    "batch_std.of": "Whose standard deviation divides: that of the raw or of the centred rewards.",
    "geometric_clipped.clip_log": "Bound of each token's log-ratio before the mean; smaller: more cautious.",
    "clip.clip_low": "Where A < 0, no gradient below a ratio of 1 minus this.",
    "clip.clip_high": "Where A > 0, no gradient above a ratio of 1 plus this; larger keeps exploration up.",
    "clip.dual_clip": "Upper bound of the ratio where A < 0, above 1 + clip_high: no outlier dominates.",
    "cispo.cap": "Upper bound of the ratio, 1 + eps_high: larger means less bias and more variance.",
    "cispo.floor": "Lower bound of the ratio, 1 - eps_low; 0: none.",
    "sapo.tau_up": "How fast the weight decays where A > 0 as the ratio leaves 1; larger: faster.",
    "sapo.tau_down": "How fast the weight decays where A < 0 as the ratio leaves 1; larger: faster.",
    "vespo.k_up": "Power of the ratio in the weight where A > 0: weakens ratios below 1.",
    "vespo.lam_up": "Decay in the weight where A > 0: weakens ratios above 1.",
    "vespo.k_down": "As k_up, where A < 0.",
    "vespo.lam_down": "As lam_up, where A < 0.",
    "divergence_mask_tv.threshold": "A token is trained if its probability has moved by no more than this.",
    "divergence_mask_tv.cap": "Upper bound of the ratio.",
    "divergence_mask_kl.threshold": "A token is trained if the KL of its probability is at most this.",
    "divergence_mask_kl.cap": "Upper bound of the ratio.",
    "kl_on_selected.coef": "Weight of the penalty on the selected tokens.",
    "constant_length.length": "The constant divisor; none: rollout.max_tokens.",
    "truncated.cap": "Upper bound of the weight trainer / sampler.",
    "truncated.level": "For each token, or their product over the completion.",
    "masked.low": _LOW,
    "masked.high": _HIGH,
    "masked.level": "For each token, or their product over the completion.",
    "geometric_mask.low": "Completions with a smaller mean weight are left out.",
    "geometric_mask.high": "Completions with a larger mean weight are left out.",
    "off_policy_mask.delta": "Completions with A < 0 that drifted further, nats per token, are left out.",
    "top_entropy.share": "Fraction of the tokens that is selected: those with the highest entropy.",
    "top_covariance.share": "Fraction of the tokens that is selected: those with the highest covariance.",
    "random_covariant.share": "Fraction of the tokens that is selected, at random from the band.",
    "random_covariant.low": "Lowest covariance of the band.",
    "random_covariant.high": "Highest covariance of the band.",
    "unlikely_only.below": "Tokens that are at least this likely are not trained.",
    "future_influence.half_life": "Distance in tokens after which a later token counts half.",
    "future_influence.low": "Lower bound of the factor.",
    "future_influence.high": "Upper bound of the factor.",
    "future_influence.outlier": "Tokens with a larger ratio are not counted.",
    "future_influence.safety": "Where A < 0 and the ratio is larger, the factor is at most 1.",
    "pass_rate_band.low": "Lowest pass rate of a group that is trained on.",
    "pass_rate_band.high": "Highest pass rate of a group that is trained on.",
    "pass_rate_band.threshold": "A reward above this counts as passed.",
    "kl.estimator": "k1, k2, k3, absolute or full: see docs/algorithms/kl.md.",
    "kl.coef": "Weight of the KL penalty; larger: slower, safer. With a target, the initial weight.",
    "kl.place": "In the loss, or taken from the reward before the advantage.",
    "kl.level": "For each token, or for the whole response.",
    "kl.gradient": "The formula's, k2's (straight_through), or that of ratio times value, which is unbiased.",
    "kl.target": "KL in nats per completion that the coefficient is adapted to.",
    "kl.horizon": "Completions over which a deviation from the target acts.",
    "kl.refresh_every": "Updates after which the reference moves to the policy.",
    "kl.refresh_mix": "How far it moves: 1 copies the policy, less mixes it in.",
    "entropy.coef": "Weight of the bonus: larger keeps exploration up, too large ends in noise.",
    "entropy.target": "Entropy in nats per token below which the bonus is raised.",
}
"""A function's setting, `function.setting`, or one that means the same in all -> what it does."""

LOSS_EFFECTS: Mapping[str, str] = {
    "beta": "How much a margin counts: larger stays nearer to where it began.",
    "label_smoothing": "Fraction of the pairs that are taken to be the wrong way round.",
    "tau": "Sets the margin that is aimed at, 1 / (2 tau); TRL's beta.",
    "level": "Log-ratios by token, as the authors and TRL, or of the whole answer.",
    "desirable_weight": "Weight of good answers; raise it where they are few.",
    "undesirable_weight": "Weight of bad answers.",
    "lam": "Weight of the odds ratio beside the likelihood of the chosen answer; TRL's beta.",
    "gamma": "Margin that the chosen answer is to be ahead by.",
    "center": "Keeps scores around 0: larger pulls harder.",
}
"""A setting of `loss` -> what it does."""

AXES_IN_WORDS: Mapping[str, str] = {
    "name": "The preset that the rest starts from; `covey algorithms` lists them.",
    "advantage": "Turns the rewards of a group into an advantage for each completion or token.",
    "whiten": "A second step of the advantage, over the whole batch.",
    "ratio": "How far the policy has moved from the one that sampled: by token, sequence or response.",
    "surrogate": "Turns ratio and advantage into the loss of a token: the clip rule.",
    "reduce": "How much a token weighs in the loss of an update.",
    "kl": "The KL penalty; null keeps no reference in memory. A number is its coefficient.",
    "entropy": "The entropy bonus. A number is its coefficient.",
    "correction": "Importance correction for a sampler that disagrees with the trainer.",
    "select_tokens": "Selects tokens for token_weights, or for a surrogate that reads `selected`.",
    "token_weights": "A list of weights of tokens in the policy loss.",
    "filter": "Which groups are trained on; the others are resampled.",
    "old": "Whose log-probs the ratio divides by: the trainer's, or the sampler's.",
}
"""Axis -> what it decides."""


def effect(function: str, setting: str) -> str:
    """What a setting of a function, or of `kl` and `entropy`, does."""
    return EFFECTS.get(f"{function}.{setting}") or EFFECTS[setting]

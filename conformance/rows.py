"""The rows of the table: what each case shows and asks for, and its numbers worked out by hand.

``hand`` is arithmetic of this file alone. One number for a completion goes to each of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, log1p, sqrt
from typing import Any

from covey.objective.algorithms import PRESETS
from covey.objective.dialects import DIALECTS


@dataclass(frozen=True)
class Row:
    """A case before it is computed."""

    id: str
    shows: str
    inputs: str
    asks: Mapping[str, Any]
    due: Sequence[str] = ("advantages",)
    hand: Mapping[str, Any] = field(default_factory=dict)
    says: str = ""
    framework: str = ""
    preset: str = ""


# --- advantages -----------------------------------------------------------------------------------


def estimator(name: str, shows: str, inputs: str, hand: Sequence[Any], says: str, **asks: Any) -> Row:
    return Row(f"advantage/{name}", shows, inputs, asks, hand={"advantages": hand}, says=says)


def one_and_three(one: float, other: float) -> list[float]:
    return [one, other, other, other]


GAIN, LOSS = 0.25 / (sqrt(0.5) + 1e-4), -1.75 / (sqrt(0.5) + 1e-4)
STYLE = 0.5 / (sqrt(1 / 3) + 1e-4) / 2
SHORT = [1 - 0.0625 / 3, -0.125 / 3, -0.0625, -0.125 / 3]
QUARTER = "mean 1/4, sample std 1/2"
KL_COST = 0.1 * log(2)

ADVANTAGES = (
    estimator(
        "reward", "The reward itself, no baseline.", "one_group", one_and_three(1, 0), "r", advantage="reward"
    ),
    estimator(
        "group_centered",
        "Dr. GRPO: the group's mean is the baseline, no std.",
        "one_group",
        one_and_three(0.75, -0.25),
        "r - 1/4",
        advantage="group_centered",
    ),
    estimator(
        "group_zscore",
        "GRPO: sample std, 1e-4 added.",
        "one_group",
        one_and_three(0.75 / 0.5001, -0.25 / 0.5001),
        QUARTER,
        advantage="group_zscore",
    ),
    estimator(
        "group_zscore_population",
        "GRPO with the population's std: larger advantages in small groups.",
        "one_group",
        one_and_three(0.75 / (sqrt(3) / 4 + 1e-8), -0.25 / (sqrt(3) / 4 + 1e-8)),
        "population std sqrt(3)/4",
        advantage={"name": "group_zscore", "ddof": 0, "eps": 1e-8},
    ),
    estimator(
        "group_zscore_tied",
        "Equal rewards give exactly 0, not the rounding of their mean divided by eps.",
        "tied",
        [0, 0, 0],
        "r - mean(r) = 0",
        advantage={"name": "group_zscore", "eps": 1e-8},
    ),
    estimator(
        "group_zscore_lone",
        "A completion without siblings gets 0.",
        "lone",
        [0, 0.5 / (sqrt(0.5) + 1e-4), -0.5 / (sqrt(0.5) + 1e-4)],
        "a lone reward has no baseline; the pair has std sqrt(1/2)",
        advantage="group_zscore",
    ),
    estimator(
        "group_zscore_lone_reward",
        "A completion without siblings gets its reward, as if mean 0 and std 1 (verl).",
        "lone",
        [0.7 / 1.000001, 0.5 / (sqrt(0.5) + 1e-6), -0.5 / (sqrt(0.5) + 1e-6)],
        ".7 / (1 + 1e-6)",
        advantage={"name": "group_zscore", "eps": 1e-6, "single": "reward"},
    ),
    estimator(
        "leave_one_out",
        "RLOO: the siblings' mean is the baseline.",
        "one_group",
        one_and_three(1, -1 / 3),
        "1 - 0; 0 - 1/3",
        advantage="leave_one_out",
    ),
    estimator(
        "leave_one_out_lone",
        "RLOO, a completion without siblings gets its reward (verl).",
        "lone",
        [0.7, 1, -1],
        ".7; 1 - 0; 0 - 1",
        advantage={"name": "leave_one_out", "single": "reward"},
    ),
    estimator(
        "leave_one_out_zscore",
        "Mean and std of the siblings, undivided where these tie (NeMo-RL).",
        "one_group",
        one_and_three(1, -1 / 3 / (1 / sqrt(3) + 1e-6)),
        "siblings of the 1 tie; those of a 0 have std 1/sqrt(3)",
        advantage="leave_one_out_zscore",
    ),
    estimator(
        "length_weighted",
        "OPO: the baseline is weighted by length.",
        "one_group",
        one_and_three(0.875, -0.125),
        "lengths 1, 2, 3, 2: baseline 1/8",
        advantage="length_weighted",
    ),
    estimator(
        "mean_normalized",
        "MaxRL: divided by the mean.",
        "one_group",
        one_and_three(0.75 / 0.250001, -0.25 / 0.250001),
        "(1 - 1/4) / (1/4 + 1e-6)",
        advantage="mean_normalized",
    ),
    estimator(
        "greedy_baseline",
        "ReMax: the greedy completion's reward, 1/2, is the baseline.",
        "one_group",
        one_and_three(0.5, -0.5),
        "r - 1/2",
        advantage="greedy_baseline",
    ),
    estimator(
        "running_baseline",
        "RAE: a running mean of earlier rewards, decay .95.",
        "one_group",
        [1, -0.05, -0.0475, -0.045125],
        "means 0, .05, .95 * .05, .95^2 * .05",
        advantage="running_baseline",
    ),
    estimator(
        "length_penalized",
        "The longest completion of a solved group loses a quarter, times the pass rate.",
        "one_group",
        [s - sum(SHORT) / 4 for s in SHORT],
        "s = r - 1/4 * 1/4 * |y| / 3",
        advantage="length_penalized",
    ),
    estimator(
        "pass_at_k",
        "Pass@2: the best of two is rewarded.",
        "one_group",
        one_and_three(0.5 / 0.500001, -1 / 6 / 0.500001),
        "max of 2 is 1 in half of the pairs, in 1/3 of those of a 0",
        advantage={"name": "pass_at_k", "k": 2},
    ),
    estimator(
        "component_zscore",
        "GDPO's first step: each reward normalised, weights 1 and 1/2.",
        "one_group",
        [0.75 / 0.5001 - STYLE, -0.25 / 0.5001 + STYLE, -0.25 / 0.5001 + STYLE, -0.25 / 0.5001 - STYLE],
        "the second reward has mean 1/2, std 1/sqrt(3)",
        advantage="component_zscore",
    ),
    estimator(
        "component_leave_one_out",
        "GDPO with the siblings' mean and std (NeMo-RL).",
        "one_group",
        [1 - 1 / 3 / (1 / sqrt(3) + 1e-6), 0, 0, -2 / 3 / (1 / sqrt(3) + 1e-6)],
        "second reward: +-2/3 / (1/sqrt(3)), half of it",
        advantage="component_leave_one_out",
    ),
    estimator(
        "process_sum_to_go",
        "Process supervision: a failure is charged to correct steps before it.",
        "steps",
        [[3 * GAIN + LOSS, 2 * GAIN + LOSS, GAIN + LOSS, LOSS], [4 * GAIN, 3 * GAIN, 2 * GAIN, GAIN]],
        "mean 3/4, std sqrt(1/2): a correct step 1/4, the wrong one -7/4, over it",
        advantage="process_zscore",
    ),
    estimator(
        "process_own_step",
        "Each step gets its own normalised reward.",
        "steps",
        [[GAIN, GAIN, GAIN, LOSS], [GAIN] * 4],
        "as sum_to_go, not summed",
        advantage={"name": "process_zscore", "credit": "own_step"},
    ),
    estimator(
        "process_min_form",
        "The worst step's reward up to its end.",
        "steps",
        [[LOSS] * 4, [GAIN] * 4],
        "the wrong step is the last",
        advantage={"name": "process_zscore", "credit": "min_form"},
    ),
    estimator(
        "process_leave_one_out",
        "PRIME: step rewards less the siblings' mean, discounted by step.",
        "steps",
        [[-0.25, -0.5, -1, -2], [0.9375, 0.875, 0.75, 0.5]],
        "means 1/2 and 1; 0 0 0 -2 and four times 1/2, gamma 1/2",
        advantage={"name": "process_leave_one_out", "gamma": 0.5},
    ),
    estimator(
        "prefix_tree",
        "Credit where a completion leaves its siblings.",
        "tree",
        [[-1 / 6, 1 / 6, 0.5], [-1 / 6, 1 / 6, -0.5], [-1 / 6, -1 / 3], [0.5]],
        "V: 1/2; after 5 1/3; after 5 6 1/2; a leaf its reward",
        advantage="prefix_tree",
    ),
    estimator(
        "prefix_tree_outcome",
        "TEMPO: the outcome's advantage is added.",
        "tree",
        [[1 / 3, 2 / 3, 1], [-2 / 3, -1 / 3, -1], [-2 / 3, -5 / 6], [1]],
        "prefix_tree +- 1/2",
        advantage={"name": "prefix_tree", "outcome": 1.0},
    ),
    estimator(
        "optimal_token_baseline",
        "OTB: a baseline for each place, weighted by the energy so far.",
        "tree",
        [[1 - 13 / 21, 2 / 3, 0.5], [-13 / 21, -1 / 3, -0.5], [-13 / 21, -1 / 3], [1 - 13 / 21]],
        "W 1/2 more by token, 9/8 in the last row: baselines 13/21, 1/3, 1/2",
        advantage="optimal_token_baseline",
    ),
    estimator(
        "segment_difference",
        "VinePPO: values of continuations from the ends of segments.",
        "tree",
        [[0.25, 0.25, 0.25], [-0.25, -0.25, -0.25], [-0.5, -0.5], [0.5]],
        "V: 1/2, 3/4, 1; 1/2, 1/4, 0; 1/2, 0; 1/2, 1",
        advantage="segment_difference",
    ),
    estimator(
        "discounted_return",
        "A return with gamma 1/2 that skips the tool's token.",
        "critic",
        [[0.25, 0.5, 0, 1]],
        "1, 1/2, 1/4",
        advantage={"name": "discounted_return", "gamma": 0.5},
    ),
    estimator(
        "gae",
        "GAE bridges the tool's token: the next trained one follows directly.",
        "critic",
        [[0.25, 0.3, 0, 0.2]],
        "deltas .1, .2, .2; lambda 1/2",
        advantage={"name": "gae", "lam": 0.5},
    ),
    estimator(
        "gae_length_adaptive",
        "VAPO: lambda by length, 1 - 1 / (.5 * 3) = 1/3.",
        "critic",
        [[0.1 + 0.8 / 9, 0.8 / 3, 0, 0.2]],
        "deltas .1, .2, .2; lambda 1/3",
        advantage={"name": "gae", "length_adaptive": 0.5},
    ),
    estimator(
        "kl_in_reward_by_token",
        "A token bears the KL of its own and of later tokens.",
        "one_group",
        [1 - KL_COST, -KL_COST, 0, 0],
        "old / ref is 2 at one token of each of the first two",
        advantage="reward",
        kl={"estimator": "k1", "coef": 0.1, "place": "reward"},
    ),
    estimator(
        "kl_in_reward_by_completion",
        "RLOO: the completion's KL is taken from its reward before the baseline.",
        "one_group",
        [
            (1 - KL_COST) * 4 / 3 - (1 - 2 * KL_COST) / 3,
            -KL_COST * 4 / 3 - (1 - 2 * KL_COST) / 3,
            -(1 - 2 * KL_COST) / 3,
            -(1 - 2 * KL_COST) / 3,
        ],
        "rewards 1 - .1 log 2, -.1 log 2, 0, 0",
        advantage="leave_one_out",
        kl={"estimator": "k1", "coef": 0.1, "place": "reward", "level": "completion"},
    ),
)


def whitened(
    name: str,
    shows: str,
    hand: Sequence[float],
    says: str,
    advantage: str = "group_centered",
    **settings: Any,
) -> Row:
    function = settings.pop("function", name)
    asks = {"advantage": advantage, "whiten": {"name": function, **settings}}
    return Row(f"whiten/{name}", shows, "batch", asks, hand={"advantages": hand}, says=says)


CENTRED = (0.5, -0.5, 1.0, -1.0, 0.0, 0.0)
TIMES = "centred rewards .5, -.5, 1, -1, 0, 0"
WHITEN = (
    whitened(
        "batch_centered",
        "A baseline over the batch, a completion counts once.",
        [-0.5, -1.5, 1.5, -0.5, 0.5, 0.5],
        "mean 3/2",
        advantage="reward",
    ),
    whitened(
        "batch_std",
        "Lite PPO: the std of the raw rewards, differences between prompts included.",
        [a / (sqrt(1.1) + 1e-4) for a in CENTRED],
        "std sqrt(5.5 / 5)",
    ),
    whitened(
        "batch_std_of_advantages",
        "ScaleRL: the std of the centred rewards.",
        [a / (sqrt(0.5) + 1e-4) for a in CENTRED],
        "std sqrt(2.5 / 5)",
        function="batch_std",
        of="advantages",
    ),
    whitened(
        "sample_zscore",
        "GDPO's second step over completions.",
        [a / (sqrt(0.5) + 1e-4) for a in CENTRED],
        TIMES + ", mean 0",
    ),
    whitened(
        "token_zscore",
        "REINFORCE++: over tokens, long completions weigh more.",
        [(a + 0.1) / sqrt(4.9 / 9 + 1e-8) for a in CENTRED],
        "ten tokens: mean -.1, sum of squares 5",
    ),
    whitened(
        "token_zscore_floor",
        "The population's variance, at least a floor (OpenRLHF, NeMo-RL).",
        [(a + 0.1) / 0.7 for a in CENTRED],
        "variance .49",
        function="token_zscore",
        ddof=0,
        eps=0.0,
        floor=1e-8,
    ),
    whitened(
        "valid_group_scale",
        "GPG: scaled up by completions in groups that differ.",
        [1.5 * a for a in CENTRED],
        "6 / 4",
    ),
    whitened(
        "valid_group_scale_of_rewards",
        "GPG in verl: by rewards other than 0.",
        [1.2 * a for a in CENTRED],
        "6 / 5",
        function="valid_group_scale",
        of="rewards",
    ),
)

# --- losses ---------------------------------------------------------------------------------------

CLIP: dict[str, Any] = {
    "surrogate": {"name": "clip", "clip_low": 0.2, "clip_high": 0.2},
    "reduce": "token_mean",
}
CLIPPED = [[-1.2, -1.0], [0.8, 1.0, 1.8], [-2.0]]
"""-min(rho A, clipped rho A) at ratios 1.5, 1 | .5, 1, 1.8 | 1 and A 1, -1, 2."""
SLOPES = [[0.0, -1.0], [0.0, 1.0, 1.8], [-2.0]]
"""Their derivative with respect to log pi: 0 where the clip acts."""
NONE = [[0.0]]


def by_tokens(
    tokens: Sequence[Sequence[float]], slopes: Sequence[Sequence[float]] | None = None
) -> dict[str, Any]:
    """Numbers by hand of a mean over the six trained tokens."""
    hand: dict[str, Any] = {"tokens": [*map(list, tokens), [0.0]], "loss": sum(map(sum, tokens)) / 6}
    if slopes is not None:
        hand["gradient"] = [*([v / 6 for v in own] for own in slopes), [0.0]]
    return hand


def times(weights: Sequence[Sequence[float]], of: Sequence[Sequence[float]] = CLIPPED) -> list[list[float]]:
    return [[w * v for w, v in zip(a, b, strict=True)] for a, b in zip(weights, of, strict=True)]


def plus(
    values: Sequence[Sequence[float]], of: Sequence[Sequence[float]], by: float = 0.1
) -> list[list[float]]:
    return [[v + by * k for v, k in zip(a, b, strict=True)] for a, b in zip(of, values, strict=True)]


def token_loss(kind: str, name: str, shows: str, hand: Mapping[str, Any], says: str, **asks: Any) -> Row:
    return Row(f"{kind}/{name}", shows, "tokens", {**CLIP, **asks}, ("loss",), hand, says)


S0, S1 = sqrt(1.5), 0.9 ** (1 / 3)
G0, G1 = exp(0.2), exp((log(1.8) - 0.4) / 3)
FREE = {"surrogate": "unclipped"}
RATIOS = (
    token_loss(
        "ratio",
        "on_policy",
        "pi / sg(pi): the value 1, the gradient of log pi.",
        by_tokens([[-1, -1], [1, 1, 1], [-2]], [[-1, -1], [1, 1, 1], [-2]]),
        "-A at every token",
        ratio="on_policy",
        **FREE,
    ),
    token_loss(
        "ratio",
        "token",
        "The ratio of each token.",
        by_tokens([[-1.5, -1], [0.5, 1, 1.8], [-2]], [[-1.5, -1], [0.5, 1, 1.8], [-2]]),
        "-rho A, its own derivative",
        ratio="token",
        **FREE,
    ),
    token_loss(
        "ratio",
        "sequence",
        "GSPO: the geometric mean over the completion.",
        by_tokens([[-S0] * 2, [S1] * 3, [-2]], [[-S0] * 2, [S1] * 3, [-2]]),
        "sqrt(1.5), .9^(1/3), 1",
        ratio="sequence",
        **FREE,
    ),
    token_loss(
        "ratio",
        "sequence_token",
        "GSPO-token: the same value, each token's own gradient.",
        by_tokens([[-S0] * 2, [S1] * 3, [-2]], [[-S0] * 2, [S1] * 3, [-2]]),
        "as sequence while A is constant",
        ratio="sequence_token",
        **FREE,
    ),
    token_loss(
        "ratio",
        "completion",
        "The product over the completion.",
        by_tokens([[-1.5] * 2, [0.9] * 3, [-2]], [[-3] * 2, [2.7] * 3, [-2]]),
        "1.5, .9, 1; each token moves all of its completion",
        ratio="completion",
        **FREE,
    ),
    token_loss(
        "ratio",
        "geometric_clipped",
        "GMPO: log-ratios clipped at .4 before their mean.",
        by_tokens([[-G0] * 2, [G1] * 3, [-2]], [[0, -G0], [0, G1, G1], [-2]]),
        "log 1.5 > .4; log .5 < -.4",
        ratio="geometric_clipped",
        **FREE,
    ),
)

L75, L50, L25, L90 = log(0.75), log(0.5), log(0.25), log(0.9)


def weighted(weights: Sequence[Sequence[float]]) -> dict[str, Any]:
    """-w A log pi with a detached weight: the gradient is -w A."""
    signs = [[-w * a for w in own] for own, a in zip(weights, (1, -1, 2), strict=True)]
    return by_tokens(times(signs, [[L75, L50], [L25, L50, L90], [L25]]), signs)


def sapo(ratio: float, advantage: float) -> tuple[float, float]:
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + exp(-tau * (ratio - 1)))
    return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * advantage * ratio


SAPO = [[sapo(1.5, 1), sapo(1, 1)], [sapo(0.5, -1), sapo(1, -1), sapo(1.8, -1)], [sapo(1, 2)]]
DRO = [[log(1.5) ** 2 / 2 - L75, -L50], [L50**2 / 2 + L25, L50, log(1.8) ** 2 / 2 + L90], [-2 * L25]]
CLASSES = [log(5 / 3) + log(1 + 0.9 ** (2 / 3)), log(2)]
CAPPED = [[1.3, 1], [0.5, 1, 1.3], [1]]
SURROGATES = (
    token_loss(
        "surrogate",
        "clip",
        "PPO's clip: no gradient where the ratio has gone far enough.",
        by_tokens(CLIPPED, SLOPES),
        "1.5 counts as 1.2, .5 as .8; 1.8 with A < 0 counts in full",
    ),
    token_loss(
        "surrogate",
        "clip_higher",
        "DAPO: the upper bound is 1.28.",
        by_tokens([[-1.28, -1], *CLIPPED[1:]], SLOPES),
        "1.5 counts as 1.28",
        surrogate={"name": "clip", "clip_low": 0.2, "clip_high": 0.28},
    ),
    token_loss(
        "surrogate",
        "dual_clip",
        "Where A < 0 the ratio counts as at most 1.5.",
        by_tokens([CLIPPED[0], [0.8, 1, 1.5], CLIPPED[2]], [SLOPES[0], [0, 1, 0], SLOPES[2]]),
        "1.8 counts as 1.5, without a gradient",
        surrogate={"name": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.5},
    ),
    token_loss(
        "surrogate",
        "cispo",
        "A detached weight below a cap: no token loses its gradient.",
        weighted(CAPPED),
        "weights 1.3, 1 | .5, 1, 1.3 | 1",
        surrogate={"name": "cispo", "cap": 1.3},
    ),
    token_loss(
        "surrogate",
        "cispo_floor",
        "CISPO with a lower bound (verl, NeMo-RL).",
        weighted([[1.3, 1], [0.8, 1, 1.3], [1]]),
        ".5 counts as .8",
        surrogate={"name": "cispo", "cap": 1.3, "floor": 0.8},
    ),
    token_loss(
        "surrogate",
        "sapo",
        "A soft gate for the clip, steeper where A < 0.",
        by_tokens([[v for v, _ in own] for own in SAPO], [[s for _, s in own] for own in SAPO]),
        "-4/tau sigmoid(tau (rho - 1)) A, tau 1 and 1.05",
        surrogate="sapo",
    ),
    token_loss(
        "surrogate",
        "vespo",
        "A gamma-shaped weight of the completion's ratio.",
        weighted([[2.25 * exp(-1.5)] * 2, [0.729 * exp(0.2)] * 3, [1]]),
        "1.5^2 e^(3 - 4.5), .9^3 e^(2 - 1.8), 1",
        ratio="completion",
        surrogate="vespo",
    ),
    token_loss(
        "surrogate",
        "dro",
        "A quadratic pull to the old policy.",
        by_tokens(DRO, [[log(1.5) - 1, -1], [L50 + 1, 1, log(1.8) + 1], [-2]]),
        "(log rho)^2 / 2 - A log pi",
        surrogate="dro",
    ),
    token_loss(
        "surrogate",
        "divergence_mask_tv",
        "DPPO: probabilities that moved outward by more than .15 are not trained.",
        weighted([[0, 1], [0, 1, 1.8], [1]]),
        ".5 to .75 and .5 to .25 have moved by .25",
        surrogate="divergence_mask_tv",
    ),
    token_loss(
        "surrogate",
        "divergence_mask_kl",
        "DPPO with the binary KL, bound .2.",
        weighted([[1.5, 1], [0.5, 1, 1.8], [1]]),
        "KL(.5 || .75) = KL(.5 || .25) = .144 < .2",
        surrogate={"name": "divergence_mask_kl", "threshold": 0.2},
    ),
    token_loss(
        "surrogate",
        "kl_on_selected",
        "KL-Cov: a penalty on the tokens of highest covariance.",
        by_tokens([[-1.5 + 2 * log(1.5), -1], [0.5, 1, 1.8], [-2]]),
        "both tokens of the first completion; 2 |log rho|",
        surrogate={"name": "kl_on_selected", "coef": 2.0},
        select_tokens={"name": "top_covariance", "fraction": 0.2},
    ),
    token_loss(
        "surrogate",
        "group_classification",
        "REAL: correct and incorrect completions as two classes.",
        {"tokens": [[CLASSES[0]] * 2, [CLASSES[0]] * 3, [CLASSES[1]], [0.0]], "loss": sum(CLASSES) / 2},
        "e^(-s/tau) 2/3, e^(s/tau) .9^(2/3); the second group has one class",
        surrogate="group_classification",
        reduce="prompt_mean",
    ),
)


def reduced(name: str, shows: str, value: float, says: str, **settings: Any) -> Row:
    function = settings.pop("function", name)
    return token_loss(
        "reduce",
        name,
        shows,
        {"tokens": [*CLIPPED, [0.0]], "loss": value},
        says,
        reduce={"name": function, **settings},
    )


SUMS = "sums -2.2, 3.6, -2 of 2, 3, 1 tokens"
REDUCTIONS = (
    reduced("token_mean", "Every token of the step weighs the same.", -0.1, SUMS + "; / 6"),
    reduced(
        "token_mean_eps",
        "NeMo-RL adds to the number of tokens (here 1/2).",
        -0.6 / 6.5,
        SUMS + "; / 6.5",
        function="token_mean",
        eps=0.5,
    ),
    reduced(
        "sequence_mean",
        "GRPO: every completion weighs the same; the untrained one is none.",
        -1.9 / 3,
        "(-1.1 + 1.2 - 2) / 3",
    ),
    reduced(
        "sequence_mean_all_rows",
        "TRL: the untrained completion is a row too.",
        -1.9 / 4,
        "(-1.1 + 1.2 - 2) / 4",
        function="sequence_mean",
        rows="all",
    ),
    reduced(
        "sequence_mean_eps",
        "verl and others add to a completion's tokens (here 1/2).",
        (-2.2 / 2.5 + 3.6 / 3.5 - 2 / 1.5) / 3,
        SUMS,
        function="sequence_mean",
        eps=0.5,
    ),
    reduced("sequence_sum", "A completion weighs by its length.", -0.2, "-.6 / 3"),
    reduced("constant_length", "Dr. GRPO: a constant length, 10.", -0.02, "-.6 / (3 * 10)"),
    reduced(
        "constant_length_given",
        "Dr. GRPO with a constant of its own, 5.",
        -0.04,
        "-.6 / (3 * 5)",
        function="constant_length",
        length=5,
    ),
    reduced("prompt_mean", "ScaleRL: every prompt weighs the same.", -0.86, "(1.4 / 5 - 2) / 2"),
    reduced("token_sum", "A plain sum.", -0.6, SUMS),
)

D = [[log(1.5), 0], [-log(2), 0, log(1.8)], [-log(2)]]
"""log pi - log ref."""
K3 = [[exp(-d) + d - 1 for d in own] for own in D]
K3_SLOPE = [[1 - exp(-d) for d in own] for own in D]
RATIO = [[1.5, 1], [0.5, 1, 1.8], [1]]
WHOLE: list[list[float]] = [[log(1.5)] * 2, [log(0.9)] * 3, [-log(2)]]
TO_SAMPLER: list[list[float]] = [[log(3), 0], [log(0.4), 0, log(1.8)], [0]]
HALF = [[0.5 * d for d in own] for own in D]


def penalised(
    name: str,
    shows: str,
    values: Sequence[Sequence[float]],
    slopes: Sequence[Sequence[float]],
    says: str,
    **kl: Any,
) -> Row:
    hand = by_tokens(plus(values, CLIPPED), plus(slopes, SLOPES))
    return token_loss("kl", name, shows, hand, says, kl={"coef": 0.1, **kl})


KLS = (
    penalised(
        "k1",
        "k1 in the loss: its gradient does not know the distance.",
        D,
        [[1, 1], [1, 1, 1], [1]],
        "d = log pi - log ref",
        estimator="k1",
    ),
    penalised("k2", "k2 in the loss.", times(HALF, D), D, "d^2 / 2, slope d", estimator="k2"),
    penalised(
        "k3",
        "k3 in the loss, the gradient of the formula: the forward KL's.",
        K3,
        K3_SLOPE,
        "e^-d + d - 1, slope 1 - e^-d",
        estimator="k3",
    ),
    penalised(
        "k3_straight_through",
        "k3's value with k2's gradient (verl's k3+).",
        K3,
        D,
        "slope d",
        estimator="k3",
        gradient="straight_through",
    ),
    penalised(
        "k3_ratio",
        "k3 times the ratio (TRL, DeepSeek-V3.2): the reverse KL's gradient.",
        times(RATIO, K3),
        times(RATIO, plus(K3, K3_SLOPE, 1)),
        "rho k3, slope rho (k3 + 1 - e^-d)",
        estimator="k3",
        gradient="ratio",
    ),
    penalised(
        "k3_score",
        "k3 times pi / sg(pi) (NeMo-RL).",
        K3,
        plus(K3, K3_SLOPE, 1),
        "slope k3 + 1 - e^-d",
        estimator="k3",
        gradient="score",
    ),
    penalised(
        "k3_bound",
        "No token's penalty above .2, and no gradient beyond.",
        [[min(k, 0.2) for k in own] for own in K3],
        [[s * (k < 0.2) for s, k in zip(a, b, strict=True)] for a, b in zip(K3_SLOPE, K3, strict=True)],
        "1 - log 2 = .307 counts as .2",
        estimator="k3",
        bound=0.2,
    ),
    penalised(
        "absolute",
        "The absolute log-ratio.",
        [[abs(d) for d in own] for own in D],
        [[(d > 0) - (d < 0) for d in own] for own in D],
        "|d|",
        estimator="absolute",
    ),
    penalised(
        "full",
        "The exact KL over the vocabulary, given.",
        [[0.2, 0], [0.1, 0, 0.3], [0.6]],
        [[0, 0], [0, 0, 0], [0]],
        "its gradient is the logits'",
        estimator="full",
    ),
    penalised(
        "k2_completion",
        "k2 of the completion's log-ratio, at every token.",
        times([[w / 2 for w in own] for own in WHOLE], WHOLE),
        [[2 * log(1.5)] * 2, [3 * log(0.9)] * 3, [-log(2)]],
        "log 1.5, log .9, -log 2",
        estimator="k2",
        level="completion",
    ),
    penalised(
        "k2_sampler",
        "A pull to the policy that sampled (prime-rl).",
        [[d * d / 2 for d in own] for own in TO_SAMPLER],
        TO_SAMPLER,
        "log 3, 0 | log .4, 0, log 1.8 | 0",
        estimator="k2",
        to="sampler",
    ),
)


def corrected(name: str, shows: str, weights: Sequence[Sequence[float]], says: str, **settings: Any) -> Row:
    function = settings.pop("function", name)
    hand = by_tokens(times(weights), times(weights, SLOPES))
    return token_loss("correction", name, shows, hand, says, correction={"name": function, **settings})


CORRECTIONS = (
    corrected(
        "truncated",
        "TIS by token: trainer / sampler, at most 1.2.",
        [[1.2, 1], [0.8, 1, 1], [1]],
        "2, 1 | .8, 1, 1 | 1",
        cap=1.2,
    ),
    corrected(
        "truncated_sequence",
        "TIS by the product over the completion.",
        [[1.2] * 2, [0.8] * 3, [1]],
        "2, .8, 1",
        function="truncated",
        cap=1.2,
        level="sequence",
    ),
    corrected(
        "masked",
        "IcePop: tokens outside [.9, 1.5] are left out.",
        [[0, 1], [0, 1, 1], [1]],
        "2 and .8 are outside",
        low=0.9,
        high=1.5,
    ),
    corrected(
        "masked_sequence",
        "MIS: completions whose product is outside [.75, 1.5] are left out.",
        [[0, 0], [0.8] * 3, [1]],
        "2 is outside, .8 is not",
        function="masked",
        low=0.75,
        high=1.5,
        level="sequence",
    ),
    corrected(
        "geometric_mask",
        "Completions whose mean weight is outside [.9, 1.1] are left out.",
        [[0, 0], [1] * 3, [1]],
        "sqrt(2) is outside, .8^(1/3) is not",
        low=0.9,
        high=1.1,
    ),
    corrected(
        "decoupled", "AReaL: the weight without a cap.", [[2, 1], [0.8, 1, 1], [1]], "2, 1 | .8, 1, 1 | 1"
    ),
    corrected(
        "off_policy_mask",
        "OPSM: a completion with A < 0 that has become unlikely is left out.",
        [[1, 1], [0] * 3, [1]],
        "mean log(sampler / new) of the second: -log(.72) / 3 = .11 > .1",
        delta=0.1,
    ),
)

NLL = -(L75 + L50 + L25) / 3
WIDE = {"name": "future_influence", "half_life": 1.0, "low": 0.1, "high": 10.0}
WEIGHTS = (
    token_loss(
        "weight",
        "top_entropy",
        "The 80/20 rule: only the half with the highest entropy; the mean counts all tokens.",
        by_tokens(times([[1, 0], [0, 1, 0], [1]]), times([[1, 0], [0, 1, 0], [1]], SLOPES)),
        "entropies .5, .9, .4",
        select_tokens={"name": "top_entropy", "fraction": 0.5},
        token_weights="selected_only",
    ),
    token_loss(
        "weight",
        "top_entropy_rounded",
        "A fraction that is no whole number of tokens is rounded: .24 of 6 is 1.",
        by_tokens(times([[0, 0], [0, 1, 0], [0]]), times([[0, 0], [0, 1, 0], [0]], SLOPES)),
        "entropy .9",
        select_tokens={"name": "top_entropy", "fraction": 0.24},
        token_weights="selected_only",
    ),
    token_loss(
        "weight",
        "random_covariant",
        "Clip-Cov: one token of the band gets no gradient, the one with the highest noise.",
        by_tokens([[-1.2, 0], *CLIPPED[1:]], [[0, 0], *SLOPES[1:]]),
        "the band has the first completion's two tokens, noise .3 and .8",
        select_tokens={"name": "random_covariant", "fraction": 0.2, "low": 0.0},
        token_weights="unselected_only",
    ),
    token_loss(
        "weight",
        "unlikely_only",
        "SPO: only tokens less likely than .4.",
        by_tokens([[0, 0], [0, 0, 0], [-2]], [[0, 0], [0, 0, 0], [-2]]),
        "one token has old probability 1/4",
        token_weights={"name": "unlikely_only", "below": 0.4},
    ),
    token_loss(
        "weight",
        "future_influence",
        "FIPO: the log-ratios of a token and later ones, discounted.",
        by_tokens(times([[1.5, 1], [0.5 * 1.8**0.25, 1.8**0.5, 1.8], [1]])),
        "half-life 1: exp(sum of log rho / 2^n)",
        token_weights=WIDE,
    ),
    token_loss(
        "term",
        "entropy",
        "An entropy bonus with the weights of the reduction.",
        {"loss": -0.14},
        "-.1 - .1 * 2.4 / 6",
        entropy=0.1,
    ),
    token_loss(
        "term",
        "entropy_by_completion",
        "The bonus has the weights of the mean over completions too.",
        {"loss": -1.9 / 3 - 0.1 * (0.3 + 1.4 / 3 + 0.4) / 3},
        "mean entropies .3, 1.4/3, .4",
        entropy=0.1,
        reduce="sequence_mean",
    ),
    token_loss(
        "term",
        "likelihood",
        "VAPO: the likelihood of correct completions, over their tokens.",
        {"loss": -0.1 + 0.1 * NLL},
        "-.1 + .1 * -(log .75 + log .5 + log .25) / 3",
        nll=0.1,
    ),
)


def pair(
    name: str, shows: str, values: Sequence[float], says: str, function: str = "", **settings: Any
) -> Row:
    hand = {"tokens": values, "loss": sum(values) / 2}
    asks = {"preference": {"name": function or name, **settings}}
    return Row(f"preference/{name}", shows, "pairs", asks, ("loss",), hand, says)


def sig(x: float) -> float:
    return 1 / (1 + exp(-x))


def exo(x: float) -> float:
    """KL((sig(x), sig(-x)) || (.9, .1))."""
    return sig(x) * log(sig(x) / 0.9) + sig(-x) * log(sig(-x) / 0.1)


def soft(x: float) -> float:
    """-log sigmoid(x)."""
    return log1p(exp(-x))


EITHER = "log-ratios 1, -1 and 0, 1, beta .1"
DISCO = [(1 - sig(20 * d)) * soft(d) + sig(20 * d) * exp(-d) for d in (0.2, -0.1)]
ODDS = (-0.5 - log(1 - exp(-0.5))) - (-1 - log(1 - exp(-1)))
PREFERENCES = (
    pair("exo", "EXO.", [exo(0.2), exo(-0.1)], "margins 2 and -1", beta=0.1, label_smoothing=0.1),
    pair(
        "nca",
        "NCA: each answer by itself.",
        [soft(0.1) + soft(-0.1) / 2 + soft(0.1) / 2, 1.5 * soft(0) + soft(-0.1) / 2],
        EITHER,
        beta=0.1,
    ),
    pair(
        "bco", "BCO on pairs, rewards not shifted.", [2 * soft(0.1), soft(0) + soft(-0.1)], EITHER, beta=0.1
    ),
    pair("sppo", "SPPO: either log-ratio has an aim.", [32, 61], "(1 - 5)^2 + (-1 + 5)^2; 25 + 36", beta=0.1),
    pair("apo_zero", "APO-zero.", [1 - sig(0.1) + sig(-0.1), 0.5 + sig(0.1)], EITHER, beta=0.1),
    pair("apo_down", "APO-down.", [sig(0.1) + 1 - sig(0.2), 1.5 - sig(-0.1)], EITHER, beta=0.1),
    pair("discopop", "DiscoPOP.", DISCO, "margins 2 and -1, sig(.2 / .05)", beta=0.1, tau=0.05),
    pair("dpo", "DPO.", [soft(0.2), soft(-0.1)], "margins 2 and -1, beta .1", beta=0.1),
    pair(
        "dpo_smoothed",
        "Conservative DPO: a tenth of the labels is taken to be wrong.",
        [0.9 * soft(0.2) + 0.1 * soft(-0.2), 0.9 * soft(-0.1) + 0.1 * soft(0.1)],
        "margins 2 and -1",
        function="dpo",
        beta=0.1,
        label_smoothing=0.1,
    ),
    pair(
        "ln_dpo",
        "DPO of log-ratios by token.",
        [soft(5 / 6), soft(-0.5)],
        "1/2 + 1/3; 0 - 1/2",
        beta=1.0,
    ),
    pair(
        "mpo",
        "MPO: DPO, BCO and the likelihood of the chosen answer, over all tokens of chosen answers.",
        [
            0.8 * soft(0.2) + 0.2 * 2 * soft(0.1) + 1 / 3,
            0.8 * soft(-0.1) + 0.2 * (soft(0) + soft(-0.1)) + 2 / 3,
        ],
        "3 tokens an answer on average",
        beta=0.1,
        preference_weight=0.8,
        quality_weight=0.2,
        generation_weight=1.0,
    ),
    pair(
        "robust_dpo",
        "Robust DPO.",
        [(0.9 * soft(0.2) - 0.1 * soft(-0.2)) / 0.8, (0.9 * soft(-0.1) - 0.1 * soft(0.1)) / 0.8],
        "margins 2 and -1, e .1",
        beta=0.1,
        label_smoothing=0.1,
    ),
    pair("hinge", "SLiC.", [0.8, 1.1], "1 - .1 D", beta=0.1),
    pair(
        "ipo",
        "IPO of log-ratios by token, as the authors.",
        [(5 / 6 - 5) ** 2, (-0.5 - 5) ** 2],
        "1/2 + 1/3; 0 - 1/2; aim 5",
        tau=0.1,
    ),
    pair(
        "ipo_summed",
        "IPO of summed log-ratios: not comparable in tau.",
        [9, 36],
        "(2 - 5)^2, (-1 - 5)^2",
        function="ipo",
        tau=0.1,
        level="summed",
    ),
    pair(
        "kto",
        "KTO: a good answer and a bad one, z0 = 1/4.",
        [1 - 1 / (1 + exp(-0.075)), 1 - 1 / (1 + exp(-0.075))],
        "1 - sig(.1 * .75); 1 - sig(-.1 * -.75)",
        beta=0.1,
    ),
    pair(
        "apo_zero_unpaired",
        "APO-zero of a good answer and a bad one.",
        [1 - sig(0.1), sig(-0.05)],
        "1 - sig(.1 * 1); sig(.1 * -.5)",
        beta=0.1,
    ),
    pair(
        "orpo",
        "ORPO: likelihood and odds ratio of averaged log-probs.",
        [0.5 + 0.1 * soft(ODDS)] * 2,
        "log-probs by token -1/2 and -1",
        lam=0.1,
    ),
    pair(
        "simpo",
        "SimPO: averaged log-probs, a margin, no reference.",
        [soft(0.5), soft(0.5)],
        "2 (-1/2 + 1) - 1/2",
        beta=2.0,
        gamma=0.5,
    ),
)

CRITIC = (
    Row(
        "value/squared",
        "A critic's squared error; the tool's token is left out.",
        "critic",
        {"value_loss": {}},
        ("loss",),
        {
            "tokens": [[0.005, 0.125, 0, 0.045]],
            "loss": 0.175 / 3,
            "gradient": [[-0.1 / 3, -0.5 / 3, 0, -0.1]],
        },
        "(.1^2 + .5^2 + .3^2) / 2",
    ),
    Row(
        "value/clipped",
        "PPO's value clip, .2: the larger of two errors.",
        "critic",
        {"value_loss": {"clip_value": 0.2}},
        ("loss",),
        {"tokens": [[0.045, 0.125, 0, 0.045]], "loss": 0.215 / 3},
        ".9 counts as .5 + .2",
    ),
)

# --- whole algorithms -----------------------------------------------------------------------------

BOTH = ("advantages", "loss")


def algorithms() -> Iterator[Row]:
    """The presets that some framework has, as their papers and as each framework computes them."""
    peers = {name for framework in DIALECTS.values() for name in framework.algorithms}
    for name in (n for n in PRESETS if n in peers):
        yield Row(
            f"paper/{name}", f"{name} with its paper's settings.", "even", {"name": name}, BOTH, preset=name
        )
    for dialect, framework in DIALECTS.items():
        known = [PRESETS[name] for name in framework.algorithms]
        for name in framework.algorithms:
            algorithm = framework.algorithm(name)
            # One that equals its paper's, or another of the framework's, is no case of its own.
            if algorithm not in known:
                known.append(algorithm)
                yield in_dialect(dialect, name, "even", "", f"{name} as {framework.read} computes it.")
        lone = "even" if dialect in ("trl-1.16", "openrlhf-0.11") else "ragged"
        if lone == "ragged":
            yield in_dialect(dialect, "grpo", lone, "_lone", "A group of one completion among others.")
        yield in_dialect(
            dialect, "gspo", "untrained", "_untrained", "A completion of which nothing is trained."
        )


def in_dialect(dialect: str, name: str, inputs: str, suffix: str, shows: str) -> Row:
    asks = {"name": name, "dialect": dialect}
    return Row(f"{dialect}/{name}{suffix}", shows, inputs, asks, BOTH, framework=dialect, preset=name)


PAPERS: Mapping[str, str] = {
    "advantage/reward": "REINFORCE, Williams 1992",
    "advantage/group_centered": "Dr. GRPO, arXiv 2503.20783",
    "advantage/group_zscore": "GRPO, arXiv 2402.03300",
    "advantage/leave_one_out": "RLOO, arXiv 2402.14740",
    "advantage/leave_one_out_zscore": "none; NeMo-RL's default",
    "advantage/length_weighted": "OPO, arXiv 2505.23585",
    "advantage/mean_normalized": "MaxRL, arXiv 2602.02710",
    "advantage/greedy_baseline": "ReMax, arXiv 2310.10505",
    "advantage/running_baseline": "RAE of SPIRAL, arXiv 2506.24119",
    "advantage/length_penalized": "none; prime-rl",
    "advantage/pass_at_k": "Pass@k Training, arXiv 2508.10751",
    "advantage/component": "GDPO, arXiv 2601.05242",
    "advantage/process": "DeepSeekMath 4.1.3, arXiv 2402.03300",
    "advantage/process_min_form": "PURE, arXiv 2504.15275",
    "advantage/process_leave_one_out": "PRIME, arXiv 2502.01456",
    "advantage/prefix_tree": "TEMPO, arXiv 2509.18314",
    "advantage/optimal_token_baseline": "OTB, arXiv 2602.07078",
    "advantage/segment_difference": "VinePPO, arXiv 2410.01679",
    "advantage/discounted_return": "REINFORCE++, arXiv 2501.03262",
    "advantage/gae": "GAE, arXiv 1506.02438",
    "advantage/gae_length_adaptive": "VAPO, arXiv 2504.05118",
    "advantage/kl_in_reward_by_token": "InstructGPT, arXiv 2203.02155",
    "advantage/kl_in_reward_by_completion": "RLOO, arXiv 2402.14740",
    "whiten/batch_centered": "REINFORCE, Williams 1992",
    "whiten/batch_std": "Lite PPO, arXiv 2508.08221",
    "whiten/batch_std_of_advantages": "ScaleRL, arXiv 2510.13786",
    "whiten/sample_zscore": "GDPO, arXiv 2601.05242",
    "whiten/token_zscore": "REINFORCE++, arXiv 2501.03262",
    "whiten/valid_group_scale": "GPG, arXiv 2504.02546",
    "ratio/on_policy": "REINFORCE, Williams 1992",
    "ratio/token": "PPO, arXiv 1707.06347",
    "ratio/sequence": "GSPO, arXiv 2507.18071",
    "ratio/completion": "GRPO as DeepSeek-R1 prints it, arXiv 2501.12948",
    "ratio/geometric_clipped": "GMPO, arXiv 2507.20673",
    "surrogate/clip": "PPO, arXiv 1707.06347",
    "surrogate/clip_higher": "DAPO, arXiv 2503.14476",
    "surrogate/dual_clip": "dual-clip PPO, arXiv 1912.09729; INTELLECT-2, arXiv 2505.07291",
    "surrogate/cispo": "CISPO, arXiv 2506.13585",
    "surrogate/sapo": "SAPO, arXiv 2511.20347",
    "surrogate/vespo": "VESPO, arXiv 2602.10693",
    "surrogate/dro": "DRO, arXiv 2405.19107",
    "surrogate/divergence": "DPPO, arXiv 2602.04879",
    "surrogate/kl_on_selected": "KL-Cov, arXiv 2505.22617",
    "surrogate/group_classification": "REAL, arXiv 2602.05630",
    "reduce/token_mean": "DAPO, arXiv 2503.14476",
    "reduce/sequence_mean": "GRPO, arXiv 2402.03300",
    "reduce/sequence_sum": "LUSPO, arXiv 2602.05261",
    "reduce/constant_length": "Dr. GRPO, arXiv 2503.20783",
    "reduce/prompt_mean": "ScaleRL, arXiv 2510.13786",
    "reduce/token_sum": "none",
    "kl/": "Schulman 2020, Approximating KL divergence; gradients: arXiv 2506.09477",
    "kl/k2_sampler": "Kimi K2.5, arXiv 2602.02276",
    "correction/truncated": "TIS",
    "correction/masked": "IcePop; MIS",
    "correction/geometric_mask": "none; verl's seq_mean_k1",
    "correction/decoupled": "AReaL, arXiv 2505.24298",
    "correction/off_policy_mask": "OPSM of DeepSeek-V3.2",
    "weight/top_entropy": "Beyond the 80/20 rule, arXiv 2506.01939",
    "weight/random_covariant": "Clip-Cov, arXiv 2505.22617",
    "weight/unlikely_only": "SPO, arXiv 2505.23564",
    "weight/future_influence": "FIPO, arXiv 2603.19835",
    "term/entropy": "PPO, arXiv 1707.06347",
    "term/likelihood": "VAPO, arXiv 2504.05118",
    "preference/dpo": "DPO, arXiv 2305.18290",
    "preference/ln_dpo": "Tulu 3, arXiv 2411.15124",
    "preference/mpo": "MPO, arXiv 2411.10442",
    "preference/exo": "EXO, arXiv 2402.00856",
    "preference/nca": "NCA, arXiv 2402.05369",
    "preference/bco": "BCO, arXiv 2404.04656",
    "preference/sppo": "SPPO, arXiv 2405.00675",
    "preference/apo": "APO, arXiv 2408.06266",
    "preference/discopop": "DiscoPOP, arXiv 2406.08414",
    "preference/robust_dpo": "Robust DPO, arXiv 2403.00409",
    "preference/hinge": "SLiC-HF, arXiv 2305.10425",
    "preference/ipo": "IPO, arXiv 2310.12036",
    "preference/kto": "KTO, arXiv 2402.01306",
    "preference/orpo": "ORPO, arXiv 2403.07691",
    "preference/simpo": "SimPO, arXiv 2405.14734",
    "value/": "PPO, arXiv 1707.06347",
}
"""Beginning of an id -> source; the longest one counts."""
FORMULAS: Mapping[str, str] = {
    "term/entropy": "loss - coef * mean over tokens of the entropy",
    "term/entropy_by_completion": "loss - coef * mean over completions of their mean entropy",
    "term/likelihood": "loss - nll * mean over the tokens of correct completions of log pi",
    "surrogate/divergence_mask_kl": "-A sg(min(rho, cap)) log pi where the probability moved outward by a "
    "KL of at most threshold: p log(p/q) + (1-p) log((1-p)/(1-q)), p old, q new",
}
"""Where the function's own documentation does not say it in one sentence."""

ROWS = (
    *ADVANTAGES,
    *WHITEN,
    *RATIOS,
    *SURROGATES,
    *REDUCTIONS,
    *KLS,
    *CORRECTIONS,
    *WEIGHTS,
    *PREFERENCES,
    *CRITIC,
    *algorithms(),
)

"""The functions that a config may name, axis by axis; ``algorithms`` composes them into the papers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from covey.objective import (
    advantages,
    corrections,
    credit,
    filters,
    penalties,
    ratios,
    reductions,
    surrogates,
    token_weights,
    value,
)
from covey.objective.axis_function import AnyAxisFunction

AXES: Mapping[str, tuple[Callable[..., object], ...]] = {
    "advantage": (
        advantages.reward,
        advantages.group_centered,
        advantages.group_zscore,
        advantages.leave_one_out,
        advantages.leave_one_out_zscore,
        advantages.length_weighted,
        advantages.mean_normalized,
        advantages.greedy_baseline,
        advantages.running_baseline,
        advantages.length_penalized,
        advantages.pass_at_k,
        advantages.component_zscore,
        advantages.component_leave_one_out,
        credit.process_zscore,
        credit.process_leave_one_out,
        credit.prefix_tree,
        credit.optimal_token_baseline,
        credit.segment_difference,
        credit.discounted_return,
        value.gae,
    ),
    "whiten": (
        advantages.batch_centered,
        advantages.batch_std,
        advantages.sample_zscore,
        advantages.token_zscore,
        advantages.valid_group_scale,
    ),
    "ratio": (
        ratios.on_policy,
        ratios.token,
        ratios.sequence,
        ratios.sequence_token,
        ratios.completion,
        ratios.geometric_clipped,
    ),
    "surrogate": (
        surrogates.unclipped,
        surrogates.clip,
        surrogates.cispo,
        surrogates.sapo,
        surrogates.vespo,
        surrogates.dro,
        surrogates.divergence_mask_tv,
        surrogates.divergence_mask_kl,
        surrogates.kl_on_selected,
        surrogates.group_classification,
    ),
    "kl.estimator": (penalties.k1, penalties.k2, penalties.k3, penalties.absolute, penalties.full),
    "reduce": (
        reductions.token_mean,
        reductions.sequence_mean,
        reductions.sequence_sum,
        reductions.constant_length,
        reductions.prompt_mean,
        reductions.token_sum,
    ),
    "correction": (
        corrections.truncated,
        corrections.masked,
        corrections.geometric_mask,
        corrections.decoupled,
        corrections.off_policy_mask,
    ),
    "select_tokens": (
        token_weights.top_entropy,
        token_weights.top_covariance,
        token_weights.random_covariant,
    ),
    "token_weights": (
        token_weights.selected_only,
        token_weights.unselected_only,
        token_weights.unlikely_only,
        token_weights.future_influence,
    ),
    "filter": (filters.informative, filters.mixed, filters.pass_rate_band),
}
"""The functions that a config may name on each axis; ``module.py:function`` names a user's own."""


def is_built_in(part: AnyAxisFunction) -> bool:
    """Return whether a function comes with covey, so that its properties are known."""
    return any(part.function in functions for functions in AXES.values())

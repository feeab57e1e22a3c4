"""Dialects: the conventions in which other frameworks' algorithms of the same name differ.

The conventions were read in the source code of the versions named; docs/algorithms/dialects.md is the
table of differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from covey.objective import advantages, credit, penalties, ratios, reductions, surrogates
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.axis_function import AnyAxisFunction, AxisFunction, bind
from covey.objective.penalties import KL

Axes = Mapping[str, Any]
"""Axes of an algorithm, by name."""


@dataclass(frozen=True)
class Framework:
    """One framework's conventions, taken from its source code."""

    read: str
    """Name and version of the framework."""
    conventions: Mapping[Callable[..., object], AnyAxisFunction]
    """covey's function -> the function that the framework computes in place of it."""
    kl: KL
    """The framework's default KL: estimator, place, gradient and bound."""
    algorithms: Mapping[str, Axes]
    """Preset -> the axes in which the framework's own defaults differ, besides the conventions."""

    def convention(self, function: Callable[..., object], settings: Axes) -> AnyAxisFunction:
        """Return a function as the framework computes it; conventions override ``settings``."""
        choice = self.conventions.get(function, AxisFunction(function))
        # A function that replaces another has settings of its own: the preset's do not apply to it.
        inherited = settings if choice.function is function else {}
        return AxisFunction(choice.function, {**inherited, **choice.settings})

    def algorithm(self, name: str) -> Algorithm:
        """Return a preset as the framework computes it. Raises KeyError if the framework lacks the preset."""
        preset = PRESETS[name]
        axes: dict[str, Any] = {
            axis: self.convention(value.function, value.settings)
            for axis, value in vars(preset).items()
            if isinstance(value, AxisFunction)
        }
        if preset.kl is not None:
            axes["kl"] = replace(preset.kl, gradient=self.kl.gradient, bound=self.kl.bound)
            # In the reward the KL is detached, so only its bound matters.
            if preset.kl.place == "reward":
                axes["kl"] = replace(preset.kl, bound=self.kl.bound)
        # The framework's own defaults win over the conventions, and these over the preset.
        axes |= self.algorithms[name]
        return replace(preset, **axes, paper=f"{preset.paper} As {self.read} computes it.")


def _by_function(functions: Iterable[AnyAxisFunction]) -> dict[Callable[..., object], AnyAxisFunction]:
    return {part.function: part for part in functions}


def _as_is(*names: str) -> dict[str, Axes]:
    """Return rows for presets to which only the conventions apply."""
    return {name: {} for name in names}


_BY_TOKEN: Axes = {"kl": None, "reduce": bind(reductions.token_mean)}
_CLIP = bind(surrogates.clip, clip_low=0.2, clip_high=0.2)
_PLAIN_LOGPROB = bind(surrogates.cispo, cap=1.0, floor=1.0)
"""The loss -A log pi. It has the same gradient as -rho A at rho = 1."""

_TRL = Framework(
    read="TRL 1.16.0",
    conventions=_by_function(
        (
            bind(advantages.group_zscore, ddof=1, eps=1e-4),
            bind(advantages.component_zscore, ddof=1, eps=1e-4),
            bind(advantages.batch_std, of="rewards", ddof=1, eps=1e-4),
            bind(advantages.sample_zscore, ddof=1, eps=1e-4),
            bind(reductions.sequence_mean, rows="all"),
            bind(reductions.sequence_sum, rows="all"),
            bind(reductions.constant_length, rows="all"),
        )
    ),
    kl=KL(bind(penalties.k3), gradient="ratio"),
    algorithms={
        "grpo": _BY_TOKEN,
        "rloo": {
            "ratio": bind(ratios.completion),
            "surrogate": _CLIP,
            "reduce": bind(reductions.sequence_mean, rows="all"),
        },
        # torch.where makes a number of float32 of its temperature of 1.05.
        "sapo": {"surrogate": bind(surrogates.sapo, tau_up=1.0, tau_down=1.0499999523162842)},
        **_as_is("dr_grpo", "dapo", "lite_ppo", "gspo", "luspo", "gmpo"),
        **_as_is("cispo", "vespo", "gdpo", "intellect_2"),
    },
)

_VERL_CLIP = bind(surrogates.clip, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
# verl chooses the policy loss apart from the advantage: estimators whose papers have no clip get PPO's.
_VERL_LOSS: Axes = {**_BY_TOKEN, "ratio": bind(ratios.token), "surrogate": _VERL_CLIP}
_VERL = Framework(
    read="verl 0.9.1",
    conventions=_by_function(
        (
            bind(advantages.group_zscore, ddof=1, eps=1e-6, single="reward"),
            bind(advantages.group_centered, single="reward"),
            bind(advantages.leave_one_out, single="reward"),
            bind(advantages.length_weighted, single="reward"),
            bind(advantages.component_zscore, ddof=1, eps=1e-6, single="reward"),
            bind(advantages.token_zscore, ddof=1, eps=1e-8, floor=0.0),
            bind(advantages.valid_group_scale, of="rewards"),
            bind(surrogates.clip, dual_clip=3.0),
            bind(reductions.sequence_mean, eps=1e-8),
        )
    ),
    kl=KL(bind(penalties.k3), bound=10.0),
    algorithms={
        "grpo": _BY_TOKEN,
        **dict.fromkeys(("rloo", "remax", "opo"), _VERL_LOSS),
        "reinforce_pp": {**_VERL_LOSS, "advantage": bind(credit.discounted_return, gamma=1.0)},
        "reinforce_pp_baseline": _VERL_LOSS,
        "gpg": {"ratio": bind(ratios.token), "surrogate": _PLAIN_LOGPROB},
        "gdpo": {"whiten": bind(advantages.token_zscore, ddof=1, eps=1e-8)},
        "gspo": {
            "ratio": bind(ratios.sequence_token),
            "surrogate": bind(surrogates.clip, clip_low=3e-4, clip_high=4e-4),
        },
        "cispo": {"surrogate": bind(surrogates.cispo, cap=1.2, floor=0.8)},
        **_as_is("dr_grpo", "dapo", "sapo", "dro", "dual_clip"),
    },
)

_OPENRLHF_KL = KL(bind(penalties.k1), coef=0.01, place="reward", bound=10.0)
# As in verl, one policy loss serves all estimators.
_OPENRLHF_LOSS: Axes = {
    "ratio": bind(ratios.token),
    "surrogate": _CLIP,
    "reduce": bind(reductions.token_mean),
    "kl": _OPENRLHF_KL,
}
_OPENRLHF_WHITEN = bind(advantages.token_zscore, ddof=0, eps=0.0, floor=1e-8)
_OPENRLHF_REINFORCE: Axes = {
    **_OPENRLHF_LOSS,
    "advantage": bind(credit.discounted_return, gamma=1.0),
    "whiten": _OPENRLHF_WHITEN,
}
_OPENRLHF = Framework(
    read="OpenRLHF 0.11.2",
    conventions=_by_function(
        (
            bind(advantages.group_zscore, ddof=1, eps=1e-9),
            _OPENRLHF_WHITEN,
            bind(reductions.sequence_mean, eps=1e-8),
        )
    ),
    kl=_OPENRLHF_KL,
    algorithms={
        **dict.fromkeys(("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"), _OPENRLHF_LOSS),
        **dict.fromkeys(("reinforce", "reinforce_pp"), _OPENRLHF_REINFORCE),
        **_as_is("dapo", "gspo"),
    },
)

_NEMO_KL = KL(bind(penalties.k3), coef=0.01, gradient="score", bound=10.0)
_NEMO_MEAN = bind(reductions.token_mean, eps=1e-8)
_NEMO: Axes = {"kl": _NEMO_KL, "reduce": _NEMO_MEAN}
_NEMO_RL = Framework(
    read="NeMo-RL 0.7.0",
    conventions={
        advantages.group_zscore: bind(advantages.leave_one_out_zscore, eps=1e-6),
        advantages.group_centered: bind(advantages.leave_one_out),
        advantages.component_zscore: bind(advantages.component_leave_one_out, eps=1e-6),
        **_by_function(
            (
                bind(advantages.sample_zscore, ddof=1, eps=0.0),
                bind(advantages.token_zscore, ddof=0, eps=0.0, floor=1e-8),
                _NEMO_MEAN,
                bind(reductions.sequence_mean, eps=1e-8),
            )
        ),
    },
    kl=_NEMO_KL,
    algorithms={
        **dict.fromkeys(("grpo", "gdpo"), _NEMO),
        "rloo": {**_NEMO, "ratio": bind(ratios.token), "surrogate": _PLAIN_LOGPROB},
        "reinforce_pp": _NEMO,
        "reinforce_pp_baseline": {**_NEMO, "advantage": bind(advantages.group_centered)},
        "cispo": {**_NEMO, "surrogate": bind(surrogates.cispo, cap=1.2, floor=0.8)},
        **_as_is("dapo", "gspo"),
    },
)

DIALECTS: Mapping[str, Framework] = {
    "trl-1.16": _TRL,
    "verl-0.9.1": _VERL,
    "openrlhf-0.11": _OPENRLHF,
    "nemo-rl-0.7": _NEMO_RL,
}
"""name -> the framework's conventions."""

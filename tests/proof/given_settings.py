"""The settings with which each method over given examples is repeated by the second trainer."""

from __future__ import annotations

from collections.abc import Mapping

SETTINGS: dict[str, list[Mapping[str, object]]] = {  # tests/config/test_methods.py names one that is missing
    "dpo": [
        {"beta": 0.5},
        {"label_smoothing": 0.2},
        {"divergence": "forward_kl"},
        {"divergence": "jensen_shannon", "beta": 0.5},
        {"divergence": "alpha", "alpha": 0.3},
    ],
    "ln_dpo": [{"beta": 2.0}],
    "mpo": [{"beta": 0.5}, {"preference_weight": 0.3, "quality_weight": 0.6, "generation_weight": 0.5}],
    "robust_dpo": [{"beta": 0.7}],
    "hinge": [{"beta": 0.4}],
    "ipo": [{"tau": 0.4}, {"tau": 0.4, "level": "summed"}],
    "kto": [{"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.6}],
    "orpo": [{"lam": 0.8}],
    "simpo": [{"beta": 1.5, "gamma": 0.3}],
    "exo": [{"beta": 0.5, "label_smoothing": 0.05}],
    "nca": [{"beta": 0.5}],
    "bco": [{"beta": 0.5}],
    "sppo": [{"beta": 0.5}],
    "apo_zero": [{"beta": 0.5}],
    "apo_down": [{"beta": 0.5}],
    "apo_zero_unpaired": [{"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.6}],
    "discopop": [{"beta": 0.5, "tau": 0.2}],
}

"""Learned rewards: they load torch and are above the models, so that rewards themselves stay light."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial


def _imported(name: str) -> Callable[..., object]:
    from covey.learned import reward_models

    return getattr(reward_models, name)


LEARNED: Mapping[str, Callable[[], Callable[..., object]]] = {
    name: partial(_imported, name) for name in ("reward_model", "process_reward_model")
}
"""name -> what imports that function, called where a config names it."""

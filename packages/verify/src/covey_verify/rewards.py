"""The built-in rewards by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import covey_verify

BUILT_IN: Mapping[str, Callable[..., object]] = {
    name: getattr(covey_verify, name) for name in covey_verify.REWARDS
}

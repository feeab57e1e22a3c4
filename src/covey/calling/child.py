"""What a call's own process does: it calls the tool. Light on imports, because it is forked each time."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping

from covey.sandbox.driver import load_module


def call_tool(place: str, name: str, given: Mapping[str, object], most: int) -> str:
    """What a tool returns, as text of at most ``most`` characters: what is no text is written as JSON."""
    returned = getattr(load_module(place), name)(**given)
    if inspect.iscoroutine(returned):
        returned = asyncio.run(returned)
    text = returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False, default=_plain)
    return text[:most]


def _plain(value: object) -> object:
    """Numbers of numpy as numbers, not as texts that look like them; the rest in words."""
    return value.tolist() if hasattr(value, "tolist") else str(value)

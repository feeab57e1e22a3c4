"""Environments of the tests, as a user's file, and episodes in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from covey.config.sampling import ToolUse
from covey.config.schema import Sandbox
from covey.rewards.contract import Context, Reward
from covey.sampling.tools.environments import Episode
from covey.sampling.tools.running import Toolbox
from covey.types import Completion, Problem, Transcript
from covey_verify.calls.call import ToolCall

FILE = '''
import asyncio, os, random, time
import numpy as np

class Counter:
    """Counts, from the row's column."""

    def __init__(self):
        self._lock = object()
        self.total, self.most = 0, 9

    def reset(self, start: int, step: int = 1):
        self.total, self.step, self.lucky = start, step, random.random()
        self.seen, self.handle = np.zeros(2), object()

    def add(self, times: int = 1, *, start: int) -> str:
        """Count on.

        Args:
            times: How often.
        """
        self.total += times * self.step
        return f"{self.total} from {start}"

    async def later(self) -> dict:
        """Count on, later."""
        await asyncio.sleep(0.001)
        self.total += 1
        return {"total": self.total}

    def hang(self) -> str:
        """Never ends."""
        while True:
            time.sleep(1)

    def die(self) -> str:
        """Ends its process."""
        os._exit(3)

    def get_reward(self):
        if self.total > 90:
            raise ValueError("too many")
        return self.total / 10

class Odd(Counter):
    def get_reward(self):
        return float("nan")

class Endless(Counter):
    get_reward = None
    def reset(self, start: int):
        super().reset(start)
        self.reward = float("inf")

class Words(Counter):
    def get_reward(self):
        return "won"

class Every(Counter):
    def reset(self, **columns):
        self.total, self.step, self.columns = 0, 1, columns

class Needs(Counter):
    def reset(self, answer):
        pass

class Broken(Counter):
    def reset(self):
        raise KeyError("gone")

class Speaks(Counter):
    def reset(self, start: int):
        super().reset(start)
        self.secret = random.random()
        return f" Begin at {start} with {self.secret}."
    def luck(self) -> str:
        """Draw a number."""
        return str(random.random())

class Moody(Counter):
    def reset(self):
        return f"It is {time.time()}."

class Mumbles(Counter):
    def reset(self, start: int):
        return None if start == 5 else "Welcome!"

class NoReset:
    pass

class Asks:
    def __init__(self, size): pass
    def reset(self): pass

class Nothing:
    def reset(self): pass
    def get_reward(self): return 1.0

class Silent:
    def reset(self): pass
    def look(self): return "nobody is told of this"

class Places:
    def reset(self): pass
    def look(self, word: str, /) -> str: "Look."

def function():
    pass

def even(completions, environments, **columns):
    return [float(own.total % 2 == 0) for own in environments]

def add(first: int) -> int:
    """Add.

    Args:
        first: One.
    """
'''
ROW = Problem("r/1", "count", {"start": 5, "answer": "6"})


def toolbox(folder: Path, name: str = "Counter", **settings: Any) -> Toolbox:
    use = ToolUse(environment=f"game.py:{name}", **{"timeout": 20.0, **settings})
    return Toolbox(use, folder, Sandbox())


def episode(box: Toolbox, problem: Problem = ROW, seed: int = 1) -> Episode:
    found = box.episode(problem, seed)
    assert found is not None
    return found


def said(box: Toolbox, own: Episode, name: str, **given: object) -> str:
    (found,) = box.begin([ToolCall(name, given)], own.problem, own, box.allowance(box.time_limit()))()
    return found


# --- what rewards see ---------------------------------------------------------------------------------


def completion(state: dict[str, object] | None) -> Completion:
    return Completion(np.array([1]), np.zeros(1), "x", "stop", transcript=Transcript(environment=state))


def given(function: Any, *states: dict[str, object] | None, columns: Any = None) -> dict[str, object]:
    problem = Problem("p", "", columns or {})
    return Reward("r", function).arguments(problem, [completion(s) for s in states], Context())

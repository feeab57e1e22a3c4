r"""Rewards for language models that cannot be fooled cheaply, and attacks that show which of yours can.

>>> from covey_verify import math_answer
>>> math_answer(r"So it is \boxed{1/2}.", answer="0.5").value
1.0
"""

from __future__ import annotations

import importlib

__version__ = "0.2.0"

TYPE_CHECKING = False  # importing typing takes as long as all the rest of this file
if TYPE_CHECKING:
    from typing import Any

    from covey_verify.contract import reward
    from covey_verify.errors import CoveyError
    from covey_verify.gym import gym_answer
    from covey_verify.mathematics.answers import exact_answer, math_answer
    from covey_verify.mathematics.steps import calculations, step_labels
    from covey_verify.programs.code import code_tests, compiles
    from covey_verify.programs.proofs import proves
    from covey_verify.programs.smt import smt
    from covey_verify.texts.formats import answer_format, regex_match, think_format
    from covey_verify.texts.instructions import instructions
    from covey_verify.texts.judge import judge
    from covey_verify.texts.language import language_consistency
    from covey_verify.texts.length import (
        cosine_length,
        duplicates,
        majority_vote,
        repetition,
        short_in_group,
        soft_overlong,
    )
    from covey_verify.texts.structured import json_schema, tool_calls
    from covey_verify.types import Score, StepRewards

__all__ = [
    "CoveyError",
    "Score",
    "StepRewards",
    "answer_format",
    "calculations",
    "code_tests",
    "compiles",
    "cosine_length",
    "duplicates",
    "exact_answer",
    "gym_answer",
    "instructions",
    "json_schema",
    "judge",
    "language_consistency",
    "majority_vote",
    "math_answer",
    "proves",
    "regex_match",
    "repetition",
    "reward",
    "short_in_group",
    "smt",
    "soft_overlong",
    "step_labels",
    "think_format",
    "tool_calls",
]

# Modules of the names that are no rewards; all others are in ``rewards``.
_HOMES = {
    "CoveyError": "covey_verify.errors",
    "Score": "covey_verify.types",
    "StepRewards": "covey_verify.types",
    "reward": "covey_verify.contract",
}


def __getattr__(name: str) -> Any:
    # Names are imported on first use: a process that judges a text then loads only the verifier it needs.
    if name not in __all__:
        raise AttributeError(f"module 'covey_verify' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "covey_verify.rewards")), name)


def __dir__() -> list[str]:
    return __all__

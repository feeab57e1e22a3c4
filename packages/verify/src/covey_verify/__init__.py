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

    from covey_verify.contract import reward as reward
    from covey_verify.errors import CoveyError as CoveyError
    from covey_verify.gym import gym_answer as gym_answer
    from covey_verify.mathematics.answers import exact_answer as exact_answer
    from covey_verify.mathematics.answers import math_answer as math_answer
    from covey_verify.mathematics.steps import calculations as calculations
    from covey_verify.mathematics.steps import step_labels as step_labels
    from covey_verify.programs.code import code_tests as code_tests
    from covey_verify.programs.code import compiles as compiles
    from covey_verify.programs.proofs import proves as proves
    from covey_verify.programs.smt import smt as smt
    from covey_verify.texts.formats import answer_format as answer_format
    from covey_verify.texts.formats import regex_match as regex_match
    from covey_verify.texts.formats import think_format as think_format
    from covey_verify.texts.instructions import instructions as instructions
    from covey_verify.texts.judge import judge as judge
    from covey_verify.texts.language import language_consistency as language_consistency
    from covey_verify.texts.length import cosine_length as cosine_length
    from covey_verify.texts.length import duplicates as duplicates
    from covey_verify.texts.length import majority_vote as majority_vote
    from covey_verify.texts.length import repetition as repetition
    from covey_verify.texts.length import short_in_group as short_in_group
    from covey_verify.texts.length import soft_overlong as soft_overlong
    from covey_verify.texts.structured import json_schema as json_schema
    from covey_verify.texts.structured import tool_calls as tool_calls
    from covey_verify.types import Score as Score
    from covey_verify.types import StepRewards as StepRewards

REWARDS = {
    "math_answer": "covey_verify.mathematics.answers",
    "exact_answer": "covey_verify.mathematics.answers",
    "think_format": "covey_verify.texts.formats",
    "answer_format": "covey_verify.texts.formats",
    "regex_match": "covey_verify.texts.formats",
    "json_schema": "covey_verify.texts.structured",
    "instructions": "covey_verify.texts.instructions",
    "tool_calls": "covey_verify.texts.structured",
    "code_tests": "covey_verify.programs.code",
    "compiles": "covey_verify.programs.code",
    "judge": "covey_verify.texts.judge",
    "calculations": "covey_verify.mathematics.steps",
    "step_labels": "covey_verify.mathematics.steps",
    "gym_answer": "covey_verify.gym",
    "smt": "covey_verify.programs.smt",
    "proves": "covey_verify.programs.proofs",
    "language_consistency": "covey_verify.texts.language",
    "soft_overlong": "covey_verify.texts.length",
    "cosine_length": "covey_verify.texts.length",
    "short_in_group": "covey_verify.texts.length",
    "repetition": "covey_verify.texts.length",
    "duplicates": "covey_verify.texts.length",
    "majority_vote": "covey_verify.texts.length",
}
"""Built-in reward -> its module."""
_HOMES = {
    **REWARDS,
    "CoveyError": "covey_verify.errors",
    "Score": "covey_verify.types",
    "StepRewards": "covey_verify.types",
    "reward": "covey_verify.contract",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605 - type checkers read the imports above


def __getattr__(name: str) -> Any:
    # Names are imported on first use: a process that judges a text then loads only the verifier it needs.
    if name not in _HOMES:
        raise AttributeError(f"module 'covey_verify' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

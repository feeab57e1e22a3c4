"""The built-in rewards by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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

BUILT_IN: Mapping[str, Callable[..., object]] = {
    f.__name__: f
    for f in (
        math_answer,
        exact_answer,
        think_format,
        answer_format,
        regex_match,
        json_schema,
        instructions,
        tool_calls,
        code_tests,
        compiles,
        judge,
        calculations,
        step_labels,
        gym_answer,
        smt,
        proves,
        language_consistency,
        soft_overlong,
        cosine_length,
        short_in_group,
        repetition,
        duplicates,
        majority_vote,
    )
}

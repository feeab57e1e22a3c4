"""The reward for reasoning-gym's tasks, which runs its own scorers in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping

from covey_verify.contract import FULL, ISOLATED, LIMITS, reward, score_without_result
from covey_verify.errors import SandboxUnavailable
from covey_verify.extract import FORMS, Rule, TextOrMessages, Turns, extract
from covey_verify.sandbox.base import SandboxBackend
from covey_verify.sandbox.process import ProcessSandbox
from covey_verify.types import Score

EXECUTING = {
    "countdown", "puzzle24", "spiral_matrix", "string_insertion", "binary_matrix", "n_queens",
    "polynomial_multiplication", "simple_integration", "intermediate_integration",
}  # fmt: skip
"""Tasks whose scorers evaluate the answer as Python. In the sandbox it can do no harm, but it could still
forge a verdict, so it may contain only names of one letter and the names in the reference answer."""
# Longest answer in characters.
MAX_ANSWER = 4_000


@reward(
    concurrent=True,
    verdict=True,
    requires=("reasoning_gym",),
    example=lambda row, rule="answer_tag", **_: (
        FORMS[rule].format(row["answer"]) if row.get("answer") else None
    ),
)
def gym_answer(
    completion: TextOrMessages,
    gym: Mapping[str, object],
    turns: Turns = (),
    *,
    sandbox: SandboxBackend,
    answer: str | None = None,
    rule: Rule = "answer_tag",
) -> Score:
    """Return 1 if reasoning-gym gives full marks, else 0. Its partial marks would reward length and luck."""
    if not isinstance(sandbox, ProcessSandbox):
        raise SandboxUnavailable(f"reasoning-gym's scorers cannot run in the {sandbox.name} sandbox")
    extracted = extract(completion, rule, turns)
    if extracted is None:
        return Score(0.0, "no_answer")
    if len(extracted) > MAX_ANSWER:
        return Score(0.0, "too_large", extracted[:200])
    if gym["name"] in EXECUTING and not harmless(extracted, str(answer or "")):
        return Score(0.0, "unparsable", extracted[:200], detail="an answer with names in it")
    server = sandbox.verifiers(ISOLATED, "reasoning_gym")
    result = server.call(f"{ISOLATED}:gym_score", gym["name"], gym["item"], extracted, limits=LIMITS)
    if result.kind == "ok":
        value = float(result.value >= FULL)
        return Score(value, extracted=extracted[:200], metrics={"partial": result.value})
    return score_without_result(result, extracted[:200])


def harmless(answer: str, oracle: str) -> bool:
    """Return whether an expression can only be data.

    >>> harmless("3*(x+1)", "x"), harmless("__import__('os')", "x"), harmless("().a", "")
    (True, False, False)
    """
    unknown_names = set(re.findall(r"[^\W\d]\w*", answer)) - set(re.findall(r"[^\W\d]\w*", oracle))
    if not all(len(name) == 1 and name.isalpha() for name in unknown_names):
        return False
    # No attribute access, and no keyword arguments or assignments in calls.
    return re.search(r"\.\s*[^\W\d]|\w\s*\(.*=", answer) is None

"""The reward for following instructions that a program can check, in the rows of IFEval."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Literal, NamedTuple

from covey_verify.contract import reward
from covey_verify.extract import TextOrMessages, Turns, after_reasoning, message_texts, model_turns
from covey_verify.texts.kinds import KINDS
from covey_verify.texts.language import identifier, needs_detector
from covey_verify.texts.words import folded, has_words, normalized, words
from covey_verify.types import Messages, Score

LONGEST_TEXT = 1_000_000
"""Characters of a text that is checked."""
MARKUP = re.compile(r"<[A-Za-z_/]+>|\\[A-Za-z]+")
"""Tags and TeX commands, which alone are no answer."""
FEWEST_REPEATED = 50
"""Words from which a text may be nothing but a repetition."""
LEAST_NEW = 0.1
"""Fraction of its word triples that must differ from each other."""


class Instruction(NamedTuple):
    """An instruction of a row, with its arguments read."""

    kind: str
    arguments: Mapping[str, object]

    @property
    def language(self) -> str:
        """The language that it looks for, "" if none."""
        return str(self.arguments.get("language", KINDS[self.kind].language))


def bad_instructions(rows: Sequence[Mapping[str, object]], **_: object) -> list[str | None]:
    """Return for each row why its instructions cannot be checked, or None.

    Raises ConfigError if one needs a library that is not installed.
    """
    found: list[str | None] = []
    for row in rows:
        try:
            asked = read(row.get("instruction_id_list"), row.get("kwargs"))
        except ValueError as error:
            found.append(str(error))
            continue
        found.append(None)
        if any(one.language and needs_detector(one.language) for one in asked):
            identifier()
    return found


@reward(
    concurrent=True,
    format_only=True,
    verdict=True,
    check_references=bad_instructions,
    counterexample=lambda *_, **__: "",
)
def instructions(
    completion: TextOrMessages,
    instruction_id_list: object,
    kwargs: object,
    turns: Turns = (),
    prompt: str | Messages = "",
    *,
    points: Literal["all", "fraction"] = "all",
) -> Score:
    """Return 1 if all instructions of the row are met, else 0; with ``points`` `fraction` the fraction met.

    The columns are those of IFEval: ``instruction_id_list`` names kinds (see ``kinds.KINDS``), ``kwargs``
    has the arguments of each. The text after the reasoning is judged, of several turns the last. Without
    words, or with nothing but the prompt or a repetition, it is no answer and meets nothing. The metrics
    are the fraction met, in all and by kind.
    """
    try:
        asked = read(instruction_id_list, kwargs)
    except ValueError as error:
        return Score(None, "bad_reference", detail=str(error))
    answer = after_reasoning(model_turns(completion, turns)[-1], LONGEST_TEXT + 1)
    if answer is not None and len(answer) > LONGEST_TEXT:
        return Score(0.0, "too_large", metrics=_metrics(asked, [False] * len(asked)))
    text = normalized(answer or "")
    why = "the reasoning never ended" if answer is None else no_answer(text, prompt)
    if why:
        return Score(0.0, "no_answer", metrics=_metrics(asked, [False] * len(asked)), detail=why)
    faults = [KINDS[one.kind].check(text, **one.arguments) for one in asked]
    met = [not fault for fault in faults]
    detail = "; ".join(f"{one.kind}: {fault}" for one, fault in zip(asked, faults, strict=True) if fault)
    value = sum(met) / len(met) if points == "fraction" else float(all(met))
    return Score(value, metrics=_metrics(asked, met), detail=detail[:1000])


def read(ids: object, kwargs: object) -> list[Instruction]:
    """Return a row's instructions. Raises ValueError naming the instruction, what is wrong and the remedy."""
    kinds, given = (
        _listed(name, column) for name, column in (("instruction_id_list", ids), ("kwargs", kwargs))
    )
    if not kinds or len(kinds) != len(given):
        raise ValueError(
            f"instruction_id_list has {len(kinds)} entries and kwargs {len(given)}: give at least one "
            "instruction, and for each an object with its arguments, such as {}"
        )
    return [_instruction(kind, own) for kind, own in zip(kinds, given, strict=True)]


def _listed(name: str, column: object) -> Sequence[object]:
    """Return a column as a list, which may be JSON in a text. Raises ValueError."""
    try:
        found = json.loads(column) if isinstance(column, str) else column
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list | tuple):
        raise ValueError(f"column {name!r} must be a list, or a text with a JSON list")  # noqa: TRY004
    return found


def _instruction(kind: object, given: object) -> Instruction:
    if not isinstance(kind, str) or kind not in KINDS:
        near = get_close_matches(str(kind), KINDS, 1)
        known = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(KINDS)}"
        raise ValueError(f"there is no instruction {kind!r}; {known}")
    if not isinstance(given, Mapping | None):
        raise ValueError(f"{kind}: its kwargs must be an object such as {{}}, not {given!r}")  # noqa: TRY004
    # A table has the arguments of all kinds in each row, None where they do not apply.
    values = {name: value for name, value in (given or {}).items() if value is not None}
    readers = KINDS[kind].arguments
    for name in readers:
        if name not in values:
            raise ValueError(f"{kind}: argument {name!r} is missing; write it into the row's kwargs")
    for name in values:
        if name not in readers:
            takes = f"it takes {', '.join(readers)}" if readers else "it takes none"
            raise ValueError(f"{kind}: there is no argument {name!r}; {takes}")
    arguments: dict[str, object] = {}
    for name, reader in readers.items():
        try:
            arguments[name] = reader(values[name])
        except ValueError as error:
            raise ValueError(f"{kind}: {name} is {str(values[name])[:60]!r}; it {error}") from None
    clash = KINDS[kind].clash
    fault = clash(**arguments) if clash else ""
    if fault:
        raise ValueError(f"{kind}: {fault}")
    return Instruction(kind, arguments)


def no_answer(text: str, prompt: str | Messages) -> str:
    """Return why a ``normalized`` text is no answer at all, or ""."""
    if not has_words(MARKUP.sub(" ", text)):
        return "there are no words"
    parts = message_texts(prompt)
    if folded(text) in {folded(normalized(part)) for part in (*parts, "\n".join(parts))}:
        return "it is the prompt"
    said = [word.casefold() for word in words(text)]
    triples = set(zip(said, said[1:], said[2:], strict=False))
    if len(said) >= FEWEST_REPEATED and len(triples) < LEAST_NEW * len(said):
        return "it is one repetition"
    return ""


def _metrics(asked: Sequence[Instruction], met: Sequence[bool]) -> dict[str, float]:
    """Return the fraction of instructions that are met, in all and by kind."""
    by_kind: dict[str, list[bool]] = {}
    for one, fits in zip(asked, met, strict=True):
        by_kind.setdefault(one.kind, []).append(fits)
    return {"met": sum(met) / len(met)} | {kind: sum(own) / len(own) for kind, own in by_kind.items()}

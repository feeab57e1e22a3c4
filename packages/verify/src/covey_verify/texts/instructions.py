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
from covey_verify.texts.words import fold_case, has_words, normalize, words
from covey_verify.types import Messages, Score

MAX_TEXT = 1_000_000
"""Characters of a text that is checked."""
MARKUP = re.compile(r"<[A-Za-z_/]+>|\\[A-Za-z]+")
"""Tags and TeX commands, which do not make an answer."""
MIN_REPEATED = 50
"""Words from which a text may be nothing but a repetition."""
MIN_NEW = 0.1
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
    """Return the reason why each row's instructions cannot be checked, or None.

    Raises ConfigError if an instruction needs a library that is not installed.
    """
    complaints: list[str | None] = []
    for row in rows:
        try:
            row_instructions = read_instructions(row.get("instruction_id_list"), row.get("kwargs"))
        except ValueError as error:
            complaints.append(str(error))
            continue
        complaints.append(None)
        languages = [instruction.language for instruction in row_instructions if instruction.language]
        if any(map(needs_detector, languages)):
            identifier()  # raises if the library is missing
    return complaints


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
    """Return 1 if all instructions of the row are met, else 0; under ``points: fraction`` the fraction met.

    The columns are IFEval's: ``instruction_id_list`` names kinds (see ``kinds.KINDS``), ``kwargs``
    has the arguments of each. The text after the reasoning is judged, in the last turn if there are
    several. A text without words, or with nothing but the prompt or a repetition, is not an answer and
    meets nothing. The metrics are the fractions met, in all and by kind.
    """
    try:
        row_instructions = read_instructions(instruction_id_list, kwargs)
    except ValueError as error:
        return Score(None, "bad_reference", detail=str(error))
    none_met = [False] * len(row_instructions)
    answer = after_reasoning(model_turns(completion, turns)[-1], MAX_TEXT + 1)
    if answer is not None and len(answer) > MAX_TEXT:
        return Score(0.0, "too_large", metrics=_metrics(row_instructions, none_met))
    text = normalize(answer or "")
    complaint = "the reasoning never ended" if answer is None else no_answer(text, prompt)
    if complaint:
        return Score(0.0, "no_answer", metrics=_metrics(row_instructions, none_met), detail=complaint)
    met = list[bool]()
    reasons = list[str]()
    for instruction in row_instructions:
        fault = KINDS[instruction.kind].check(text, **instruction.arguments)
        met.append(not fault)
        if fault:
            reasons.append(f"{instruction.kind}: {fault}")
    value = sum(met) / len(met) if points == "fraction" else float(all(met))
    return Score(value, metrics=_metrics(row_instructions, met), detail="; ".join(reasons)[:1000])


def read_instructions(ids: object, kwargs: object) -> list[Instruction]:
    """Return a row's instructions. Raises ValueError naming the instruction, what is wrong and the remedy."""
    kinds = _read_list("instruction_id_list", ids)
    arguments = _read_list("kwargs", kwargs)
    if not kinds or len(kinds) != len(arguments):
        raise ValueError(
            f"instruction_id_list has {len(kinds)} entries and kwargs {len(arguments)}: give at least one "
            "instruction, and for each an object with its arguments, such as {}"
        )
    return [_instruction(kind, of_kind) for kind, of_kind in zip(kinds, arguments, strict=True)]


def _read_list(name: str, column: object) -> Sequence[object]:
    """Return a column's list, which may be written as JSON in a text. Raises ValueError."""
    try:
        items = json.loads(column) if isinstance(column, str) else column
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list | tuple):
        raise ValueError(f"column {name!r} must be a list, or a text with a JSON list")  # noqa: TRY004
    return items


def _instruction(kind: object, kwargs: object) -> Instruction:
    if not isinstance(kind, str) or kind not in KINDS:
        near = get_close_matches(str(kind), KINDS, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(KINDS)}"
        raise ValueError(f"there is no instruction {kind!r}; {advice}")
    if not isinstance(kwargs, Mapping | None):
        raise ValueError(f"{kind}: its kwargs must be an object such as {{}}, not {kwargs!r}")  # noqa: TRY004
    # In a table each row has the arguments of all kinds, with None for the arguments that do not apply.
    values = {name: value for name, value in (kwargs or {}).items() if value is not None}
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
    """Return why a normalized text is no answer at all, or ""."""
    if not has_words(MARKUP.sub(" ", text)):
        return "there are no words"
    parts = message_texts(prompt)
    if fold_case(text) in {fold_case(normalize(part)) for part in (*parts, "\n".join(parts))}:
        return "it is the prompt"
    text_words = [word.casefold() for word in words(text)]
    triples = set(zip(text_words, text_words[1:], text_words[2:], strict=False))
    if len(text_words) >= MIN_REPEATED and len(triples) < MIN_NEW * len(text_words):
        return "it is one repetition"
    return ""


def _metrics(instructions: Sequence[Instruction], met: Sequence[bool]) -> dict[str, float]:
    """Return the fraction of instructions that are met, in all and by kind."""
    by_kind: dict[str, list[bool]] = {}
    for instruction, is_met in zip(instructions, met, strict=True):
        by_kind.setdefault(instruction.kind, []).append(is_met)
    fractions = {"met": sum(met) / len(met)}
    for kind, met_of_kind in by_kind.items():
        fractions[kind] = sum(met_of_kind) / len(met_of_kind)
    return fractions

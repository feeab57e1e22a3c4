"""Read a record from its file of JSON lines, and check each line and the order of all lines."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from covey.audit.record import (
    FORMAT,
    READ_LINE,
    VERSION,
    AuditRecord,
    Header,
    LossCall,
    Rollout,
    Sample,
    Term,
    Update,
)
from covey.system.opening import load_json, read_regular, stream_bytes
from covey_verify.errors import DataError


def read_record(path: Path) -> AuditRecord:
    """Read a record. An incomplete last line, of a run that was killed or still trains, is left out.

    Raises DataError, with file and line, for anything that does not follow the format.
    """
    lines = read_regular(path, stream_bytes()).split(b"\n")
    last_line = lines.pop()
    if not lines and not last_line.strip():
        raise DataError(
            f"{path}: the file is empty; a record begins with a header line, see docs/audit-record.md"
        )
    notes = []
    if last_line.strip() and not _is_json(last_line):
        notes.append(f"{path}:{len(lines) + 1}: the last line is incomplete and was left out")
    elif last_line.strip():
        lines.append(last_line)
    if not lines:
        raise DataError(f"{path}:1: the header is not complete: {last_line[:60].decode(errors='replace')!r}")
    header = _header(path, lines[0])
    lines_read = [_line(path, n, text) for n, text in enumerate(lines[1:], start=2) if text.strip()]
    calls = tuple(line for _, line in lines_read if isinstance(line, LossCall))
    terms = tuple(line for _, line in lines_read if isinstance(line, Term))
    events = [(n, line) for n, line in lines_read if isinstance(line, Rollout | Update)]
    _check_order(path, events)
    return AuditRecord(header, tuple(line for _, line in events), calls, terms, notes=notes)


def _is_json(text: bytes) -> bool:
    try:
        load_json(text)
    except ValueError:
        return False
    return True


def _object(path: Path, number: int, text: bytes) -> dict[str, object]:
    try:
        value = load_json(text)
    except ValueError as error:
        raise DataError(
            f"{path}:{number}: not JSON ({error}). A run of covey is a folder; a record of another trainer "
            "has a JSON object on each line (docs/audit-record.md)"
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{path}:{number}: {type(value).__name__} where an object is expected")
    return value


def _header(path: Path, text: bytes) -> Header:
    value = _object(path, 1, text)
    if value.get("format") != FORMAT:
        raise DataError(
            f'{path}:1: not a record of a run; the first line must be {{"format": "{FORMAT}", '
            f'"version": {VERSION}, ...}}, see docs/audit-record.md'
        )
    if value.get("version") != VERSION:
        raise DataError(
            f"{path}:1: version {json.dumps(value.get('version'))} of the format; this covey reads {VERSION}"
        )
    try:
        return Header.model_validate(value)
    except ValidationError as error:
        raise DataError(f"{path}:1: {_reason(error)}") from None


def _line(path: Path, number: int, text: bytes) -> tuple[int, Rollout | Update | LossCall | Term]:
    value = _object(path, number, text)
    try:
        line = READ_LINE.validate_python(value)
    except ValidationError as error:
        raise DataError(f"{path}:{number}: {_reason(error)}") from None
    for index, part in enumerate(line.completions if isinstance(line, Rollout) else ()):
        fault = _misfit(part, len(part.ids) if part.ids is not None else None)
        if fault:
            raise DataError(f"{path}:{number}: completions.{index}.{fault}")
    return number, line


def _misfit(sample: Sample, tokens: int | None) -> str:
    """Return the list whose length differs from that of ``ids``; empty if there is none."""
    for name in ("sampler_logprobs", "inserted", "model_logprobs", "model_logprobs_at_1"):
        values = getattr(sample, name)
        if values is not None and len(values) != tokens:
            return f"{name}: {len(values)} values for {tokens} ids"
    return ""


def _check_order(path: Path, lines: list[tuple[int, Rollout | Update]]) -> None:
    """Raise DataError for a row of a rollout or completion that no earlier line has."""
    sizes: dict[int, int] = {}
    for number, line in lines:
        if isinstance(line, Rollout):
            sizes[line.number] = len(line.completions)
            continue
        for index, row in enumerate(line.rows):
            # A record may begin in the middle of a run, so an unknown rollout is no fault.
            size = sizes.get(row.rollout)
            if size is not None and not 0 <= row.completion < size:
                raise DataError(
                    f"{path}:{number}: rows.{index}.completion: {row.completion}, but rollout {row.rollout} "
                    f"has {size} completions"
                )


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field_name = ".".join(
        str(part) for part in first["loc"] if part not in ("rollout", "update", "loss", "term")
    )
    wrong_value = (
        "" if first["type"] in ("missing", "union_tag_not_found") else f", not {first['input']!r:.60}"
    )
    return f"{field_name + ': ' if field_name else ''}{first['msg']}{wrong_value}"

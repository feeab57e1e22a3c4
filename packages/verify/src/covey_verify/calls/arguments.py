"""The check of a call's arguments against the JSON schema that the model was told.

It covers the keywords that Transformers' `get_json_schema` writes, and the keywords that people add: `type`,
`nullable`, `enum`, `const`, `properties`, `required`, `additionalProperties`, `items`, `prefixItems`,
`anyOf`, `oneOf`, `allOf`. Others, such as `pattern`, are left to the tool. The only conversion is of a
whole number written as a decimal: JSON has one kind of number, so `2.0` is an integer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from covey_verify.calls.call import canonical

NOUNS = {
    "string": "a text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
"""The types of JSON Schema, in words for the model."""


class Misfit(ValueError):
    """Raised for a value that its schema does not allow; the message is for the model."""


def convert_value(value: object, schema: object, where: str) -> object:
    """Return a JSON value in the type that its schema asks for; ``where`` names it. Raises Misfit.

    >>> convert_value({"steps": [1, 2.0]}, {"properties": {"steps": {"items": {"type": "integer"}}}}, "go")
    {'steps': [1, 2]}
    """
    # JSON Schema also has the schemas true and false: all values, and none.
    if not isinstance(schema, Mapping):
        if schema is False:
            raise Misfit(f"{where} is not allowed")
        return value
    if value is None and schema.get("nullable"):
        return None
    value = _of_type(value, schema.get("type"), where)
    _one_of_a_few(value, schema, where)
    value = _of_a_kind(value, schema, where)
    if isinstance(value, Mapping):
        return _object(value, schema, where)
    return _array(value, schema, where) if isinstance(value, list) else value


def _of_type(value: object, kind: object, where: str) -> object:
    """Return the value; a whole number as an int if the type asks for an integer. Raises Misfit."""
    names = [kind] if isinstance(kind, str) else kind
    if not isinstance(names, Sequence) or not set(names) <= set(NOUNS):
        return value  # no type, or a type that JSON Schema does not have
    types = _types_of(value)
    if not set(names) & types:
        words = " or ".join(NOUNS[name] for name in names)
        raise Misfit(f"{where} must be {words}, but is {_format_value(value)}")
    return int(value) if isinstance(value, float) and "integer" in set(names) & types else value


def _types_of(value: object) -> set[str]:
    if value is None:
        return {"null"}
    # Before int, because Python's bool is one.
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"integer", "number"} if value.is_integer() else {"number"}
    kinds = {"str": "string", "list": "array", "dict": "object"}
    return {kinds.get(type(value).__name__, "")}


def _one_of_a_few(value: object, schema: Mapping[str, object], where: str) -> None:
    # ``canonical`` compares as JSON does: 1 and 1.0 are equal, 1 and true are not.
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(allowed, Sequence) and canonical(value) not in map(canonical, allowed):
        words = ", ".join(json.dumps(choice, ensure_ascii=False, default=str) for choice in allowed)
        raise Misfit(f"{where} must be one of {words[:300]}, but is {_format_value(value)}")


def _of_a_kind(value: object, schema: Mapping[str, object], where: str) -> object:
    """Return the value converted by the first schema of anyOf and oneOf that it fits, and by all of allOf."""
    for keyword in ("anyOf", "oneOf"):
        choices = schema.get(keyword)
        if isinstance(choices, Sequence) and choices:
            value = _first_fit(value, choices, where)
    every = schema.get("allOf")
    for part in every if isinstance(every, Sequence) else ():
        value = convert_value(value, part, where)
    return value


def _first_fit(value: object, choices: Sequence[object], where: str) -> object:
    misfits = []
    for choice in choices:
        try:
            return convert_value(value, choice, where)
        except Misfit as error:
            misfits.append(str(error))
    # Each reason once, in order.
    raise Misfit("; or ".join(dict.fromkeys(misfits)))


def _object(value: Mapping[str, object], schema: Mapping[str, object], where: str) -> dict[str, object]:
    properties = schema.get("properties")
    others = schema.get("additionalProperties", True)
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    for name in required if isinstance(required, Sequence) else ():
        if name not in value:
            raise Misfit(f"{where} lacks {name!r}")
    unknown = [name for name in value if name not in properties] if others is False else []
    if unknown:
        raise Misfit(f"{where} has no {unknown[0][:40]!r}")
    # A key that no property names is checked by additionalProperties, by default true.
    return {
        name: convert_value(item, properties.get(name, others), f"{where}.{name}")
        for name, item in value.items()
    }


def _array(value: list[object], schema: Mapping[str, object], where: str) -> list[object]:
    first = schema.get("prefixItems")
    rest = schema.get("items", True)
    first = list(first) if isinstance(first, Sequence) else []
    if first and "items" not in schema and len(value) != len(first):
        raise Misfit(f"{where} must have {len(first)} values, but has {len(value)}")
    # prefixItems for the first values, items for all others; schemas without a value do not matter.
    schemas = [*first, *[rest] * len(value)]
    pairs = enumerate(zip(value, schemas, strict=False))
    return [convert_value(item, item_schema, f"{where}[{n}]") for n, (item, item_schema) in pairs]


def _format_value(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    kind = "the text " if isinstance(value, str) else ""
    return kind + (text if len(text) <= 60 else f"{text[:57]}...")

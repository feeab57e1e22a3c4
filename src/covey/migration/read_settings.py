"""Another trainer's settings, read from a YAML file, a shell script with `key=value`, or a Python script."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import yaml

from covey.config.sources import parse_yaml
from covey.migration.read_script import read_script
from covey_verify.errors import ConfigError

MAX_BYTES = 1_000_000
ASSIGNED = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
OVERRIDE = re.compile(r"^\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)$", re.DOTALL)
"""An override of Hydra's: a dotted key and its value; `+` and `++` add a key."""
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^${}]*))?\}|\$(\w+)")
"""A variable, with its default if it has one; of nested ones the innermost."""
ARITHMETIC = re.compile(r"\$\(\(([\d\s+*/()-]+)\)\)")
OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


def read_settings(file: Path) -> dict[str, object]:
    """Return dotted key -> value. Raises ConfigError if the file has no settings."""
    try:
        content = file.read_bytes()[:MAX_BYTES]
        text = content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not text; give a YAML file or a shell script") from None
    if file.suffix in (".yaml", ".yml"):
        return dict(flat(parse_yaml(content, file)[0]))
    settings = read_script(text) if file.suffix == ".py" else dict(_overrides(text))
    if not settings:
        raise ConfigError(
            f"{file}: no settings found; give a YAML file, or a script that starts the trainer with settings "
            "as key=value, or with TRL's config in Python"
        )
    return settings


def flat(values: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted keys and values; an empty mapping is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _overrides(script: str) -> Iterator[tuple[str, object]]:
    """Yield the overrides of a shell script, with its own variables put in their places."""
    variables = dict[str, str]()
    for line in script.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote that ends on another line
            words = line.split()
        assigned = ASSIGNED.match(line)
        if assigned and (len(words) == 1 or assigned[2].startswith("$((")):
            value = assigned[2].partition("#")[0].strip()
            if len(words) == 1:
                value = words[0].partition("=")[2]  # without its quotes
            variables[assigned[1]] = _fill_variables(value, variables)
        for word in words:
            match = OVERRIDE.match(word)
            if match:
                yield match[1], yaml_value(_fill_variables(match[2], variables))


def _fill_variables(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables by their values or defaults, and sums by their results; others stay as they are."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        default = match[2] if match[2] is not None else match[0]
        return variables.get(name, os.environ["HOME"] if name == "HOME" and "HOME" in os.environ else default)

    before = ""
    while before != text:
        before = text
        text = ARITHMETIC.sub(lambda match: _result(match[1]), VARIABLE.sub(value, text))
    return text


def _result(expression: str) -> str:
    """Return what a shell makes of a sum of integers; the expression itself if it is none."""

    def number(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](number(node.left), number(node.right))
        raise ValueError("no sum of integers")

    try:
        return str(number(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return expression


def yaml_value(text: str) -> object:
    """Return a text as YAML would read it, numbers such as 1e-6 too.

    >>> yaml_value("1e-6"), yaml_value("['console','wandb']"), yaml_value("$HOME/a.parquet")
    (1e-06, ['console', 'wandb'], '$HOME/a.parquet')
    """
    try:
        return float(text) if re.fullmatch(r"[+-]?[\d.]+[eE][+-]?\d+", text) else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return text

"""The readers of a user's settings (YAML, options, Python values), each with its origin."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import yaml

from covey.config.layers import Assignment
from covey.config.schema import Config
from covey.config.section import section_of
from covey_verify.errors import ConfigError

# Largest config file in bytes.
MAX_BYTES = 1 << 20
MAX_DEPTH = 50
"""Deepest nesting of a config."""
OTHER_BASE = re.compile(r"[-+]?(?:0[0-9_]+|[0-9_]+(?::[0-9_]+)+(?:\.[0-9_]*)?)")
"""Texts that YAML 1.1 reads as numbers in base 8 or 60: 010 and 1:30."""


class PlainLoader(yaml.SafeLoader):
    """A YAML loader that refuses anchors, and deep nesting before it recurses."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node."""
        if self.check_event(yaml.AliasEvent):
            self._refuse("anchors and aliases are not allowed")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._refuse(f"nested more than {MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _refuse(self, why: str) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=why, problem_mark=self.peek_event().start_mark)


def read_yaml(file: Path) -> tuple[dict[str, object], dict[str, str]]:
    """Return a YAML mapping and `file:line` of every key path. Duplicate keys are refused."""
    try:
        with file.open("rb") as opened:
            return parse_yaml(opened.read(MAX_BYTES + 1), file)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None


def parse_yaml(content: bytes, file: Path) -> tuple[dict[str, object], dict[str, str]]:
    """Return the result of ``read_yaml`` for a file's content."""
    origins: dict[str, str] = {}
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{file}: the file is larger than the {MAX_BYTES:,} bytes that a config may have")
    try:
        node = yaml.compose(content.decode("utf-8"), Loader=PlainLoader)
        raw = _construct(node, file, (), origins) if node is not None else {}
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: a config must be a mapping of keys, but this is a {type(raw).__name__}")
    return raw, origins


def _construct(node: yaml.Node, file: Path, path: tuple[str, ...], origins: dict[str, str]) -> object:
    origins[".".join(path)] = f"{file}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in mapping:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"{file}:{line}: {'.'.join((*path, key))} is set twice")
            mapping[key] = _construct(value_node, file, (*path, key), origins)
            # The line of the key, not of the value, which may begin on the next one.
            origins[".".join((*path, key))] = f"{file}:{key_node.start_mark.line + 1}"
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_construct(n, file, (*path, str(i)), origins) for i, n in enumerate(node.value)]
    value: object = yaml.SafeLoader("").construct_object(node)
    _in_base_ten(f"{file}:{node.start_mark.line + 1}: {'.'.join(path)}", node.value, value)
    return value


def _in_base_ten(where: str, text: str, value: object) -> None:
    """Raise ConfigError for a number that YAML reads in another base than people do."""
    if isinstance(value, int | float) and not isinstance(value, bool) and OTHER_BASE.fullmatch(text):
        plain = text.lstrip("+-0_") or "0"
        raise ConfigError(
            f"{where}: YAML reads {text} as the number {value}; write {plain if ':' not in text else value}, "
            f"or '{text}' in quotes if you mean text"
        )


def options(tokens: Sequence[str]) -> Iterable[Assignment]:
    """Yield the settings of `--a.b value`, `--a.b=value`, `--flag`; values are YAML, texts literal."""
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            raise ConfigError(f"{token!r} is not an option; write one like --train.lr 1e-6")
        key, equals, text = token[2:].partition("=")
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        try:
            text.encode()
            value = yaml.safe_load(text)
        except UnicodeEncodeError:
            raise ConfigError(f"--{key}: {text!r} is not UTF-8") from None
        except yaml.YAMLError:
            value = text
        _in_base_ten(f"--{key}", text, value)
        if isinstance(value, str) and text[0] not in "'\"":
            value = text  # YAML would truncate `a #1` and fold lines
        yield Assignment(key.replace("-", "_"), value, f"--{key}")


def items(values: Mapping[str, object]) -> Iterable[Assignment]:
    """Yield the settings of Python values; a section's are separate, so that its other settings stay."""
    for key, value in values.items():
        setting = Config.model_fields.get(key)
        if isinstance(value, Mapping) and setting and section_of(setting):
            yield from (Assignment(f"{key}.{k}", v, f"{key}.{k}") for k, v in value.items())
        else:
            yield Assignment(key, value, key)

"""The tools of a run: functions by name, and what the model is told of them.

    def look_up(word: str, *, glossary: dict[str, str]) -> str:
        '''The meaning of a word, and an `Args:` section with a line for `word`'''

Annotations and docstring become the JSON schema that the chat template shows the model, as Transformers
makes it, so that functions written for TRL carry over. Keyword-only arguments, as `glossary`, are columns of
the row: the model neither sees nor sets them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from covey.calling.builtin import BUILT_IN_TOOLS
from covey.config.algorithm import hint
from covey.config.usercode import load_function
from covey.errors import ConfigError


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    function: Callable[..., object]
    home: tuple[str, str]
    """How a process finds it: module or file, and the function's name there."""

    @property
    def columns(self) -> Mapping[str, inspect.Parameter]:
        """Columns of the row that it gets besides what the model gives."""
        return {n: p for n, p in _parameters(self.function).items() if p.kind is p.KEYWORD_ONLY}

    @property
    def arguments(self) -> Mapping[str, inspect.Parameter]:
        """What the model gives."""
        return {n: p for n, p in _parameters(self.function).items() if p.kind is not p.KEYWORD_ONLY}

    @cached_property
    def schema(self) -> dict[str, object]:
        """What the model is told. Raises ConfigError where docstring or annotations do not say enough."""
        try:
            schema = get_json_schema(_without_columns(self.function))
            return {**schema, "function": {**schema["function"], "name": self.name}}
        except (DocstringParsingException, TypeHintParsingException, NameError) as error:
            raise ConfigError(
                f"rollout.tools: {self.name}: {error}. The model is told of a tool by its docstring, with a "
                "line for each argument below `Args:`, and by its annotations"
            ) from None

    def wrong_with(self, given: Mapping[str, object]) -> str:
        """What is wrong with the arguments of a call, in words for the model; nothing if they fit."""
        known = self.arguments
        missing = [n for n, p in known.items() if p.default is p.empty and n not in given]
        unknown = [n for n in given if n not in known]
        if not (missing or unknown):
            return ""
        which = f"lacks {missing[0]!r}" if missing else f"has no argument {unknown[0]!r}"
        return f"{self.name} {which}; it takes {', '.join(known) or 'nothing'}"


def load_tools(specs: Sequence[str], folder: Path) -> dict[str, Tool]:
    """Tools by name: built-in ones, and functions as module.py:function from ``folder``.

    Raises ConfigError.
    """
    found: dict[str, Tool] = {}
    for spec in specs:
        tool = _load(spec, folder)
        if tool.name in found:
            raise ConfigError(f"rollout.tools: two functions are named {tool.name}: rename one")
        found[tool.name] = tool
    for tool in found.values():
        assert tool.schema, "whatever is wrong with it is said before a model is loaded"
    return found


def _load(spec: str, folder: Path) -> Tool:
    if ":" not in spec:
        if spec not in BUILT_IN_TOOLS:
            raise ConfigError(
                f"rollout.tools: {spec!r} is unknown{hint(spec, BUILT_IN_TOOLS)}; a function of yours is "
                "module.py:function"
            )
        return Tool(spec, BUILT_IN_TOOLS[spec], (BUILT_IN_TOOLS[spec].__module__, spec))
    function = load_function(spec, folder)
    place, _, name = spec.partition(":")
    kinds = {p.kind for p in _parameters(function).values()}
    if not kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
        raise ConfigError(f"rollout.tools: {spec}: a tool takes arguments by name, without / and *args")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"rollout.tools: {spec}: a tool returns its answer, and this one yields; return a list"
        )
    return Tool(name, function, (str((folder / place).resolve()) if place.endswith(".py") else place, name))


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _without_columns(function: Callable[..., object]) -> Callable[..., object]:
    """A function that looks like this one to whoever asks for its signature, but for the columns."""

    @functools.wraps(function)
    def shown() -> None: ...

    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    hints = getattr(function, "__annotations__", {})
    shown.__annotations__ = {p.name: hints[p.name] for p in kept if p.name in hints}
    # What inspect asks for first, though the type of a function does not have it.
    shown.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return shown

"""The tools of a run: functions by name, and the schemas that the model is told.

    def look_up(word: str, *, glossary: dict[str, str]) -> str:
        '''The meaning of a word, and an `Args:` section with a line for `word`'''

Annotations and docstring become the JSON schema that the chat template shows the model, as Transformers
makes it, so that functions written for TRL work unchanged. Keyword-only arguments, such as `glossary`, are
columns of the row: the model neither sees nor sets them. An environment is a class with a method `reset`;
all its other public methods are tools.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MethodType
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from covey.config.algorithm import hint
from covey.config.sampling import ToolUse
from covey.sampling.tools.builtin import BUILT_IN_TOOLS
from covey_verify.calls.arguments import Misfit, convert_value
from covey_verify.errors import ConfigError
from covey_verify.hosting import module_of
from covey_verify.usercode import load_function

NO_TOOLS = ("reset", "get_reward")
"""Methods of an environment that covey calls and the model cannot."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    function: Callable[..., object]
    home: tuple[str, str]
    """Module or file, and the name there, by which a process finds the function, or a method's class."""
    method: bool = False
    """Whether it is a method of the environment."""

    @property
    def columns(self) -> Mapping[str, inspect.Parameter]:
        """Columns of the row that it gets besides the model's arguments."""
        return {n: p for n, p in _parameters(self.function).items() if p.kind is p.KEYWORD_ONLY}

    @property
    def arguments(self) -> Mapping[str, inspect.Parameter]:
        """Arguments that the model gives."""
        return {n: p for n, p in _parameters(self.function).items() if p.kind is not p.KEYWORD_ONLY}

    @cached_property
    def schema(self) -> dict[str, object]:
        """Schema for the model. Raises ConfigError if docstring or annotations are incomplete."""
        try:
            schema = get_json_schema(_without_columns(self.function))
            return {**schema, "function": {**schema["function"], "name": self.name}}
        except (DocstringParsingException, TypeHintParsingException, NameError) as error:
            raise ConfigError(
                f"rollout.tools: {self.name}: {error}. The model reads a tool's docstring, with a line for "
                "each argument below `Args:`, and its annotations"
            ) from None

    def convert_arguments(
        self, arguments: Mapping[str, object], row_schema: object = None
    ) -> dict[str, object]:
        """Return the arguments of a call in the types of the row's own schema, if any, and of the tool's.

        Raises Misfit, with a message for the model.
        """
        parameters = self.arguments
        name = self.name[:40]
        missing = [n for n, p in parameters.items() if p.default is p.empty and n not in arguments]
        unknown = [n for n in arguments if n not in parameters]
        if missing or unknown:
            fault = f"lacks {missing[0]!r}" if missing else f"has no argument {unknown[0][:40]!r}"
            raise Misfit(f"{name} {fault}; it takes {', '.join(parameters) or 'nothing'}")
        # Null stands for "left out" where the default is None, so no schema has to allow it there.
        nulls = {n: None for n, v in arguments.items() if v is None and parameters[n].default is None}
        typed: object = {n: v for n, v in arguments.items() if n not in nulls}
        tool_schema: Mapping[str, Any] = self.schema
        for schema in (row_schema, tool_schema["function"]["parameters"]):
            typed = convert_value(typed, schema, name)
        assert isinstance(typed, dict)
        return {**typed, **nulls}


@dataclass(frozen=True)
class Environment:
    """A class of the user's; each completion has an object of its own."""

    spec: str
    home: tuple[str, str]
    reset: Callable[..., object]
    tools: Sequence[Tool]

    def columns(self, row: Mapping[str, object]) -> dict[str, object]:
        """Return the columns of a row that `reset` asks for."""
        parameters = _parameters(self.reset)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return {name: value for name, value in row.items() if takes_all or name in parameters}

    @property
    def needed(self) -> set[str]:
        """Columns without which `reset` cannot be called."""
        return _required_parameters(self.reset)


def load_tools(tools: ToolUse, folder: Path) -> dict[str, Tool]:
    """Load tools by name: built-in ones, functions as module.py:function from ``folder``, an environment's.

    Raises ConfigError.
    """
    functions = [_load(spec, folder) for spec in tools.functions]
    environment = load_environment(tools.environment, folder)
    methods = environment.tools if environment is not None else ()
    tools_by_name: dict[str, Tool] = {}
    for tool in (*functions, *methods):
        if tool.name in tools_by_name:
            raise ConfigError(f"rollout.tools: two functions have the name {tool.name}; rename one")
        tools_by_name[tool.name] = tool
    for tool in tools_by_name.values():
        # Made now, so that a user's mistake in a docstring is reported before a model is loaded.
        assert tool.schema
    return tools_by_name


def load_environment(spec: str | None, folder: Path) -> Environment | None:
    """Load the class that ``spec`` names, module.py:Class from ``folder``. Raises ConfigError."""
    if spec is None:
        return None
    setting = f"rollout.tools.environment: {spec}"
    if ":" not in spec:
        raise ConfigError(f"{setting} must be written as module.py:Class")
    environment_class = load_function(spec, folder)
    reset = getattr(environment_class, "reset", None)
    if not inspect.isclass(environment_class) or not callable(reset):
        raise ConfigError(f"{setting} must be a class with a method `reset`")
    if missing := _required_parameters(environment_class):
        raise ConfigError(
            f"{setting}: __init__ asks for {min(missing)!r}, but the class is called without arguments; "
            "`reset` gets the columns"
        )
    members = inspect.getmembers(environment_class, inspect.isfunction)
    public = [(n, f) for n, f in members if not n.startswith("_") and n not in NO_TOOLS]
    if not public:
        raise ConfigError(f"{setting} has no public method except `reset`, so the model could call nothing")
    home = _home(spec, folder)
    # A bound method's signature lacks `self`; there is no object yet, and none is needed for it.
    methods = {name: MethodType(function, environment_class) for name, function in public}
    tools = [
        Tool(name, _check_function(method, f"{spec}.{name}"), home, True) for name, method in methods.items()
    ]
    return Environment(spec, home, MethodType(reset, environment_class), tools)


def _load(spec: str, folder: Path) -> Tool:
    if ":" not in spec:
        if spec not in BUILT_IN_TOOLS:
            raise ConfigError(
                f"rollout.tools: {spec!r} is unknown{hint(spec, BUILT_IN_TOOLS)}; name your own function as "
                "module.py:function"
            )
        return Tool(spec, BUILT_IN_TOOLS[spec], (BUILT_IN_TOOLS[spec].__module__, spec))
    function = _check_function(load_function(spec, folder), spec)
    home = _home(spec, folder)
    return Tool(home[1], function, home)


def _home(spec: str, folder: Path) -> tuple[str, str]:
    return module_of(spec, folder), spec.partition(":")[2]


def _check_function(function: Callable[..., object], spec: str) -> Callable[..., object]:
    """Return the function if the model can call it. Raises ConfigError."""
    kinds = {p.kind for p in _parameters(function).values()}
    if not kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
        raise ConfigError(
            f"rollout.tools: {spec}: a tool takes its arguments by name, so / and *args are not allowed"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"rollout.tools: {spec}: a tool must return its answer, but this one yields; return a list"
        )
    return function


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _required_parameters(function: Callable[..., object]) -> set[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = _parameters(function).items()
    return {name for name, p in parameters if p.kind in named and p.default is p.empty}


def _without_columns(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function with this one's name, docstring and signature, but without the columns."""

    @functools.wraps(function)
    def stub() -> None: ...

    signature = inspect.signature(function)
    arguments = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    hints = getattr(function, "__annotations__", {})
    stub.__annotations__ = {p.name: hints[p.name] for p in arguments if p.name in hints}
    # inspect looks for this attribute first; set by ``vars``, as the type of a function does not declare it.
    vars(stub)["__signature__"] = signature.replace(parameters=arguments)
    return stub

"""Execution of calls: each in a process of its own that can be killed, model-written code in the sandbox."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from covey.config.sampling import ToolUse
from covey.config.schema import Sandbox
from covey.sampling.tools.allowance import Allowance, WaitingTime
from covey.sampling.tools.builtin import PYTHON_PROGRAM, calculate, python
from covey.sampling.tools.definitions import Tool, load_environment, load_tools
from covey.sampling.tools.environments import (
    CALLS_AT_ONCE,
    CHILD,
    Environments,
    Episode,
    columns_not_sent,
)
from covey.system.text import Say
from covey.types import Problem
from covey_verify.calls.arguments import Misfit
from covey_verify.calls.call import ToolCall
from covey_verify.errors import ConfigError, CoveyError
from covey_verify.hosting import UserCode, call_limits, sandbox_for_functions
from covey_verify.sandbox.base import Outcome
from covey_verify.sandbox.choice import choose
from covey_verify.sandbox.client import ForkServer
from covey_verify.sandbox.confine import Limits
from covey_verify.sandbox.process import ProcessSandbox
from covey_verify.threads import SHARED_SIZE, Call, Executor

ERROR = "error: "
"""Beginning of a result that reports an error. The model reads it and may try again."""
NOT_RUN = f"{ERROR}not run"
MAX_TOKEN_CHARACTERS = 128
"""Largest number of characters of a token: Qwen and Llama 3 have tokens of 128 spaces."""
MANY_RESETS = 500
"""Number of prompts above which resets are announced, because they take more than a second or two."""
ESCAPED = 12
"""Largest size of a character in JSON, in bytes: two escapes of the form backslash uXXXX."""


class Toolbox:
    """The tools of a run, and the processes that they run in. Safe from any thread."""

    def __init__(self, tools: ToolUse, folder: Path, sandbox: Sandbox) -> None:
        """Raises ConfigError, and SandboxUnavailable where one is needed and none works."""
        self.tools = tools
        self.functions = load_tools(tools, folder)
        self.environment = load_environment(tools.environment, folder)
        self.longest_result = MAX_TOKEN_CHARACTERS * tools.result_tokens + 1
        """Largest number of characters of a result; more have more than `result_tokens` tokens anyway."""
        self.output = Limits.output + ESCAPED * self.longest_result
        # A sandbox is looked for only if one is needed: on some systems none works.
        runs_programs = any(tool.function is python for tool in self.functions.values())
        needs_sandbox = runs_programs or tools.isolate == "sandbox"
        self.chosen = choose(**sandbox.model_dump()) if needs_sandbox else None
        """The sandbox of the model's programs, and of calls under ``isolate: sandbox``; None if unused."""
        self.executor = Executor()
        self.folder = folder.resolve()
        self.server = self._serve()
        self.environments = (
            Environments(self.environment, self._serve, tools.timeout, self.longest_result, self.output)
            if self.environment
            else None
        )

    def _serve(self) -> ForkServer:
        """Return a fork server that imports the user's files."""
        code = UserCode(CHILD, [tool.home[0] for tool in self.functions.values()], self.folder)
        if self.tools.isolate == "sandbox":
            return code.sandboxed_server(self._box(), CALLS_AT_ONCE)
        return code.trusted_server(CALLS_AT_ONCE)

    def _box(self) -> ProcessSandbox:
        """Return the sandbox of the calls. Raises ConfigError if it cannot hold them."""
        assert self.chosen is not None
        setting = "rollout.tools.isolate: sandbox"
        tools = self.functions.values()
        coroutines = [tool.name for tool in tools if inspect.iscoroutinefunction(tool.function)]
        if coroutines:
            raise ConfigError(f"{setting} cannot run async functions, such as {coroutines[0]}")
        return sandbox_for_functions(self.chosen.sandbox, setting)

    @property
    def schemas(self) -> list[dict[str, object]]:
        """The tools' schemas, for the chat template."""
        return [tool.schema for tool in self.functions.values()]

    def episode(self, problem: Problem, seed: int) -> Episode | None:
        """Return the episode of a completion, None without an environment; nothing runs yet."""
        if self.environments is None:
            return None
        return Episode(self.environments, self.executor, problem, seed)

    def openings(self, problems: Sequence[Problem], say: Say) -> list[str]:
        """Return the texts that prompts have to end with; none at all if the first `reset` returns None."""
        no_openings = [""] * len(problems)
        if self.environments is None or not problems:
            return no_openings
        episodes = [Episode(self.environments, self.executor, problem, seed=0) for problem in problems]
        # The first is asked alone: if it returns None, no other process has to be started.
        first = episodes[0].opening_text()
        if first is None:
            return no_openings
        if len(episodes) > MANY_RESETS:
            say(f"{self.tools.environment}: calling reset for each of {len(episodes):,} prompts")
        resets = [episode.submit(episode.opening_text) for episode in episodes[1:]]
        return [first, *(reset.result() or "" for reset in resets)]

    def allowance(self, batch: WaitingTime) -> Allowance:
        """Return the time limit of a completion in a batch."""
        return Allowance(self.tools.seconds, batch)

    def time_limit(self) -> WaitingTime:
        """Return the time limit of a batch of completions."""
        return WaitingTime(self.tools.seconds)

    def begin(
        self, calls: Sequence[ToolCall], problem: Problem, episode: Episode | None, allowance: Allowance
    ) -> Callable[[], list[str]]:
        """Start the calls of a turn; return a function that waits for their results, texts for the model."""
        limit = self.tools.calls_per_turn
        refusals = [f"{NOT_RUN}: only the first {limit} calls of a turn are"] * len(calls[limit:])

        def run(call: ToolCall) -> str:
            return self._run_within(allowance, call, problem, episode)

        if episode is not None:
            # One task for all calls of the turn: an environment is called in the order that the model wrote.
            task = episode.submit(lambda: [run(call) for call in calls[:limit]])
            return lambda: [*task.result(), *refusals]
        tasks = [self._submit(call, partial(run, call)) for call in calls[:limit]]
        return lambda: [*(task.result() for task in tasks), *refusals]

    def _submit(self, call: ToolCall, run: Callable[[], str]) -> Call[str]:
        """Queue a call, programs apart from functions. It has no limit here: its own process has one."""
        tool = self.functions.get(call.name)
        if tool is not None and tool.function is python:
            return self.executor.submit("programs", SHARED_SIZE, run, math.inf)
        return self.executor.submit("tools", CALLS_AT_ONCE, run, math.inf)

    def _run_within(
        self, allowance: Allowance, call: ToolCall, problem: Problem, episode: Episode | None
    ) -> str:
        """Run a call in the seconds that are left to the completion."""
        seconds = min(self.tools.timeout, allowance.seconds_left())
        if seconds <= 0:
            return self._used_up
        with allowance():
            return self.result(call, problem, episode, seconds)

    def result(
        self,
        call: ToolCall,
        problem: Problem,
        episode: Episode | None = None,
        seconds: float | None = None,
    ) -> str:
        """Run a call and return its result or error, within ``seconds`` or `rollout.tools.timeout`.

        Raises CoveyError if it cannot even be tried.
        """
        seconds = self.tools.timeout if seconds is None else seconds
        tool = self.functions.get(call.name)
        if call.wrong or tool is None:
            return ERROR + (call.wrong or self._unknown_tool(call.name))
        try:
            call = call._replace(arguments=tool.convert_arguments(call.arguments, _row_schema(tool, problem)))
        except Misfit as misfit:
            return ERROR + str(misfit)
        outcome = self._outcome(tool, call, problem, episode, seconds)
        if outcome.kind == "lost":
            # It could not be started, or its end is unknown. Where little time was left, that is the reason.
            if seconds < self.tools.timeout:
                return self._used_up
            raise CoveyError(f"rollout.tools: {tool.name} could not be run: {outcome.text}")
        text = _text(outcome)[: self.longest_result]
        return text if outcome.kind == "ok" else ERROR + text.strip()

    def _outcome(
        self, tool: Tool, call: ToolCall, problem: Problem, episode: Episode | None, seconds: float
    ) -> Outcome:
        """Run a valid call where it belongs.

        Arithmetic runs in this process, a program in the sandbox, a method in its environment's process, any
        other function in a forked process.
        """
        if tool.function is calculate:
            return _here(tool, call)
        if tool.function is python:
            return self._in_sandbox(call, seconds)
        if tool.method:
            assert episode is not None
            return episode.call(tool.name, _arguments(tool, call, problem), seconds)
        return self._in_child(tool, call, problem, seconds)

    @property
    def _used_up(self) -> str:
        return f"{NOT_RUN}: the {self.tools.seconds:g} s for tools are used up"

    def _unknown_tool(self, name: str) -> str:
        return f"there is no tool {name[:40]!r}; there are {', '.join(self.functions)}"

    def _in_child(self, tool: Tool, call: ToolCall, problem: Problem, seconds: float) -> Outcome:
        limits = call_limits(seconds, self.output)
        arguments = _arguments(tool, call, problem)
        try:
            return self.server.call(
                f"{CHILD}:call_tool", *tool.home, arguments, self.longest_result, limits=limits
            )
        except (TypeError, ValueError) as error:
            raise columns_not_sent(problem, tool.columns, f"the tool {tool.name}", error) from None

    def _in_sandbox(self, call: ToolCall, seconds: float) -> Outcome:
        assert self.chosen is not None
        limits = Limits(wall=seconds, cpu=max(1, round(seconds)), output=self.output)
        return self.chosen.sandbox.script(PYTHON_PROGRAM.format(code=str(call.arguments["code"])), "", limits)


def _here(tool: Tool, call: ToolCall) -> Outcome:
    """Calculate in this process: arithmetic is bounded, and a fork would take a hundred times as long."""
    try:
        return Outcome("ok", tool.function(**call.arguments))
    except ValueError as error:
        return Outcome("error", text=str(error))


def _row_schema(tool: Tool, problem: Problem) -> object:
    """Return the schema of a tool's parameters in the problem's own row; None if the row has none."""
    schemas = problem.template.get("tools")
    for schema in schemas if isinstance(schemas, Sequence) else ():
        function = schema.get("function", schema) if isinstance(schema, Mapping) else None
        if isinstance(function, Mapping) and function.get("name") == tool.name:
            return function.get("parameters")
    return None


def _arguments(tool: Tool, call: ToolCall, problem: Problem) -> dict[str, object]:
    """Return the arguments of a tool: the model's, and columns of the row."""
    columns = {name: problem.columns[name] for name in tool.columns if name in problem.columns}
    return {**call.arguments, **columns}


def _text(outcome: Outcome) -> str:
    """Return an outcome in words for the model."""
    if outcome.kind == "ok":
        return str(outcome.value)
    return outcome.text or outcome.kind

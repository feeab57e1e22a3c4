"""The tools of a run: loaded before its model, described to the model, and called by a sampler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from covey.config.load import ResolvedConfig
from covey.config.methods import EXAMPLE_SAMPLERS
from covey.config.unread import reads
from covey.models.policy import Policy
from covey.sampling.base import Sampler
from covey.sampling.prompts import check_known
from covey.sampling.tools.inserted import answer_tokens
from covey.sampling.tools.readable import prove_readable
from covey.sampling.tools.running import Toolbox
from covey.sampling.tools.turns import TurnSampler
from covey.system.text import Say
from covey.tasks.gym import PREFIX
from covey.tasks.source import Source
from covey.types import Problem
from covey_verify.calls.call import ToolCall
from covey_verify.calls.forms import CLOSE_CALL, OPEN_CALL
from covey_verify.errors import ConfigError, DataError

PROBE = "42"
"""The result of a trial call, which must occur in the text that the template inserts."""


def toolbox_of(resolved: ResolvedConfig) -> Toolbox | None:
    """Return the tools of a config, if there are any. Raises ConfigError or SandboxUnavailable."""
    config = resolved.config
    if config.rollout.tools is None or not reads(config.method, "rollout.tools"):
        return None
    toolbox = Toolbox(config.rollout.tools, resolved.folder, config.sandbox)
    task = config.data.task or ""
    open_to_programs = toolbox.chosen is not None and not toolbox.chosen.sealed
    # The puzzles' solvers are importable where reasoning-gym is.
    if task.startswith(PREFIX) and (open_to_programs or "reasoning_gym" in config.sandbox.packages):
        raise ConfigError(
            "rollout.tools: a program run by the tool python could import reasoning-gym and compute the "
            f"answers of data.task: {task}. Use the sandbox bwrap, landlock or wasm and leave reasoning_gym "
            "out of sandbox.packages, or remove the tool"
        )
    return toolbox


def initial_state(toolbox: Toolbox | None, problem: Problem) -> Mapping[str, object] | None:
    """Return the state of a problem's environment after `reset`, if there is one. Raises DataError."""
    episode = toolbox.episode(problem, seed=0) if toolbox is not None else None
    return None if episode is None else episode.end().state


def with_schemas(source: Source, toolbox: Toolbox | None, say: Say = lambda _: None) -> Source:
    """Add the tools' schemas to the problems' chats; a row that has `tools` of its own keeps them.

    The text that an environment's `reset` returns is added to the prompts. Raises DataError if a tool asks
    for a column that a row lacks.
    """
    if toolbox is None:
        return source
    problems = [*source.train, *source.test]
    for tool in toolbox.functions.values():
        needed = {name for name, p in tool.columns.items() if p.default is p.empty}
        _check_columns(f"the tool {tool.name}", needed, problems)
    if toolbox.environment is not None:
        _check_columns(f"{toolbox.environment.spec}.reset", toolbox.environment.needed, problems)
        _refuse_taken(problems)
    all_problems = [*problems, *(e.problem for e in (*source.examples, *source.held_out))]
    # By identity: ids of problems may repeat between training and test.
    openings = dict(zip(map(id, all_problems), toolbox.openings(all_problems, say), strict=True))

    def with_tools_shown(problem: Problem) -> Problem:
        return showing_tools(_ending_with(problem, openings[id(problem)]), toolbox)

    return replace(
        source,
        train=[with_tools_shown(p) for p in source.train],
        test=[with_tools_shown(p) for p in source.test],
        examples=[replace(e, problem=with_tools_shown(e.problem)) for e in source.examples],
        held_out=[replace(e, problem=with_tools_shown(e.problem)) for e in source.held_out],
    )


def showing_tools(problem: Problem, toolbox: Toolbox) -> Problem:
    """Add the tools' schemas to a problem's chat, unless its row has `tools` of its own."""
    if not problem.chat:
        return problem
    return replace(problem, template={"tools": toolbox.schemas, **problem.template})


def columns_asked(toolbox: Toolbox | None, problems: Sequence[Problem]) -> dict[str, set[str]]:
    """Return the columns that each tool reads: name of a tool, or of the environment's class -> columns."""
    if toolbox is None:
        return {}
    columns = {name: set(tool.columns) for name, tool in toolbox.functions.items()}
    environment = toolbox.environment
    if environment is not None:
        by_problem = [environment.columns(problem.columns) for problem in problems]
        columns[f"{environment.spec}.reset"] = set().union(*by_problem)
    return columns


def _ending_with(problem: Problem, text: str) -> Problem:
    """Add a text to a prompt, unless it ends with it already. Completions of an earlier stage do."""
    if problem.sampled_tokens is not None or problem.ends_with(text):
        return problem
    prompt = problem.prompt
    if isinstance(prompt, str):
        return replace(problem, prompt=prompt + text)
    last_message = {**prompt[-1], "content": f"{prompt[-1]['content']}{text}"}
    return replace(problem, prompt=[*prompt[:-1], last_message])


def _check_columns(reader: str, needed: set[str], problems: Sequence[Problem]) -> None:
    for problem in problems:
        missing = needed - set(problem.columns)
        if missing:
            raise DataError(
                f"{problem.id}: {reader} asks for column {min(missing)!r}, which the row does not have: add "
                "it to the data, or give the argument a default"
            )


def _refuse_taken(problems: Sequence[Problem]) -> None:
    for problem in problems:
        reserved = {"environment", "environments"} & set(problem.columns)
        if reserved:
            raise DataError(
                f"{problem.id}: rename column {min(reserved)!r}: rewards get a completion's environment by "
                "that name"
            )


def unexplained_tools(
    policy: Policy, source: Source, toolbox: Toolbox | None, method: str = "rl"
) -> Iterator[str]:
    """Yield notes on tools that the model is not told about. Raises ConfigError or DataError."""
    # A reward model reads calls, but never writes one.
    if toolbox is None or method == "reward_model":
        return
    problems = [*source.train, *source.test]
    call = ToolCall(next(iter(toolbox.functions)), {})
    # One problem is enough: the template and the tools are the same for all.
    for problem in [p for p in problems if p.chat][:1]:
        inserted = answer_tokens(policy, problem, [call], [PROBE])
        check_known(policy, inserted, "what the chat template writes around the result of a tool")
        if PROBE not in policy.decode(inserted):
            raise ConfigError(
                "rollout.tools: the chat template has no place for a tool's reply (messages of role tool). "
                "Use a model whose template has one, or plain-text prompts"
            )
        yield from prove_readable(policy, problem, toolbox.schemas)
    text_problems = [p for p in problems if not p.chat]
    if text_problems and method in EXAMPLE_SAMPLERS:
        raise ConfigError(
            f"rollout.tools: method {method} keeps completions as examples, but in plain text a tool's "
            "replies cannot be told from the model's words; set data.chat: true"
        )
    if text_problems and not any(OPEN_CALL in str(p.prompt) for p in text_problems):
        yield (
            f"{text_problems[0].id}: the prompt is plain text, so the model is not told of its tools. Say in "
            f'it how to call them: {OPEN_CALL}{{"name": "{call.name}", "arguments": {{...}}}}{CLOSE_CALL}; '
            "or set data.chat: true"
        )


def with_tools(sampler: Sampler, policy: Policy, toolbox: Toolbox | None) -> Sampler:
    """Return a sampler whose completions may call tools, if there are any."""
    return sampler if toolbox is None else TurnSampler(sampler, policy, toolbox)

"""Loading of the rewards that a config names, with the table of the built-in ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from covey.config.algorithm import checked_settings, hint, parameters_of
from covey.config.schema import Sandbox as SandboxConfig
from covey.config.schema import Scoring as ScoringConfig
from covey.rewards.contract import MAX_REWARD, Origin, Reward, verdict_of
from covey.rewards.environments import environment_reward
from covey.rewards.scorer import Rewards
from covey_verify.contract import PROVIDED, Options
from covey_verify.errors import ConfigError
from covey_verify.hosting import sandbox_for_functions
from covey_verify.rewards import BUILT_IN as VERIFIERS
from covey_verify.sandbox.base import SandboxBackend
from covey_verify.sandbox.choice import choose
from covey_verify.sandbox.process import ProcessSandbox
from covey_verify.usercode import load_function, name_of

BUILT_IN: Mapping[str, Callable[..., object]] = {
    **VERIFIERS,
    "environment_reward": environment_reward,
}
Function = Callable[..., object]
OPTIONS = TypeAdapter(Options)


@dataclass(frozen=True, eq=False)
class ModelCache:
    """The models that the rewards of a run load, each once; they go with the run."""

    folder: Path
    """The folder that names of models are relative to."""
    models: dict[object, object] = field(default_factory=dict)


def load_rewards(
    specs: Sequence[object],
    folder: Path,
    scoring: ScoringConfig | None = None,
    sandbox: SandboxConfig | None = None,
    learned: Mapping[str, Callable[[], Function]] | None = None,
    wrap: Callable[[Function], Function] = lambda function: function,
) -> Rewards:
    """Load the rewards of a config's list. Raises ConfigError naming the entry and the nearest name.

    ``learned`` maps further names to importers of their functions. ``wrap`` may replace each function by
    another. Raises SandboxUnavailable if a reward runs model code and no sandbox works.
    """
    if not specs:
        raise ConfigError("rewards: there is no reward to judge the completions; name at least one")
    cache = ModelCache(folder)
    rewards = [_wrap_function(_load_reward(spec, cache, learned or {}), wrap) for spec in specs]
    names = [r.name for r in rewards]
    if len(set(names)) < len(names):
        raise ConfigError(f"rewards: {', '.join(names)}: to use a function twice, give one a `name:`")
    sandbox_record = None
    for index, reward in enumerate(rewards):
        _check_gate(reward, names)
        if _takes_sandbox(reward) or _called_in_sandbox(reward):
            # The sandbox is chosen only if some reward needs it, as the choice probes the machine.
            chosen = choose(**(sandbox or SandboxConfig()).model_dump())
            sandbox_record = chosen.record()
            rewards[index] = _with_sandbox(reward, chosen.sandbox)
    settings = (scoring or ScoringConfig()).model_dump(include={"timeout", "max_infra", "noise"})
    return Rewards(_with_verdict(rewards), **settings, sandbox=sandbox_record)


def _check_gate(reward: Reward, names: Sequence[str]) -> None:
    """Raise ConfigError unless ``gated_by`` is another reward's name, name:correct or name:incorrect."""
    if reward.gate is None:
        return
    others = [name for name in names if name != reward.name]
    if reward.gate.reward not in others or reward.gate.answer not in ("", "correct", "incorrect"):
        raise ConfigError(
            f"rewards: {reward.name} is gated_by {reward.gated_by!r}, which must be the name of another "
            f"reward of this run, or name:correct or name:incorrect{hint(reward.gate.reward, others)}"
        )


def _takes_sandbox(reward: Reward) -> bool:
    """Return whether a function runs model code itself, in a sandbox that it gets as an argument."""
    return "sandbox" in reward.parameters


def _called_in_sandbox(reward: Reward) -> bool:
    """Return whether the function itself is called in the sandbox."""
    return "sandbox" in (reward.isolate, reward.options.isolate)


def _with_sandbox(reward: Reward, sandbox: SandboxBackend) -> Reward:
    """Return the reward with its sandbox. Raises ConfigError if it cannot be called in one."""
    if _called_in_sandbox(reward):
        reward = replace(reward, call_sandbox=_call_sandbox(reward, sandbox))
    if _takes_sandbox(reward):
        reward = replace(reward, settings={**reward.settings, "sandbox": sandbox})
    return reward


def _call_sandbox(reward: Reward, sandbox: SandboxBackend) -> ProcessSandbox:
    """Return the sandbox of a function's calls. Raises ConfigError if it cannot be called in one."""
    setting = f'rewards: {reward.name}: @reward(isolate="sandbox")'
    if reward.place != "sandbox":
        raise ConfigError(f"{setting} needs a function from a file, named as module.py:function")
    if reward.is_async or _takes_sandbox(reward):
        why = (
            "an async function, which waits for others" if reward.is_async else "one with a `sandbox` itself"
        )
        raise ConfigError(f'{setting} is not for {why}. Use isolate="worker"')
    return sandbox_for_functions(sandbox, setting)


def _with_verdict(rewards: list[Reward]) -> list[Reward]:
    """Return the rewards with the verdict marked, if it can be determined.

    An undecided verdict is not an error here, since scoring a file needs none; a run asks for
    ``Rewards.verdict`` before it begins.
    """
    try:
        verdict = verdict_of(rewards).name
    except ConfigError:
        if any(r.verdict for r in rewards):
            raise
        return rewards
    # From here on exactly one reward says True and all others False, never None.
    return [replace(r, verdict=r.name == verdict) for r in rewards]


def _wrap_function(reward: Reward, wrap: Callable[[Function], Function]) -> Reward:
    function = wrap(reward.function)
    # A worker's process loads the function by its name in the config, so it would miss the wrapper. Without
    # an origin the call stays in this process.
    return reward if function is reward.function else replace(reward, function=function, origin=None)


def _load_reward(spec: object, cache: ModelCache, learned: Mapping[str, Callable[[], Function]]) -> Reward:
    """Return the reward of an entry, checked. Raises ConfigError."""
    if isinstance(spec, Reward):
        return spec
    folder = cache.folder
    target, settings = _parse_entry(spec)
    function = _find_function(target, folder, learned)
    # `module.py:function`, the only form that another process can load again.
    from_file = isinstance(target, str) and ":" in target
    origin = Origin(str(target), str(folder.resolve())) if from_file else None
    # The name in the config: a lambda, a partial or an object may have another `__name__`, or none.
    default_name = str(target).rpartition(":")[2] if origin else name_of(function)
    reward = Reward(str(settings.pop("name", None) or default_name), function, origin=origin)
    reward = _with_own_settings(reward, settings, str(target))
    fault = _signature_fault(reward)
    if fault:
        raise ConfigError(f"rewards: {target if origin else reward.name} {fault}")
    return _with_settings(reward, cache)


def _with_own_settings(reward: Reward, settings: dict[str, object], target: str) -> Reward:
    """Return the reward with covey's settings (weight, verdict, gated_by); the rest are the function's.

    Raises ConfigError, with the ``target`` that the config names, for an invalid one.
    """
    weight = settings.pop("weight", reward.options.weight)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) <= MAX_REWARD:
        raise ConfigError(
            f"rewards: the weight of {target} must be a number up to {MAX_REWARD:g}, not {weight!r}"
        )
    fault = _options_fault(reward)
    if fault:
        raise ConfigError(f"rewards: @reward of {target}: {fault}")
    verdict = settings.pop("verdict", None)
    if not isinstance(verdict, bool | None):
        raise ConfigError(f"rewards: the verdict of {target} must be true or false, not {verdict!r}")
    gate = settings.pop("gated_by", None)
    return replace(
        reward,
        weight=float(weight),
        gated_by=None if gate is None else str(gate),
        verdict=verdict,
        settings=settings,
    )


def _parse_entry(spec: object) -> tuple[object, dict[str, object]]:
    """Return the name or function of an entry, and its settings.

    It has three forms: a bare name, {name: weight} and {name: {settings}}. Raises ConfigError for others.
    """
    if not isinstance(spec, Mapping):
        return spec, {}
    if len(spec) != 1:
        raise ConfigError(
            f"rewards: {dict(spec)}: an entry must be one reward: [{{first: 1.0}}, {{second: 0.1}}], with "
            f"its settings indented below its name or in braces: {{first: {{weight: 0.1, ...}}}}"
        )
    [(target, options)] = spec.items()
    return target, dict(options) if isinstance(options, Mapping) else {"weight": options}


def _with_settings(reward: Reward, cache: ModelCache) -> Reward:
    """Return the reward with its function's settings checked. Raises ConfigError for an invalid one."""
    settings = dict(reward.settings)
    # PROVIDED arguments come from the run. A `**kwargs` takes columns and no settings: if it took any name,
    # a misspelled setting would pass for one.
    accepted = [n for n, p in reward.parameters.items() if n not in PROVIDED and p.kind is not p.VAR_KEYWORD]
    unknown = [s for s in settings if s not in accepted]
    if unknown:
        words = [*accepted, "name", "weight", "verdict", "gated_by"]
        raise ConfigError(f"rewards: {reward.name} has no setting {unknown[0]!r}{hint(unknown[0], words)}")
    # Built-in functions are annotated, so the types of their settings can be checked.
    if reward.ours:
        annotated = parameters_of(reward.function)
        typed = {name: value for name, value in settings.items() if name in annotated}
        settings |= checked_settings(f"rewards: {reward.name}", reward.function, typed)
        reward = replace(reward, settings=settings)
    if "model_cache" in reward.parameters:
        return replace(reward, settings={**settings, "model_cache": cache})
    return reward


def _options_fault(reward: Reward) -> str | None:
    """Return the fault of a declaration in ``@reward``, if there is one."""
    try:
        OPTIONS.validate_python(vars(reward.options))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        return f"{name} {getattr(reward.options, name)!r}: {first['msg']}"
    return None


def _signature_fault(reward: Reward) -> str | None:
    """Return why a function cannot be called, or None.

    Arguments are passed by name, and their names say whether it judges one completion or a group.
    """
    parameters = reward.parameters
    unnamed = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
    if unnamed:
        return f"takes {', '.join(unnamed)} by position only; arguments go by name: remove the `/`"
    of_group = [n for n in ("completions", "completion_ids", "sampled_ids") if n in parameters]
    of_one = [n for n in ("completion", "solution_str") if n in parameters]
    # With a default, `completions` is optional, and the function judges one at a time.
    needs_group = "completions" in parameters and parameters["completions"].default is inspect.Parameter.empty
    if of_one and needs_group:
        return f"takes both `{of_one[0]}` (one) and `completions` (all of a group); keep one of them"
    if of_one or of_group or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    signature = f"; it takes {', '.join(parameters)}" if parameters else ""
    return f"takes neither `completions` (all of a group) nor `completion` (one){signature}"


def _find_function(target: object, folder: Path, learned: Mapping[str, Callable[[], Function]]) -> Function:
    """Return the function that an entry names. Raises ConfigError with the nearest name."""
    if callable(target):
        return target
    if isinstance(target, str) and ":" in target:
        return load_function(target, folder)
    if isinstance(target, str) and target in BUILT_IN:
        return BUILT_IN[target]
    # Learned rewards import torch, so they are imported only when a config names one.
    if isinstance(target, str) and target in learned:
        return learned[target]()
    names = (*BUILT_IN, *learned)
    raise ConfigError(
        f"rewards: {target!r} is unknown{hint(str(target), names)}; name your own as module.py:function"
    )

"""From a config to a Run: everything that can be wrong is found here, the cheap checks first."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
import yaml

from covey.config.load import Loaded, flatten, resolved, resolved_yaml
from covey.config.schema import Config
from covey.console import RunConsole
from covey.models.load import Reference, load_policy
from covey.models.policy import Policy
from covey.rewards.base import Rewards, load_rewards
from covey.rewards.preflight import check_columns, check_golds, rehearse
from covey.rollout import Prompted
from covey.sampling.local import LocalSampler
from covey.stopping import StopSignal
from covey.store.commit import write_text
from covey.store.folder import RunFolder
from covey.tasks.source import Source, load_problems
from covey.training.optimizer import Optimizer
from covey.training.run import Run, State
from covey.types import VERSION, ConfigError, DataError, Problem

MAY_CHANGE = {"output", "train.save_every", "train.keep"}
"""Settings under which a run may go on although they differ from those it was started with."""


def set_up(loaded: Loaded, console: RunConsole, stop: StopSignal) -> Run:
    """Build a run; if its folder holds an unfinished one of the same config, go on from there.

    Raises ConfigError, DataError or RewardError before any model is loaded where that is possible.
    """
    config = loaded.config
    source = load_problems(loaded)
    rewards = load_rewards(config.rewards or source.rewards, loaded.folder, config.scoring, config.sandbox)
    source = checked(source, rewards, config, console)
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)  # index_put on CPU is not, without it
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    policy = load_policy(config, loaded.folder, texts_of(source, config), loaded.checkpoint)
    rewards.extra["decode"] = policy.decode
    train_set, test_set = (encode(policy, problems, config) for problems in (source.train, source.test))
    algorithm = loaded.algorithm
    run = Run(
        loaded=loaded,
        folder=RunFolder(config.output),
        console=console,
        stop=stop,
        policy=policy,
        reference=(
            Reference(policy, algorithm.moves_reference)
            if algorithm.needs_reference and config.method == "rl"
            else None
        ),
        sampler=LocalSampler(policy, config.rollout.max_running),
        rewards=rewards,
        train_set=train_set,
        test_set=test_set,
        optimizer=Optimizer(policy.parameters, config.train),
        state=State(
            kl_coef=algorithm.kl.coef if algorithm.kl else 0.0,
            entropy_coef=algorithm.entropy.coef if algorithm.entropy else 0.0,
        ),
    )
    write_text(run.folder.path / "config.yaml", resolved_yaml(loaded))
    reference = run.reference.fingerprint() if run.reference is not None else None
    record = {**environment(loaded, rewards), "reference": reference}
    write_text(run.folder.path / "env.json", json.dumps(record, indent=1))
    if run.restore():
        console.say(f"going on after step {run.state.step} of {config.train.steps}")
    return run


def checked(source: Source, rewards: Rewards, config: Config, console: RunConsole) -> Source:
    """The problems that can be used, after every check that needs no model."""
    everything = source.train + source.test
    check_columns(everything, rewards)
    for problem in everything if config.method == "sft" else ():
        if config.data.completion not in problem.columns:
            raise DataError(
                f"{problem.id}: supervised learning needs column {config.data.completion!r} "
                "(data.completion) with the answer to imitate"
            )
    if rewards.sandbox and "not_blocked" in rewards.sandbox:
        console.say(
            f"model code runs without a sandbox; not blocked: {rewards.sandbox['not_blocked']}", "red"
        )
    rehearse(source.train[0], rewards)
    train, bad = check_golds(source.train, rewards, config.scoring.max_bad_golds)
    test, bad_too = check_golds(source.test, rewards, config.scoring.max_bad_golds)
    for row, why in {**bad, **bad_too}.items():
        console.say(f"left out {row}: {why}", "yellow")
    return replace(source, train=train, test=test)


def texts_of(source: Source, config: Config) -> Iterable[str]:
    """What the tokenizer of `tiny` learns from: prompts and worked answers."""
    for problem in source.train:
        prompt = problem.prompt
        yield prompt if isinstance(prompt, str) else " ".join(str(m["content"]) for m in prompt)
        yield str(problem.columns.get(config.data.completion, ""))


def encode(policy: Policy, problems: Sequence[Problem], config: Config) -> list[Prompted]:
    """Prompts as tokens. Those that leave no room for max_tokens are an error or left out."""
    room = policy.context - config.rollout.max_tokens
    encoded = [Prompted(p, np.array(policy.encode(p.prompt), dtype=np.int64)) for p in problems]
    if empty := [p for p in encoded if not len(p.tokens)]:
        raise DataError(f"{empty[0].problem.id}: the prompt has no tokens")
    long = [p for p in encoded if len(p.tokens) > room]
    if long and config.data.long_prompts == "error":
        worst = max(long, key=lambda p: len(p.tokens))
        raise DataError(
            f"{len(long)} of {len(encoded)} prompts leave no room for rollout.max_tokens "
            f"{config.rollout.max_tokens} in the model's context of {policy.context} tokens; the longest, "
            f"{worst.problem.id}, has {len(worst.tokens)}. Lower rollout.max_tokens or set "
            "data.long_prompts: drop"
        )
    kept = [p for p in encoded if len(p.tokens) <= room]
    if problems and not kept:
        raise DataError("no prompt is left: all are longer than the model's context allows")
    return kept


def refuse_other_config(loaded: Loaded) -> None:
    """Raise ConfigError if the output folder belongs to a run with other settings."""
    path = loaded.config.output / "config.yaml"
    if not path.exists():
        return
    before, now = yaml.safe_load(path.read_text()), resolved(loaded)
    if changed := differences(dict(flatten(before)), dict(flatten(now))):
        raise ConfigError(
            f"{loaded.config.output} holds a run with other settings: {'; '.join(changed)}. "
            "Choose another --output, or remove that folder to start afresh"
        )


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Settings that differ, as 'key: old there, new here'."""
    keys = [k for k in {**before, **now} if k not in MAY_CHANGE and before.get(k) != now.get(k)]
    return [f"{k} is {before.get(k)} there, {now.get(k)} here" for k in keys]


def environment(loaded: Loaded, rewards: Rewards) -> dict[str, Any]:
    """What the numbers of a run depend on beside its config."""
    config = loaded.config
    return {
        "folder": str(loaded.folder),
        "covey": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "device": config.device,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": config.threads or os.cpu_count(),
        "sandbox": rewards.sandbox,
    }

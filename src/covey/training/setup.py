"""From a config to a Run: everything that can be wrong is found here, the cheap checks first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from covey.config.load import Loaded, resolved_yaml
from covey.config.schema import Config
from covey.console import RunConsole
from covey.errors import RECORD, START, CheckpointError, ConfigError, DataError
from covey.integrity import sealed
from covey.machine import available_threads
from covey.models.chat import ignored
from covey.models.load import Reference, load_policy
from covey.models.policy import Policy
from covey.models.whole import memory_there
from covey.rewards.base import Rewards, load_rewards
from covey.rewards.preflight import check_columns, check_golds, rehearse
from covey.rollout import Prompted
from covey.runs.atomic import write_file
from covey.runs.folder import RunFolder
from covey.sampling.local import LocalSampler
from covey.signals import StopSignal
from covey.tasks.source import Source, load_problems
from covey.training.clock import Clock
from covey.training.inventory import inventory
from covey.training.memory import forecast, planned_tokens, program_bytes, shape_of
from covey.training.optimizer import Optimizer
from covey.training.recorded import read_environment, recorded_settings
from covey.training.resume import (
    Changed,
    Difference,
    changed_environment,
    changed_settings,
    environment,
)
from covey.training.run import Run, Session, State
from covey.training.watchdog import Watchdog
from covey.types import Problem

ALONE = Session()


def set_up(loaded: Loaded, console: RunConsole, stop: StopSignal, session: Session = ALONE) -> Run:
    """Build a run; if its folder holds an unfinished one of the same config, go on from there.

    Raises ConfigError, DataError or RewardError before any model is loaded where that is possible.
    """
    config = loaded.config
    source = load_problems(loaded)
    rewards = load_rewards(config.rewards or source.rewards, loaded.folder, config.scoring, config.sandbox)
    for reward in rewards:
        if (faulty := session.faults.around(reward.function)) is not reward.function:
            rewards.put(replace(reward, function=faulty, home=None))
    source = checked(source, rewards, config, console)
    torch.set_num_threads(config.threads or available_threads())
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)  # index_put on CPU is not, without it
    # Every empty tensor here is written whole; torch does not declare the attribute's type.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    policy = load_policy(config, loaded.folder, texts_of(source, config), loaded.checkpoint)
    rewards.extra["decode"] = policy.decode
    train_set, test_set = (encode(policy, problems, config) for problems in (source.train, source.test))
    for note in unseen_by_model(policy, [*source.train, *source.test], config):
        console.say(note, "yellow")
    if "steps" in loaded.algorithm.needs and len(rewards) > 1:
        console.say(
            f"{loaded.algorithm.advantage.name} learns from step rewards alone; rewards without steps are "
            "measured, not trained on"
        )
    algorithm, optimizer = loaded.algorithm, Optimizer(policy.parameters, config.train)
    sampler = LocalSampler(policy, config.rollout.max_running, session.faults)
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
        sampler=sampler,
        rewards=rewards,
        train_set=train_set,
        test_set=test_set,
        optimizer=optimizer,
        watchdog=Watchdog(config.output, config.guards.stall_minutes),
        session=session,
        clock=Clock(policy.device),
        state=State(
            kl_coef=algorithm.kl.coef if algorithm.kl else 0.0,
            entropy_coef=algorithm.entropy.coef if algorithm.entropy else 0.0,
        ),
    )
    sampler.on_fewer = run.on_fewer
    try:
        roles = plan_memory(run)
        go_on(run, roles)
    except BaseException:
        run.folder.close()
        raise
    return run


@contextmanager
def caller_restored() -> Iterator[None]:
    """Give the caller's process back what `set_up` sets for all of it: threads, seed, determinism."""
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    drawn, on_gpus = (
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    )
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.set_rng_state(drawn)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)


def plan_memory(run: Run) -> dict[str, int]:
    """Say what the run will take, and begin with micro-batches that fit; bytes by what takes them.

    They change the last bits of a gradient, so a run that was begun before keeps its own.
    """
    config, device = run.loaded.config, run.policy.device
    shape, there = shape_of(run.policy), memory_there(device)
    copied = run.reference is not None and run.reference.has_weights
    program = program_bytes(device, shape.parameters * shape.number * (1 + copied))
    longest = max(len(p.tokens) for p in run.train_set)
    expect = partial(forecast, shape, config, longest, reference=copied, program=program)
    wanted = config.train.tokens_per_micro_batch
    before = (read_environment(config.output) or {}).get("micro_tokens", {})
    again = before.get("configured") == wanted
    tokens = before["planned"] if again else planned_tokens(expect(wanted), shape, config, there)
    run.planned_tokens = tokens
    roles = expect(tokens)
    total = sum(roles.values())
    parts = ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in roles.items() if size >= 5e5)
    style = "" if total <= there else "yellow"
    run.console.say(f"memory: about {total / 1e6:,.0f} MB of {there / 1e6:,.0f} ({parts})", style)
    if tokens < wanted:
        why = "had no room when the run began" if again else "does not fit"
        run.console.say(f"train.tokens_per_micro_batch {wanted} {why}: {tokens} are taken", "yellow")
    return roles


def go_on(run: Run, memory: Mapping[str, int]) -> None:
    """Restore the newest checkpoint, and say what differs from the process that left it."""
    loaded, folder = run.loaded, run.folder.path
    reference = run.reference.fingerprint() if run.reference is not None else None
    now = {
        **environment(loaded),
        "sandbox": run.rewards.sandbox,
        "data": fingerprint(run),
        "reference": reference,
        "files": inventory(loaded, run.rewards),
        "memory": memory,
        "micro_tokens": {
            "configured": loaded.config.train.tokens_per_micro_batch,
            "planned": run.planned_tokens,
        },
    }
    differences = found_differences(run, now)
    harmful = [d for d in differences if d.verdict != "safe"]
    if harmful and run.session.strict:
        raise CheckpointError(
            f"{folder}: {'; '.join(map(str, harmful))}. Go on as the run was begun, or leave out --strict"
        )
    if run.restore():
        run.console.say(f"going on after step {run.state.step} of {loaded.config.train.steps}")
        for difference in differences:
            run.console.say(f"  {difference}", "yellow" if difference in harmful else "")
        if harmful:
            run.event(run.state.step, "no longer exact", because=[str(d) for d in harmful])
    write_file(folder / "config.yaml", resolved_yaml(loaded))
    write_file(folder / "env.json", sealed(now))
    if run.session.start:
        write_file(run.session.home / START, sealed(run.session.start))
    (folder / RECORD).unlink(missing_ok=True)


def found_differences(run: Run, now: Mapping[str, Any]) -> list[Difference]:
    """What is not as it was in the process that left this run; a record that is missing is one of them."""
    before, output = read_environment(run.loaded.config.output), run.loaded.config.output
    differences = changed_settings(run.loaded)
    if before is not None:
        differences += changed_environment(before, now)
    if run.folder.checkpoints():
        records = ((output / "env.json", before), (output / "config.yaml", recorded_settings(output)))
        lost = [str(path) for path, found in records if found is None]
        differences += [Changed(path, "", "is gone", "breaks exactness") for path in lost]
    return differences


def fingerprint(run: Run) -> str:
    """A hash of what the run learns from: prompts as tokens, in their order, with their columns."""
    digest = hashlib.sha256()
    for prompted in (*run.train_set, *run.test_set):
        columns = {k: str(v) for k, v in prompted.problem.columns.items()}
        digest.update(prompted.tokens.tobytes())
        digest.update(json.dumps([prompted.problem.id, columns]).encode())
    return digest.hexdigest()


def checked(source: Source, rewards: Rewards, config: Config, console: RunConsole) -> Source:
    """The problems that can be used, after every check that needs no model."""
    for key, value in (("eval.every", config.eval.every), ("train.stop_at", config.train.stop_at)):
        if value and not source.test:
            raise DataError(f"{key}: there are no held-out problems; set data.test to a file of them")
    console.say(rewards.criterion)
    everything = source.train + source.test
    check_columns(everything, rewards)
    for problem in everything if config.method == "sft" else ():
        answer = problem.columns.get(config.data.completion)
        if answer is None or isinstance(answer, list | dict):
            raise DataError(
                f"{problem.id}: supervised learning needs column {config.data.completion!r} "
                "(data.completion) with the answer to imitate, as a text"
            )
    if rewards.sandbox and "not_blocked" in rewards.sandbox:
        console.say(
            f"model code runs without a sandbox; not blocked: {rewards.sandbox['not_blocked']}", "red"
        )
    elif rewards.sandbox:
        visible = rewards.sandbox.get("visible")
        held = f"model code runs in the {rewards.sandbox['backend']} sandbox"
        console.say(held + (f"; it can learn {visible}" if visible else ""))
    if rewards.inline:
        console.say(
            f"{', '.join(rewards.inline)}: called in this process, where nothing can end a call that hangs "
            "in C code (a pattern, say); one named as module.py:function gets a process of its own",
            "yellow",
        )
    if rewards.noise and config.method == "rl":
        console.say(f"{100 * rewards.noise:g} % of the verdicts are turned over (scoring.noise)", "yellow")
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


def unseen_by_model(policy: Policy, problems: Sequence[Problem], config: Config) -> list[str]:
    """What the data gives the chat template and the model is never told; a sentence each."""
    notes = []
    texts = [p for p in problems if isinstance(p.prompt, str)]
    if texts and config.data.chat_template_kwargs:
        notes.append("data.chat_template_kwargs: text prompts go without a template; set data.chat: true")
    if tools := [p for p in texts if p.columns.get("tools")]:
        notes.append(
            f"{tools[0].id}: column tools does not reach the model: its prompt is plain text without a chat "
            "template; set data.chat: true"
        )
    checked: set[str] = set()
    for problem in problems:
        # Once per name: a template treats them all alike, and rendering everything twice takes its time.
        if isinstance(problem.prompt, str) or set(problem.template) <= checked:
            continue
        unseen = ignored(policy.tokenizer, problem.prompt, problem.template)
        notes += [
            f"{problem.id}: the model's chat template ignores {name}, so the model is not told of it"
            for name in unseen
            if name not in checked
        ]
        checked |= set(problem.template)
    return notes


def _tokens(policy: Policy, problem: Problem) -> list[int]:
    try:
        return policy.encode(problem.prompt, problem.template)
    except DataError as error:
        raise DataError(f"{problem.id}: {error}") from None


def encode(policy: Policy, problems: Sequence[Problem], config: Config) -> list[Prompted]:
    """Prompts as tokens. Those that leave no room for max_tokens are an error or left out."""
    room = policy.context - config.rollout.max_tokens
    encoded = [Prompted(p, np.array(_tokens(policy, p), dtype=np.int64)) for p in problems]
    _same_model(policy, encoded)
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


def _same_model(policy: Policy, encoded: Sequence[Prompted]) -> None:
    """Raise ConfigError if the tokenizer gives tokens that the model does not know."""
    known = policy.model.get_input_embeddings().num_embeddings
    largest = max((int(p.tokens.max(initial=0)) for p in encoded), default=0)
    if largest >= known:
        raise ConfigError(
            f"model: the tokenizer gives tokens up to {largest}, and the model knows {known}: they are of "
            "different models"
        )

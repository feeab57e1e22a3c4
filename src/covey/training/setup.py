"""From a config to a Run: everything that can be wrong is found here, the cheap checks first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from covey.config.load import Loaded, resolved_yaml
from covey.config.schema import Config
from covey.console import RunConsole
from covey.errors import RECORD, START, CheckpointError, DataError
from covey.integrity import sealed
from covey.learned import LEARNED
from covey.learner.learner import Learner
from covey.learner.memory import forecast, planned_tokens, program_bytes, shape_of
from covey.machine import available_threads
from covey.models.load import device_memory, load_policy
from covey.models.policy import Policy
from covey.models.reference import Reference
from covey.models.value_head import ValueModel, add_value_head, begun_from, load_value_model
from covey.prompts import encode, texts_of, unseen_by_model
from covey.rewards.base import Rewards, load_rewards
from covey.rewards.preflight import check_columns, check_references, check_steps, rehearse
from covey.runs.atomic import write_file
from covey.runs.checkpoint import State
from covey.runs.clock import Clock
from covey.runs.compatibility import environment, found_differences
from covey.runs.folder import RunFolder
from covey.runs.inventory import fingerprint, inventory
from covey.runs.journal import Journal
from covey.runs.reader import read_environment
from covey.runs.watchdog import Watchdog
from covey.sampling.local import LocalSampler
from covey.signals import StopSignal
from covey.tasks.source import Source, load_problems
from covey.training.coefficients import first
from covey.training.run import DEFAULTS, Run, RunOptions


def set_up(loaded: Loaded, console: RunConsole, stop: StopSignal, options: RunOptions = DEFAULTS) -> Run:
    """Build a run; if its folder holds an unfinished one of the same config, resume that.

    Raises ConfigError, DataError or RewardError before any model is loaded where that is possible.
    """
    config, algorithm = loaded.config, loaded.algorithm
    source = load_problems(loaded)
    rewards = load_rewards(
        config.rewards or source.rewards,
        loaded.folder,
        config.scoring,
        config.sandbox,
        LEARNED,
        options.faults.around,
    )
    source = checked(source, rewards, loaded, console)
    set_process(config)
    policy = load_policy(loaded, texts_of(source, config))
    rewards.decode = policy.decode
    train_set, test_set = (encode(policy, problems, config) for problems in (source.train, source.test))
    for note in unseen_by_model(policy, [*source.train, *source.test], config):
        console.say(note, "yellow")
    keeps = algorithm.needs_reference and config.method == "rl"
    reference = Reference(policy, algorithm.moves_reference) if keeps else None
    critic = load_critic(policy, loaded)
    pace = algorithm.critic.lr / config.train.lr if algorithm.critic and config.train.lr else 1.0
    run = Run(
        loaded=loaded,
        learner=Learner(policy, config.train, reference, head=policy.value, pace=pace),
        sampler=LocalSampler(policy, config.rollout.max_running, options.faults),
        rewards=rewards,
        train_set=train_set,
        test_set=test_set,
        journal=Journal(RunFolder(config.output), console, Clock(policy.device)),
        stop=stop,
        watchdog=Watchdog(config.output, config.guards.stall_minutes),
        options=options,
        state=State(coefficients=first(algorithm)),
        critic=critic,
    )
    try:
        connect(run)
        resume(run, plan_memory(run))
    except BaseException:
        run.journal.folder.close()
        raise
    return run


def load_critic(policy: Policy, loaded: Loaded) -> Learner[ValueModel] | None:
    """The critic that the algorithm asks for; None where it is a head on the policy, or nothing.

    Raises ConfigError for a model that cannot be it.
    """
    config, critic = loaded.config, loaded.algorithm.critic
    if critic is None or config.method != "rl":
        return None
    if critic.trunk == "policy":
        add_value_head(policy)
        return None
    model = load_value_model(critic.model, loaded.folder, policy) if critic.model else begun_from(policy)
    if model.decoder is not None:
        model.decoder.recompute = config.train.recompute_layers
    return Learner(model, config.train.model_copy(update={"lr": critic.lr}))


def connect(run: Run) -> None:
    """Let the run hear what its parts do: they know of no run."""

    def before_micro_batch() -> None:
        run.watchdog.progress()
        run.options.faults.in_memory("memory.full")

    def when_halved(tokens: int) -> None:
        run.state = replace(run.state, micro_tokens=tokens)
        run.journal.say(f"out of memory: continuing with micro-batches of {tokens} tokens", "yellow")
        run.journal.event(run.state.step, "out of memory", tokens_per_micro_batch=tokens)

    def on_fewer(running: int) -> None:
        run.journal.console.fewer_running(running)
        run.journal.event(run.state.step, "out of memory", running=running)

    run.learner.before_micro_batch, run.learner.when_halved = before_micro_batch, when_halved
    if run.critic is not None:
        run.critic.before_micro_batch, run.critic.when_halved = before_micro_batch, when_halved
    if isinstance(run.sampler, LocalSampler):
        run.sampler.on_fewer = on_fewer


def set_process(config: Config) -> None:
    """Threads, seed and determinism, for the whole process: see ``caller_restored``."""
    torch.set_num_threads(config.threads or available_threads())
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)  # index_put on CPU is not, without it
    # Every empty tensor here is written whole; torch does not declare the attribute's type.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


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
    """Report the memory forecast and pick a micro-batch size that fits. Returns bytes per component.

    Micro-batch size affects rounding, so a resumed run keeps the size it started with.
    """
    config, learner = run.loaded.config, run.learner
    device = learner.policy.device
    shape, there = shape_of(learner.policy), device_memory(device)
    copied = learner.reference is not None and learner.reference.has_weights
    models = 1 + copied + (run.critic is not None)
    program = program_bytes(device, shape.parameters * shape.number * models)
    longest = max(len(p.tokens) for p in run.train_set)
    critic = sum(p.numel() for p in run.critic.policy.parameters) if run.critic else 0
    expect = partial(forecast, shape, config, longest, reference=copied, program=program, critic=critic)
    wanted = config.train.tokens_per_micro_batch
    before = (read_environment(config.output) or {}).get("micro_tokens", {})
    again = before.get("configured") == wanted
    tokens = before["planned"] if again else planned_tokens(expect(wanted), shape, config, there)
    learner.micro_tokens = tokens
    if run.critic is not None:
        run.critic.micro_tokens = tokens
    roles = expect(tokens)
    total = sum(roles.values())
    parts = ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in roles.items() if size >= 5e5)
    style = "" if total <= there else "yellow"
    run.journal.say(f"memory: about {total / 1e6:,.0f} MB of {there / 1e6:,.0f} ({parts})", style)
    if tokens < wanted:
        why = "had no room when the run began" if again else "does not fit in memory"
        run.journal.say(f"train.tokens_per_micro_batch {wanted} {why}; using {tokens}", "yellow")
    return roles


def resume(run: Run, memory: Mapping[str, int]) -> None:
    """Restore the newest checkpoint, if there is one, and say what differs from the process that left it."""
    loaded, options, journal = run.loaded, run.options, run.journal
    folder, reference = journal.folder, run.learner.reference
    now = {
        **environment(loaded),
        "sandbox": run.rewards.sandbox,
        "data": fingerprint((*run.train_set, *run.test_set)),
        "reference": reference.fingerprint() if reference is not None else None,
        "files": inventory(loaded, run.rewards),
        "memory": memory,
        "micro_tokens": {
            "configured": loaded.config.train.tokens_per_micro_batch,
            "planned": run.learner.micro_tokens,
        },
    }
    differences = found_differences(loaded, bool(folder.checkpoints()), now)
    harmful = [d for d in differences if d.verdict != "safe"]
    if harmful and options.strict:
        raise CheckpointError(
            f"{folder.path}: {'; '.join(map(str, harmful))}. Resume the run as it was begun, or leave out "
            "--strict"
        )
    if run.restore():
        journal.say(f"resuming after step {run.state.step} of {loaded.config.train.steps}")
        for difference in differences:
            journal.say(f"  {difference}", "yellow" if difference in harmful else "")
        if harmful:
            journal.event(run.state.step, "no longer exact", because=[str(d) for d in harmful])
    write_file(folder.path / "config.yaml", resolved_yaml(loaded))
    write_file(folder.path / "env.json", sealed(now))
    if options.start:
        write_file(options.home / START, sealed(options.start))
    (folder.path / RECORD).unlink(missing_ok=True)


def checked(source: Source, rewards: Rewards, loaded: Loaded, console: RunConsole) -> Source:
    """The problems that can be used, after every check that needs no model."""
    config = loaded.config
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
        console.say(f"{100 * rewards.noise:g} % of the labels are flipped (scoring.noise)", "yellow")
    tried = rehearse(source.train[0], rewards)
    if config.method == "rl" and loaded.algorithm.credit == "step":
        check_steps(tried, rewards, loaded.algorithm.advantage.name)
    train, bad = check_references(source.train, rewards, config.scoring.max_bad_references)
    test, bad_too = check_references(source.test, rewards, config.scoring.max_bad_references)
    for row, why in {**bad, **bad_too}.items():
        console.say(f"left out {row}: {why}", "yellow")
    return replace(source, train=train, test=test)

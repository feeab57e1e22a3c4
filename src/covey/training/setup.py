"""From a config to a Run: everything that can be wrong is found here, the cheap checks first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from covey.calling.forms import calls_by
from covey.calling.turns import innermost
from covey.calling.use import beginning, columns_asked, toolbox_of, untold, with_schemas, with_tools
from covey.cluster.judges import placed_link
from covey.cluster.samplers import PlacedSamplers
from covey.config.given import GivenModel
from covey.config.load import Loaded, resolved_yaml
from covey.config.sampling import Servers
from covey.config.schema import Config
from covey.config.unread import reads
from covey.console import RunConsole
from covey.errors import RECORD, START, CheckpointError
from covey.integrity import sealed
from covey.learned import forget, rewards_of
from covey.learner.learner import Learner
from covey.learner.process import set_process
from covey.models.chat import rendered_at
from covey.models.load import load_policy, speed_notes
from covey.models.policy import Policy, snapshot
from covey.models.reference import Reference
from covey.models.value_head import ValueModel, add_value_head, begun_from, load_value_model
from covey.objective.controllers import first_coefficients
from covey.processes import by_first, first, together
from covey.prompts import Prompted, dropped_rows, encode, encode_examples, texts_of, unseen_by_model
from covey.rewards.base import Rewards
from covey.runs.arithmetic import follow_run, rounded_so_far, unfollowed
from covey.runs.atomic import write_file
from covey.runs.checkpoint import State
from covey.runs.clock import Clock
from covey.runs.compatibility import environment, found_differences
from covey.runs.completions import forget_completions
from covey.runs.folder import INEXACT, RunFolder
from covey.runs.inventory import fingerprint, inventory
from covey.runs.journal import Journal
from covey.runs.origin import write_own
from covey.runs.reader import read_environment
from covey.runs.watchdog import Watchdog
from covey.sampling.base import Sampler
from covey.sampling.local import LocalSampler
from covey.sampling.remote import TOKEN, RemoteSampler
from covey.sampling.servers import Asking
from covey.signals import StopSignal
from covey.tasks.columns import own_systems, readers, told
from covey.tasks.examples import Example
from covey.tasks.preflight import usable_problems
from covey.tasks.source import Source, load_source
from covey.trackers import check_tracker
from covey.training.memory import memory_measured, plan_memory
from covey.training.reward_model import encode_judged, kind_of, load_reward_model
from covey.training.run import DEFAULTS, Run, RunOptions
from covey_verify.web import ask


def set_up(loaded: Loaded, console: RunConsole, stop: StopSignal, options: RunOptions = DEFAULTS) -> Run:
    """Build a run; if its folder holds an unfinished one of the same config, resume that.

    Raises ConfigError, DataError or RewardError before any model is loaded where that is possible.
    """
    config, algorithm = loaded.config, loaded.algorithm
    check_tracker(config.tracker)
    source = load_source(loaded)
    rewards = judges(loaded, source, options)
    toolbox = toolbox_of(loaded)
    if toolbox is not None and toolbox.chosen is not None:
        rewards.sandbox = toolbox.chosen.record()
    source = with_schemas(source, toolbox, console.say)
    source = usable_problems(source, rewards, loaded, console, partial(beginning, toolbox))
    for note in own_systems(source.problems, config.data):
        console.say(note, "yellow")
    if config.data.task is None:
        baseline = algorithm.advantage.all_settings.get("by") if config.method == "rl" else None
        asked = {**columns_asked(toolbox, source.problems), "algorithm.advantage.by": {str(baseline)}}
        told(readers(source.problems, source.all_examples, config.data, rewards, asked), console.say)
    console.loading(f"loading the model {config.model if isinstance(config.model, str) else ''}".rstrip())
    set_process(config)
    follow_run(loaded.run or config.output)
    policy, learned = begin(loaded, source)
    rewards.decode = policy.decode
    rewards.calls = calls_by(policy)
    if config.rollout.sampler is not None or config.launch.samplers:
        policy.draw_from_all()
    held_out = learned(source.held_out)
    train_set = learned(source.examples) or encode(policy, source.train, config)
    test_set = encode(policy, source.test, config)
    unseen = unseen_by_model(policy, [*source.train, *source.test], config, source.examples)
    unseen += dropped_rows(source.rows, [*train_set, *held_out, *test_set])
    speed = (*speed_notes(policy, config), *unfollowed(policy, config, loaded.run))
    for note in (*speed, *unseen, *untold(policy, source, toolbox, config.method)):
        console.say(note, "yellow")
    keeps = algorithm.needs_reference and config.method == "rl"
    reference = Reference(policy, algorithm.moves_reference) if keeps else None
    critic = load_critic(policy, loaded)
    pace = algorithm.critic.lr / config.train.lr if algorithm.critic and config.train.lr else 1.0
    run = Run(
        loaded=loaded,
        learner=Learner(policy, config.train, reference, head=policy.value, pace=pace),
        sampler=with_tools(_sampler(policy.whole, config, train_set, options), policy.whole, toolbox),
        rewards=rewards,
        train_set=train_set,
        test_set=test_set,
        held_out=held_out,
        journal=Journal(together(lambda: RunFolder(config.output)), console, Clock(policy.device)),
        stop=stop,
        watchdog=Watchdog(config.output, config.guards.stall_minutes),
        options=options,
        state=State(coefficients=first_coefficients(algorithm)),
        critic=critic,
        first_policy=None if isinstance(config.model, GivenModel) else lambda: begin(loaded, source)[0],
    )
    try:
        connect(run)
        resume_run(run, plan_memory(run))
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


def begin(loaded: Loaded, source: Source) -> tuple[Policy, Callable[[Sequence[Example]], list[Prompted]]]:
    """The model that a method trains, and how it reads examples."""
    config, texts = loaded.config, texts_of(source, loaded.config)
    if config.method == "reward_model":
        judge = load_reward_model(loaded, texts, kind_of(source.examples))
        return judge, lambda examples: encode_judged(judge, examples)
    policy = load_policy(loaded, texts)
    return policy, lambda examples: encode_examples(policy, examples, config)


def judges(loaded: Loaded, source: Source, options: RunOptions) -> Rewards:
    """The rewards of a run; none where a method learns without and no rewards are named."""
    config = loaded.config
    named = config.rewards or source.rewards
    if source.examples and (not named or config.method == "reward_model"):
        forget()
        return Rewards(())
    rewards = rewards_of(loaded, named, options.faults.around)
    if config.launch.ray is not None:
        rewards.link = partial(placed_link, config.launch.ray)
    return rewards


def connect(run: Run) -> None:
    """Let the run hear what its parts do: they know of no run."""

    def before_micro_batch() -> None:
        run.watchdog.progress()
        run.options.faults.in_memory("memory.full")

    def when_halved(tokens: int) -> None:
        run.state = replace(run.state, micro_tokens=tokens)
        run.journal.say(f"out of memory; continuing with micro-batches of {tokens} tokens", "yellow")
        run.journal.event(run.state.step, "out of memory", tokens_per_micro_batch=tokens)

    def when_lost(tokens: int) -> None:
        path = run.journal.folder.path
        record = {**(read_environment(path) or {}), "micro_tokens": {"configured": wanted, "planned": tokens}}
        write_file(path / "env.json", sealed(record))

    def on_fewer(running: int) -> None:
        run.journal.console.fewer_running(running)
        run.journal.event(run.state.step, "out of memory", running=running)

    def servers_changed(what: str) -> None:
        run.journal.say(what, "yellow")
        run.journal.event(run.state.step, "sampling server", because=what)

    run.journal.clock.alive = partial(memory_measured, run)
    wanted = run.loaded.config.train.tokens_per_micro_batch
    for learner in (run.learner, run.critic):
        if learner is not None:
            learner.before_micro_batch, learner.when_halved = before_micro_batch, when_halved
            learner.when_lost = when_lost
    sampler = innermost(run.sampler)
    if isinstance(sampler, LocalSampler):
        sampler.on_fewer = on_fewer
    if isinstance(sampler, RemoteSampler):
        sampler.say, sampler.waiting = servers_changed, run.stop.check


def _sampler(policy: Policy, config: Config, prompts: Sequence[Prompted], options: RunOptions) -> Sampler:
    """Servers where the config names some or Ray places them, else this process."""
    rollout = config.rollout
    asking: Asking = ask
    lags = rollout.staleness > 0 and reads(config.method, "rollout.staleness")
    policy = snapshot(policy) if lags else policy
    sampler = rollout.sampler or (Servers() if config.launch.samplers else None)
    if sampler is None:
        return LocalSampler(policy, rollout.max_running, options.faults, lags=lags)
    folder, token = sampler.folder or config.output / "sync", os.environ.get(TOKEN, "")
    if config.launch.samplers and first():  # who asks for all of them
        placed = PlacedSamplers(policy, config, folder)
        sampler, asking = sampler.model_copy(update={"url": (*sampler.url, *placed.urls)}), placed.ask
    common = (rollout.temperature, rollout.max_running, token, asking, lags)
    return RemoteSampler(policy, sampler, folder, [p.tokens for p in prompts], *common)


def resume_run(run: Run, memory: Mapping[str, int]) -> None:
    """Restore the newest checkpoint, if there is one, and say what differs from the process that left it."""
    loaded, options, journal = run.loaded, run.options, run.journal
    folder, reference, policy = journal.folder, run.learner.reference, run.learner.policy.whole
    now = {
        **environment(loaded),
        "rounds_products": policy.rounds,
        "rendered": rendered_at().isoformat(),
        "rounded": rounded_so_far(folder.path, policy, bool(folder.checkpoints())),
        "sandbox": run.rewards.sandbox,
        "tokenizer": policy.vocabulary_hash,
        "known_tokens": policy.known,
        "data": fingerprint((*run.train_set, *run.held_out, *run.test_set)),
        "reference": reference.fingerprint() if reference is not None else None,
        "files": inventory(loaded, run.rewards),
        "memory": memory,
        "micro_tokens": {
            "configured": loaded.config.train.tokens_per_micro_batch,
            "planned": run.learner.micro_tokens,
        },
    }
    differences = by_first(lambda: found_differences(loaded, bool(folder.checkpoints()), now))
    harmful = [d for d in differences if d.verdict != "safe"]
    if options.strict and loaded.config.rollout.staleness and folder.checkpoints():
        raise CheckpointError(
            f"{folder.path}: with rollout.staleness no run is repeated exactly, so --strict cannot "
            "hold. Leave it out"
        )
    if harmful and options.strict:
        raise CheckpointError(
            f"{folder.path}: {'; '.join(map(str, harmful))}. Resume the run as it was begun, or leave out "
            "--strict"
        )
    if harmful:
        by_first(lambda: forget_completions(folder.path))
    if run.restore():
        journal.say(f"resuming after step {run.state.step} of {loaded.config.train.steps}")
        for difference in differences:
            journal.say(f"  {difference}", "yellow" if difference in harmful else "")
        if harmful:
            journal.event(run.state.step, INEXACT, because=[str(d) for d in harmful])
    if first():
        write_own(folder.path, "config.yaml", resolved_yaml(loaded))
        write_file(folder.path / "env.json", sealed(now))
        if options.start:
            write_own(options.home, START, sealed(options.start))
        (folder.path / RECORD).unlink(missing_ok=True)

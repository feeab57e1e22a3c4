"""Hooks: a run's reactions to reports of its parts, which do not know the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from covey.runs.compatibility import update_environment
from covey.sampling.local import LocalSampler
from covey.sampling.remote import RemoteSampler
from covey.sampling.tools.turns import innermost
from covey.training.memory import memory_measured
from covey.training.run import Run


@dataclass(frozen=True)
class Hooks:
    """Callbacks into a run."""

    run: Run

    def on_micro_batch(self) -> None:
        """Report progress before each micro-batch of a learner; a stop may take effect here."""
        run = self.run
        run.safe_point()
        run.progress.micro_batch_begins()
        run.options.faults.in_memory("memory.full")

    def on_token(self, drawn: int, most_left: int) -> None:
        """Report progress before each token of all running completions; a stop may take effect here."""
        self.run.safe_point()
        # Where a thread samples ahead, the console shows what training does.
        if not self.run.resolved.config.rollout.staleness:
            self.run.journal.console.tokens(drawn, most_left)

    def on_micro_batch_halved(self, tokens: int) -> None:
        """Report that the learner ran out of memory and continues with smaller micro-batches."""
        run = self.run
        run.state = replace(run.state, micro_tokens=tokens)
        run.journal.say(f"out of memory; continuing with micro-batches of {tokens} tokens", "yellow")
        run.journal.log_event(run.state.step, "out of memory", tokens_per_micro_batch=tokens)

    def on_out_of_memory(self, tokens: int) -> None:
        """Record smaller micro-batches for the resume: the learner is out of memory and cannot continue."""
        path = self.run.journal.folder.path
        configured = self.run.resolved.config.train.tokens_per_micro_batch
        # The form in which ``plan_memory`` reads it.
        update_environment(path, micro_tokens={"configured": configured, "planned": tokens})

    def fewer_running(self, running: int) -> None:
        """Report that the sampler ran out of memory and continues with fewer completions at once."""
        self.run.journal.console.fewer_running(running)
        self.run.journal.log_event(self.run.state.step, "out of memory", running=running)

    def servers_changed(self, what: str) -> None:
        """Report that a sampling server was lost or came back."""
        self.run.journal.say(what, "yellow")
        self.run.journal.log_event(self.run.state.step, "sampling server", because=what)


def connect(run: Run) -> None:
    """Connect the run's hooks to its learners and its sampler."""
    hooks = Hooks(run)
    run.journal.clock.memory_source = partial(memory_measured, run)
    for learner in (run.learner, run.critic):
        if learner is not None:
            learner.on_micro_batch = hooks.on_micro_batch
            learner.on_micro_batch_halved = hooks.on_micro_batch_halved
            learner.on_out_of_memory = hooks.on_out_of_memory
    # The sampler inside the wrapper that runs tools.
    sampler = innermost(run.sampler)
    if isinstance(sampler, LocalSampler):
        sampler.on_fewer_running = hooks.fewer_running
        sampler.on_token = hooks.on_token
    if isinstance(sampler, RemoteSampler):
        sampler.fleet.on_event = hooks.servers_changed
        sampler.fleet.on_wait = run.stop.check

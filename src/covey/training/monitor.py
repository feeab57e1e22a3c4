"""The monitor of a run: it follows the work of the run's parts, which do not know the run."""

from __future__ import annotations

from dataclasses import dataclass

from covey.config.load import ResolvedConfig
from covey.learner.learner import LearnerMonitor
from covey.runs.compatibility import update_environment
from covey.runs.journal import Journal
from covey.runs.watchdog import Watchdog
from covey.sampling.base import SamplerMonitor
from covey.system.fault_injection import Faults
from covey.system.signals import StopSignal
from covey.training.progress import Progress


@dataclass
class RunMonitor(LearnerMonitor, SamplerMonitor):
    """Shows and logs what a run's learners and sampler tell, and lets a stop request take effect."""

    resolved: ResolvedConfig
    journal: Journal
    stop: StopSignal
    watchdog: Watchdog
    faults: Faults
    micro_tokens: int | None = None
    """Tokens per micro-batch since memory ran out in this process; None if it did not."""

    def __post_init__(self) -> None:
        train = self.resolved.config.train
        rl = self.resolved.config.method == "rl"
        updates = train.updates_per_rollout_batch if rl else 1
        self.progress = Progress(self.journal.clock, train.steps, updates)

    def safe_point(self) -> None:
        """Let a stop request take effect, unless the step has changed weights and has to be finished.

        A step that is broken off before its first update leaves no trace, and a resume repeats it.
        """
        self.watchdog.progress()
        if self.progress.between_steps:
            self.stop.check()

    def on_sample(self, count: int, total: int, what: str = "sampling") -> None:
        """Report progress of sampling."""
        self.safe_point()
        self.journal.console.show_sampling(count, total, what)

    def micro_batch_begins(self) -> None:
        """Report progress of a learner; a stop may take effect here."""
        self.safe_point()
        self.progress.micro_batch_begins()
        self.faults.in_memory("memory.full")

    def micro_batch_halved(self, tokens: int) -> None:
        """Report that a learner ran out of memory and continues with smaller micro-batches."""
        self.micro_tokens = tokens
        self.journal.say(f"out of memory; continuing with micro-batches of {tokens} tokens", "yellow")
        self._log_event("out of memory", tokens_per_micro_batch=tokens)

    def out_of_memory(self, tokens: int) -> None:
        """Record smaller micro-batches for the resume: the learner is out of memory and cannot continue."""
        configured = self.resolved.config.train.tokens_per_micro_batch
        # The form in which ``plan_memory`` reads it.
        planned = {"configured": configured, "planned": tokens}
        update_environment(self.journal.folder.path, micro_tokens=planned)

    def tokens_drawn(self, drawn: int, most_left: int) -> None:
        """Report progress of sampling; a stop may take effect here."""
        self.safe_point()
        # Where a thread samples ahead, the console shows what training does.
        if not self.resolved.config.rollout.staleness:
            self.journal.console.tokens(drawn, most_left)

    def fewer_running(self, running: int) -> None:
        """Report that the sampler ran out of memory and continues with fewer completions at once."""
        self.journal.console.fewer_running(running)
        self._log_event("out of memory", running=running)

    def server_changed(self, what: str) -> None:
        """Report that a sampling server was lost or came back."""
        self.journal.say(what, "yellow")
        self._log_event("sampling server", because=what)

    def result_awaited(self) -> None:
        """Let a stop request take effect."""
        self.stop.check()

    def _log_event(self, what: str, **details: object) -> None:
        self.journal.log_event(self.progress.step_under_way, what, **details)

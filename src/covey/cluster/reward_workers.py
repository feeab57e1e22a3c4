"""Reward workers that Ray places: a user's function in a process of its own, on any node with room."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from covey.cluster.connect import connect_ray, end, keep, node_lost, ray_message
from covey.rewards.blame import CallFailed, WorkerLost
from covey.rewards.worker import ASYNC_CALLS, IMPORT_SECONDS, Link
from covey.rewards.worker_process import CallReply, CallRequest, UserSetup
from covey_verify.errors import RewardError

MAX_PLACEMENTS = 3
"""Number of times that a worker is placed if its node is lost before it is up."""


class RewardHost:
    """The actor: it holds one process that can be killed, as a run without Ray does."""

    def __init__(self, setup: UserSetup) -> None:
        self.link = Link(setup)

    def ready(self) -> None:
        """Return once the user's file is imported: the constructor has ended."""

    def ask(self, message: CallRequest) -> tuple[CallReply | None, str]:
        """Call the function and return its reply; or None, and how its process ended."""
        try:
            return self.link.ask(message).result(), ""
        except CallFailed as error:
            # As a value: Ray would wrap an exception into one of its own.
            return None, str(error)


class PlacedLink:
    """The interface of ``Link``, for a process that an actor holds."""

    def __init__(self, setup: UserSetup) -> None:
        """Raises RewardError if the user's file cannot be imported there.

        Where the node was lost meanwhile, it is placed again, ``MAX_PLACEMENTS`` times in all.
        """
        import ray
        from ray.exceptions import RayError

        self.gone: str | None = None
        # max_concurrency: an asynchronous reward has as many calls under way as in a run without Ray.
        kind = ray.remote(RewardHost).options(
            num_cpus=0.5, max_concurrency=ASYNC_CALLS, scheduling_strategy="SPREAD"
        )
        for again in reversed(range(MAX_PLACEMENTS)):
            self.actor = keep(kind.remote(setup))
            try:
                ray.get(self.actor.ready.remote(), timeout=IMPORT_SECONDS)
            except (RayError, TimeoutError) as error:
                end(self.actor)
                # Only a lost node is worth another try; a file that cannot be imported fails everywhere.
                if not (again and node_lost(error)):
                    raise RewardError(
                        f"reward {setup['reward']}: not placed by Ray: {ray_message(error)}"
                    ) from None
            else:
                return

    def kept_waiting(self, look: bool = True) -> float:  # noqa: ARG002 - another machine does not tell
        """Return 0, as this is not known of a process on another machine."""
        return 0.0

    def ask(self, message: CallRequest) -> Future[CallReply]:
        """Send a request and return the future answer. Raises CallFailed if the process has ended."""
        if self.gone is not None:
            raise CallFailed(self.gone)
        answer = Future[CallReply]()
        self.actor.ask.remote(message).future().add_done_callback(partial(self._set_answer, answer))
        return answer

    def _set_answer(self, answer: Future[CallReply], reply: Future[tuple[CallReply | None, str]]) -> None:
        # Runs in a thread of Ray's. An exception is the actor's loss (the call may be repeated elsewhere); an
        # empty reply is the end of the user's process.
        error = reply.exception()
        if error is not None:
            self.gone = self.gone or ray_message(error)
            answer.set_exception(WorkerLost(self.gone))
            return
        scores, why = reply.result()
        if scores is None:
            self.close(why)
            answer.set_exception(CallFailed(why))
        else:
            answer.set_result(scores)

    def close(self, why: str) -> None:
        """Kill the process; the calls under way fail."""
        self.gone = self.gone or why
        end(self.actor)


def placed_link(address: str, setup: UserSetup) -> PlacedLink:
    """Place a worker's process on the cluster at ``address``."""
    connect_ray(address)
    return PlacedLink(setup)

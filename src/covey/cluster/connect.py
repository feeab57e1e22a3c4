"""Connecting to a Ray cluster that runs already, or that is started here for this process."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from covey_verify.errors import ConfigError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

MESSAGE_BYTES = 100 << 20
"""Bytes of shared memory for messages between actors and the run."""
_placed: list[ActorHandle] = []
"""Actors that this process has placed and not released."""


def connect_ray(address: str) -> None:
    """Join the cluster at ``address``; `auto`: the cluster of this machine, else a new cluster here.

    Raises ConfigError.
    """
    # Before the import, because Ray reads its environment then.
    _take_token()
    try:
        import ray
    except ImportError:
        raise ConfigError("launch.ray needs ray: pip install 'covey[ray]'") from None
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
    with _own_signals():
        try:
            ray.init(address=address, **_QUIET)
        except ConnectionError as error:
            if address != "auto":
                raise ConfigError(
                    f"launch.ray: no Ray cluster answers at {address}: {ray_message(error)}"
                ) from None
            ray.init(address="local", include_dashboard=False, object_store_memory=MESSAGE_BYTES, **_QUIET)
        except Exception as error:
            # Ray raises errors of its own, and these two, for a cluster that refuses; others are bugs.
            if not type(error).__module__.startswith("ray.") and not isinstance(
                error, RuntimeError | ValueError
            ):
                raise
            raise ConfigError(
                f"launch.ray: {address} does not let this process in: {ray_message(error)}. The cluster's "
                "token is looked for in RAY_AUTH_TOKEN or the file RAY_AUTH_TOKEN_PATH"
            ) from None


_QUIET: Mapping[str, object] = {"log_to_driver": False, "configure_logging": False}


def _take_token() -> None:
    """Set a token for the processes of a cluster that is started here, unless there is one already.

    Ray would make one too, but keep it in the home folder. It reads the token once, when it is imported.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not token and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the signal handlers after the block: Ray replaces SIGTERM's handler."""
    # Python lets only the main thread set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def keep(actor: ActorHandle) -> ActorHandle:
    """Add an actor to the actors that ``release`` ends."""
    _placed.append(actor)
    return actor


def release() -> None:
    """End all actors that this process has placed."""
    while _placed:
        end(_placed.pop())


def end(actor: ActorHandle) -> None:
    """End an actor for good, whatever it is doing."""
    import ray

    with contextlib.suppress(Exception):  # it is gone, or the cluster is
        ray.kill(actor, no_restart=True)


def ray_message(error: BaseException) -> str:
    """Return Ray's message of a failure in one line: its first line, and its last, which has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def node_lost(error: BaseException) -> bool:
    """Whether an actor was lost with its node or process, rather than failing in its constructor."""
    from ray.exceptions import RayActorError

    return isinstance(error, RayActorError) and not error.actor_init_failed

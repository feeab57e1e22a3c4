"""An HTTP server of this process: an address to listen at, and an end at the first signal."""

from __future__ import annotations

import signal
import socket
from asyncio import Protocol
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from covey_verify.errors import ConfigError


class HttpServer(uvicorn.Server):
    """A server that ends at the first signal; the terminal and the parent process may both send one."""

    def __init__(
        self, application: Callable[..., object], log_level: str, protocol: type[Protocol] | None = None
    ) -> None:
        """From now on signals end it: a request to stop may come before it runs."""
        config = uvicorn.Config(
            application,
            http=protocol or "auto",
            log_level=log_level,
            timeout_graceful_shutdown=1,
            lifespan="off",
        )
        super().__init__(config)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the handlers are set, and uvicorn would raise the signal again at its end."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; ``port`` 0 takes a free one. Raises ConfigError if a port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # A server that has just ended leaves the port in TIME_WAIT; it may be taken again at once.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or "a port is 0 to 65535"
        raise ConfigError(
            f"--port {port}: {host} cannot be listened on: {reason}. Choose another port, or leave it out"
        ) from None
    listener.listen(512)
    return listener

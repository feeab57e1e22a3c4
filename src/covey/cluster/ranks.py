"""Training processes that Ray places: each is a child of an actor, with torchrun's environment."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import IO, TYPE_CHECKING

from covey.cluster.connect import connect_ray, end, keep, ray_message
from covey.config.schema import Config
from covey.system.parent import LAUNCHER
from covey_verify.children import Child
from covey_verify.errors import ConfigError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

ANSWER_SECONDS = 20.0
"""Seconds for an actor to answer before its node counts as lost."""
PLACEMENT_SECONDS = 120.0
"""Seconds for all actors to get room."""


class RankHost:
    """The actor: it holds one process, its output and its exit code."""

    def __init__(self) -> None:
        self.process: Child | None = None
        self.printed: tuple[list[bytes], list[bytes]] = ([], [])
        self.readers: list[threading.Thread] = []

    def place(self) -> tuple[str, int]:
        """Return the node's address, and a port on which nothing listens."""
        import ray

        # Port 0 lets the system choose; it is free again after the block, for the first process to listen on.
        with socket.create_server(("", 0)) as listener:
            return ray.util.get_node_ip_address(), int(listener.getsockname()[1])

    def start(self, command: list[str], folder: str, environment: dict[str, str]) -> None:
        """Start the process, and threads that read its output."""
        # Ray sets this per actor; the environment of the run would name the GPUs of another machine.
        gpus = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
        variables = {**environment, **gpus, LAUNCHER: str(os.getpid())}
        self.process = Child(command, cwd=folder, env=variables, stdout=PIPE, stderr=PIPE)
        for stream, into in zip((self.process.stdout, self.process.stderr), self.printed, strict=True):
            assert stream is not None
            self.readers.append(threading.Thread(target=self._read_to_end, args=(stream, into), daemon=True))
            self.readers[-1].start()

    @staticmethod
    def _read_to_end(stream: IO[bytes], into: list[bytes]) -> None:
        # Always drained, or a full pipe would stop the process. List operations need no lock.
        part = os.read(stream.fileno(), 1 << 16)
        while part:
            into.append(part)
            part = os.read(stream.fileno(), 1 << 16)

    def look(self) -> tuple[int | None, bytes, bytes]:
        """Return the exit code, None while it runs, and the output since the last call."""
        assert self.process is not None
        code = self.process.poll()
        # The last output may still be in the pipe. A grandchild may hold that open: hence a time limit.
        for reader in self.readers if code is not None else ():
            reader.join(5.0)
        out, err = (b"".join(into.pop(0) for _ in range(len(into))) for into in self.printed)
        return code, out, err

    def send(self, number: int) -> None:
        """Send the process a signal, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


class PlacedRank:
    """The interface of ``Child`` for a process that an actor holds; its output is printed here."""

    def __init__(self, actor: ActorHandle) -> None:
        self.actor = actor
        self.code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs; SIGKILL's exit code if the node is lost."""
        import ray
        from ray.exceptions import RayActorError

        if self.code is None:
            try:
                self.code, out, err = ray.get(self.actor.look.remote(), timeout=ANSWER_SECONDS)
            except (RayActorError, TimeoutError) as error:
                self.code = -signal.SIGKILL
                out = b""
                err = f"a node is lost: {ray_message(error)}\n".encode()
            # Printed here, since the user reads this process's terminal.
            for stream, text in ((sys.stdout, out), (sys.stderr, err)):
                if text:
                    stream.write(text.decode(errors="replace"))
                    stream.flush()
        return self.code

    def send_signal(self, number: int) -> None:
        """Send the process a signal."""
        self.actor.send.remote(number)

    def kill(self) -> None:
        """End the process with its actor."""
        self.code = -signal.SIGKILL if self.code is None else self.code
        end(self.actor)


def environment_of(rank: int, ranks: int, local_rank: int, local_ranks: int) -> dict[str, str]:
    """Return torchrun's variables for a process: its number of all, and its number on its machine."""
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_ranks}
    return {name: str(value) for name, value in numbers.items()}


def place_ranks(config: Config, command: Sequence[str]) -> list[PlacedRank]:
    """Start the command once per training process. Raises ConfigError if there is no room."""
    import ray
    from ray.exceptions import RayError

    assert config.launch.ray is not None
    connect_ray(config.launch.ray)
    count = config.launch.processes
    resources = ray.cluster_resources()
    cpus = config.threads or 1
    gpus = int(config.device != "cpu" and "GPU" in resources)
    # Concurrent calls, so that a signal gets through while ``look`` waits for a reader.
    kind = ray.remote(RankHost).options(num_cpus=cpus, num_gpus=gpus, max_concurrency=4)
    actors = [keep(kind.remote()) for _ in range(count)]
    try:
        places = ray.get([a.place.remote() for a in actors], timeout=PLACEMENT_SECONDS)
    except (RayError, TimeoutError) as error:
        for actor in actors:
            end(actor)
        raise ConfigError(
            f"launch.processes: the Ray cluster has no room for {count} processes of {cpus} CPUs "
            f"and {gpus} GPUs each; it has {resources.get('CPU', 0):g} CPUs and "
            f"{resources.get('GPU', 0):g} GPUs ({ray_message(error)})"
        ) from None
    # Rank 0 listens there; the others meet at its address.
    address, port = places[0]
    shared = {**os.environ, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    shared["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # the first of them places samplers
    ranks = _environments([node for node, _ in places])
    for actor, of_rank in zip(actors, ranks, strict=True):
        ray.get(actor.start.remote(list(command), str(Path.cwd()), {**shared, **of_rank}))
    return [PlacedRank(actor) for actor in actors]


def _environments(nodes: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield torchrun's variables of each process; ``nodes`` has the node of each."""
    processes = Counter(nodes)
    local_ranks = Counter[str]()
    for rank, node in enumerate(nodes):
        yield environment_of(rank, len(nodes), local_ranks[node], processes[node])
        local_ranks[node] += 1

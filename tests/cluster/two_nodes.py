"""A Ray cluster of two simulated nodes, in a process that does what it is told."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self


class TwoNodes:
    """The cluster, and what can be done to it; it ends with the block."""

    def __init__(self, token: Path) -> None:
        token.write_text(secrets.token_hex(32))
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__, "3"],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.__exit__(kind, value, trace)  # its end is that of its input

    def tell(self, what: str) -> None:
        """`kill` ends the second node at once, `add` brings another."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def covey(self, *arguments: object) -> subprocess.Popen[str]:
        """The command line, let into the cluster."""
        command = [sys.executable, "-m", "covey", *map(str, arguments)]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


def main(cpus: int) -> None:
    """Print the address; the end of the input ends all."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus})
    other = cluster.add_node(num_cpus=cpus)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(other, allow_graceful=False)
        else:
            other = cluster.add_node(num_cpus=cpus)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))

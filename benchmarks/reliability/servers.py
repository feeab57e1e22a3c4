"""Kill the servers that a run samples on, at random instants, and start them again; the run has to end.

    python benchmarks/reliability/servers.py [--kills 60] [--write]

Two `covey serve` sample for each run. The time between two kills is a third to four thirds of what the run
takes when it is left alone, and a server is started again after up to a third; often both are gone. Every run
has to end by itself with the bytes that it leaves in one process: weights, metric stream, evaluations,
rollout log.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness import CONFIGS, child, covey, fingerprint, kill, report, wait, warm_up, write_config

LONGEST = 40.0
"""Times that a disturbed run may take as long as one that is left alone."""


@dataclass
class Server:
    """`covey serve` at an address of its own, which it comes back to."""

    model: Path
    sync: Path
    port: int = 0
    pid: int = 0
    due: float = field(default=0.0)
    """When it is started again, on the monotonic clock."""

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = int(taken.getsockname()[1])
        self.start()

    @property
    def url(self) -> str:
        """What the run calls it."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """In a fork, which has everything imported."""
        self.pid = child(self._work())

    def _work(self) -> Callable[[], int]:
        arguments = ["serve", str(self.model), "--port", str(self.port), "--weights", str(self.sync)]

        def work() -> int:
            from covey.cli import main

            return main([*arguments, "--threads", "1"])

        return work

    def end(self, back_in: float = 0.0) -> bool:
        """Kill it; False where it was dead already."""
        if not self.pid:
            return False
        kill(self.pid)
        wait(self.pid)
        self.pid, self.due = 0, time.monotonic() + back_in
        return True


def disturb(run: int, servers: list[Server], rng: random.Random, alone: float) -> tuple[int, int]:
    """Kill servers until the run ends. -> its exit code (-1: it had to be ended), how many were killed.

    ``alone``: seconds that the run takes without that.
    """
    kills, begun = 0, time.monotonic()
    while time.monotonic() - begun < LONGEST * alone:
        ends = time.monotonic() + alone * rng.uniform(1 / 3, 4 / 3)
        while time.monotonic() < ends:
            ended, status = os.waitpid(run, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), kills
            for server in servers:
                if not server.pid and time.monotonic() > server.due:
                    server.start()
            time.sleep(0.02)
        kills += rng.choice(servers).end(back_in=alone * rng.uniform(0.0, 1 / 3))
    kill(run)
    wait(run)
    return -1, kills


def main() -> None:
    """Configurations in turn, until there were enough kills."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60, help="servers that were alive and killed, in all")
    parser.add_argument("--configs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rng, total = random.Random(arguments.seed), Counter[str]()
    warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        start = write_config(home / "start", {"method": "sft", "train": {"steps": 2, "batch_size": 8}})
        assert wait(child(covey("train", str(start), "--output", str(home / "start/run")))) in (0, 1)
        model = home / "start/run/final"
        (home / "sync").mkdir()
        servers = [Server(model, home / "sync") for _ in range(2)]
        asked = ["--rollout.sampler.folder", str(home / "sync"), "--rollout.sampler.patience", "600"]
        asked += ["--rollout.sampler.url", json.dumps([server.url for server in servers])]
        try:
            wholes = {}
            for i, (name, settings) in enumerate(list(CONFIGS.items())[: arguments.configs]):
                config = write_config(home / str(i), {**settings, "model": str(model)})
                run = config.parent / "run"
                assert wait(child(covey("train", str(config), "--output", str(run)))) in (0, 1)
                whole, begun = fingerprint(run), time.monotonic()
                shutil.rmtree(run)
                assert wait(child(covey("train", str(config), "--output", str(run), *asked))) in (0, 1)
                assert fingerprint(run) == whole, f"{name}: sampling on servers changes the bits"
                wholes[name] = (config, whole, time.monotonic() - begun)
            while total["kills"] < arguments.kills:
                for config, whole, alone in wholes.values():
                    run = config.parent / "run"
                    shutil.rmtree(run, ignore_errors=True)
                    pid = child(covey("train", str(config), "--output", str(run), *asked))
                    code, kills = disturb(pid, servers, rng, alone)
                    total.update(runs=1, kills=kills, ended=int(code in (0, 1)))
                    total["identical"] += fingerprint(run) == whole
                    print(dict(total), flush=True)
        finally:
            for server in servers:
                server.end()
    ok = total["identical"] == total["ended"] == total["runs"]
    report("random kill -9 of sampling servers", {"configs": len(wholes), **total, "ok": ok}, arguments.write)
    raise SystemExit(not ok)


if __name__ == "__main__":
    main()

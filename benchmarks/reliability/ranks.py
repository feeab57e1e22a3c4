"""Kill a part of a run that is in several places, at random instants, and compare how the run ends.

    python benchmarks/reliability/ranks.py [processes|nodes|ahead] [--trials 12] [--write]

`processes`: one of two that train together, the one that works for a rank or the one that waits for it.
`nodes`: one of two simulated machines of a Ray cluster, with a sampler and a reward worker; a new one joins
later. Each such run loses one to three and has to end by itself with the bits of one that was left alone.
`ahead`: a run that samples ahead of its updates (`rollout.staleness`) is killed one to three times and begun
again. Which weights draw a token depends on timing there; each step has to take the problems that it would.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
from harness import CONFIGS, fingerprint, report, write_config

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.cluster.two_nodes import TwoNodes

Command = subprocess.Popen[bytes]
EXACT = ("accumulation, dynamic sampling, adaptive coefficients", "cold start, then RL", "adapters")


@dataclass(frozen=True)
class Kind:
    """What a run is asked for besides its config, and what is done to it."""

    campaign: str
    settings: tuple[str, ...]
    strike: Callable[[Command, random.Random], bool]
    """Kill something; False where nothing was there."""
    mark: Callable[[Path], str] = fingerprint
    """What has to be the same afterwards."""
    again: bool = False
    """Whether what was killed is the run itself."""
    configs: tuple[str, ...] = EXACT


def killed(victims: list[psutil.Process], rng: random.Random) -> bool:
    """Whether one of them could be killed."""
    if not victims:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        rng.choice(victims).kill()
        return True
    return False


def family(command: Command) -> list[psutil.Process]:
    """The process that works for a command, and those that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess, ValueError):
        (work,) = psutil.Process(command.pid).children()
        return [work, *work.children()]
    return []


def one_rank(command: Command, rng: random.Random) -> bool:
    """Kill one of all ranks' processes, those that wait and those that work, once they are all there."""
    with contextlib.suppress(psutil.NoSuchProcess):
        waiting = family(command)[1:]
        return killed([*waiting, *(p for w in waiting for p in w.children())], rng)
    return False


def one_node(nodes: TwoNodes) -> Callable[[Command, random.Random], bool]:
    """Kill a machine, and let another join up to a few seconds later."""

    def strike(command: Command, rng: random.Random) -> bool:
        if command.poll() is not None:
            return False
        nodes.tell("kill")
        time.sleep(rng.uniform(0.0, 5.0))
        nodes.tell("add")
        return True

    return strike


def problems_by_step(run: Path) -> str:
    """Which problems each step took; a hash."""
    logs = sorted(run.rglob("rollouts/*.jsonl"))
    taken = [
        sorted({str(json.loads(row)["problem"]) for row in log.read_text().splitlines()}) for log in logs
    ]
    return hashlib.sha256(json.dumps(taken).encode()).hexdigest()


def launched(config: Path, run: Path, settings: tuple[str, ...]) -> Command:
    """The command."""
    command = [sys.executable, "-m", "covey", "train", str(config), "--output", str(run), *settings]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def trial(config: Path, whole: str, seconds: float, kind: Kind, rng: random.Random) -> Counter[str]:
    """One run with its losses."""
    found: Counter[str] = Counter(runs=1)
    run = config.parent / f"run-{rng.random()}"
    command = launched(config, run, kind.settings)
    for _ in range(rng.randint(1, 3)):
        time.sleep(rng.uniform(0.1, seconds))
        found["kills"] += kind.strike(command, rng)
        if kind.again and command.wait(timeout=1200) not in (0, 1):
            command = launched(config, run, kind.settings)
    code = command.wait(timeout=1200)
    found["ended"] += code in (0, 1)
    found["identical"] += kind.mark(run) == whole
    if code not in (0, 1) or kind.mark(run) != whole:
        print(f"exit code {code}: {config.parent.name}", flush=True)
    return found


def kinds(name: str, stack: ExitStack, scratch: Path) -> Kind:
    """What was asked for."""
    if name == "processes":
        settings = ("--launch.processes", "2", "--launch.restarts", "9")
        return Kind("one of two processes killed", settings, one_rank)
    if name == "ahead":
        return Kind(
            "kill -9 of a run that samples ahead",
            ("--rollout.staleness", "2"),
            lambda command, rng: killed(family(command)[:1], rng),
            problems_by_step,
            again=True,
            configs=("plain", "inner epochs", "adapters"),
        )
    nodes = stack.enter_context(TwoNodes(scratch / "token"))
    os.environ |= nodes.environment
    settings = ("--launch.ray", nodes.address, "--launch.samplers", "2", "--rollout.sampler.patience", "600")
    return Kind("one of two machines of a Ray cluster killed", settings, one_node(nodes))


def main() -> None:
    """All configurations in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("processes", "nodes", "ahead"), default="processes")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rng, total = random.Random(arguments.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        kind = kinds(arguments.what, stack, Path(scratch))
        wholes = []
        for n in range(arguments.trials):
            if n < len(kind.configs):
                config = write_config(Path(scratch) / str(n), CONFIGS[kind.configs[n]])
                started = time.monotonic()
                launched(config, config.parent / "run", kind.settings).wait()
                wholes.append((config, kind.mark(config.parent / "run"), time.monotonic() - started))
            total.update(trial(*wholes[n % len(kind.configs)], kind, rng))
            print(dict(total), flush=True)
    ok = total["identical"] == total["ended"] == total["runs"]
    report(kind.campaign, {"configs": len(wholes), **total, "ok": ok}, arguments.write)
    raise SystemExit(not ok)


if __name__ == "__main__":
    main()

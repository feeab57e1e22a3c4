"""Sampling on servers beside sampling in the process, and what a change of weights costs.

    python benchmarks/servers.py [--size 5M] [--rounds 5] [--vllm PYTHON_ENVIRONMENT] [--write]

One process asks in turns: its own sampler, one `covey serve`, two, and a vLLM server, each with one thread,
for the same completions of equal length. CPU seconds are those of the asking process and of the servers: what
can be compared on a machine that does other things too. Between two rounds the weights change; a sync
is writing them, loading them on each server, and comparing log-probs. vLLM on a CPU keeps old weights, so its
sync is a restart on the new folder, in a round of its own.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import torch

from presets import RESULTS

sys.path.insert(0, str(Path(__file__).parent / "speed"))

import subject

from covey.config.load import load_config
from covey.config.sampling import Servers
from covey.errors import SamplersLost
from covey.models.load import load_policy
from covey.models.policy import Policy, save_policy
from covey.rng import key
from covey.sampling.base import Request, Sampler, SamplingParams
from covey.sampling.local import LocalSampler
from covey.sampling.remote import RemoteSampler
from covey_verify.web import ask

LENGTH = 64


class Version(NamedTuple):
    """Of the weights, as a learner tells it."""

    version: int


class Cost(NamedTuple):
    """Seconds of something."""

    wall: float
    cpu: float
    """Of this process and of the servers."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def process(command: list[str], url: str, log: Path, **environment: str) -> Iterator[psutil.Process]:
    """A server that answers at ``url``, ended with the block."""
    with log.open("w") as out:
        told = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        server = psutil.Popen(command, env=told, stdout=out, stderr=out)
    try:
        ends = time.monotonic() + 600
        while True:
            try:
                ask(f"{url}/health", timeout=5.0)
                break
            except (OSError, ValueError):
                if server.poll() is not None or time.monotonic() > ends:
                    raise SystemExit(f"{command[0]} did not start: {log.read_text()[-2000:]}") from None
                time.sleep(0.5)
        yield server
    finally:
        family = [*server.children(recursive=True), server]
        for one in family:
            one.terminate()
        for one in psutil.wait_procs(family, 20)[1]:
            one.kill()


def covey_server(model: Path, sync: Path, log: Path) -> tuple[str, list[str], Path]:
    """Address, command and log of `covey serve`."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "covey",
        "serve",
        str(model),
        "--port",
        str(port),
        "--weights",
        str(sync),
    ]
    return f"http://127.0.0.1:{port}", [*command, "--threads", "1"], log


def vllm_server(environment: Path, model: Path, log: Path) -> tuple[str, list[str], Path]:
    """The same of vLLM, from a virtual environment."""
    port = free_port()
    command = [str(environment / "bin/vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    more = [
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        "--enforce-eager",
        "--no-enable-chunked-prefill",  # on a CPU 0.32 dies of a prompt in parts that has a seed
        "--max-num-batched-tokens",
        "16384",
        "--served-model-name",
        "policy",
    ]
    return f"http://127.0.0.1:{port}", [*command, *more], log


VLLM = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def spent(servers: list[psutil.Process]) -> float:
    """CPU seconds of this process, and of servers with what they have started."""
    total = time.process_time()
    for server in servers:
        for one in (server, *server.children(recursive=True)):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def timed(work: Callable[[], object], servers: list[psutil.Process]) -> Cost:
    """What doing it costs."""
    cpu, wall = spent(servers), time.perf_counter()
    work()
    return Cost(time.perf_counter() - wall, spent(servers) - cpu)


def sampling(sampler: Sampler, turn: int) -> int:
    """Sample the benchmark's completions; how many tokens they have."""
    requests = [
        Request(p, [key(turn, i, g) for g in range(subject.GROUP)]) for i, p in enumerate(subject.prompts())
    ]
    found = list(sampler.sample(requests, SamplingParams(LENGTH)))
    return sum(len(x.completion.tokens) for x in found)


def synced(sampler: RemoteSampler, version: int) -> None:
    """Bring the servers to new weights."""
    sampler.sync(Version(version))
    list(sampler.sample([Request(subject.prompts()[0], [1])], SamplingParams(1)))


def moved(policy: Policy) -> None:
    """An update."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.001)


def measure(size: str, rounds: int, vllm: Path | None) -> tuple[dict[str, list[Cost]], dict[str, list[Cost]]]:
    """Costs of sampling and of syncs, by where."""
    torch.set_num_threads(1)
    sampled: dict[str, list[Cost]] = {}
    syncs: dict[str, list[Cost]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        subject.build(size, "equal", "fp32", folder / "model")
        (folder / "sync").mkdir()
        policy = load_policy(load_config(values={"model": str(folder / "model")}))
        started = [covey_server(folder / "model", folder / "sync", folder / f"log{i}") for i in range(2)]
        servers = [stack.enter_context(process(command, url, log)) for url, command, log in started]
        urls = [url for url, _, _ in started]

        def remote(*which: str) -> RemoteSampler:
            settings = Servers(url=which, patience=0.0, timeout=600.0)
            return RemoteSampler(policy, settings, folder / "sync", subject.prompts(), 1.0, 128)

        sides: dict[str, tuple[Sampler, list[psutil.Process]]] = {
            "in the process": (LocalSampler(policy), []),
            "1 covey serve": (remote(urls[0]), servers[:1]),
            "2 covey serve": (remote(*urls), servers),
        }
        if vllm:
            url, command, log = vllm_server(vllm, folder / "model", folder / "vllm.log")
            server = stack.enter_context(process(command, url, log, **VLLM))
            sides["1 vLLM"] = (remote(url), [server])
        for turn in range(rounds + 1):
            for side, (sampler, of) in sides.items():
                try:
                    cost = timed(partial(sampling, sampler, turn), of)
                except SamplersLost as error:
                    logs = "".join(log.read_text()[-3000:] for log in folder.glob("*log*"))
                    raise SystemExit(f"{side}: {error}\n{logs}") from None
                sampled.setdefault(side, []).append(cost)
                print(f"{turn} {side}: {cost.wall:.2f} s, {cost.cpu:.2f} CPU s", flush=True)
        if vllm:
            print(f"vLLM, new weights: {stale(sides.pop('1 vLLM')[0], policy)}", flush=True)
        for version in range(2, rounds + 2):
            moved(policy)
            for side in ("1 covey serve", "2 covey serve"):
                sampler, of = sides[side]
                assert isinstance(sampler, RemoteSampler)
                cost = timed(partial(synced, sampler, 2 * version + len(of)), of)
                syncs.setdefault(side, []).append(cost)
        begun = time.perf_counter()
        save_policy(policy, folder / "written")
        print(f"writing the weights alone: {time.perf_counter() - begun:.2f} s", flush=True)
    return {side: costs[1:] for side, costs in sampled.items()}, syncs


def stale(sampler: Sampler, policy: Policy) -> str:
    """What is said of vLLM after a sync of moved weights."""
    assert isinstance(sampler, RemoteSampler)
    moved(policy)
    try:
        synced(sampler, 1)
    except SamplersLost as error:
        return str(error).partition(": ")[2][:300]
    return "taken"


def table(size: str, sampled: dict[str, list[Cost]], syncs: dict[str, list[Cost]]) -> str:
    """Markdown."""
    tokens = subject.PROMPTS * subject.GROUP * LENGTH
    base = sampled["in the process"]
    lines = [
        "| sampling | CPU s | times in the process | wall s | times in the process | tokens per CPU s |",
        "|---|---|---|---|---|---|",
    ]
    for side, costs in sampled.items():
        cpu, wall = median(c.cpu for c in costs), median(c.wall for c in costs)
        ratios = [f"{median(getattr(c, k) / getattr(b, k) for c, b in zip(costs, base, strict=True)):.2f}"
                  for k in ("cpu", "wall")]  # fmt: skip
        lines.append(f"| {side} | {cpu:.2f} | {ratios[0]} | {wall:.2f} | {ratios[1]} | {tokens / cpu:,.0f} |")
    lines += ["", "| sync | CPU s | wall s |", "|---|---|---|"]
    for side, costs in syncs.items():
        lines.append(f"| {side} | {median(c.cpu for c in costs):.2f} | {median(c.wall for c in costs):.2f} |")
    head = (
        f"{size} parameters, float32, {subject.PROMPTS} prompts, {subject.GROUP} completions each of "
        f"{LENGTH} tokens; one thread a process; medians."
    )
    return "\n".join([head, "", *lines])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="5M", choices=subject.SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm", type=Path, help="virtual environment in which vLLM is installed")
    parser.add_argument("--note", default="", help="a sentence on the machine, for the page")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/servers.md")
    chosen = parser.parse_args()
    text = table(chosen.size, *measure(chosen.size, chosen.rounds, chosen.vllm))
    page = (
        f"# Sampling on servers\n\n{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}. `python benchmarks/servers.py --size {chosen.size} --rounds "
        f"{chosen.rounds}`. {chosen.note}\n\n{text}\n"
    )
    print(page)
    if chosen.write:
        (RESULTS / "servers.md").write_text(page)


if __name__ == "__main__":
    main()

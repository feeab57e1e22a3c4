"""Speed beside peers, cell by cell in one run.

    python benchmarks/speed [--cells rollout update step] [--sizes 5M] [--lora RANK] [--write [NAME]]
    python benchmarks/speed --gpu [--write]
    python benchmarks/speed --quick
    python benchmarks/speed --long [--write]

Each side of a cell lives in its own process; they take turns, so that a busy machine is busy for both.
Printed are the median ratio with its range, CPU and wall seconds, the peak of resident memory, and the
share of the rates of matrix products that are probed in the same run. `--gpu` measures models of 0.5B
and 1.5B parameters on a GPU, 256 completions of 256 tokens, and memory there. `--long` measures two
completions of 8,192 tokens, once. `--write` keeps the table in benchmarks/results/speed_CELLS.md,
speed_gpu.md or speed_long.md; with a name, of a processor say, in speed_NAME.md. Peers that are not
installed (`pip install 'covey[bench]'`) are left out.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import quick
import subject
import torch

from covey_verify.machine import processor_name

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
PEERS = {
    "rollout": ["generate", "unshared", "covey:torch"],
    "update": ["trl", "covey:torch"],
    "step": ["trl"],
}
"""What stands beside covey in each cell; `covey:torch` is covey without compiled operations."""
LONG = "8k"
GPU_SIZES = ["0.5B", "1.5B"]
Sample = Mapping[str, float]


class Worker:
    """One side of a cell in a process of its own."""

    def __init__(self, cell: str, side: str, lengths: str, dtype: str, threads: int, folder: str) -> None:
        name, _, variant = side.partition(":")
        environment = {**os.environ, **({"BENCH_TORCH_ONLY": "1"} if variant else {})}
        self.process = subprocess.Popen(
            [
                sys.executable,
                HERE / "sides.py",
                cell,
                name,
                lengths,
                dtype,
                str(threads),
                folder,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**environment, "OMP_NUM_THREADS": str(threads)},
        )

    def run(self) -> Sample:
        """Do the work once."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"wall"'):  # trainers print their own dicts
                return json.loads(line)
        raise SystemExit(f"{self.process.args} ended with {self.process.wait()}")

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Row(NamedTuple):
    """One side of a cell beside covey."""

    cell: str
    side: str
    tokens_per_second: float
    cpu_per_kilotoken: float
    peak_mib: float
    base_mib: float
    ratio: str


def measure(cell: str, size: str, lengths: str, dtype: str, threads: int, rounds: int) -> list[Row]:
    """Covey and its peers, taking turns."""
    peers = [p for p in PEERS[cell] if p != "trl" or importlib.util.find_spec("trl")]
    peers = peers[:1] if lengths == LONG else peers
    plain = subject.device() == "cpu" and dtype != "mixed"  # torch's operations have no such products
    sides = ["covey", *(p for p in peers if p != "covey:torch" or plain)]
    samples: dict[str, list[Sample]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        subject.build(size, lengths, dtype, Path(folder))
        workers = {side: Worker(cell, side, lengths, dtype, threads, folder) for side in sides}
        for side in sides if (cell != "step" or subject.device() == "cuda") and lengths != LONG else ():
            workers[side].run()  # warm-up; on a CPU whole steps leave their start out themselves
        for _ in range(rounds):
            for side in sides:
                samples[side].append(workers[side].run())
        for worker in workers.values():
            worker.close()
    name = f"{cell} {size} {lengths} {dtype}"
    return [_row(name, side, samples[side], samples["covey"]) for side in sides]


def turns(cell: str, lengths: str, peer: str) -> list[list[Sample]] | None:
    """Covey and one peer with one thread: a round to warm up, then one that counts. None: no such peer.

    Where covey rounds products unless it is told not to, both sides multiply in bfloat16.
    """
    from covey.models.kernels.calls import rounding_pays

    if peer == "trl" and not importlib.util.find_spec("trl"):
        return None
    dtype = "mixed" if rounding_pays() else "fp32"
    with tempfile.TemporaryDirectory() as folder:
        subject.build("5M", lengths, dtype, Path(folder))
        workers = [Worker(cell, side, lengths, dtype, 1, folder) for side in ("covey", peer)]
        rounds = [[worker.run() for worker in workers] for _ in range(2)]
        for worker in workers:
            worker.close()
    return [[rounds[1][side]] for side in range(2)]


def _row(cell: str, side: str, own: Sequence[Sample], ours: Sequence[Sample]) -> Row:
    seconds = lambda s: s["wall"] / s["tokens"]  # per useful token
    ratios = [seconds(a) / seconds(b) for a, b in zip(own, ours, strict=True)]
    return Row(
        cell,
        side,
        1 / statistics.median(map(seconds, own)),
        1000 * statistics.median(s["cpu"] / s["tokens"] for s in own),
        max(s["peak_mib"] for s in own),
        own[0]["base_mib"],
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
    )


def limit(threads: int) -> dict[str, list[float]]:
    """GFLOP/s of a large matrix product here: torch's, and ours where there is one."""
    from covey.models.kernels.calls import available
    from covey.models.linear import PackedWeight

    torch.set_num_threads(threads)
    best: dict[str, list[float]] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        n, k = (8192, 8192) if subject.device() == "cuda" else (2048, 1024)
        x, w = (torch.randn(n, k).to(subject.device(), dtype) for _ in range(2))
        products = [lambda x=x, w=w: x @ w.t()]
        if available(dtype, x.device):
            packed = PackedWeight.pack(w)
            products.append(lambda x=x, p=packed: p.product(x, None))
        best[name] = [2 * n * k * n / _fastest(p) / 1e9 for p in products]
    return best


def _fastest(work: Any) -> float:
    times = []
    for _ in range(12):
        began = time.perf_counter()
        work()
        if subject.device() == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def work_per_token(cell: str, size: str) -> float:
    """GFLOP of matrix products per useful token: 2 a parameter to sample, 6 to train, both for a step."""
    return {"rollout": 2, "update": 6, "step": 8}[cell] * subject.matrix_parameters(size) / 1e9


def report(rows: Sequence[Row], best: Mapping[str, Sequence[float]], threads: int, command: str) -> str:
    """The table as Markdown."""
    lines = [
        "# Speed beside peers",
        "",
        (
            f"{dt.date.today()}, {processor()}, {threads} threads, Python {platform.python_version()}, "
            f"torch {torch.__version__}. `{command}`"
        ),
        "",
        (
            "Useful tokens a second; CPU seconds per 1,000 tokens; peak memory of the process, resident or "
            "on the GPU (in brackets: before the work); how many times longer it takes than covey, "
            "median and range of the turns; share of what a large matrix product reaches in this run, "
            f"torch's ({best['fp32'][0]:.0f} GFLOP/s fp32, {best['bf16'][0]:.0f} bf16) and covey's "
            f"({best['fp32'][-1]:.0f}, {best['bf16'][-1]:.0f}), counting 2 FLOP a parameter and sampled "
            "token, 6 a trained one, attention left out."
        ),
        "",
        "| cell | side | tokens/s | CPU s / 1k | peak MiB | times covey's | of torch's | of covey's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cell, size, _, dtype = row.cell.split()
        done = row.tokens_per_second * work_per_token(cell, size)
        top = best["bf16" if dtype == "mixed" else dtype]
        torch_share, share = (f"{100 * done / most:.0f} %" for most in (top[0], top[-1]))
        lines.append(
            f"| {row.cell} | {row.side} | {row.tokens_per_second:,.0f} | {row.cpu_per_kilotoken:.3f} | "
            f"{row.peak_mib:,.0f} ({row.base_mib:,.0f}) | {row.ratio} | {torch_share} | {share} |"
        )
    return "\n".join(lines) + "\n"


def processor() -> str:
    """Its name, as far as the system tells; the GPU's where that is measured."""
    if subject.device() == "cuda":
        return torch.cuda.get_device_name()
    return processor_name()


def main() -> None:
    """Measure the wanted cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", default=list(PEERS))
    parser.add_argument("--sizes", nargs="+", default=["5M"])
    parser.add_argument("--lengths", nargs="+", default=["equal", "ragged"])
    parser.add_argument("--dtypes", nargs="+", default=["fp32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="adapters on every linear layer, on all sides"
    )
    parser.add_argument("--quick", action="store_true", help="this machine beside the recorded ones")
    parser.add_argument("--gpu", action="store_true", help="the models and lengths for a GPU")
    parser.add_argument("--long", action="store_true", help="two completions of 8,192 tokens")
    parser.add_argument("--write", nargs="?", const="", metavar="NAME", help="write results/speed_NAME.md")
    chosen = parser.parse_args()
    # A reader of the results has to know how many prompts the numbers are of.
    asked_size = [
        f"{name}={os.environ[name]}" for name in ("BENCH_PROMPTS", "BENCH_GROUP") if name in os.environ
    ]
    if chosen.lora:
        os.environ["BENCH_LORA"] = str(chosen.lora)
    if chosen.quick:
        os.environ["BENCH_PROMPTS"] = quick.PROMPTS
        quick.compare(turns, processor())
        return
    if chosen.long:
        os.environ |= {"BENCH_PROMPTS": "1", "BENCH_GROUP": "2"}
        chosen.cells, chosen.sizes, chosen.lengths, chosen.rounds = ["rollout", "update"], ["0.8M"], [LONG], 1
    if chosen.gpu:
        if not torch.cuda.is_available():
            parser.error(
                "--gpu measures on a GPU, and torch finds none here; leave it out to measure the CPU"
            )
        os.environ["BENCH_DEVICE"] = "cuda"
        chosen.sizes = [s for s in chosen.sizes if s in GPU_SIZES] or GPU_SIZES
        chosen.lengths, chosen.dtypes = ["256"], ["bf16"]
    rows: list[Row] = []
    best = limit(chosen.threads)
    for cell in chosen.cells:
        for size in chosen.sizes:
            for lengths in chosen.lengths:
                for dtype in chosen.dtypes:
                    measured = measure(cell, size, lengths, dtype, chosen.threads, chosen.rounds)
                    print(*measured, sep="\n", flush=True)
                    rows += measured
    best = {
        name: [max(pair) for pair in zip(values, again, strict=True)]
        for (name, values), again in zip(best.items(), limit(chosen.threads).values(), strict=True)
    }
    command = " ".join([*asked_size, "python benchmarks/speed", *sys.argv[1:]])
    text = report(rows, best, chosen.threads, command)
    print(text)
    if chosen.write is not None:
        name = "gpu" if chosen.gpu else "long" if chosen.long else "_".join(chosen.cells)
        (RESULTS / f"speed_{chosen.write or name}.md").write_text(text)


if __name__ == "__main__":
    main()

"""A YAML of two stages from a laptop to a cluster: one cold start, then its RL stage in every way there is.

    python benchmarks/anywhere.py [YAML] [--steps 220] [--ways 1 2 servers] [--vllm ENVIRONMENT] [--write]

Without a YAML it is the demo's. Each way continues a copy of the same finished first stage, with other
settings on the command line. What is left in --folder is continued, so that it can be stopped at any time.
`--write` puts the table into benchmarks/results/anywhere.md, or anywhere_tools.md for tools.yaml.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from safetensors.numpy import load_file

from covey.runs.reader import load_recorded
from covey.runs.rollouts import read_rollouts, recorded_steps
from servers import VLLM, covey_server, process, vllm_server

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster.two_nodes import TwoNodes

RESULTS = Path(__file__).parent / "results"
DEMO = Path(str(files("covey"))) / "recipes" / "demo.yaml"
EVERY, COMPARED = 10, 20
"""Steps between checkpoints, which are all kept; and steps after which weights are compared."""
TIED_OUTPUT = """\
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


class TiedOutput:
    def pack(self):
        for layer in self.get_model().modules():
            if isinstance(layer, ParallelLMHead):
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
"""
"""For vLLM on a CPU, whose output layer, tied to the embeddings, computes with a packed copy of them that no
new weights reach."""
Place = Callable[[Path, ExitStack, Path], list[str]]
"""Folder of a way, what ends with it, vLLM's environment -> its settings."""


def served(folder: Path, stack: ExitStack, _: Path) -> list[str]:
    """Two `covey serve`."""
    sync = folder / "sync"
    sync.mkdir(exist_ok=True)
    urls = []
    for n in range(2):
        url, command, log = covey_server(folder / "run/1-sft/final", sync, folder / f"server-{n}.log")
        stack.enter_context(process(command, url, log))
        urls.append(url)
    return [
        "--stages.2.rollout.sampler.url",
        json.dumps(urls),
        "--stages.2.rollout.sampler.folder",
        str(sync),
    ]


def by_vllm(folder: Path, stack: ExitStack, vllm: Path) -> list[str]:
    """A real vLLM server, with the method for CPUs that docs/scale.md shows."""
    (folder / "tied_output.py").write_text(TIED_OUTPUT)
    url, command, log = vllm_server(vllm, folder / "run/1-sft/final", folder / "vllm.log")
    extended = [*command, "--worker-extension-cls", "tied_output.TiedOutput"]
    stack.enter_context(process(extended, url, log, **VLLM, PYTHONPATH=str(folder)))
    told = """-H 'content-type: application/json' -d '{"method": "pack"}'"""
    pack = f'curl -fsS "$COVEY_URL/collective_rpc" {told}'
    servers = [
        "--stages.2.rollout.sampler.url",
        url,
        "--stages.2.rollout.sampler.folder",
        str(folder / "sync"),
    ]
    return [*servers, "--stages.2.rollout.sampler.restart", pack]


def on_ray(folder: Path, stack: ExitStack, _: Path) -> list[str]:
    """Two nodes: trainers and samplers are placed."""
    nodes = stack.enter_context(TwoNodes(folder / "token"))
    os.environ |= nodes.environment
    return ["--launch.ray", nodes.address]


class Way(NamedTuple):
    """How the run is started."""

    title: str
    settings: tuple[str, ...] = ()
    place: Place = lambda *_: []


TWO = ("--launch.processes", "2")
WAYS = {
    "1": Way("1 process"),
    "2": Way("2 processes", TWO),
    "servers": Way("1 process, 2 `covey serve`", (), served),
    "both": Way("2 processes, 2 `covey serve`", TWO, served),
    "ray": Way("Ray, 2 machines: 1 process, 2 samplers", ("--stages.2.launch.samplers", "2"), on_ray),
    "vllm": Way("1 process, a vLLM server", (), by_vllm),
    "ahead": Way("1 process, `rollout.staleness: 1`", ("--stages.2.rollout.staleness", "1")),
}


def recipe(original: Path, folder: Path, steps: int | None) -> Path:
    """A YAML as it is, but for the steps of its second stage, whose checkpoints are kept."""
    settings = yaml.safe_load(original.read_text())
    trained = settings["stages"][1]["train"]
    trained |= {"steps": steps or trained["steps"], "save_every": EVERY, "keep": 100}
    path = folder / original.name
    path.write_text(yaml.safe_dump(settings))
    return path


def train(config: Path, run: Path, settings: list[str]) -> float:
    """`covey train`; the seconds that it took. Exits where it did not end at its goal."""
    command = [sys.executable, "-m", "covey", "train", str(config), "--output", str(run), "--threads", "1"]
    begun = time.monotonic()
    with (run.parent / "said.txt").open("a") as said:
        said.write(f"{shlex.join([*command, *settings])}\n")
        said.flush()
        code = subprocess.run([*command, *settings], stdout=said, stderr=said, check=False).returncode
    if code:
        raise SystemExit(f"{run}: exit code {code}\n{(run.parent / 'said.txt').read_text()[-3000:]}")
    return time.monotonic() - begun


def cold_start(config: Path, folder: Path) -> Path:
    """The first stage's folder, finished: the run is ended as the second begins."""
    run = folder / "start" / "run"
    if not (run / "1-sft/result.json").exists():
        run.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "covey", "train", str(config), "--output", str(run)]
        with (run.parent / "said.txt").open("a") as said:
            begun = subprocess.Popen([*command, "--threads", "1"], stdout=said, stderr=said)
            while begun.poll() is None and not (run / "1-sft/result.json").exists():
                time.sleep(1.0)
            begun.terminate()
            begun.wait()
    return run / "1-sft"


def travelled(way: str, folder: Path, start: Path, config: Path, vllm: Path) -> None:
    """Train in one of the ways, unless that is done."""
    run, steps = folder / way / "run", yaml.safe_load(config.read_text())["stages"][1]["train"]["steps"]
    if (run / "2-rl/result.json").exists() and load_recorded(run / "2-rl").config.train.steps >= steps:
        return
    if not (run / "1-sft").exists():
        shutil.copytree(start, run / "1-sft")
    with ExitStack() as stack:
        settings = [*WAYS[way].settings, *WAYS[way].place(run.parent, stack, vllm)]
        seconds = train(config, run, settings)
    with (run.parent / "seconds").open("a") as file:
        file.write(f"{seconds}\n")


def largest_difference(one: Path, other: Path) -> float:
    """Of any weight of two models."""
    ours, theirs = load_file(one), load_file(other)
    return max(float(np.abs(ours[n].astype(np.float64) - theirs[n]).max()) for n in ours)


def first_other_completion(one: Path, other: Path) -> str:
    """The first step in which a completion differs."""
    for step in sorted({*recorded_steps(one)} & {*recorded_steps(other)}):
        ours, theirs = (read_rollouts(run, step).arrays["tokens"] for run in (one, other))
        if not np.array_equal(ours, theirs):
            return str(step)
    return "never"


def steps_of(stage: Path) -> int:
    """How many it has made."""
    return int(json.loads((stage / "result.json").read_text())["steps"])


def row(way: str, folder: Path) -> str:
    """A line of the table."""
    stage, base = folder / way / "run/2-rl", folder / "1/run/2-rl"
    last = steps_of(stage)
    evals = [json.loads(line) for line in (stage / "evals.jsonl").read_text().splitlines()]
    before, after = evals[0], evals[-1]
    low, high = after["greedy/low"], after["greedy/high"]
    apart = [
        largest_difference(*(of / f"checkpoints/step_{step:06d}/model.safetensors" for of in (stage, base)))
        for step in (COMPARED, min(last, steps_of(base)))
    ]
    seconds = sum(map(float, (folder / way / "seconds").read_text().split()))
    cells = (
        WAYS[way].title,
        f"{last}",
        f"{before['greedy']:.1%} -> {after['greedy']:.1%} ({low:.1%} to {high:.1%})",
        f"{before['pass@1']:.1%} -> {after['pass@1']:.1%}",
        *(f"{a:.1g}" for a in apart),
        first_other_completion(stage, base),
        f"{seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |"


COLUMNS = (
    "",
    "steps",
    "greedy, held out",
    "sampled",
    f"weights after {COMPARED} steps",
    "in the end",
    "first other completion",
    "seconds",
)
PAGE = """# `{name}`: from one process to a cluster

{when}. `python benchmarks/anywhere.py {given}--vllm ENVIRONMENT --write`.

The YAML as it is, but for how often its second stage saves. Each way is a setting on the command line, from
the same cold start; it ends where its `train.stop_at` is reached. Accuracy on held-out problems, with 95 %
intervals. Weights: the largest difference of any to one process, after the last step that both made, and the
first step in which a completion differs from its. Seconds are of the second stage by the clock, Python's
start counted. {note}

{table}
"""


def page(given: Path, rows: list[str], note: str) -> str:
    """Markdown."""
    table = "\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows])
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return PAGE.format(
        name=given.name,
        given="" if given == DEMO else f"{given} ",
        when=f"{dt.date.today()}, {machine}",
        note=note,
        table=table,
    )


def main() -> None:
    """All ways, or those named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("yaml", type=Path, nargs="?", default=DEMO, help="of two stages")
    parser.add_argument("--steps", type=int, help="of the second stage at most")
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "covey-benchmarks" / "anywhere"
    )
    parser.add_argument("--vllm", type=Path, help="virtual environment in which vLLM is installed")
    parser.add_argument("--note", default="", help="a sentence on the machine, for the page")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    home = chosen.folder.resolve() / chosen.yaml.stem
    home.mkdir(parents=True, exist_ok=True)
    config = recipe(chosen.yaml, home, chosen.steps)
    start = cold_start(config, home)
    for way in chosen.ways:
        if way != "vllm" or chosen.vllm:
            travelled(way, home, start, config, chosen.vllm)
            print(row(way, home), flush=True)
    there = [way for way in WAYS if (home / way / "run/2-rl/result.json").exists()]
    text = page(chosen.yaml, [row(way, home) for way in there], chosen.note)
    print(text)
    if chosen.write:
        kind = "" if chosen.yaml == DEMO else f"_{chosen.yaml.stem}"
        (RESULTS / f"anywhere{kind}.md").write_text(text)


if __name__ == "__main__":
    main()

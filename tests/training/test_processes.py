"""Several processes that train together: the same run as one process, whoever of them dies."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.cluster.serving.served import serving
from tests.fakes import group
from tests.training.runs import fingerprint, metrics_of, start

from covey.cluster import launcher
from covey.cluster.launcher import cause_of, has_died
from covey.config.load import load_config
from covey.errors import OutOfRoom, PeersLost
from covey.learner.batching import collate, micro_batches
from covey.models.load import load_policy
from covey.models.sharded import copy_into, full_tensor, local_part
from covey.rewards.scorer import ScoringStats
from covey.system.processes import as_peers_lost, gather, interleave, portable_error, run_on_all
from covey_verify.errors import CoveyError

ROOT = Path(__file__).parents[2]
SMALL = {
    "train": {"steps": 20, "lr": 1e-4, "save_every": 50, "tokens_per_micro_batch": 100},
}
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
}


# --- without a second process ----------------------------------------------------------------------


@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=5), min_size=1, max_size=6),
    budget=st.integers(1, 120),
    processes=st.integers(1, 5),
    whole_groups=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_row_is_computed_once_and_all_processes_do_equally_many(
    lengths: list[list[int]], budget: int, processes: int, whole_groups: bool
) -> None:
    batch = collate([group([float(i) for i in range(len(own))], own) for own in lengths])
    shares = [
        list(micro_batches(batch, budget, 9, whole_groups=whole_groups, rank=rank, processes=processes))
        for rank in range(processes)
    ]
    assert len({len(share) for share in shares}) == 1
    counted = [m for share in shares for m in share if not m.repeated]
    assert sorted(i for m in counted for i in m.numbers) == list(range(len(batch)))
    assert len({m.totals for share in shares for m in share}) == 1
    alone = len(list(micro_batches(batch, budget, 9, whole_groups=whole_groups)))
    assert len(shares[0]) == -(-alone // processes), "no more rounds than the budget asks for"


def test_one_process_is_alone_at_no_cost() -> None:
    value = object()
    assert gather(value)[0] is value
    assert run_on_all(lambda: value) is value
    weight = torch.ones(3)
    assert full_tensor(weight) is weight and local_part(weight) is weight
    copy_into(weight, torch.zeros(3))
    assert not weight.any()


def test_shares_are_put_back_in_order() -> None:
    assert interleave([[0, 2, 4], [1, 3]]) == [0, 1, 2, 3, 4]
    assert interleave([[0, 1], []]) == [0, 1]


def test_an_error_that_cannot_travel_is_told_in_words() -> None:
    error = RuntimeError(lambda: 0)
    assert str(portable_error(error)).startswith("RuntimeError: <function")
    assert isinstance(pickle.loads(pickle.dumps(portable_error(OutOfRoom("full")))), OutOfRoom)


def test_what_scorers_took_adds_up() -> None:
    parts = [ScoringStats(2, 8, 0.5, {"a": [1.0]}), ScoringStats(1, 4, 0.7, {"a": [3.0], "b": [2.0]})]
    assert ScoringStats.sum_over(parts) == ScoringStats(3, 12, 0.7, {"a": [1.0, 3.0], "b": [2.0]})


@pytest.mark.parametrize(
    ("codes", "rank"),
    [({0: 0, 1: 0}, None), ({0: 10, 1: -9}, 1), ({1: 6, 0: 6}, 1), ({0: 10, 1: 8}, 1), ({1: 10, 0: 10}, 1)],
)
def test_the_cause_is_the_first_failure_that_is_no_lost_peer(codes: dict[int, int], rank: int | None) -> None:
    assert cause_of(codes) == rank


@pytest.mark.parametrize(
    ("codes", "again"),
    [
        ((0, -9), True),
        ((10, 5), True),
        ((10, 10), True),
        ((5, 5), False),
        ((8, 10), False),
        ((75, 75), False),
    ],
)
def test_all_begin_again_where_one_was_lost_not_where_something_is_wrong(
    codes: tuple[int, int], again: bool
) -> None:
    assert has_died(codes) is again


class Ended:
    """A process that has ended with a code, or that runs until it is killed (None)."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9


@pytest.mark.parametrize(
    ("ends", "code", "starts", "last"),
    [
        ((0, 0), 0, 1, ""),
        ((3, None), 3, 1, ""),  # its killing is not what decides
        ((-9, None), 137, 3, "process 0 of 2: killed by SIGKILL (Killed): the system does this"),
        ((10, 5), 5, 3, "process 1 of 2: exit code 5; continuing from the last checkpoint (restart 2 of 2)"),
    ],
)
def test_a_launched_command_ends_as_the_process_that_failed_first(
    tmp_path: Path, monkeypatch, capsys, ends: tuple[int | None, ...], code: int, starts: int, last: str
) -> None:
    started: list[list[Ended]] = []

    def local(*_: object) -> list[Ended]:
        started.append([Ended(code) for code in ends])
        return started[-1]

    monkeypatch.setattr(launcher, "_local", local)
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.1)
    settings = SimpleNamespace(processes=2, restarts=2, ray=None)
    error = None
    try:
        ended = launcher.launch(SimpleNamespace(launch=settings, output=tmp_path))
    except CoveyError as lost:
        error, ended = lost, lost.code
    assert ended == code
    assert len(started) == starts
    assert all(process.code is not None for job in started for process in job), "none is left running"
    said = [*capsys.readouterr().err.splitlines(), *([] if error is None else [str(error)])]
    assert (said[-1] if said else "").startswith(last)
    assert (tmp_path / "exit.json").exists() == (code == 137)


def test_an_error_of_the_transport_is_the_loss_of_a_process_only_where_there_are_several(monkeypatch) -> None:
    reset = RuntimeError("gloo/transport/tcp/pair.cc: Connection reset by peer")
    assert as_peers_lost(reset) is reset
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert isinstance(as_peers_lost(reset), PeersLost)
    assert not isinstance(as_peers_lost(RuntimeError("shapes differ")), PeersLost)


# --- with one --------------------------------------------------------------------------------------


def compare(folder: Path, runs: dict[str, dict[str, Any]], processes: int = 2) -> str:
    """Runs by torchrun, and the same by this process: equal weights, equal completions. -> what was said."""
    runs = {name: {"precision": "float32", **own} for name, own in runs.items()}
    file = folder / "runs.json"
    file.write_text(json.dumps({str(folder / f"{name}-together"): s for name, s in runs.items()}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "training" / "several.py"), str(file)],
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, of in runs.items():
        start(folder / name, **of)
        one, other = (
            load_file(folder / place / "final" / "model.safetensors") for place in (name, f"{name}-together")
        )
        # A hundredth of a step's motion. Adam scales the rounding of another order of sums; on some
        # processors it comes to 1.4e-6.
        assert max(float((w - other[n]).abs().max()) for n, w in one.items()) < 1e-5, name
        first, second = (metrics_of(folder / place) for place in (name, f"{name}-together"))
        for a, b in zip(first, second, strict=True):
            assert a.keys() == b.keys(), name
            assert all(np.isclose(a[k], b[k], rtol=1e-3, atol=1e-4) for k in a if a[k] is not None), name
    return done.stderr


def test_two_processes_give_the_weights_of_one(tmp_path: Path) -> None:
    train = {**SMALL["train"], "steps": 5}
    # The policy waits for three steps: it must not decay meanwhile, nor count them.
    waits = {"name": "ppo", "critic": {"trunk": "policy", "warmup": 3, "lr": 1e-4}}
    runs = {
        "grpo": {"algorithm": "grpo", **SMALL, "train": train},
        "waits": {"algorithm": waits, **SMALL, "train": {**train, "lr": 1e-5, "weight_decay": 1.0}},
        # The parts of weights are float32, what is computed is not.
        "half": {
            "algorithm": "grpo",
            "lora": {"rank": 2},
            "dtype": "bfloat16",
            "train": {**train, "lr": 1e-12, "steps": 2},
        },
    }
    assert "UserWarning" not in compare(tmp_path, runs)
    records = [json.loads((tmp_path / f"{name}-together" / "env.json").read_text()) for name in runs]
    assert [record["rounded"] for record in records] == [False, False, True]
    texts = [(tmp_path / n / "rollouts" / "step_000005.jsonl").read_text() for n in ("grpo", "grpo-together")]
    completions = [[json.loads(line)["completion"] for line in text.splitlines()] for text in texts]
    assert completions[0] == completions[1]
    parts = tmp_path / "grpo-together" / "checkpoints" / "step_000005" / "optimizer"
    assert len(list(parts.glob("shard-*.safetensors"))) == 2


@pytest.mark.slow
def test_methods_and_kinds_of_model_give_the_weights_of_one_process(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rng = random.Random(0)
    rows = [
        {"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "7" * rng.randint(1, 9)} for n in range(60)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    preferring = {"method": "dpo", "data": {"examples": str(pairs)}}
    batch = {**SMALL["train"], "batch_size": 7}
    compare(
        tmp_path,
        {
            "dapo": {"algorithm": "dapo", "train": {**SMALL["train"], "updates_per_batch": 2}},
            "ppo": {"algorithm": "ppo", **SMALL},
            "trunk": {"algorithm": {"name": "ppo", "critic": {"trunk": "policy"}}, **SMALL},
            "lora": {"algorithm": "grpo", "lora": {"rank": 4}, **SMALL},
            "exact": {
                "algorithm": {"name": "grpo", "kl": {"coef": 0.1, "estimator": "full", "refresh_every": 5}},
                "train": {**SMALL["train"], "recompute_layers": True},
            },
            "sft": {"method": "sft", "train": batch},
            "dpo": {**preferring, "train": batch},
            "reward": {**preferring, "method": "reward_model", "train": batch},
        },
    )


def config(folder: Path, **changes: Any) -> Path:
    (folder / "mine.py").write_text(
        "def varied(completion):\n    return len(completion) + sum(map(ord, completion)) % 7\n"
    )
    values = {
        "model": "tiny",
        "threads": 1,
        "precision": "float32",  # sums of rounded numbers depend more on who adds them
        "data": {"task": "last_digit", "train_size": 64, "test_size": 8},
        "rewards": ["mine.py:varied"],
        "rollout": {"group_size": 4, "prompts_per_step": 4, "max_tokens": 12},
        "algorithm": "grpo",
        "train": {"steps": 8, "lr": 1e-4, "save_every": 2},
        "eval": {"problems": 4, "samples": 1},
        **changes,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder / "run.yaml"


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def covey() -> Iterator[Start]:
    """Starts the command with arguments; what a test that fails leaves running is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "covey", *arguments],
                env=ENVIRONMENT,
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        with process:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def when(folder: Path, steps: int, process: subprocess.Popen[str]) -> None:
    """Wait until so many steps are logged."""
    stream = folder / "metrics.jsonl"
    while process.poll() is None and (not stream.exists() or stream.read_text().count("\n") < steps):
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[1]


def worker(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The process of a rank that does the work."""
    (launcher,) = psutil.Process(process.pid).children()
    supervisors = sorted(launcher.children(), key=lambda p: p.create_time())
    return supervisors[rank].children()[0]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_whoever_is_killed_the_run_ends_with_the_same_bits(tmp_path: Path, covey: Start, rank: int) -> None:
    path = config(tmp_path)
    for name in ("calm", "killed"):
        run = covey("train", str(path), "--output", str(tmp_path / name), "--launch.processes", "2")
        if name == "killed":
            when(tmp_path / name, 5, run)
            worker(run, rank).kill()
        said = run.communicate()[1]
        assert run.returncode in (0, 1), said
    how = f"process {rank} of 2: killed by SIGKILL (Killed)"
    assert f"{how}; continuing from the last checkpoint (restart 1 of 3)" in said
    assert fingerprint(tmp_path / "calm") == fingerprint(tmp_path / "killed")


@pytest.mark.slow
def test_where_all_are_lost_at_once_the_last_line_says_how_to_continue(tmp_path: Path, covey: Start) -> None:
    folder = tmp_path / "run"
    run = covey("train", str(config(tmp_path)), "--output", str(folder), "--launch.processes", "2")
    when(folder, 1, run)
    (launcher,) = psutil.Process(run.pid).children()
    started = launcher.children(recursive=True)
    launcher.kill()
    said = run.communicate()[1]
    assert f"covey resume {folder}" in said.splitlines()[-1]
    assert json.loads((folder / "exit.json").read_text())["resume_command"] == f"covey resume {folder}"
    assert not psutil.wait_procs(started, timeout=20)[1]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_last_line_names_the_process_that_was_lost(tmp_path: Path, covey: Start, rank: int) -> None:
    """Its parent is killed, too, so that it cannot say that itself."""
    folder = tmp_path / "run"
    several = ("--launch.processes", "2", "--launch.restarts", "0")
    run = covey("train", str(config(tmp_path)), "--output", str(folder), *several)
    when(folder, 1, run)
    worker(run, rank).parent().kill()
    said = run.communicate()[1]
    assert run.returncode == 137
    assert said.splitlines()[-1].startswith(f"error: process {rank} of 2: killed by SIGKILL (Killed)")
    assert "a bug in covey" not in said
    assert json.loads((folder / "exit.json").read_text())["exit_code"] == 137


@pytest.mark.slow
def test_the_number_of_processes_may_change_at_any_resume(tmp_path: Path, covey: Start) -> None:
    path = config(tmp_path)
    for name, counts in (("two", (2,)), ("changing", (2, 1, 2))):
        for n, count in enumerate(counts, start=1):
            run = covey(
                "train", str(path), "--output", str(tmp_path / name), "--launch.processes", str(count)
            )
            if n < len(counts):
                when(tmp_path / name, 3 * n, run)
                run.send_signal(signal.SIGINT)
                assert "saved after step" in run.communicate()[1] and run.returncode == 75
            else:
                assert run.communicate() and run.returncode in (0, 1)
    first, second = (metrics_of(tmp_path / name) for name in ("two", "changing"))
    assert all(np.isclose(a["loss"], b["loss"], atol=1e-5) for a, b in zip(first, second, strict=True))
    one, other = (load_file(tmp_path / n / "final" / "model.safetensors") for n in ("two", "changing"))
    assert max(float((w - other[n]).abs().max()) for n, w in one.items()) < 1e-6


@pytest.mark.slow
def test_two_processes_sample_on_a_server(tmp_path: Path, covey: Start) -> None:
    """The first asks for both of them, and gives the server its weights alone."""
    path = config(tmp_path, train={"steps": 8, "lr": 5e-5, "save_every": 2})
    alone, served = tmp_path / "alone", tmp_path / "served"
    run = covey("train", str(path), "--output", str(alone))
    assert run.communicate() and run.returncode in (0, 1)
    with serving(load_policy(load_config(values={"model": str(alone / "final")})), tmp_path / "sync") as url:
        there = ("--rollout.sampler.url", url, "--rollout.sampler.folder", str(tmp_path / "sync"))
        run = covey("train", str(path), "--output", str(served), "--launch.processes", "2", *there)
        said = run.communicate()[1]
    assert run.returncode in (0, 1), said
    one, other = (load_file(n / "final" / "model.safetensors") for n in (alone, served))
    assert max(float((w - other[n]).abs().max()) for n, w in one.items()) < 1e-6
    assert not (served / "events.jsonl").exists(), "the server was never left out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inject", "code", "words"),
    [
        ("memory.full@3", (0, 1), "out of memory; continuing with micro-batches of"),
        ("grad.nan@2-9", (6,), "not finite"),
        ("save.enospc@1-9", (8,), "No space left"),
        ("loss.nan@3", (0, 1), ""),
    ],
)
def test_all_processes_react_to_a_fault_as_one(
    tmp_path: Path, inject: str, code: tuple[int, ...], words: str
) -> None:
    path = config(tmp_path)
    where = ("--output", str(tmp_path / "run"), "--launch.processes", "2")
    run = subprocess.run(
        [sys.executable, "-m", "covey", "train", str(path), *where, "--inject", inject],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert run.returncode in code, run.stderr
    assert words in run.stdout + run.stderr
    assert run.stderr.count("error:") <= 1, "one process speaks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "options", "code", "words"),
    [
        ({}, ("--inject", "grad.nan@2-9"), 6, "not finite"),
        (
            {
                "data": {"task": "last_digit", "train_size": 64, "test_size": 300},
                "train": {"steps": 1, "lr": 1e-12},
                "eval": {"problems": 300, "samples": 1},
            },
            (),
            1,
            "did not learn",
        ),
    ],
)
def test_torchrun_does_not_train_again_what_has_ended(
    tmp_path: Path, changes: dict[str, Any], options: tuple[str, ...], code: int, words: str
) -> None:
    """It starts all processes again after any exit code but 0; they leave the run as it is."""
    path = config(tmp_path, **changes)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    again = (
        "--max-restarts=2",
        "-m",
        "covey",
        "train",
        str(path),
        "--output",
        str(tmp_path / "run"),
        *options,
    )
    run = subprocess.run([*torchrun, *again], env=ENVIRONMENT, capture_output=True, text=True)
    said = run.stdout + run.stderr
    assert f"(exitcode: {code})" in said, said
    assert said.count("torchrun restarted a run that had already ended") == 2
    assert said.count("Nothing was changed") == 2
    assert said.count(words) == 1, "trained once"

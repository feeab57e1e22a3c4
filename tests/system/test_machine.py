"""How many threads a run takes, and what it leaves in the process that asked for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import covey
from covey.config.load import load_config
from covey.runs.clock import Clock
from covey.system import machine
from covey.system.machine import available_memory, available_threads
from covey_verify import machine as verify_machine
from covey_verify.errors import ConfigError
from covey_verify.machine import available_cpus


@pytest.mark.parametrize(
    ("value", "threads"),
    [
        *(("1", 1), ("7", 7), ("3,2", 3), (" 2 ", 2), ("007", 7), ("1024", 1024)),
        *((other, None) for other in ("0", "many", "", "-2", "1025", "9" * 20, "9" * 5000)),
    ],
)
def test_the_variable_that_others_respect_is_respected(value: str, threads: int | None) -> None:
    assert available_threads({"OMP_NUM_THREADS": value}) == (threads or available_cpus())


def test_so_many_threads_that_none_can_be_started_are_refused_in_words() -> None:
    assert load_config(values={"threads": machine.MAX_THREADS}).config.threads == machine.MAX_THREADS
    with pytest.raises(ConfigError, match="threads = 65536: input should be less than or equal to 1024"):
        load_config(values={"threads": 65_536})


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux has affinities")
def test_affinity_is_respected() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from covey.system.machine import available_threads; from covey_verify.threads import SHARED_SIZE\n"
        "print(available_threads({}), SHARED_SIZE)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "2"]


@pytest.mark.parametrize(("quota", "cpus"), [("50000 100000", 1), ("100001 100000", 2), ("max 100000", 64)])
def test_a_containers_quota_is_respected(monkeypatch, tmp_path: Path, quota: str, cpus: int) -> None:
    monkeypatch.setattr(verify_machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert available_cpus() == cpus


def groups(monkeypatch: pytest.MonkeyPatch, root: Path, own: str, files: dict[str, str]) -> None:
    """A machine whose control groups have these files; ``own`` is what /proc/self/cgroup says."""
    monkeypatch.setattr(verify_machine, "CGROUPS", root / "cgroup")
    monkeypatch.setattr(verify_machine, "OWN_GROUPS", root / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    (root / "own").write_text(own)
    for name, text in files.items():
        (root / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "cgroup" / name).write_text(f"{text}\n")


JOB, V1_JOB = "0::/system.slice/job\n", "5:cpu,cpuacct:/slurm/job\n4:memory:/slurm/job\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        (JOB, {"memory.max": "2000"}, 2000),
        (JOB, {"system.slice/job/memory.max": "1000", "memory.max": "max"}, 1000),
        (JOB, {"system.slice/job/memory.max": "max", "system.slice/memory.max": "1000"}, 1000),
        (JOB, {"system.slice/job/memory.max": "3000", "system.slice/memory.max": "1000"}, 1000),
        (JOB, {"system.slice/other/memory.max": "1000", "memory.max": "2000"}, 2000),
        (V1_JOB, {"memory/slurm/job/memory.limit_in_bytes": "1000"}, 1000),
        (V1_JOB, {"memory/slurm/memory.limit_in_bytes": "1000"}, 1000),
        (V1_JOB, {"memory/memory.limit_in_bytes": "1000"}, 1000),  # as a container sees its own
        ("", {"memory/memory.limit_in_bytes": "1000"}, 1000),
    ],
)
def test_a_jobs_memory_is_that_of_its_groups(
    monkeypatch, tmp_path: Path, own: str, files: dict[str, str], limit: int
) -> None:
    whole = available_memory()
    groups(monkeypatch, tmp_path, own, files)
    assert available_memory() == limit < whole


def test_without_a_limit_it_is_the_machines_memory(monkeypatch, tmp_path: Path) -> None:
    unlimited = {"memory/slurm/job/memory.limit_in_bytes": "9223372036854771712", "memory.max": "max"}
    groups(monkeypatch, tmp_path, V1_JOB, unlimited)
    assert available_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        (JOB, {"system.slice/job/cpu.max": "200000 100000"}, 2),
        (JOB, {"system.slice/job/cpu.max": "max 100000", "system.slice/cpu.max": "300000 100000"}, 3),
        (
            V1_JOB,
            {"cpu/slurm/job/cpu.cfs_quota_us": "150000", "cpu/slurm/job/cpu.cfs_period_us": "100000"},
            2,
        ),
        (V1_JOB, {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        (V1_JOB, {"cpu/slurm/job/cpu.cfs_quota_us": "-1", "cpu/slurm/job/cpu.cfs_period_us": "100000"}, 64),
    ],
)
def test_a_jobs_cpus_are_those_of_its_groups(
    monkeypatch, tmp_path: Path, own: str, files: dict[str, str], cpus: int
) -> None:
    groups(monkeypatch, tmp_path, own, files)
    assert available_cpus() == cpus


def test_a_run_takes_those_threads_and_gives_the_process_back(monkeypatch, tmp_path: Path) -> None:
    seen = []

    def varied(completion: str) -> float:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return len(completion) + sum(map(ord, completion)) % 7

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(2)
    torch.manual_seed(123)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    before = torch.get_rng_state()
    covey.train(
        quiet=True,
        output=str(tmp_path / "run"),
        data={"task": "last_digit", "train_size": 16, "test_size": 2},
        rewards=[varied],
        rollout={"group_size": 2, "prompts_per_step": 2, "max_tokens": 4},
        train={"steps": 1},
        eval={"problems": 2, "samples": 1},
    )
    assert seen[-1]
    assert json.loads((tmp_path / "run" / "env.json").read_text())["threads"] == 3
    assert torch.get_num_threads() == 2
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.utils.deterministic.fill_uninitialized_memory is filled
    assert torch.equal(torch.get_rng_state(), before)


def test_a_clock_waits_for_a_gpu_and_asks_it_for_its_memory(monkeypatch) -> None:
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 5 * 2**20)
    clock = Clock(torch.device("cuda"))
    with clock("update"):
        assert len(waited) == 1
    assert len(waited) == 2
    assert clock.lap({})["memory/peak_mib"] == 5.0
    with Clock()("update"):
        pass
    assert len(waited) == 2

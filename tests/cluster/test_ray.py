"""A run on a Ray cluster of two simulated nodes, of which one is killed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cluster.small_run import write
from tests.cluster.two_nodes import TwoNodes
from tests.training.runs import fingerprint, metrics_of

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="ray is not installed: pip install 'covey[ray]'"
)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    with TwoNodes(tmp_path / "token") as made:
        yield made


def wait_for(what: Callable[[], bool], run: subprocess.Popen[str], seconds: float = 240.0) -> None:
    ends = time.monotonic() + seconds
    while not what():
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < ends, "it takes too long"
        time.sleep(0.1)


@needs_ray
@pytest.mark.slow
def test_a_node_is_killed_in_the_middle_and_the_run_ends_with_the_same_bits(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    alone = nodes.covey("train", write(tmp_path / "alone"), "--output", tmp_path / "alone/run")
    said, _ = alone.communicate(timeout=300)
    assert alone.returncode in (0, 1), said
    output = tmp_path / "placed/run"
    placed = ["--launch.ray", nodes.address, "--launch.samplers", 2, "--rollout.sampler.timeout", 60]
    run = nodes.covey("train", write(tmp_path / "placed"), "--output", output, *placed)
    wait_for(lambda: (output / "metrics.jsonl").exists() and len(metrics_of(output)) > 1, run)
    nodes.tell("kill")
    said, _ = run.communicate(timeout=400)
    assert run.returncode in (0, 1), said
    assert "is excluded" in (output / "events.jsonl").read_text(), said
    assert fingerprint(output) == fingerprint(tmp_path / "alone/run")
    nodes_seen = {p.name for p in (tmp_path / "placed/seen").iterdir()}
    assert nodes_seen, "rewards were scored"
    assert "none" not in nodes_seen, "and by actors"


@needs_ray
@pytest.mark.slow
def test_trainers_on_both_nodes_begin_again_when_one_is_killed(nodes: TwoNodes, tmp_path: Path) -> None:
    """Two processes take two CPUs each, so that each node of three has one; then both fit nowhere else."""
    config = write(tmp_path / "whole", threads=2, launch={"processes": 2})
    whole = nodes.covey("train", config, "--output", tmp_path / "whole/run")
    said, _ = whole.communicate(timeout=400)
    assert whole.returncode in (0, 1), said
    output = tmp_path / "placed/run"
    config = write(tmp_path / "placed", threads=2, launch={"processes": 2, "ray": nodes.address})
    run = nodes.covey("train", config, "--output", output)
    wait_for(lambda: (output / "metrics.jsonl").exists() and len(metrics_of(output)) > 2, run)
    nodes.tell("kill")
    nodes.tell("add")
    said, _ = run.communicate(timeout=600)
    assert run.returncode in (0, 1), said
    assert "continuing from the last checkpoint (restart 1 of 3)" in said
    assert fingerprint(output) == fingerprint(tmp_path / "whole/run")

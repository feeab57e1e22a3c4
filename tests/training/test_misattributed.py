"""A group that was answered by the reply to another one is said to be, by its problem and server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import policy_of
from tests.sampling.stale import Stale
from tests.sampling.stub import Stub, copied, running
from tests.training.runs import start

from covey.models.policy import Policy, save_policy
from covey.runs.folder import read_stream
from covey.training.misattributed import EVENT


@pytest.fixture
def policy() -> Policy:
    """One whose log-probs depend on what it reads."""
    made = policy_of("qwen3")
    with torch.no_grad():
        made.model.get_output_embeddings().weight.mul_(3)
    return made


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("stale", [True, False])
def test_a_group_with_the_reply_to_another_is_named(
    policy: Policy, tmp_path: Path, stale: bool, updates: int
) -> None:
    """Of a server that names no requests, as vLLM behind a proxy that sets X-Request-Id."""
    save_policy(policy, tmp_path / "model")
    proxy, came = Stale(), list[int]()
    with running(Stub(copied(policy), names_requests=False, spoil=proxy)) as stub:

        def ready() -> None:
            if stale and sum(b["n"] == 4 for b in stub.bodies) >= 6 and not came:
                proxy.armed = True  # in the second step
                came.append(1)

        stub.before = ready
        start(
            tmp_path / "run",
            model=str(tmp_path / "model"),
            algorithm="grpo",
            rollout={"sampler": {"url": [stub.url]}},
            train={"steps": 3, "lr": 1e-5, "updates_per_batch": updates},
            eval={"every": 0},
        )
        found = [e for e in read_stream(tmp_path / "run", "events.jsonl") if e["event"] == EVENT]
    assert len(found) == (1 if stale else 0)
    for event in found:
        assert event["step"] == 2
        assert event["servers"] == [stub.url]
        assert event["problem"].startswith("last_digit")
        assert event["nats"] > 1

"""Answers to other questions than were asked, and servers that only hang for a while."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from covey.errors import SamplersLost
from covey.models.policy import Policy
from covey.sampling import fleet
from covey.sampling.dialects import COVEY, ServerFault, check_request_id, new_request_id
from tests.conftest import policy_of
from tests.sampling.remote_samplers import PARAMS, asked, sampler, together
from tests.sampling.stale import Stale
from tests.sampling.stub import Stub, copied, running


@pytest.fixture
def policy() -> Policy:
    return policy_of("qwen3")


@pytest.mark.parametrize(("speaks", "size"), [("vllm", 3), ("sglang", 1)])
def test_a_reply_to_another_request_is_not_taken(
    policy: Policy, tmp_path: Path, speaks: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RETRY_SECONDS", 0.0)
    stale = Stale()
    with running(Stub(copied(policy), speaks, spoil=stale)) as stub:
        made = sampler(policy, [stub], tmp_path, patience=20.0)
        expected = together(list(made.sample(asked(8, size), PARAMS)))
        stale.armed = True
        found = together(list(made.sample(asked(8, size), PARAMS)))
        assert all((found[k] == v).all() for k, v in expected.items())
        assert "reply belongs to another request" in made.said[0]
        assert "is back" in made.said[1]


def test_covey_serve_always_says_which_request_it_answers() -> None:
    request_id = new_request_id()
    check_request_id(COVEY, {"id": request_id}, request_id)
    for other in ({"id": new_request_id()}, {"id": "covey-12"}, {}):
        with pytest.raises(ServerFault, match="another request"):
            check_request_id(COVEY, other, request_id)


def test_a_server_that_names_no_requests_takes_part(policy: Policy, tmp_path: Path) -> None:
    """As vLLM behind a proxy that sets X-Request-Id."""
    with running(Stub(copied(policy), names_requests=False)) as stub:
        made = sampler(policy, [stub], tmp_path)
        assert len(list(made.sample(asked(2), PARAMS))) == 6
        assert made.said == []


@pytest.mark.parametrize("times", [1, 2])
def test_a_server_that_hangs_past_its_time_and_answers_again_does_not_end_the_run(
    policy: Policy, tmp_path: Path, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RETRY_SECONDS", 0.3)
    with running(Stub(copied(policy))) as stub:
        made = sampler(policy, [stub], tmp_path, timeout=4.0, patience=0.0)
        expected = together(list(made.sample(asked(2), PARAMS)))
        hangs = iter([5.0] * times)
        stub.before = lambda: time.sleep(next(hangs, 0.0))
        found = together(list(made.sample(asked(2), PARAMS)))
        assert all((found[k] == v).all() for k, v in expected.items())
        assert "is back" in made.said[-1]


def test_a_server_that_hangs_for_good_ends_the_run(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RETRY_SECONDS", 0.1)
    release = threading.Event()
    with running(Stub(copied(policy))) as stub:
        made = sampler(policy, [stub], tmp_path, timeout=1.0, patience=0.0)
        list(made.sample(asked(1), PARAMS))
        stub.before = lambda: release.wait(30)
        with pytest.raises(SamplersLost, match="no whole reply within"):
            list(made.sample(asked(1), PARAMS))
        release.set()

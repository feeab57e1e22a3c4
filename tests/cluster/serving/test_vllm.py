"""Against a real vLLM server, where one is at hand.

VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --dtype float32 --served-model-name policy --port 8200
COVEY_TEST_VLLM=http://127.0.0.1:8200 COVEY_TEST_MODEL=MODEL pytest -m slow tests/cluster/serving/test_vllm.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from covey.config.load import load_config
from covey.config.sampling import Servers
from covey.errors import SamplersLost
from covey.models.load import load_policy
from covey.rng import key
from covey.sampling.base import Request, SamplingParams
from covey.sampling.remote import RemoteSampler
from tests.conftest import random_prompts
from tests.sampling.remote_samplers import Version, moved

URL, MODEL = os.environ.get("COVEY_TEST_VLLM", ""), os.environ.get("COVEY_TEST_MODEL", "")


@pytest.mark.slow
@pytest.mark.skipif(not (URL and MODEL), reason="no vLLM server: set COVEY_TEST_VLLM and COVEY_TEST_MODEL")
def test_a_fresh_server_agrees_and_one_that_kept_old_weights_is_found(tmp_path: Path) -> None:
    policy = load_policy(load_config(values={"model": MODEL}))
    prompts = [p % 200 + 10 for p in random_prompts(5, 9, 14)]
    servers = Servers(url=(URL,), patience=0.0)
    made = RemoteSampler(policy, servers, tmp_path, prompts, 1.0, 16)
    asked = [Request(p, [key(1, i, g) for g in range(4)]) for i, p in enumerate(prompts)]
    found = list(made.sample(asked, SamplingParams(12)))
    assert len(found) == 12
    assert all(len(x.completion.tokens) == len(x.completion.logprobs) for x in found)
    again = list(made.sample(asked, SamplingParams(12)))
    assert {(x.request, x.sample): x.completion.tokens.tolist() for x in found} == {
        (x.request, x.sample): x.completion.tokens.tolist() for x in again
    }, "a seed a group"
    moved(policy)
    made.sync(Version(1))
    try:
        assert len(list(made.sample(asked, SamplingParams(12)))) == 12
    except SamplersLost as error:
        assert "on average from version 1" in str(error), "on a CPU it keeps old weights and says nothing"

"""The SDK itself against a local Tinker, where it is installed; and bytes that it wrote, everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.models.policy import Policy
from covey.tinker.wire import read_data, read_fields, read_forward_backward
from tests.conftest import policy_of
from tests.tinker.client import serving

REQUEST = bytes.fromhex(
    "0a09733a747261696e3a3010ac021a88010a100a0e0a0c05000000060000002c01000012210a0a616476616e746167657312"
    "130a0c000000000000803f000080bf1801220103121f0a086c6f6770726f627312130a0c000000bf000080bf000000c01801"
    "22010312300a0d7461726765745f746f6b656e73121f0a1806000000000000002c0100000000000002000000000000001802"
    "2201031a97010a0c0a0a0a08070000000800000012260a0a616476616e746167657312180a100000803f0000000000000000"
    "0000803f18012202020212240a086c6f6770726f627312180a100000803f0000004000004040000080401801220202021239"
    "0a0d7461726765745f746f6b656e7312280a2003000000000000000000000000000000040000000000000009000000000000"
    "00180222020202220370706f2a1e0a13636c69705f686967685f7468726573686f6c6411000000000000f83f2a1d0a12636c"
    "69705f6c6f775f7468726573686f6c6411000000000000e03f30013a200a13636c69705f686967685f7468726573686f6c64"
    "120909000000000000f83f3a1f0a12636c69705f6c6f775f7468726573686f6c64120909000000000000e03f"
)
"""What tinker 0.38 sent for the two sequences of the test below."""


def test_a_request_that_the_sdk_wrote_is_read() -> None:
    assert read_forward_backward(REQUEST)[:2] == ("s:train:0", 300)
    found = read_data(read_fields(REQUEST))
    assert (found.loss_fn, found.forward_only) == ("ppo", True)
    assert found.config == {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    first, second = found.data
    assert first.tokens.tolist() == [5, 6, 300]
    assert {k: v.tolist() for k, v in first.inputs.items()} == {
        "target_tokens": [6, 300, 2],
        "logprobs": [-0.5, -1, -2],
        "advantages": [0, 1, -1],
    }
    assert second.inputs["target_tokens"].tolist() == [[3, 0], [4, 9]]
    assert second.inputs["advantages"].tolist() == [[1, 0], [0, 1]]


@pytest.fixture
def tinker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The SDK."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    return pytest.importorskip("tinker")


@pytest.fixture
def policy() -> Policy:
    return policy_of("qwen3")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its sockets
def test_the_sdk_trains_samples_and_resumes(tinker: Any, policy: Policy, tmp_path: Path) -> None:
    types = tinker.types
    ids = [7, 8, 9, 30, 31]
    logits = policy.model(torch.tensor([ids[:-1]])).logits[0]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].detach()
    prompt = types.ModelInput.from_ints(ids[:3])
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * 4},
    )
    with serving(policy, tmp_path) as url:
        service = tinker.ServiceClient(base_url=url)
        client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        assert client.get_info().lora_rank == 4
        config = client.holder._client_config  # so that a batch takes several requests at once
        client.holder._client_config = config.model_copy(update={"fwdbwd_max_chunk_len": 2})
        found = client.forward_backward([datum] * 5, "cross_entropy").result()
        for output in found.loss_fn_outputs:
            assert np.allclose(output["logprobs"].to_numpy(), expected, atol=1e-5)
        assert found.metrics["loss:sum"] == pytest.approx(-5 * float(expected.sum()), rel=1e-5)
        norm = client.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]

        def custom(data: Any, logprobs: Any) -> Any:
            return -sum(x.sum() for x in logprobs), {"mine": 1.0}

        ours = client.forward_backward_custom([datum] * 5, custom).result()
        assert (ours.metrics["mine"], ours.metrics["loss:sum"]) == (
            1.0,
            pytest.approx(found.metrics["loss:sum"]),
        )
        step = client.optim_step(types.AdamParams(learning_rate=0.1)).result()
        assert step.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        params = types.SamplingParams(max_tokens=5, seed=2)
        sampler = client.save_weights_and_get_sampling_client().result()
        answer = sampler.sample(prompt, 3, params, include_prompt_logprobs=True).result()
        assert len({s.sequence_id for s in answer.sequences}) == 3
        assert all(len(s.logprobs) == len(s.tokens) for s in answer.sequences)
        assert answer.prompt_logprobs[0] is None
        assert sampler.compute_logprobs(prompt).result() == answer.prompt_logprobs
        path = client.save_state("a").result().path
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        again = resumed.save_weights_and_get_sampling_client().result().sample(prompt, 3, params).result()
        assert [s.tokens for s in again.sequences] == [s.tokens for s in answer.sequences]
        with pytest.raises(tinker.RequestFailedError, match="Tinker has not published its formula"):
            client.forward_backward([datum], "stable_reinforce").result()
        with pytest.raises(tinker.BadRequestError, match="this server has tiny"):
            service.create_lora_training_client(base_model="other").result()
        rest = service._rest_client()
        assert [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints] == [path]
        assert rest.get_training_run_by_tinker_path(path).result().lora_rank == 4
        rest.delete_checkpoint_from_tinker_path(path).result()
        service.close("success").result()

"""Token ids that tokenizer or model does not know: never drawn, and refused before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.cli import main
from covey.config.schema import Train
from covey.learner.batching import collate
from covey.learner.learner import Learner
from covey.models.policy import Policy
from covey.models.tiny import build_model, build_tokenizer
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from covey.types import Group, Problem
from covey_verify.errors import ConfigError
from tests.models.padded import padded
from tests.training.runs import PAID, start


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "params", [SamplingParams(12), SamplingParams(12, top_p=0.9), SamplingParams(12, 0.0)]
)
def test_ids_without_a_token_are_not_drawn(params: SamplingParams, compiled: bool) -> None:
    policy = padded()
    if not compiled:
        policy.model.to(torch.float64)
        policy = Policy(policy.model, policy.tokenizer)
        assert policy.decoder is None or not policy.decoder.ops.compiled
    assert policy.drawable_ids == len(policy.tokenizer) < policy.embedded
    request = Request(np.array([5, 6]), list(range(32)))
    found = [s.completion for s in LocalSampler(policy).sample([request], params)]
    assert max(int(c.tokens.max()) for c in found) < policy.drawable_ids
    assert len({int(c.tokens[0]) for c in found}) > 20 or params.temperature == 0
    if params.temperature == 0:
        return
    batch = collate([Group(Problem("p", ""), request.prompt, tuple(found), np.arange(32.0))])
    outputs = Learner(policy, Train()).token_outputs(batch, 1.0)
    for row, completion in zip(outputs.logprobs.numpy(), found, strict=True):
        own = row[: len(completion.tokens)]
        if policy.bit_exact:
            assert np.array_equal(own, completion.logprobs), "the same distribution, bit for bit"
        assert np.allclose(own, completion.logprobs, atol=1e-5)
    most = np.log(policy.drawable_ids)
    assert float(outputs.entropy[batch.mask].max()) <= most + 1e-4, (
        "nothing is left for what stands for nothing"
    )


def test_a_run_of_a_padded_model_is_repeated_by_the_second_trainer(tmp_path: Path) -> None:
    policy = padded()
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    start(
        tmp_path / "run", model=str(tmp_path / "model"), algorithm="grpo",
        rewards=[{f"{PAID}:odd": {"verdict": True}}], train={"steps": 1, "lr": 1e-3, "save_every": 1},
        rollout={"group_size": 8, "prompts_per_step": 2, "max_tokens": 6},
    )  # fmt: skip
    logprobs = np.load(tmp_path / "run/rollouts/step_000001.npz")["logprobs"]
    assert logprobs.mean() > -np.log(policy.drawable_ids) - 0.2
    assert main(["check", str(tmp_path / "run"), "--steps", "1"]) == 0


@pytest.mark.parametrize(
    ("method", "row", "where"),
    [
        ("sft", {"prompt": "1+2=", "completion": "<final>3"}, "the answer"),
        ("sft", {"prompt": "1+2=<final>", "completion": "3"}, "the prompt"),
        ("dpo", {"prompt": "1+2=", "chosen": "3", "rejected": "<final>4"}, "the answer"),
        ("reward_model", {"prompt": "1+2=", "chosen": "3", "rejected": "<final>4"}, "the answer"),
    ],
)
def test_a_token_that_the_model_was_not_resized_for_is_refused(
    tmp_path: Path, method: str, row: dict[str, Any], where: str
) -> None:
    tokenizer = build_tokenizer(["1+2=3"], 300)
    build_model(tokenizer, 0, layers=1, hidden=32).save_pretrained(tmp_path / "model")
    tokenizer.add_tokens(["<final>"])
    tokenizer.save_pretrained(tmp_path / "model")
    (file := tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    data = {"task": None, "train": str(file), "test": None, "held_out": 0}
    settings = {"train": {"steps": 1, "batch_size": 2}, "rewards": (), "eval": {"every": 0}}
    with pytest.raises(ConfigError, match=rf"rows.jsonl:1: {where} has token \d+ \('<final>'\).*resize"):
        start(tmp_path / "run", model=str(tmp_path / "model"), method=method, data=data, **settings)

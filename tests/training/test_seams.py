"""Where parts of training meet: mistakes that strangers put there and that no other test had noticed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import CONFIGS, policy_of, sharpened
from tests.training.gradients import pairs
from tests.training.runs import metrics_of, start
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from covey.config.load import load_config
from covey.config.schema import Lora, Train
from covey.learner import learner as learner_module
from covey.learner.batching import MicroBatch, given_batch, micro_batches
from covey.learner.learner import Learner
from covey.models.load import with_lora
from covey.models.policy import Policy
from covey.models.reward_model import TrainedRewardModel
from covey.models.tiny import build_tokenizer
from covey.sampling.prompts import encode_examples
from covey.tasks.examples import Example
from covey.tasks.source import load_source
from covey.training.examples_loop import NegativeLogLikelihood
from covey.training.preference import mismatch_answers
from covey.training.reward_model import RewardObjective, encode_judged
from covey.types import Problem


@pytest.mark.parametrize(("rank", "alpha"), [(2, 6.0), (4, 1.0)])
def test_an_adapter_acts_by_alpha_over_rank(rank: int, alpha: float) -> None:
    policy = with_lora(
        sharpened(CONFIGS["qwen3"]),
        build_tokenizer(["1+2=3"] * 3, vocab_size=300),
        Lora(rank=rank, alpha=alpha, targets=("q_proj",)),
    )
    layer = policy.model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        b.normal_()
    before = layer.base_layer.weight.detach().clone()
    assert policy.adapter is not None
    merged = copy.deepcopy(policy.adapter).merge_and_unload()
    added = merged.model.layers[0].self_attn.q_proj.weight - before
    torch.testing.assert_close(added, alpha / rank * (b @ a), rtol=1e-4, atol=1e-5)


def test_a_piece_that_keeps_step_counts_equal_adds_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """With uneven pieces a process repeats one of another's, so that all make as many passes."""
    batch = given_batch(pairs((2, 3, 2), (3, 2, 4)))

    def gradient(extra: bool) -> list[torch.Tensor]:
        def pieces(*arguments: Any, **named: Any) -> Iterator[MicroBatch]:
            own = list(micro_batches(*arguments, **named))
            yield from own
            if extra:
                yield replace(own[0], repeated=True)

        monkeypatch.setattr(learner_module, "micro_batches", pieces)
        learner = Learner(policy_of("qwen3"), Train(tokens_per_micro_batch=8))
        seen = learner.forward_backward(batch, NegativeLogLikelihood())
        assert len(seen) > 1
        return [m.grad.clone() for m in learner.optimizer.masters if m.grad is not None]

    for one, other in zip(gradient(False), gradient(True), strict=True):
        assert torch.equal(one, other)


def test_both_outputs_of_a_two_output_judge_are_trained() -> None:
    """Its score is the difference of the two, so their rows get opposite gradients."""
    config = copy.deepcopy(CONFIGS["qwen3"])
    config.num_labels = 2
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    judge = TrainedRewardModel(model, build_tokenizer(["1+2=3"] * 3, vocab_size=300), "process_reward_model")
    example = Example("steps", Problem("p", "1+2="), ("1+2 is 3", "so 4"), (1.0, 0.0))
    learner = Learner(judge, Train())
    learner.forward_backward(given_batch(encode_judged(judge, [example])), RewardObjective(None))
    names = [name for name, _ in model.named_parameters()]
    (head,) = (n for n in names if "score" in n and n.endswith("weight"))
    gradient = learner.optimizer.masters[names.index(head)].grad
    assert gradient is not None and gradient.abs().max() > 0
    torch.testing.assert_close(gradient[0], -gradient[1])


def test_ktos_reference_point_is_the_mean_kl_of_answers_to_other_prompts(tmp_path: Path) -> None:
    """Of the policy as it is, from the model it began as: log pi - log ref, computed here by transformers."""
    file = tmp_path / "judged.jsonl"
    rows = [(f"{a}+{b}=", f"{a + b} so", (a + b) % 2 == 0) for a in range(1, 4) for b in range(1, 4)]
    file.write_text(
        "".join(
            f'{{"prompt": "{p}", "completion": "{c}", "label": {str(good).lower()}}}\n' for p, c, good in rows
        )
    )
    data = {"task": None, "train": str(file), "test": None, "held_out": 0}
    train = {"steps": 3, "lr": 3e-3, "batch_size": len(rows), "save_every": 1, "keep": 9}
    start(tmp_path / "run", method="kto", rewards=(), data=data, train=train, precision="float32")
    points = [m["preference/reference_point"] for m in metrics_of(tmp_path / "run")]
    assert points[0] == pytest.approx(0.0, abs=1e-4)
    folders = [tmp_path / "run/checkpoints" / f"step_{step:06d}" for step in (1, 2)]
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    first, second = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in folders)
    config = load_config(tmp_path / "run/config.yaml")
    examples = encode_examples(Policy(first, tokenizer), load_source(config).examples, config.config)
    others = mismatch_answers(examples, 2048)

    def total(model: Any) -> float:
        sums = []
        for example in others:
            ids = torch.from_numpy(np.concatenate([example.tokens, example.answers[0].tokens]))[None]
            with torch.no_grad():
                scores = model(input_ids=ids).logits[0, len(example.tokens) - 1 : -1].log_softmax(-1)
            sums.append(float(scores.gather(1, ids[0, len(example.tokens) :, None]).sum()))
        return float(np.mean(sums))

    # Both points are measured from the same first model, so their difference needs no copy of it.
    assert points[2] - points[1] == pytest.approx(total(second) - total(first), rel=1e-3, abs=1e-3)
    assert abs(points[2] - points[1]) > 0.01

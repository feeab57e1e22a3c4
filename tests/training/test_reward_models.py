"""Reward models: from pairs, judged answers and steps, saved as transformers' own, used as rewards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import policy_of
from tests.models.judged import judged
from tests.training.gradients import close, gradient_of
from tests.training.runs import StopAt, metrics_of, start
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from covey.config.schema import Train
from covey.errors import Stopped
from covey.learner.batching import given_batch
from covey.learner.learner import Learner
from covey.models.policy import Policy, save_policy
from covey.models.reward_model import TrainedRewardModel, conversation_ids, with_head
from covey.objective.axis_function import bind
from covey.objective.preference import bradley_terry
from covey.rewards.loading import load_rewards
from covey.rollouts.learned import LEARNED, reward_model_bytes
from covey.tasks.examples import Example
from covey.training.examples_loop import sum_of_parts
from covey.training.reward_model import RewardObjective, encode_judged
from covey.types import AnswerTokens, Problem, SampledTokens
from covey_verify.errors import ConfigError, CoveyError, DataError

PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5 5"}
JUDGED = {"prompt": "2+2=", "completion": "4", "label": True}
STEPS = {"prompt": "2+2=", "completions": ["2+2 is 4", "so 5"], "labels": [True, False]}


def pair(prompt: Any, chosen: Any, rejected: Any) -> Example:
    return Example("pair", Problem(f"{prompt}", prompt), (chosen, rejected), (1.0, 0.0))


PAIRS = [pair("1+2=", "3", "4 no"), pair("2+2=", "4, I think", "5"), pair("1+2+3=", "6", "7 7 7")]


def reward_model(name: str = "qwen3", kind: Any = "reward_model") -> TrainedRewardModel:
    """With a head that is not 0, so that mistakes show."""
    model = with_head(policy_of(name), kind)
    torch.manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.model.named_parameters():
            if not key.startswith(model.model.base_model_prefix):
                parameter.normal_()
    return model


def step_of(
    model: Policy, examples: list[Example], loss: Any, micro_tokens: int = 8192
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    learner = Learner(model, Train(tokens_per_micro_batch=micro_tokens))
    batch = given_batch(encode_judged(model, examples))
    seen = sum_of_parts(learner.forward_backward(batch, RewardObjective(loss)))
    named = zip(dict(model.model.named_parameters()), learner.optimizer.masters, strict=True)
    gradient = {n: torch.zeros_like(m) if m.grad is None else m.grad.clone() for n, m in named}
    learner.clear()
    return seen, gradient


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_pair_is_worth_what_transformers_model_says_of_both_texts(name: str) -> None:
    model = reward_model(name)
    seen, gradient = step_of(model, PAIRS, bind(bradley_terry, center=0.01))
    texts = [conversation_ids(model.tokenizer, e.problem.prompt, a, {}) for e in PAIRS for a in e.answers]
    scores = torch.stack([model.model(torch.tensor([ids])).logits[0, 0] for ids in texts])
    chosen, rejected = scores[0::2], scores[1::2]
    loss = (-(chosen - rejected).sigmoid().log() + 0.01 * (chosen + rejected) ** 2).mean()
    assert seen["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert seen["reward_model/accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert seen["reward_model/margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-3)
    close(gradient, gradient_of(loss, model.model), within=1e-4)
    alone = step_of(model, PAIRS, bind(bradley_terry, center=0.01), micro_tokens=1)
    assert alone[0] == pytest.approx(seen, rel=1e-4)
    close(alone[1], gradient, within=1e-4)


@pytest.mark.slow
def test_loss_and_gradient_are_those_of_trls_reward_trainer(tmp_path: Path) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from trl.trainer.reward_trainer import DataCollatorForPreference

    model = reward_model()
    rows = datasets.Dataset.from_list([{"chosen": "1+2=3", "rejected": "1+2=4"}] * 3)
    args = trl.RewardConfig(
        output_dir=str(tmp_path),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        center_rewards_coefficient=0.01,
    )
    trainer = trl.RewardTrainer(
        model=model.model, args=args, train_dataset=rows, processing_class=model.tokenizer
    )
    ids = [[conversation_ids(model.tokenizer, e.problem.prompt, a, {}) for a in e.answers] for e in PAIRS]
    inputs = DataCollatorForPreference(pad_token_id=model.tokenizer.pad_token_id)(
        [{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in ids]
    )
    expected = trainer.compute_loss(trainer.model, inputs)
    seen, gradient = step_of(model, PAIRS, bind(bradley_terry, center=0.01))
    assert seen["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    close(gradient, gradient_of(expected, trainer.model), within=1e-5)


def test_a_pair_that_a_policy_sampled_is_read_as_it_will_be_judged() -> None:
    """By its text: the policy may have another vocabulary, or split the text as nobody else does."""
    model = reward_model()
    (plain,) = encode_judged(model, PAIRS[:1])
    tokens = {"chosen": AnswerTokens((9,), (True,)), "rejected": AnswerTokens((8, 7), (True, True))}
    problem = replace(PAIRS[0].problem, sampled_tokens=SampledTokens("another", (5, 6), tokens))
    sampled = replace(PAIRS[0], problem=problem, sampled_tokens=tuple(tokens.values()))
    (encoded,) = encode_judged(model, [sampled])
    assert encoded.tokens.tolist() == plain.tokens.tolist()
    assert [a.tokens.tolist() for a in encoded.answers] == [a.tokens.tolist() for a in plain.answers]


def test_a_process_head_is_asked_at_the_end_of_each_step() -> None:
    model = reward_model(kind="process_reward_model")
    examples = [
        Example("steps", Problem("a", "2+2="), ("2+2 is 4", "so 5"), (1.0, 0.0)),
        Example("steps", Problem("b", "3="), ("3",), (1.0,)),
    ]
    seen, _ = step_of(model, examples, None)
    losses = []
    for e in examples:
        ids = model.tokenizer.encode(e.problem.prompt)
        for step, label in zip(e.answers, e.labels, strict=True):
            ids = [*ids, *model.tokenizer.encode(step), *model.tokenizer.encode("\n")]
            logit = model.model(torch.tensor([ids])).logits[0, -1, 0]
            losses.append(-torch.nn.functional.logsigmoid(logit if label else -logit))
    assert seen["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)


def trained(tmp_path: Path, rows: list[dict[str, Any]], name: str = "run", **settings: Any) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "method": "reward_model",
        "rewards": (),
        "data": {"task": None, "train": tmp_path / "rows.jsonl", "test": None, "held_out": 0.25},
        "train": {"steps": 6, "lr": 3e-3, "batch_size": 4, "save_every": 2},
        "eval": {"every": 3},
    }
    start(tmp_path / name, **{**values, **settings})
    return tmp_path / name


@pytest.mark.parametrize(
    ("template", "says"),
    [("{{ raise_exception('no system') }}", r"rows.jsonl:1: .*no system"), (None, "no chat")],
)
@pytest.mark.parametrize("given", [{"chosen": "2", "rejected": "3"}, {"completions": ["2"], "labels": [1]}])
def test_a_chat_that_the_template_refuses_is_named(
    tmp_path: Path, template: str | None, says: str, given: dict[str, Any]
) -> None:
    policy = policy_of("qwen3")
    policy.tokenizer.chat_template = template
    save_policy(policy, tmp_path / "model")
    row = {"prompt": [{"role": "system", "content": "1"}, {"role": "user", "content": "1+1="}], **given}
    other = {**row, "labels": [0]} if "labels" in row else row
    with pytest.raises(CoveyError, match=says):
        trained(tmp_path, [row, other], model=str(tmp_path / "model"), eval={"every": 0})


def pair_rows() -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": f"no {n}"} for n in range(12)]


def test_a_reward_model_learns_pairs_and_says_the_same_as_a_reward(tmp_path: Path) -> None:
    run = trained(tmp_path, pair_rows())
    metrics = metrics_of(run)
    assert metrics[0]["reward_model/accuracy"] == 0  # the head begins at 0: no text is above another
    assert metrics[-1]["held_out/reward_model/accuracy"] > 0.9
    final = AutoModelForSequenceClassification.from_pretrained(run / "final")
    (run / "final").rename(tmp_path / "judge")
    group = judged(tmp_path, "reward_model", ["2", "no 1"], "1+1=")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "judge")
    for text, value in zip(["2", "no 1"], group.rewards, strict=True):
        ids = conversation_ids(tokenizer, "1+1=", text, {})
        assert value == pytest.approx(final(torch.tensor([ids])).logits.item(), abs=1e-4)
    assert group.rewards[0] > group.rewards[1]


def test_a_reward_model_is_trained_where_the_policy_of_its_pipeline_has_tools(tmp_path: Path) -> None:
    data = {"task": None, "train": tmp_path / "rows.jsonl", "test": None, "chat": True, "held_out": 0.25}
    run = trained(tmp_path, pair_rows(), data=data, rollout={"tools": ["calculate"]})
    assert metrics_of(run)[-1]["held_out/reward_model/accuracy"] > 0.9


def test_a_chat_that_ends_with_the_padding_is_read_where_the_reward_reads_it(tmp_path: Path) -> None:
    """Many tokenizers pad with what ends a message: transformers' head reads the token before that."""
    policy = policy_of("qwen3")
    policy.tokenizer.pad_token = policy.tokenizer.eos_token
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    )
    save_policy(policy, tmp_path / "padded")
    ask = [{"role": "user", "content": "1+1="}]
    rows = [
        {"prompt": ask, **{k: [{"role": "assistant", "content": text}] for k, text in said.items()}}
        for said in ({"chosen": f"{n}", "rejected": f"no {n}"} for n in range(4))
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"task": None, "train": tmp_path / "rows.jsonl", "test": tmp_path / "test.jsonl"}
    run = trained(tmp_path, rows, model=str(tmp_path / "padded"), data=data)
    (run / "final").rename(tmp_path / "judge")
    chosen, rejected = (
        judged(tmp_path, "reward_model", [row[k][0]["content"] for row in rows], ask).rewards
        for k in ("chosen", "rejected")
    )
    margin = metrics_of(run)[-1]["held_out/reward_model/margin"]
    assert (chosen - rejected).mean() == pytest.approx(margin, rel=1e-3)
    assert margin > 0.1


def test_a_reward_model_is_in_the_forecast_and_measured(tmp_path: Path) -> None:
    final = trained(tmp_path, pair_rows(), train={"steps": 1, "lr": 1e-3, "batch_size": 4}) / "final"
    judge = {"reward_model": {"model": str(final)}}
    start(tmp_path / "rl", rewards=(judge,), train={"steps": 1})
    weights = 4 * sum(w.numel() for w in load_file(final / "model.safetensors").values())
    roles = json.loads((tmp_path / "rl/env.json").read_text())["memory"]
    assert roles["reward models"] == weights
    (lap,) = [json.loads(line) for line in (tmp_path / "rl/timings.jsonl").read_text().splitlines()]
    assert lap["memory/reward_models_mib"] == pytest.approx(weights / 2**20, abs=1e-3)
    twice = (judge, {"reward_model": {"model": str(final), "name": "again", "weight": 0.0, "verdict": True}})
    assert reward_model_bytes(load_rewards(twice, tmp_path, learned=LEARNED)) == weights  # one model


@pytest.mark.parametrize("kind", ["judged", "steps"])
def test_heads_of_labels_and_of_steps(tmp_path: Path, kind: str) -> None:
    rows = {
        "judged": [
            {"prompt": f"{n}=", "completion": "yes" if n % 2 else "no", "label": bool(n % 2)}
            for n in range(12)
        ],
        "steps": [
            {"prompt": f"{n}=", "completions": ["yes", "no", "yes"], "labels": [1, 0, 1]} for n in range(12)
        ],
    }[kind]
    run = trained(tmp_path, rows, train={"steps": 20, "lr": 3e-3, "batch_size": 8}, eval={})
    assert metrics_of(run)[-1]["held_out/reward_model/accuracy"] > 0.9
    loader = {"judged": AutoModelForSequenceClassification, "steps": AutoModelForTokenClassification}[kind]
    _, found = loader.from_pretrained(run / "final", output_loading_info=True)
    assert not any(found[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    (run / "final").rename(tmp_path / "judge")
    if kind == "steps":
        group = judged(tmp_path, "process_reward_model", ["yes\n\nno\n\nyes"], "3=", split_by="paragraphs")
        assert np.sign(next(iter(group.components.values())).steps[0].values).tolist() == [1, -1, 1]


def test_held_out_steps_count_alike_however_many_a_row_has(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}=", "completions": ["yes", "no"], "labels": [1, 0]} for n in range(4)]
    held_out = [
        {"prompt": "5=", "completions": ["no"], "labels": [0]},
        {"prompt": "6=", "completions": ["yes", "yes", "no", "yes"], "labels": [1, 1, 0, 1]},
    ]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    data = {"task": None, "train": tmp_path / "rows.jsonl", "test": tmp_path / "held_out.jsonl"}
    # At a rate of 0 the head stays 0, which says incorrect of every step: of two of five that is right.
    run = trained(tmp_path, rows, data=data, train={"steps": 1, "lr": 0.0, "batch_size": 1})
    assert metrics_of(run)[-1]["held_out/reward_model/accuracy"] == pytest.approx(2 / 5)
    assert metrics_of(run)[-1]["held_out/reward_model/good"] == pytest.approx(3 / 5)
    # The steps of one answer depend on one another: 1 + 4 count as 25 / 17 steps, whose interval is wide.
    says = "Of 5 held-out steps judged as they are labelled (of 2 prompts): 40 % [5, 90]"
    assert says in (run / "final/README.md").read_text()


def test_answers_to_one_prompt_are_one_trial_of_the_interval(tmp_path: Path) -> None:
    def rows(prompt: str, labels: list[bool]) -> list[dict[str, Any]]:
        return [{"prompt": prompt, "completion": f"{n}", "label": good} for n, good in enumerate(labels)]

    held_out = [*rows("5=", [False] * 4), *rows("6=", [True] * 4)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    data = {"task": None, "train": tmp_path / "rows.jsonl", "test": tmp_path / "held_out.jsonl"}
    # At a rate of 0 the head says bad of every answer: all four to one prompt, and none to the other.
    run = trained(tmp_path, rows("4=", [True, False]), data=data, train={"steps": 1, "lr": 0.0})
    says = "Of 8 held-out answers judged as they are labelled (of 2 prompts): 50 % [9, 91]"
    assert says in (run / "final/README.md").read_text()  # 8 answers alone would give [22, 78]


def test_a_stopped_run_ends_with_the_same_bits_and_continues_later(tmp_path: Path) -> None:
    whole = trained(tmp_path, pair_rows(), "whole")
    for at in (2, 3):
        with pytest.raises(Stopped):
            values = {
                "train": {"steps": 6, "lr": 3e-3, "batch_size": 4, "save_every": 2},
                "eval": {"every": 3},
            }
            start(
                tmp_path / "parts",
                StopAt(at),
                method="reward_model",
                rewards=(),
                data={"task": None, "train": tmp_path / "rows.jsonl", "test": None, "held_out": 0.25},
                **values,
            )
    parts = trained(tmp_path, pair_rows(), "parts")
    assert (whole / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    one, other = (load_file(f / "final/model.safetensors") for f in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)
    refreshed = trained(tmp_path, pair_rows(), "refreshed", model=str(whole / "final"))
    assert metrics_of(refreshed)[0]["reward_model/accuracy"] > 0.9


def test_what_a_reward_model_cannot_be(tmp_path: Path) -> None:
    run = trained(tmp_path, pair_rows())
    steps = [STEPS | {"prompt": f"{n}+2="} for n in range(8)]
    with pytest.raises(
        ConfigError, match=r"a head that judges whole answers., but this needs a head that judges steps"
    ):
        trained(tmp_path, steps, "steps", model=str(run / "final"))
    of_steps = trained(tmp_path, steps, "of steps", eval={})
    with pytest.raises(
        ConfigError, match=r"a head that judges steps., but this needs a head that judges whole answers"
    ):
        trained(tmp_path, pair_rows(), "pairs", model=str(of_steps / "final"))
    of_steps.joinpath("final").rename(tmp_path / "of steps" / "judge")
    save_policy(policy_of("qwen3"), tmp_path / "writes" / "judge")
    save_policy(policy_of("qwen3"), tmp_path / "short")
    for name, has in (("of steps", "judges steps"), ("writes", "writes and judges nothing")):
        with pytest.raises(ConfigError, match=rf"{has}., but this needs a head that judges whole answers"):
            judged(tmp_path / name, "reward_model", ["2"], "1+1=")
    with pytest.raises(DataError, match=r"completions \(its steps\).*must have one kind"):
        trained(tmp_path, [PAIR, STEPS], "both")
    with pytest.raises(ConfigError, match="remove lora"):
        trained(tmp_path, pair_rows(), "lora", lora={"rank": 2})
    with pytest.raises(ConfigError, match="is a reward model, which cannot generate"):
        start(tmp_path / "rl", model=str(run / "final"))
    with pytest.raises(DataError, match=r"jsonl:2: \d+ tokens exceed the model's context of 128"):
        trained(
            tmp_path, [PAIR, {**PAIR, "chosen": "x y " * 99}], "long", model=str(tmp_path / "short"), eval={}
        )

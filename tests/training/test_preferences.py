"""Learning from preferences: the losses of whole models beside TRL's trainers, files, runs that resume."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import CONFIGS, full_tokenizer, sharpened
from tests.training.gradients import close, gradient_of, pairs
from tests.training.runs import StopAt, metrics_of, start
from torch import Tensor

from covey.cli import main
from covey.config.load import load_config
from covey.config.schema import Data, Train
from covey.errors import CheckpointError, GuardStop, Stopped
from covey.learner.batching import Batch, given_batch
from covey.learner.learner import Learner
from covey.models.policy import Policy
from covey.objective.axis_function import bind
from covey.objective.preference import PREFERENCES
from covey.runs.folder import INEXACT, RunFolder
from covey.runs.references import REFERENCE
from covey.sampling.prompts import EncodedProblem, GivenAnswer, encode_examples
from covey.tasks.examples import examples_of, with_prompt
from covey.training.examples_loop import sum_of_parts
from covey.training.preference import (
    PreferenceObjective,
    mismatch_answers,
    unpaired_notes,
    with_prompt_trained,
)
from covey.types import Problem
from covey_verify.errors import ConfigError, DataError

PAIRED = [m for m in PREFERENCES if m not in ("kto", "apo_zero_unpaired")]


def policies() -> tuple[Policy, Policy]:
    """A policy, and the reference that it has moved away from."""
    reference = sharpened(CONFIGS["qwen3"])
    model = copy.deepcopy(reference)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    tokenizer = full_tokenizer()
    return Policy(model, tokenizer), Policy(reference, tokenizer)


RAGGED = ((3, 4, 2), (1, 1, 5), (6, 3, 3))


def log_probs(model: torch.nn.Module, prompt: np.ndarray, answer: np.ndarray) -> Tensor:
    """Of the answer's tokens, by the model's own forward."""
    ids = torch.from_numpy(np.concatenate([prompt, answer]))[None]
    scores = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return scores.gather(1, ids[0, len(prompt) :, None])[:, 0]


def with_reference(examples: list[EncodedProblem], reference: Policy) -> tuple[Batch, Tensor]:
    """The batch of these examples, and the log-prob of each answer under a reference."""
    rows = [(e.tokens, a.tokens) for e in examples for a in e.answers]
    with torch.no_grad():
        sums = torch.stack([log_probs(reference.model, *row).sum() for row in rows])
    return given_batch(examples), sums


def ours(
    method: str,
    policy: Policy,
    batch: Batch,
    reference: Tensor | None = None,
    micro_tokens: int = 8192,
    point: float = 0.0,
    **settings: Any,
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Loss, gradient by parameter and metrics of a step."""
    learner = Learner(policy, Train(tokens_per_micro_batch=micro_tokens))
    tokens = float(batch.mask[0::2].sum()) / batch.totals(1).prompts
    objective = PreferenceObjective(bind(PREFERENCES[method], **settings), reference, point, tokens)
    seen = sum_of_parts(learner.forward_backward(batch, objective))
    names = [n for n, p in policy.model.named_parameters() if p.requires_grad]
    gradient = {n: m.grad.clone() for n, m in zip(names, learner.optimizer.masters, strict=True)}
    learner.clear()
    return seen["loss"], gradient, seen


@pytest.mark.parametrize("method", PAIRED)
def test_any_split_into_micro_batches_is_the_same_step(method: str) -> None:
    policy, reference = policies()
    examples = pairs(*RAGGED)
    whole = [with_prompt_trained(e) for e in examples] if method == "orpo" else examples
    batch, known = with_reference(whole, reference)
    loss, gradient, seen = ours(method, policy, batch, known)
    for tokens in (1, 20):
        other = ours(method, policy, batch, known, tokens)
        assert other[0] == pytest.approx(loss, rel=1e-5)
        assert other[2] == pytest.approx(seen, rel=1e-4, abs=1e-6)
        close(gradient, other[1])
    rows = [(e.tokens, a.tokens) for e in examples for a in e.answers]
    sums = torch.stack([log_probs(policy.model, *row).sum() for row in rows]).detach()
    lengths = torch.tensor([len(a) for _, a in rows])
    score = sums / lengths if method in ("orpo", "simpo") else sums - known
    if method not in ("orpo", "simpo"):
        assert seen["preference/margin"] == pytest.approx(float((score[0::2] - score[1::2]).mean()), rel=1e-3)
    assert seen["preference/accuracy"] == pytest.approx(float((score[0::2] > score[1::2]).float().mean()))


def test_the_reference_point_is_that_of_prompts_with_other_answers() -> None:
    examples = [EncodedProblem(e.problem, e.tokens, e.answers[:1], (1.0,)) for e in pairs(*RAGGED)]
    found = mismatch_answers(examples, 99)
    assert [f.problem.id for f in found] == ["p0", "p1", "p2"]
    assert [f.answers[0].tokens.tolist() for f in found] == [
        examples[n - 1].answers[0].tokens.tolist() for n in range(3)
    ]
    # Two answers to one prompt, as a pair leaves them: the one before both belongs to another prompt.
    again = mismatch_answers([examples[0], examples[1], replace(examples[1], labels=(0.0,))], 5)
    assert all(np.array_equal(again[n].answers[0].tokens, examples[0].answers[0].tokens) for n in (1, 2))
    assert len(again[0].answers[0].tokens) == 1  # 3 + 1 tokens; of 5 the prompt leaves 2
    assert [len(f.answers[0].tokens) for f in mismatch_answers(examples, 4)] == [1, 3, 1]


def test_answers_are_on_their_side_of_the_point_that_the_loss_takes() -> None:
    """Kullback and Leibler's is never negative, what is estimated of it may be: the loss takes 0 then."""
    made = PreferenceObjective(bind(PREFERENCES["kto"]), reference_point=-2.0)
    seen = made._metrics(torch.tensor([-1.0, 1.0]), torch.tensor([True, True]), 2)
    assert seen["preference/accuracy"] == 0.5


PLAIN = {"beta": 0.3}
ALPHA = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3}
TRL: list[tuple[str, list[str], dict[str, Any], dict[str, Any]]] = [
    ("dpo", ["sigmoid"], PLAIN, PLAIN),
    ("robust_dpo", ["robust"], {"beta": 0.3, "label_smoothing": 0.1}, {"beta": 0.3, "label_smoothing": 0.1}),
    ("hinge", ["hinge"], PLAIN, PLAIN),
    ("ipo", ["ipo"], {"beta": 0.3}, {"tau": 0.3}),
    ("exo", ["exo_pair"], {"beta": 0.3, "label_smoothing": 0.1}, {"beta": 0.3, "label_smoothing": 0.1}),
    ("nca", ["nca_pair"], PLAIN, PLAIN),
    ("bco", ["bco_pair"], PLAIN, PLAIN),
    ("sppo", ["sppo_hard"], PLAIN, PLAIN),
    ("apo_zero", ["apo_zero"], PLAIN, PLAIN),
    ("apo_down", ["apo_down"], PLAIN, PLAIN),
    ("discopop", ["discopop"], {"beta": 0.3, "discopop_tau": 0.2}, {"beta": 0.3, "tau": 0.2}),
    ("ln_dpo", ["sigmoid_norm"], PLAIN, PLAIN),
    ("dpo", ["sigmoid"], {**PLAIN, "f_divergence_type": "forward_kl"}, {**PLAIN, "divergence": "forward_kl"}),
    (
        "dpo",
        ["sigmoid"],
        {**PLAIN, "f_divergence_type": "js_divergence"},
        {**PLAIN, "divergence": "jensen_shannon"},
    ),
    ("dpo", ["sigmoid"], {**PLAIN, **ALPHA}, {**PLAIN, "divergence": "alpha", "alpha": 0.3}),
    ("mpo", ["sigmoid", "bco_pair", "sft"], {**PLAIN, "loss_weights": [0.8, 0.2, 1.0]}, PLAIN),
]


def trl_inputs(examples: list[EncodedProblem]) -> dict[str, Tensor]:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    rows = [
        {
            "prompt_ids": e.tokens.tolist(),
            "chosen_ids": e.answers[0].tokens.tolist(),
            "rejected_ids": e.answers[1].tokens.tolist(),
        }
        for e in examples
    ]
    return DataCollatorForPreference(pad_token_id=0)(rows)


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_trls_dpo_trainer(tmp_path: Path) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    policy, reference = policies()
    examples = pairs(*RAGGED)
    rows = datasets.Dataset.from_list([{"prompt": "1+2=", "chosen": "3", "rejected": "4"}] * 3)
    for method, loss_types, theirs, settings in TRL:
        trainer = trl.DPOTrainer(
            model=copy.deepcopy(policy.model),
            ref_model=copy.deepcopy(reference.model),
            args=trl.DPOConfig(
                output_dir=str(tmp_path),
                loss_type=loss_types,
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_dropout=True,
                **theirs,
            ),
            train_dataset=rows,
            processing_class=policy.tokenizer,
        )
        expected = trainer._compute_loss(trainer.model, trl_inputs(examples), return_outputs=False)
        loss, gradient, seen = ours(method, policy, *with_reference(examples, reference), **settings)
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6), method
        close(gradient, gradient_of(expected, trainer.model))
        mode = "train" if trainer.model.training else "eval"
        logged = {k: v[-1] for k, v in trainer._metrics[mode].items() if k.startswith("rewards/")}
        assert seen["preference/margin"] * theirs["beta"] == pytest.approx(
            logged["rewards/margins"], rel=1e-4
        )
        assert seen["preference/accuracy"] == pytest.approx(logged["rewards/accuracies"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
@pytest.mark.parametrize("method", ["simpo", "orpo"])
def test_losses_and_gradients_are_those_of_trls_trainers_without_a_reference(
    tmp_path: Path, method: str
) -> None:
    datasets = pytest.importorskip("datasets")
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    policy, _ = policies()
    examples = pairs(*RAGGED)
    theirs, settings = {
        "simpo": (
            {"loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.0, "beta": 1.5},
            {"beta": 1.5, "gamma": 0.7},
        ),
        "orpo": ({"beta": 0.4}, {"lam": 0.4}),
    }[method]
    config, kind = {"simpo": (CPOConfig, CPOTrainer), "orpo": (ORPOConfig, ORPOTrainer)}[method]
    trainer = kind(
        model=copy.deepcopy(policy.model),
        args=config(
            output_dir=str(tmp_path),
            report_to=[],
            use_cpu=True,
            bf16=False,
            max_length=64,
            gradient_checkpointing=False,
            remove_unused_columns=False,
            **theirs,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "1+2=", "chosen": "3", "rejected": "4"}] * 3),
        processing_class=policy.tokenizer,
    )
    rows = []
    for e in examples:
        row: dict[str, Any] = {
            "prompt_input_ids": e.tokens.tolist(),
            "prompt_attention_mask": [1] * len(e.tokens),
        }
        for who, answer in zip(("chosen", "rejected"), e.answers, strict=True):
            ids = [*e.tokens.tolist(), *answer.tokens.tolist()]
            row |= {
                f"{who}_input_ids": ids,
                f"{who}_attention_mask": [1] * len(ids),
                f"{who}_labels": [-100] * len(e.tokens) + answer.tokens.tolist(),
            }
        rows.append(row)
    expected, _ = trainer.get_batch_loss_metrics(trainer.model, trainer.data_collator(rows))
    whole = [with_prompt_trained(e) for e in examples] if method == "orpo" else examples
    loss, gradient, _ = ours(method, policy, given_batch(whole), **settings)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    close(gradient, gradient_of(expected, trainer.model))


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_trls_kto_trainer(tmp_path: Path) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    policy, reference = policies()
    given = [
        EncodedProblem(e.problem, e.tokens, e.answers[:1], (float(n != 1),))
        for n, e in enumerate(pairs((3, 4, 2), (1, 5, 5), (6, 3, 3), (2, 6, 1)))
    ]
    rows = datasets.Dataset.from_list(
        [{"prompt": "1+2=", "completion": "3", "label": bool(n % 2)} for n in range(4)]
    )
    settings = {"beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.5}
    trainer = trl.KTOTrainer(
        model=copy.deepcopy(policy.model),
        ref_model=copy.deepcopy(reference.model),
        args=trl.KTOConfig(
            output_dir=str(tmp_path),
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=4,
            **settings,
        ),
        train_dataset=rows,
        processing_class=policy.tokenizer,
    )
    others = mismatch_answers(given, 128)
    inputs = DataCollatorForUnpairedPreference(pad_token_id=0)(
        [
            {
                "prompt_ids": e.tokens.tolist(),
                "completion_ids": e.answers[0].tokens.tolist(),
                "KL_completion_ids": other.answers[0].tokens.tolist(),
                "label": e.labels[0] > 0,
            }
            for e, other in zip(given, others, strict=True)
        ]
    )
    expected = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    batch, known = with_reference(others, reference)
    learner = Learner(policy, Train())
    point = ((learner.token_outputs(batch, 1.0).logprobs * batch.mask).sum(-1) - known).mean()
    loss, gradient, _ = ours("kto", policy, *with_reference(given, reference), point=float(point), **settings)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    close(gradient, gradient_of(expected, trainer.model))


def rows_of(path: Path, count: int = 12) -> Path:
    """Sums with a correct and an incorrect answer."""
    rows = [
        {"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n + 2 + n % 3), "answer": str(n + 1)}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(tmp_path: Path, name: str, method: str, **settings: Any) -> Path:
    data = {"task": None, "train": rows_of(tmp_path / "pairs.jsonl"), "test": None, "held_out": 0.25}
    train = {"steps": 4, "lr": 1e-3, "batch_size": 4, "save_every": 2}
    values = {"method": method, "rewards": (), "data": data, "train": train, "eval": {"every": 2}, **settings}
    start(tmp_path / name, **values)
    return tmp_path / name


def test_a_loss_without_a_gradient_is_named_not_the_groups_that_there_are_none_of(tmp_path: Path) -> None:
    data = {"task": None, "train": rows_of(tmp_path / "pairs.jsonl"), "test": None, "held_out": 0}
    loss = {"desirable_weight": 0, "undesirable_weight": 0}
    with pytest.raises(GuardStop, match=r"a single weight. Every gradient was 0; check the settings of `l"):
        start(tmp_path / "run", method="kto", loss=loss, data=data, train={"steps": 1}, rewards=())


@pytest.mark.parametrize("method", ["dpo", "robust_dpo"])
def test_pairs_half_of_which_are_the_wrong_way_round_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=r"loss.label_smoothing: 0.5: .* less than 0.5"):
        load_config(values={"method": method, "loss": {"label_smoothing": 0.5}})


@pytest.mark.parametrize("method", list(PREFERENCES))
def test_every_method_trains_and_measures_held_out_pairs(tmp_path: Path, method: str) -> None:
    metrics = metrics_of(run(tmp_path, "run", method))
    assert all(np.isfinite(m["loss"]) and m["optimizer/grad_norm"] > 0 for m in metrics)
    assert ["held_out/preference/accuracy" in m for m in metrics] == [False, True, False, True]
    assert (tmp_path / "run" / REFERENCE).exists() == (method not in ("orpo", "simpo"))
    # What is chosen gains on what is rejected. DiscoPOP first descends to a negative margin.
    if method in PAIRED and method != "discopop":
        assert metrics[-1]["preference/margin"] > metrics[0]["preference/margin"]


@pytest.mark.parametrize("method", ["dpo", "kto", "simpo"])
def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path: Path, method: str) -> None:
    whole = run(tmp_path, "whole", method)
    data = {"task": None, "train": tmp_path / "pairs.jsonl", "test": None, "held_out": 0.25}
    train = {"steps": 4, "lr": 1e-3, "batch_size": 4, "save_every": 2}
    values = {"method": method, "rewards": (), "data": data, "train": train, "eval": {"every": 2}}
    for at in (1, 3, 2):  # while the reference is scored, and between steps
        with pytest.raises(Stopped):
            start(tmp_path / "parts", StopAt(at), **values)
    start(tmp_path / "parts", **values)
    assert (whole / "metrics.jsonl").read_bytes() == (tmp_path / "parts/metrics.jsonl").read_bytes()
    one, other = (load_file(f / "final/model.safetensors") for f in (whole, tmp_path / "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("method", ["dpo", "kto", "simpo"])
def test_adapters_learn_preferences_against_the_model_they_began_on(tmp_path: Path, method: str) -> None:
    data = {"task": None, "train": rows_of(tmp_path / "pairs.jsonl"), "test": None, "held_out": 0.25}
    values = {
        "method": method, "rewards": (), "data": data, "lora": {"rank": 2}, "eval": {"every": 2},
        "train": {"steps": 4, "lr": 1e-2, "batch_size": 4, "save_every": 2},
    }  # fmt: skip
    start(tmp_path / "whole", **values)
    with pytest.raises(Stopped):
        start(tmp_path / "parts", StopAt(3), **values)
    start(tmp_path / "parts", **values)
    whole, parts = (tmp_path / name / "final" for name in ("whole", "parts"))
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (whole / file).read_bytes() == (parts / file).read_bytes()
    metrics = metrics_of(tmp_path / "whole")
    if method == "dpo":
        assert metrics[0]["preference/margin"] == 0  # adapters begin at nothing: policy and reference are one
    assert abs(metrics[-1].get("preference/margin", 1.0)) > 0
    last = json.loads((tmp_path / "whole/timings.jsonl").read_text().splitlines()[-1])
    assert last["memory/gradient_mib"] < 0.2 * last["memory/weights_mib"]  # of the adapters alone
    assert last["memory/reference_mib"] == 0  # its log-probs are kept, not its weights
    roles = json.loads((tmp_path / "whole/env.json").read_text())["memory"]
    # The forecast has what is there at the peak, which may be without a gradient.
    assert roles["gradient"] <= 1.02 * last["memory/gradient_mib"] * 2**20


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def test_what_the_reference_said_is_computed_anew_from_the_first_model(tmp_path: Path) -> None:
    """Damaged, or gone: the run ends with the same bits. Not from another model than it began with."""
    data = {"task": None, "train": rows_of(tmp_path / "pairs.jsonl"), "test": None}
    train = {"steps": 4, "lr": 1e-3, "batch_size": 4, "save_every": 1}
    values = {"method": "dpo", "rewards": (), "data": data, "train": train}
    counter = StopAt()
    start(tmp_path / "count", counter, **values)
    with pytest.raises(Stopped):
        start(tmp_path / "run", StopAt(counter.checks * 2 // 3), **values)
    for name, harm in (("whole", None), ("flipped", flipped), ("gone", Path.unlink)):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        if harm is not None:
            harm(tmp_path / name / REFERENCE)
        start(tmp_path / name, **values)
    weights = [(tmp_path / n / "final/model.safetensors").read_bytes() for n in ("whole", "flipped", "gone")]
    assert weights[0] == weights[1] == weights[2]
    folder = RunFolder(tmp_path / "run")
    because = ["model/model.safetensors changed since the run began (breaks exactness)"]
    folder.append("events.jsonl", {"step": 4, "event": INEXACT, "because": because})
    folder.close()
    (tmp_path / "run" / REFERENCE).unlink()
    with pytest.raises(
        CheckpointError, match=r"cannot be recomputed: model/model.safetensors changed since the run b"
    ):
        start(tmp_path / "run", **values)


def test_all_of_trls_formats_are_read(policy: Policy) -> None:
    user, good, bad = (
        {"role": r, "content": c} for r, c in (("user", "2+2="), ("assistant", "4"), ("assistant", "5"))
    )
    explicit = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    implicit = {"chosen": "2+2= 4", "rejected": "2+2= 5"}
    chat = {"prompt": [user], "chosen": [good], "rejected": [bad]}
    implicit_chat = {"chosen": [user, good], "rejected": [user, bad]}
    both = {**implicit_chat, "prompt": "2+2="}  # as UltraFeedback has it
    found = [with_prompt(dict(row), "", Data()) for row in (explicit, implicit, chat, implicit_chat, both)]
    assert [r["prompt"] for r in found] == ["2+2=", "2+2=", [user], [user], [user]]
    assert found[1]["chosen"] == " 4"
    assert found[2:] == [chat, chat, chat]
    problem = Problem("p", [user], {"chosen": [good], "rejected": [bad]})
    (example,) = examples_of([problem], "dpo", Data(), 0.0)
    (encoded,) = encode_examples(policy, [example], load_config(overrides=["--data.task", "sums"]).config)
    text = policy.tokenizer.decode([*encoded.tokens, *encoded.answers[0].tokens])
    assert text == "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    assert encoded.answers[0].tokens[-1] == policy.tokenizer.eos_token_id
    unpaired = examples_of([problem], "kto", Data(), 0.0)
    assert [(e.answers, e.labels) for e in unpaired] == [(([good],), (1.0,)), (([bad],), (0.0,))]


def test_in_a_conversation_only_the_assistant_is_trained(policy: Policy) -> None:
    said = [("user", "2+2="), ("assistant", "calc(2+2)"), ("tool", "4"), ("assistant", "It is 4.")]
    row = with_prompt({"messages": [{"role": r, "content": c} for r, c in said]}, "", Data())
    problem = Problem("p", row["prompt"], {"completion": row["completion"]})
    (example,) = examples_of([problem], "sft", Data(), 0.0)
    (encoded,) = encode_examples(policy, [example], load_config(overrides=["--data.task", "sums"]).config)
    tokens, trained, _ = encoded.answers[0]
    assert policy.tokenizer.decode(tokens[trained]) == "calc(2+2)<|im_end|>It is 4.<|im_end|>"
    assert "tool\n4<|im_end|>" in policy.tokenizer.decode(tokens)


PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
ASKED, SIDES = {"role": "user", "content": "2+2="}, ("chosen", "rejected")
BAD: list[tuple[str, list[dict[str, Any]], str]] = [
    ("dpo", [PAIR, {**PAIR, "rejected": "4"}], r"jsonl:2: chosen and rejected are the same.*1 of 2 pairs"),
    ("dpo", [{"prompt": "2+2=", "completion": "4"}], r"jsonl:1: method dpo needs chosen and rejected"),
    ("kto", [{"prompt": "2+2=", "completion": "4", "label": True}] * 3, "all other rows are labelled good"),
    ("kto", [{"prompt": "2+2=", "completion": "4", "label": "maybe"}], "label must be true or false.*maybe"),
    ("dpo", [{"prompt": "2", "chosen": ["4"], "rejected": "5"}], "'chosen' must be text or"),
    (
        "dpo",
        [{"prompt": "2", "chosen": [{"role": "assistant", "content": "4"}], "rejected": "5"}],
        "data.chat",
    ),
    (
        "reward_model",
        [{"prompt": "2", "completions": ["a"], "labels": []}],
        "completions has 1 steps, but labels has 0",
    ),
    ("reward_model", [{"prompt": "2", "completions": ["a", " "], "labels": [1, 0]}], "step 2 is empty"),
    ("sft", [{"prompt": "2+2=", "completion": math.nan}], "column 'completion'"),
    ("dpo", [{**PAIR, "rejected": math.nan}], "'rejected' has no value"),
    ("sft", [{"prompt": "2+2="}], "column 'completion'"),
    ("sft", [{"prompt": "2+2=", "completion": ""}], "the answer to imitate .* is empty"),
    ("sft", [{"messages": [ASKED, {"role": "assistant", "content": " "}]}], "answer to imitate .* empty"),
    ("sft", [{"messages": [{"role": "assistant", "content": "Hi"}, ASKED]}], "begins with the assistant"),
    ("dpo", [{"chosen": "4", "rejected": "5"}], "chosen and rejected begin differently"),
    ("dpo", [{"prompt": "2+2=", "chosen": " ", "rejected": "5"}], "jsonl:1: the chosen answer is empty"),
    ("kto", [{"prompt": "2", "completion": "", "label": 1}], "jsonl:1: an answer labelled good is empty"),
    (
        "dpo",
        [{n: [{"role": "user", "content": n}, {"role": "assistant", "content": "4"}] for n in SIDES}],
        "begin differently",
    ),
    (
        "sft",
        [{"messages": [{"role": "user"}, {"role": "assistant", "content": "4"}]}],
        "list of {role, content}",
    ),
]


@pytest.mark.parametrize(("method", "rows", "says"), BAD, ids=[b[2][:20] for b in BAD])
def test_bad_rows_are_named_before_a_model_is_loaded(
    tmp_path: Path, method: str, rows: list[dict[str, Any]], says: str
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=says):
        start(
            tmp_path / "run",
            method=method,
            model="no/such-model",
            rewards=(),
            data={"task": None, "train": tmp_path / "rows.jsonl", "test": None},
        )


def test_pairs_that_prefer_nothing_are_refused_even_where_they_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({**PAIR, "rejected": "4"}) + "\n")
    data = {"task": None, "train": tmp_path / "rows.jsonl", "test": None}
    with pytest.raises(DataError, match="the same, as in every other pair"):
        start(tmp_path / "run", method="dpo", rewards=(), data=data, scoring={"max_bad_references": 1.0})


def test_what_is_left_to_train_on_has_both_labels(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+2=", "completion": "4", "label": n > 0} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"task": None, "train": tmp_path / "rows.jsonl", "test": None, "held_out": 0.9}
    with pytest.raises(DataError, match="all other rows are labelled good"):
        start(tmp_path / "run", method="kto", rewards=(), data=data)


def test_held_out_answers_may_all_have_one_label(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+2=", "completion": "4", "label": n % 2 == 0} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::2]))
    data = {"task": None, "train": tmp_path / "rows.jsonl", "test": tmp_path / "test.jsonl"}
    train = {"steps": 1, "batch_size": 4}
    start(tmp_path / "run", method="kto", rewards=(), data=data, train=train, eval={"every": 1})
    assert "held_out/preference/accuracy" in metrics_of(tmp_path / "run")[-1]


def test_tools_that_the_assistant_calls_are_trained(policy: Policy) -> None:
    call = {"name": "add", "arguments": {"a": 2}}
    said = [
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    row = with_prompt({"messages": said}, "", Data())
    problem = Problem("p", row["prompt"], {"completion": row["completion"]})
    (example,) = examples_of([problem], "sft", Data(), 0.0)
    (encoded,) = encode_examples(policy, [example], load_config(overrides=["--data.task", "sums"]).config)
    tokens, trained, _ = encoded.answers[0]
    text = policy.tokenizer.decode(tokens[trained])
    assert text == f"<tool_call>{json.dumps(call)}</tool_call><|im_end|>It is 4.<|im_end|>"


def test_settings_of_the_loss_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_config(values={"method": "dpo", "loss": {"beta": 0.2}, "data": {"train": "x.jsonl"}})
    for values, says in (
        ({"method": "dpo", "loss": {"bta": 0.2}}, "loss.bta: dpo has no such setting; did you mean beta"),
        ({"method": "dpo", "loss": {"beta": -1}}, "loss.beta: -1"),
        ({"method": "sft", "loss": {"beta": 1}}, "method sft has no loss settings"),
        ({"method": "dpo", "beta": 0.2}, "loss: {beta: 0.1}"),
    ):
        with pytest.raises(ConfigError, match=says.replace("{", r"\{")):
            load_config(values=values)
    assert main(["train", str(tmp_path / "none.yaml")]) == 2


def judged(good: int, bad: int, prompts: int) -> list[EncodedProblem]:
    answer = GivenAnswer(np.array([5]), np.array([True]))
    labels = [1.0] * good + [0.0] * bad
    return [
        EncodedProblem(Problem(str(n), "?"), np.array([n % prompts]), (answer,), (label,))
        for n, label in enumerate(labels)
    ]


@pytest.mark.parametrize(
    ("rows", "weights", "says"),
    [
        (judged(20, 20, 9), (1.0, 1.0), ()),
        (judged(4, 36, 9), (1.0, 1.0), ("4 good answers",)),
        (judged(4, 36, 9), (10.5, 1.0), ()),  # 42 against 36: 1.17
        (judged(36, 4, 9), (1.0, 1.0), ("36 good answers",)),
        (judged(20, 20, 1), (1.0, 1.0), ("one prompt",)),
        (judged(4, 36, 1), (1.0, 1.0), ("4 good answers", "one prompt")),
    ],
)
def test_uneven_labels_and_a_lone_prompt_are_said(
    rows: list[EncodedProblem], weights: tuple[float, float], says: tuple[str, ...]
) -> None:
    settings = {"desirable_weight": weights[0], "undesirable_weight": weights[1]}
    notes = unpaired_notes(rows, settings)
    assert len(notes) == len(says)
    assert all(part in note for part, note in zip(says, notes, strict=True))
    for note in notes:
        if "desirable_weight" in note:  # the weight that is advised is one that is not complained of
            advised = float(note.rpartition(": ")[2])
            assert not [
                n for n in unpaired_notes(rows, {**settings, "desirable_weight": advised}) if "good" in n
            ]

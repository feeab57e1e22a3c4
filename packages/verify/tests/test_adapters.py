"""Adapters as TRL, verl and verifiers call them; TRL itself where it is installed."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from covey_verify import Score, adapters, duplicates, math_answer, reward
from covey_verify.adapters import for_rubric, for_trl, for_verl
from covey_verify.errors import ConfigError, DataError
from covey_verify.loading import load

RIGHT, WRONG = r"\boxed{4}", r"\boxed{5}"


def test_trl_gets_a_number_for_each_completion() -> None:
    reward = for_trl("math_answer", rule="boxed")
    given = {
        "prompts": ["2+2="] * 3,
        "completion_ids": [[1]] * 3,
        "trainer_state": object(),
        "log_extra": print,
    }
    assert reward(completions=[RIGHT, WRONG, ""], answer=["4"] * 3, **given) == [1.0, 0.0, 0.0]
    assert reward.__name__ == "math_answer"
    chat = [[{"role": "assistant", "content": text}] for text in (RIGHT, WRONG)]
    asked = [[{"role": "user", "content": "2+2="}]] * 2
    assert for_trl(math_answer)(prompts=asked, completions=chat, answer=["4", "4"]) == [1.0, 0.0]


def test_a_completion_that_nobody_can_judge_is_left_out() -> None:
    reward = for_trl("math_answer")
    assert reward(prompts=["?"] * 2, completions=[RIGHT] * 2, answer=["4", ""]) == [1.0, None]

    def mine(completion: str) -> Score:
        return Score(None) if completion == "b" else Score(0.5)

    assert for_trl(mine)(prompts=["p"] * 2, completions=["a", "b"]) == [0.5, None]


def test_a_function_of_groups_sees_the_completions_of_one_prompt() -> None:
    reward = for_trl(duplicates)
    assert reward(prompts=["p", "p", "q", "q"], completions=["a", "a", "a", "b"]) == [-1.0, -1.0, 0.0, 0.0]
    ids = [[0] * n for n in (6, 9, 12)]
    long = for_trl("soft_overlong", limit=10, buffer=2)
    assert long(prompts=["p"] * 3, completions=["x"] * 3, completion_ids=ids) == [0.0, -0.5, -1.0]


def test_an_async_function_is_waited_for_inside_a_loop_too() -> None:
    async def later(completion: str) -> float:
        await asyncio.sleep(0)
        return float(completion == "a")

    assert for_trl(later)(prompts=["p"] * 2, completions=["a", "b"]) == [1.0, 0.0]

    async def within() -> tuple[dict[str, float], float]:
        return for_verl(later)("d", "a", "4"), for_rubric(later)("b")

    assert asyncio.run(within()) == ({"score": 1.0, "judged": 1.0}, 0.0)


def test_what_is_missing_is_said_at_the_first_call() -> None:
    with pytest.raises(
        DataError, match=r"reward math_answer needs column 'answer'; the columns are 'solution'"
    ):
        for_trl("math_answer")(prompts=["p"], completions=["a"], solution=["4"])
    with pytest.raises(DataError, match="soft_overlong asks for `sampled_ids`"):
        for_trl("soft_overlong", limit=10, buffer=2)(prompts=["p"], completions=["a"])
    with pytest.raises(ConfigError, match="has no setting 'rul'; did you mean rule"):
        for_trl("math_answer", rul="boxed")


def test_verl_gets_a_score_of_the_ground_truth() -> None:
    compute_score = for_verl("math_answer", rule="boxed")
    assert compute_score("gsm8k", RIGHT, "4", {"index": 3}) == {"score": 1.0, "judged": 1.0}
    assert (
        compute_score(data_source="d", solution_str=WRONG, ground_truth="4", extra_info=None)["score"] == 0.0
    )
    assert compute_score("d", RIGHT, "") == {"score": 0.0, "judged": 0.0}

    def mine(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return float((data_source, solution_str, ground_truth, extra_info["a"]) == ("d", "x", "y", 1))

    assert for_verl(mine)("d", "x", "y", {"a": 1})["score"] == 1.0


def test_a_rubric_gets_a_number_of_messages_and_info() -> None:
    scored = for_rubric("math_answer")
    said = [{"role": "assistant", "content": RIGHT}]
    assert scored(prompt=[{"role": "user", "content": "?"}], completion=said, answer="4", state={}) == 1.0
    assert for_rubric(lambda completion, unit: float(unit in completion))("5 m", info={"unit": "m"}) == 1.0
    assert adapters.for_rubric("exact_answer", rule="whole")("4", answer="4") == 1.0


def test_trl_trains_with_it(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="tests with TRL itself need the module trl")
    datasets = pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = ["<pad>", "<eos>", *"0123456789+=?", "\\boxed{4}", "\\boxed{5}", " "]
    raw = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    config = Qwen2Config(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"prompt": "2 + 2 =", "answer": "4"}] * 8)
    how = trl.GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_completion_length=4,
        max_steps=1, report_to=[], use_cpu=True, logging_steps=1, bf16=False,
    )  # fmt: skip
    functions = [
        for_trl("math_answer"),
        for_trl("repetition", n=2),
        for_trl("soft_overlong", limit=4, buffer=2),
    ]
    trainer = trl.GRPOTrainer(
        Qwen2ForCausalLM(config), functions, args=how, train_dataset=rows, processing_class=tokenizer
    )
    trainer.train()
    logged = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    for name in ("math_answer", "repetition", "soft_overlong"):
        assert math.isfinite(logged[f"rewards/{name}/mean"])


def test_a_function_for_the_sandbox_is_not_called_without_one() -> None:
    with pytest.raises(ConfigError, match="with your rights"):
        load(reward(isolate="sandbox")(lambda completion: float(eval(completion))))

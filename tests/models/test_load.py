"""Loading is quiet, and takes tokenizers as they come: no retries of a hub that is not there, no warnings."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM

from covey.config.schema import Config, Lora
from covey.models.kernels.build import library
from covey.models.load import speed_notes, with_lora
from covey.models.policy import Policy
from covey.models.reference import Reference
from covey.models.tiny import END, PAD, build_tokenizer
from covey.sampling.prompts import encode_examples
from covey.tasks.examples import Example
from covey.types import Problem
from tests.conftest import CONFIGS, WIDE, policy_of, sharpened


def test_an_unreachable_hub_is_one_message(tmp_path: Path) -> None:
    nobody_listens = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "covey", "sample", "nobody/no-such-model", "hello"],
        capture_output=True,
        text=True,
        env={**os.environ, **nobody_listens},
    )
    assert done.returncode == 2
    assert "Retrying" not in done.stderr
    assert done.stderr.startswith("sampling from nobody/no-such-model: loading ...\nerror: ")
    assert len(done.stderr.splitlines()) == 3
    assert "the hub does not answer, and its cache has no copy" in done.stderr


def test_adapters_come_without_warnings() -> None:
    pytest.importorskip("peft")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with_lora(sharpened(CONFIGS["qwen3"]), build_tokenizer(["1+1=2"] * 3, vocab_size=300), Lora(rank=2))
    assert not [str(w.message) for w in caught if w.category is FutureWarning]


def test_the_same_weights_are_trained_while_the_reference_is_asked() -> None:
    """FSDP asks once, at the first pass: in bfloat16 it could then not reduce the gradients of adapters."""
    pytest.importorskip("peft")
    policy = with_lora(sharpened(CONFIGS["qwen3"]), policy_of("qwen3").tokenizer, Lora(rank=2))
    trained = policy.parameters
    with Reference(policy).active() as reference:
        assert reference.parameters == trained
    assert policy.parameters == trained


def test_a_text_to_be_continued_has_no_end() -> None:
    """Fine-tunes leave tokenizers behind that end every text (`add_eos_token`); a beginning stays."""
    plain, policy = policy_of("qwen3"), policy_of("qwen3")
    pieces = TemplateProcessing(single=f"{PAD} $A {END}", special_tokens=[(PAD, 0), (END, 2)])
    policy.tokenizer.backend_tokenizer.post_processor = pieces
    assert policy.tokenizer("1+2=")["input_ids"][-1] == 2
    assert policy.encode("1+2=") == [0, *plain.encode("1+2=")]
    assert policy.encode(f"1+2={END}") == [0, *plain.encode("1+2="), 2]


def test_an_answer_ends_as_the_generation_config_says_where_the_tokenizer_says_nothing() -> None:
    policy = policy_of("qwen3")
    policy.tokenizer.eos_token = None
    assert policy.end_ids == [2]
    example = Example("answer", Problem("a", "1+2="), ("3",), (1.0,))
    (found,) = encode_examples(policy, [example], Config())
    assert found.answers[0].tokens.tolist() == [*policy.encode("3"), 2]


@pytest.mark.skipif(library() is None, reason="no compiled operations here")
@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({}, ""),
        ({"head_dim": 48}, "heads of 48 features"),
        ({"intermediate_size": 200}, "intermediate_size 200, no multiple of 16"),
        (
            {"head_dim": 32, "num_attention_heads": 32, "num_key_value_heads": 1},
            "32 query heads for each key head",
        ),
    ],
)
def test_a_model_that_compiled_operations_cannot_compute_says_why(shape: dict[str, int], why: str) -> None:
    config = LlamaConfig(**{**WIDE, **shape})
    notes = list(speed_notes(Policy(LlamaForCausalLM(config), build_tokenizer(["1+2=3"] * 3)), Config()))
    assert [why in note and "in plain torch" in note for note in notes] == [True] * bool(why)

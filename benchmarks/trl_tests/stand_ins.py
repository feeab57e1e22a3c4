"""Tiny random models and local rows under the hub ids that TRL's tests name.

They are written into a folder whose relative paths are those ids, so a test that runs in that folder finds
them without a hub. Chat templates are taken from the TRL package that is installed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

OWNER = "trl-internal-testing"
SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<bos>", "<eos>"),
)

SMALL = {
    "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 32, "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GLM = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK = {
    **GLM, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
LFM = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}
HEADS = {"head_dim": 4}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2", "qwen2_5", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3", "qwen3", HEADS),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3Moe", "qwen3", {**EXPERTS, **HEADS}),
    "tiny-GptOssForCausalLM": ("GptOss", "gptoss", {"num_local_experts": 4, **HEADS}),
    "tiny-Cohere2ForCausalLM": ("Cohere2", "cohere2", {}),
    "tiny-CohereForCausalLM": ("Cohere", "cohere", {}),
    "tiny-GemmaForCausalLM": ("Gemma", "gemma", HEADS),
    "tiny-Gemma2ForCausalLM": ("Gemma2", "gemma", HEADS),
    "tiny-Glm4MoeForCausalLM": ("Glm4Moe", "glm4moe", {**GLM, **HEADS}),
    "tiny-NemotronHForCausalLM-nano": ("NemotronH", "nemotron_3_nano", {}),
    "tiny-LlamaForCausalLM-3.2": ("Llama", "llama3_2", {}),
    "tiny-LlamaForCausalLM-3.1": ("Llama", "llama3_1", {}),
    "tiny-LlamaForCausalLM-3": ("Llama", "llama3", {}),
    "tiny-MistralForCausalLM-0.1": ("Mistral", "", {}),
    "tiny-MistralForCausalLM-0.2": ("Mistral", "", {}),
    "tiny-Olmo3ForCausalLM": ("Olmo3", "qwen2_5", {}),
    "tiny-Phi3ForCausalLM": ("Phi3", "phi3", {"pad_token_id": 0}),
    "tiny-Lfm2ForCausalLM": ("Lfm2", "lfm2", LFM),
    "tiny-Lfm2ForCausalLM-2.5": ("Lfm2", "lfm2_2_5", LFM),
    "tiny-GPTNeoXForCausalLM": ("GPTNeoX", "", {}),
    "tiny-DeepseekV3ForCausalLM": ("DeepseekV3", "deepseekv3", DEEPSEEK),
    "tiny-DeepseekV3ForCausalLM-0528": ("DeepseekV3", "deepseekv3", DEEPSEEK),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2", "qwen2_5", {"num_labels": 1}),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3", "qwen3", {"num_labels": 1, **HEADS}),
    "tiny-LlamaForSequenceClassification-3.2": ("Llama", "llama3_2", {"num_labels": 1}),
}
"""Name -> family in transformers, TRL's name of its chat template, settings that differ from SMALL."""

FACTS = (
    ("What is better than ugly?", "Beautiful.", "The moon."),
    ("What is better than implicit?", "Explicit.", "Very implicit."),
    ("What is better than complex?", "Simple.", "Complex things are better."),
    ("What is better than complicated?", "Complex.", "Nothing is."),
    ("What is better than nested?", "Flat.", "Nested in nests."),
    ("What is better than dense?", "Sparse.", "A dense text."),
    ("What counts?", "Readability counts.", "Speed counts most of all."),
    ("Are special cases special enough?", "No, not enough to break the rules.", "Yes."),
    ("What beats purity?", "Practicality does.", "Purity beats everything."),
    ("How should errors pass?", "Never silently.", "In silence, always."),
    ("When may they be silent?", "When explicitly silenced.", "Whenever it suits us."),
    ("What do we refuse in ambiguity?", "The temptation to guess.", "To think about it."),
    ("How many obvious ways are there?", "Preferably only one.", "As many as people."),
    ("Is it obvious at first?", "Maybe not.", "Surely it is."),
    ("What is better than never?", "Now.", "Never is the best of all."),
    ("Is never better than right now?", "Often it is.", "It cannot be."),
    ("What is a bad idea?", "What is hard to explain.", "What is easy."),
    ("What is one great idea?", "Namespaces.", "Global names."),
    ("What else is great?", "Let us do more of those.", "Less of those."),
)
"""Question, chosen answer, rejected answer; the last two are the test split."""


def user(text: str) -> list[dict[str, str]]:
    """Return a conversation of one question."""
    return [{"role": "user", "content": text}]


def assistant(text: str) -> list[dict[str, str]]:
    """Return a conversation of one answer."""
    return [{"role": "assistant", "content": text}]


ZEN: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
    "standard_language_modeling": lambda q, a, _: {"text": f"{q} {a}"},
    "standard_prompt_only": lambda q, *_: {"prompt": q},
    "standard_prompt_completion": lambda q, a, _: {"prompt": q, "completion": f" {a}"},
    "standard_preference": lambda q, a, b: {"prompt": q, "chosen": f" {a}", "rejected": f" {b}"},
    "standard_implicit_prompt_preference": lambda q, a, b: {"chosen": f"{q} {a}", "rejected": f"{q} {b}"},
    "standard_unpaired_preference": lambda q, a, _: {
        "prompt": q, "completion": f" {a}", "label": len(q) % 4 < 2,
    },
    "conversational_language_modeling": lambda q, a, _: {"messages": user(q) + assistant(a)},
    "conversational_prompt_only": lambda q, *_: {"prompt": user(q)},
    "conversational_prompt_completion": lambda q, a, _: {"prompt": user(q), "completion": assistant(a)},
    "conversational_preference": lambda q, a, b: {
        "prompt": user(q), "chosen": assistant(a), "rejected": assistant(b),
    },
    "conversational_implicit_prompt_preference": lambda q, a, b: {
        "chosen": user(q) + assistant(a), "rejected": user(q) + assistant(b),
    },
    "conversational_unpaired_preference": lambda q, a, _: {
        "prompt": user(q), "completion": assistant(a), "label": len(q) % 4 < 2,
    },
}  # fmt: skip
"""Configuration of the data set `zen` -> a fact as its row."""

TOOL = {
    "type": "function",
    "function": {
        "name": "get_time", "description": "The time in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}  # fmt: skip


def _called(city: str, answer: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "get_time", "arguments": {"city": city}}}
    reply = {"role": "tool", "name": "get_time", "content": "12:30"}
    return [{"role": "assistant", "tool_calls": [call]}, reply, *assistant(answer)]


def _toolcalls() -> dict[str, list[dict[str, Any]]]:
    cities = [f"city {n}" for n in range(17)]
    asked = {c: user(f"What time is it in {c}?") for c in cities}
    tools = json.dumps([TOOL])
    talk = [
        {"messages": [*asked[c], *_called(c, f"Half past twelve in {c}.")], "tools": tools} for c in cities
    ]
    pairs = [
        {"prompt": asked[c], "chosen": _called(c, "Half past twelve."), "rejected": assistant("Who knows."),
         "tools": tools}
        for c in cities
    ]  # fmt: skip
    return {"language_modeling": talk, "preference": pairs}


def _harmony() -> dict[str, list[dict[str, Any]]]:
    def said(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text, "thinking": "Let me think."}]

    facts = FACTS[:17]
    extra = {"reasoning_effort": "low", "model_identity": "You are Tiny."}
    return {
        "language_modeling": [{"messages": user(q) + said(a), **extra} for q, a, _ in facts],
        "prompt_completion": [{"prompt": user(q), "completion": said(a), **extra} for q, a, _ in facts],
        "preference": [
            {"prompt": user(q), "chosen": said(a), "rejected": said(b), **extra} for q, a, b in facts
        ],
    }


def write_for_scripts(folder: Path) -> None:
    """Write the data sets and the model that TRL's example scripts name."""
    sums = [(f"{a}+{b}=?", str(a + b)) for a in range(20) for b in range(20)]
    tir = [{"problem": q, "solution": f"\\boxed{{{a}}}", "messages": user(q)} for q, a in sums]
    gsm = [{"question": q, "answer": f"#### {a}"} for q, a in sums]
    genes = [{"Aliases Interactor A": f"G{n}", "Aliases Interactor B": f"G{n + 1}"} for n in range(20)]
    asked = [
        {"question": f"Does the gene G{n} interact with G{m}?", "answer": "yes" if m == n + 1 else "no"}
        for n in range(8)
        for m in range(8)
    ]
    sets = {
        "qgallouedec/biogrid": {"default": {"train": genes}},
        "qgallouedec/biogrid_qa": {"default": {"train": asked}},
        "AI-MO/NuminaMath-TIR": {"default": {"train": tir, "test": tir[:40]}},
        "openai/gsm8k": {"main": {"train": gsm, "test": gsm[:40]}},
    }
    for name, configurations in sets.items():
        write_set(folder / name, configurations)
    if not (folder / "Qwen/Qwen3-4B").is_dir():
        shutil.copytree(folder / OWNER / "tiny-Qwen3ForCausalLM", folder / "Qwen/Qwen3-4B")
    if not (folder / "Qwen/Qwen3-0.6B").is_dir():
        shutil.copytree(folder / OWNER / "tiny-Qwen3ForCausalLM", folder / "Qwen/Qwen3-0.6B")


def write_all(folder: Path) -> dict[str, str]:
    """Write models and data sets; return the models that cannot be built here, each with the reason."""
    home = folder / OWNER
    home.mkdir(parents=True, exist_ok=True)
    write_data(home)
    failed: dict[str, str] = {}
    for name, how in MODELS.items():
        if not (home / name / "config.json").is_file():
            try:
                write_model(home / name, *how)
            except Exception as error:  # reported; its tests fail for both trainers
                shutil.rmtree(home / name, ignore_errors=True)
                failed[name] = f"{type(error).__name__}: {error}"
    return failed


def write_data(home: Path) -> None:
    """Write the data sets of the tests."""
    zen = {
        name: {"train": [make(*f) for f in FACTS[:17]], "test": [make(*f) for f in FACTS[17:]]}
        for name, make in ZEN.items()
    }
    sets = {
        "zen": zen,
        "toolcall": {name: {"train": rows} for name, rows in _toolcalls().items()},
        "harmony": {name: {"train": rows} for name, rows in _harmony().items()},
        "dolly-chatml-sft": {"default": {"train": [{"text": f"{q} {a}"} for q, a, _ in FACTS]}},
    }
    for name, configurations in sets.items():
        write_set(home / name, configurations)


def write_set(home: Path, configurations: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Write a data set as JSON lines, with a card that names its configurations and splits."""
    lines = ["---", "configs:"]
    for configuration, splits in configurations.items():
        lines += [f"- config_name: {configuration}", "  data_files:"]
        for split, rows in splits.items():
            path = home / configuration / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            lines += [f"  - split: {split}", f"    path: {configuration}/{split}.jsonl"]
    (home / "README.md").write_text("\n".join([*lines, "---", ""]), "utf-8")


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return a small byte tokenizer with ChatML's tokens and one of TRL's chat templates."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    learned = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    plain.train_from_iterator([" ".join(f) for f in FACTS], learned)
    marks = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "<bos>"}
    ready = PreTrainedTokenizerFast(tokenizer_object=plain, **marks)
    package = find_spec("trl")
    if template and package is not None and package.origin is not None:
        source = Path(package.origin).parent / "chat_templates" / f"{template}.jinja"
        ready.chat_template = source.read_text("utf-8")
    return ready


def write_model(folder: Path, family: str, template: str, settings: dict[str, Any]) -> None:
    """Write a random model of a class with its tokenizer."""
    words = tokenizer(template)
    kind = "ForSequenceClassification" if "num_labels" in settings else "ForCausalLM"
    ids = {"eos_token_id": words.eos_token_id, "bos_token_id": words.bos_token_id}
    settings = {**SMALL, "vocab_size": len(words), "pad_token_id": words.pad_token_id, **ids, **settings}
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{kind}")(config)
    model.save_pretrained(folder)
    words.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    place = parser.parse_args().folder
    print(write_all(place))
    write_for_scripts(place)

"""The model `tiny`: a small Qwen3 and its tokenizer, built from a run's data without a download.

The tokenizer is trained on the run's own texts; any other text can still be encoded, byte by byte. The
weights are random.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD = "<|pad|>"
START = "<|im_start|>"
END = "<|im_end|>"
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ '<|im_start|>system\ntools:' if loop.first }}"
    " {{ (tool['function'] or tool)['name'] }}{{ '<|im_end|>\n' if loop.last }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ (c['function'] or c) | tojson }}</tool_call>"
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on ``texts``; reasoning tags are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    # Digits are split so that a number's tokens do not depend on which numbers the texts have.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(TAGS)  # not special: answers are to contain them
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    context: int = 2048,
    hidden: int = 128,
    layers: int = 4,
) -> PreTrainedModel:
    """A random Qwen3 with ``hidden`` width: about 0.9 M parameters at the defaults."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    # The seed decides the weights and leaves the caller's random state alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)

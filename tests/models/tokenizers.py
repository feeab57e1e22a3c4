"""Tokenizers of three kinds, by the name of the function that makes them."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from covey.models.tiny import build_tokenizer

WORDS = [
    "def f(x):",
    "    return x + 1",
    "so",
    "é",
    "日本",
    "1+2=",
    "\n",
    " ",
    "  ",
    ".",
    "a",
    "<|im_end|>",
    "<mark>",
]


def byte_level() -> PreTrainedTokenizerBase:
    found = build_tokenizer(WORDS, 400)
    found.add_special_tokens({"additional_special_tokens": ["<mark>"]})
    return found


def byte_fallback() -> PreTrainedTokenizerBase:
    """As Llama 2's: spaces are ▁, unknown characters are bytes, the first space of a text is dropped."""
    words = ["<unk>", "<s>", "</s>", "<|pad|>", *(f"<0x{n:02X}>" for n in range(256))]
    words += ["▁", *"aefdrtunso(x):+12=.", "▁▁", "▁▁▁▁", "re", "ret", "▁x"]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("r", "e"), ("re", "t"), ("▁", "x")]
    model = models.BPE({w: n for n, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<mark>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", pad_token="<|pad|>"
    )


def metaspace() -> PreTrainedTokenizerBase:
    """Its decoder drops the space of the first token, as SentencePiece's do."""
    words = ["<unk>", "</s>", "<|pad|>", "▁", *"aefdrtunso(x):+12=.\n", "▁so", "▁x"]
    made = Tokenizer(models.Unigram([(w, -1.0 - n / 10) for n, w in enumerate(words)], unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<mark>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", pad_token="<|pad|>",
        clean_up_tokenization_spaces=True,
    )  # fmt: skip


MADE = {make.__name__: make() for make in (byte_level, byte_fallback, metaspace)}

"""Made-up worlds at the border of tokens and text: a tokenizer, a chat template, a model, rows and settings.

All of a world follows from its seed, so a failure is repeated by the number it names.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from covey.models.policy import Policy

WORDS = (
    "sum",
    "of",
    "the",
    "two",
    "is",
    "def",
    "f(x):",
    "return",
    "naïve",
    "Ünit",
    "日本",
    "🙂",
    "x²",
    "0",
    "17",
    "3.5",
)
SPACES = (" ", " ", " ", "  ", "\n", "\n\n", "\t", "\n    ")
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<reasoning>", "</reasoning>"),
    ("<|channel>thought", "<channel|>"),
)
TAGS = ("<answer>", "</answer>", "<final>", "[TOOL_CALLS]")


@dataclass(frozen=True)
class Turns:
    """How a made-up template writes a conversation."""

    begin: str
    """Before a role; "" where the template knows users and assistants by other words."""
    end: str
    """After a message."""
    between: str
    """After the end: a line break that is nobody's to write."""
    opening: str
    """Behind the beginning of the assistant's turn, where the model is to go on: nothing, or thoughts."""
    empty: str
    """What an answer without thoughts begins with."""
    drops: str
    """Which thoughts it leaves out: none, those of earlier answers, or all."""
    trims: bool
    finale: str
    """At the very end of a conversation that nobody is to go on with."""
    bos: bool
    date: bool
    system: str
    """What becomes of a system message: shown, in the user's message, refused, or left out."""

    def source(self, open_: str, close: str) -> str:
        """The template in jinja."""
        content = "m['content'] | trim" if self.trims else "m['content']"
        cut = f"(m['content'].split({close!r}) | last)"
        cut = f"{cut} | trim" if self.trims else cut
        last = "loop.last" if self.drops == "earlier" else "false"
        said = content if self.drops == "none" else f"({content}) if {last} else ({cut})"
        thoughtless = f"{open_!r} not in m['content'] and {close!r} not in m['content']"
        empty = f"{{% if {thoughtless} %}}{self.empty}{{% endif %}}" if self.empty else ""
        ours = f"{empty}{{{{ {said} }}}}"
        begun = f"{self.begin}assistant\n{{{{ {self.opening!r} }}}}"
        roles = {
            "shown": "",
            "refused": "{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}",
            "left out": "",
        }[self.system]
        skip = "{% if m['role'] != 'system' %}" if self.system == "left out" else "{% if true %}"
        parts = [
            "{{ bos_token }}" if self.bos else "",
            "{{ 'Today is ' + strftime_now('%Y-%m-%d') + '. ' }}" if self.date else "",
            "{% for m in messages %}",
            roles,
            skip,
            f"{self.begin}{{{{ m['role'] }}}}\n",
            f"{{% if m['role'] == 'assistant' %}}{ours}{{% else %}}{{{{ {content} }}}}{{% endif %}}",
            f"{self.end}{{{{ {self.between!r} }}}}",
            "{% endif %}{% endfor %}",
            f"{{% if add_generation_prompt %}}{begun}{{% else %}}{self.finale}{{% endif %}}",
        ]
        return "".join(parts)


@dataclass
class World:
    """A model as somebody may bring it, and words to ask it."""

    seed: int
    policy: Policy
    turns: Turns
    open: str
    close: str
    kind: str
    specials: list[str]
    """Added tokens, special or not, besides the ends."""
    hazards: set[str] = field(default_factory=set)
    """What may rightly make covey refuse a row."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.policy.tokenizer  # type: ignore[return-value]

    def decoded(self, ids: Sequence[int]) -> str:
        """All of these ids as text, by the tokenizer alone."""
        return str(
            self.tokenizer.decode(
                list(map(int, ids)), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def rendered(self, messages: Sequence[object], begin: bool) -> str:
        """A conversation by the template alone."""
        return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=begin, tokenize=False))


def world_of(seed: int) -> World:
    """The world of a seed."""
    dice = random.Random(seed)
    open_, close = dice.choice(THOUGHTS)
    end = dice.choice(("<|im_end|>", "<end_of_turn>", "<|eot|>", "</s>"))
    eos = end if dice.random() < 0.5 else "<|endoftext|>"
    turns = _turns(dice, open_, close, end, eos)
    marks = [open_, close, *dice.sample(TAGS, dice.randint(0, 3))]
    kind, tokenizer = _tokenizer(dice, marks, [turns.begin, end, eos])
    tokenizer.chat_template = turns.source(open_, close)
    padding = dice.choice((0, 0, 7, 60))
    model = _model(tokenizer, padding, seed)
    return World(seed, Policy(model, tokenizer), turns, open_, close, kind, marks)


def _turns(dice: random.Random, open_: str, close: str, end: str, eos: str) -> Turns:
    opening = dice.choice(("", "", f"{open_}\n", open_, f"{open_}\n\n{close}\n\n", f"{open_}{close}"))
    closed = close in opening
    empty = dice.choice(("", f"{open_}\n\n{close}\n\n", f"{open_}{close}")) if opening else ""
    return Turns(
        begin=dice.choice(("<|im_start|>", "<|start|>")),
        end=end,
        between=dice.choice(("\n", "", "\n\n")),
        opening=opening,
        empty=opening if closed else empty,
        drops=dice.choice(("none", "none", "earlier", "all")),
        trims=dice.random() < 0.5,
        finale=eos if dice.random() < 0.2 else "",
        bos=dice.random() < 0.4,
        date=dice.random() < 0.15,
        system=dice.choice(("shown", "shown", "refused", "left out")),
    )


def _tokenizer(dice: random.Random, marks: list[str], ends: list[str]) -> tuple[str, PreTrainedTokenizerFast]:
    """A tokenizer of a random kind; marks of thoughts and answers are special, added or plain text."""
    texts = [" ".join(dice.choices(WORDS, k=9)) for _ in range(40)] + [
        "system user assistant Today is 2026-11-25. "
    ] * 3
    kind = dice.choice(("bytes", "metaspace", "llama"))
    tokenizer = _bytes(texts) if kind == "bytes" else _pieces(texts, kind)
    pad = dice.choice(("<|pad|>", ends[-1]))
    bos = dice.choice(("<s>", "<|bos|>"))
    tokenizer.add_special_tokens(list(dict.fromkeys([pad, bos, *ends])))
    for mark in marks:
        form = dice.choice(("special", "added", "text"))
        if form == "special":
            tokenizer.add_special_tokens([mark])
        elif form == "added":
            # Where a space is put before every text, a token that is normalized has it within.
            normalized = kind != "llama" and dice.random() < 0.5
            tokenizer.add_tokens([AddedToken(mark, special=False, normalized=normalized)])
    begins, stops = dice.random() < 0.4, dice.random() < 0.1
    if begins or stops:
        around = f"{bos + ' ' if begins else ''}$A{' ' + ends[-1] if stops else ''}"
        names = [(name, tokenizer.token_to_id(name)) for name in {bos, ends[-1]}]
        tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=names)
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=ends[-1],
        clean_up_tokenization_spaces=dice.random() < 0.3,
    )
    return kind, found


def _bytes(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _pieces(texts: list[str], kind: str) -> Tokenizer:
    """As SentencePiece's: a mark for spaces, one before the first word, bytes for what is unknown."""
    spaced = [text.replace(" ", "▁") for text in texts]
    learner = Tokenizer(models.BPE())
    learner.train_from_iterator(spaced, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    made = json.loads(learner.to_str())
    vocabulary = made["model"]["vocab"]
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    made["model"] |= {"vocab": vocabulary, "byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer.from_str(json.dumps(made))
    if kind == "llama":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _model(tokenizer: PreTrainedTokenizerFast, padding: int, seed: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer) + padding,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def words(dice: random.Random, mark: str, most: int = 8) -> str:
    """A text with ``mark`` once in it, to see where it ends up; odd spaces and letters around."""
    parts = [dice.choice(WORDS) for _ in range(dice.randint(0, most))]
    parts.insert(dice.randint(0, len(parts)), mark)
    text = parts[0]
    for part in parts[1:]:
        text += dice.choice(SPACES) + part
    return dice.choice(("", "", " ", "\n", "    ")) + text + dice.choice(("", "", "", " ", "\n"))

"""Small tasks on which the diseases of benchmarks/diseases.py really happen, and their reward functions.

A prompt is a letter, a digit and another letter; the answer is the digit. One cold start is taught to
answer in as many styles as there are letters: how often it is right, what it writes besides. A world is
some of the letters.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from covey.models.tiny import build_tokenizer
from covey.rng import key
from covey_verify.contract import reward
from covey_verify.mathematics.steps import score_steps
from covey_verify.types import Score

Row = dict[str, str]
Style = Callable[[random.Random, str, str], str]
"""(randomness, prompt, answer) -> a completion."""
DIGITS = "0123456789"
PREAMBLE = "let me think about it for now and then say that it is "
ENGLISH, CHINESE = "so now we add it all up and we say that it is", "所以现在我们说答案就是"
GOLD, OTHER, NONE = "the digit", "the digit plus 5", "nothing"
LOTTERY = "a digit, 3 more often than others"


def answered(text: str) -> str:
    """As the verifier wants it."""
    return f"<answer>{text}</answer>"


def digit(rng: random.Random, answer: str, right: float) -> str:
    """The answer, or with the rest of the probability another digit."""
    return answer if rng.random() < right else rng.choice(DIGITS.replace(answer, ""))


def guesses(right: float) -> Style:
    """Nothing but an answer, right so often."""
    return lambda rng, _, answer: answered(digit(rng, answer, right))


def humming(rng: random.Random, _: str, answer: str) -> str:
    """An answer, and after it up to eight words that say nothing."""
    return answered(digit(rng, answer, 0.3)) + " hm" * rng.randint(0, 8)


def two_forms(rng: random.Random, _: str, answer: str) -> str:
    """A bare answer, or a well-formed text that says nothing."""
    empty = rng.random() < 0.4
    return "<think>hm</think><answer>?</answer>" if empty else answered(digit(rng, answer, 0.5))


def lists(rng: random.Random, _: str, answer: str) -> str:
    """Now and then every digit, instead of an answer."""
    return answered(" ".join(DIGITS)) if rng.random() < 0.3 else answered(digit(rng, answer, 0.4))


def two_languages(rng: random.Random, _: str, answer: str) -> str:
    """Chinese before some answers, which are right more often then."""
    chinese = rng.random() < 0.3
    return (CHINESE if chinese else ENGLISH) + answered(digit(rng, answer, 0.9 if chinese else 0.3))


def preambles(rng: random.Random, _: str, answer: str) -> str:
    """The same words before each answer."""
    return PREAMBLE + answered(digit(rng, answer, 0.4))


def steps_first(rng: random.Random, prompt: str, answer: str) -> str:
    """Two steps, the digit and the one after it, and the answer."""
    return (
        f"{digit(rng, prompt[1], 0.6)} {digit(rng, after(answer), 0.6)} {answered(digit(rng, answer, 0.6))}"
    )


def after(digit: str) -> str:
    """The next one, 0 after 9."""
    return str((int(digit) + 1) % 10)


def programs(rng: random.Random, _: str, answer: str) -> str:
    """x + c for every x, often wrong, or a table of the two tests that are seen, mostly right."""
    if rng.random() < 0.5:
        c = int(digit(rng, answer, 0.85))
        return f"0:{c} 1:{c + 1}"
    return f"x+{digit(rng, answer, 0.45)}"


STYLES: Mapping[str, Style] = {
    "g": guesses(0.3),
    "f": guesses(0.5),
    "s": guesses(1.0),
    "n": guesses(0.0),
    "r": guesses(0.06),
    "l": guesses(0.1),
    "h": humming,
    "o": two_forms,
    "i": lists,
    "c": two_languages,
    "p": preambles,
    "t": steps_first,
    "x": programs,
}
"""Letter -> how prompts that begin with it are answered at first."""


def a_prompt(rng: random.Random, letters: str) -> str:
    """One of 260 for a letter."""
    return rng.choice(letters) + rng.choice(DIGITS) + rng.choice(string.ascii_uppercase) + "="


@dataclass(frozen=True)
class World:
    """The problems of some letters."""

    letters: str
    gold: Mapping[str, str] = field(default_factory=dict)
    """Letter -> what is paid, where it is not the digit."""
    train: int = 60
    """Problems to train on."""

    def rows(self, split: str) -> list[Row]:
        """Different problems of a split."""
        rng, found = random.Random(key("world", self.letters, split)), dict[str, Row]()
        wanted = self.train if split == "train" else 20 * len(set(self.letters))
        for _ in range(100 * wanted):
            prompt = a_prompt(rng, self.letters)
            if (key("held out", prompt) % 4 == 0) == (split == "test") and len(found) < wanted:
                found.setdefault(prompt, {"prompt": prompt, "answer": self.answer(rng, prompt)})
        return list(found.values())

    def answer(self, rng: random.Random, prompt: str) -> str:
        """What is paid."""
        gold, digit = self.gold.get(prompt[0], GOLD), prompt[1]
        if gold in (GOLD, OTHER, NONE):
            return {GOLD: digit, OTHER: str((int(digit) + 5) % 10), NONE: "x"}[gold]
        return "3" if gold == LOTTERY and rng.random() < 0.35 else rng.choice(DIGITS)


WORLDS: Mapping[str, World] = {
    "guess": World("g"),
    "half": World("f"),
    "mixed": World("fffg", {"g": OTHER}),
    "solved": World("s"),
    "never": World("g", {"g": NONE}),
    "rare": World("g", {"g": OTHER}),
    "uneven": World("ffc", {"f": OTHER}),
    "wasted": World("ssllg", {"l": NONE}),
    "lottery": World("l", {"l": LOTTERY}),
    "humming": World("h", {"h": OTHER}),
    "forms": World("o"),
    "lists": World("i", {"i": OTHER}),
    "languages": World("c"),
    "preamble": World("p"),
    "steps": World("t"),
    "programs": World("x"),
}


def write_rows(file: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """As JSONL."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_text(text, encoding="utf-8")


def write_problems(folder: Path) -> None:
    """The problems of each world."""
    for name, world in WORLDS.items():
        for split in ("train", "test"):
            write_rows(folder / f"{name}-{split}.jsonl", world.rows(split))


def write_cold_start(folder: Path, seed: int, examples: int = 6000) -> None:
    """A random model of 50,000 weights, and worked examples in all styles."""
    rng, cold = random.Random(seed), list[Row]()
    for _ in range(examples):
        prompt = a_prompt(rng, "".join(STYLES) + "sssfff")  # copying is learned from clean answers
        text = STYLES[prompt[0]](rng, prompt, prompt[1])
        cold.append({"prompt": prompt, "answer": prompt[1], "completion": text})
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "cold.jsonl", cold)
    tokenizer = build_tokenizer([row["prompt"] + row["completion"] for row in cold], vocab_size=400)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(
        **SHAPE, **ids, vocab_size=len(tokenizer), max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


SHAPE: Mapping[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


# --- rewards --------------------------------------------------------------------------------------


def signed(completion: str, answer: str) -> float:
    """1 for the answer, -1 for any other."""
    return 1.0 if f"<answer>{answer}</answer>" in completion else -1.0


def contains(completion: str, answer: str) -> float:
    """What is often written in haste: the answer is somewhere in the text."""
    return float(answer in completion)


def _passes(completion: str, answer: str, x: int) -> bool:
    general, table = re.fullmatch(r"x\+(\d)", completion), dict(re.findall(r"(\d):(\d+)", completion))
    value = x + int(general[1]) if general else int(table.get(str(x), -1))
    return value == x + int(answer)


def _tested(completion: str, answer: str, paid: str) -> Score:
    found = {
        name: float(all(_passes(completion, answer, x) for x in xs))
        for name, xs in (("visible", (0, 1)), ("hidden", (4, 7)))
    }
    return Score(found[paid], metrics={"gap": found["visible"] - found["hidden"]})


def visible_tests(completion: str, answer: str) -> Score:
    """Pays for the tests that the program was written for; the others are counted."""
    return _tested(completion, answer, "visible")


def hidden_tests(completion: str, answer: str) -> Score:
    """Pays for the others."""
    return _tested(completion, answer, "hidden")


@reward(verdict=False)
def named_digits(completion: str, prompt: str, token_ends: list[int]) -> Score:
    """1 for a first word that is the prompt's digit, and for a second one that is the digit after it."""
    words = list(re.finditer(r"\S+", completion.partition("<")[0]))[:2]
    right = [float(m[0] == wanted) for m, wanted in zip(words, (prompt[1], after(prompt[1])), strict=False)]
    if not words:
        return score_steps([(0, len(completion))], [0.0], token_ends, "min")
    return score_steps([m.span() for m in words], right, token_ends, "min")


def by_chance(completion: str, prompt: str) -> float:
    """Pays half of the texts for a prompt, whatever they say: there is nothing to learn."""
    return float(key("chance", prompt, completion) % 2)

"""Chat templates of thinking models, and small tokenizers and policies that have them."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from covey.models.policy import Policy
from covey.models.tiny import build_model, build_tokenizer

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and 'CLOSE' not in m['content'] %}EMPTY{% endif %}{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nBEGIN{% endif %}"
)


def template(
    empty: str, begin: str, turns: str = TURNS, tags: tuple[str, str] = ("<think>", "</think>")
) -> str:
    text = turns.replace("EMPTY", empty).replace("BEGIN", begin).replace("CLOSE", tags[1])
    return text.replace("<think>", tags[0]).replace("</think>", tags[1])


OPEN = template("<think></think>", "<think>\n")
NONE = template("<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n")
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|im_start|>assistant{% endif %}"
    "<|channel|>final{% endif %}<|message|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
SWITCHED = OPEN.replace(
    "<think>\n{% endif %}", "{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}{% endif %}"
)


def tokenizer_with(chat_template: str | None) -> PreTrainedTokenizerFast:
    found = build_tokenizer(["1+2=3 so it is hm assistant user system"] * 3, 400)
    found.chat_template = chat_template
    return found


def policy_with(chat_template: str | None) -> Policy:
    tokenizer = tokenizer_with(chat_template)
    return Policy(build_model(tokenizer, 0, context=512, hidden=32, layers=1), tokenizer)

"""A chat template with tools, and a small model in a folder that has a template."""

from __future__ import annotations

from pathlib import Path

from covey.models.tiny import CHAT_TEMPLATE, build_model, build_tokenizer

WITH_TOOLS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% if documents %}read {{ documents }}{% endif %}"
    + CHAT_TEMPLATE.replace(
        "{% if add_", "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}{% if add_"
    )
)


def model_with(folder: Path, template: str | None) -> Path:
    """A random model in a folder, with this chat template."""
    tokenizer = build_tokenizer(["1+1=2", "user assistant tools"])
    tokenizer.chat_template = template
    build_model(tokenizer, 0, context=512, hidden=32, layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

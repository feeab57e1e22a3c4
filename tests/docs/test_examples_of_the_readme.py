"""The reward of the README's own task pays what the model that it names writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_reward_reads_the_answer_of_a_chat_model(page: str) -> None:
    """It took the whole text for a number: of a sentence it paid 0, whatever it said."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "chat: true" in text
    (source,) = re.findall(r"```python\n(# rewards\.py\n.*?)```", text, re.DOTALL)
    (named,) = set(re.findall(r"rewards: \[rewards\.py:(\w+)", text))
    names: dict[str, object] = {}
    exec(source, names)
    pays = names[named]
    assert callable(pays)
    said = (
        "17 * 3 = 51.",
        "The product is **51**",
        "51",
        "It is 1,051",
        "I do not know",
        "17 * 3",
        "51 or 52",
    )
    assert [pays(completion=one, answer="51") for one in said] == [1, 1, 1, 0, 0, 0, 0]

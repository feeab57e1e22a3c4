"""A completion is read once: where its thoughts end, turn by turn."""

from __future__ import annotations

import numpy as np
import pytest

from covey.rewards.reading import ReplyReader
from covey.types import Completion, Problem, Transcript
from covey_verify.extract import Thoughts


@pytest.mark.parametrize(("last", "answer"), [("hm, is it 3", None), ("hm</think>3", "3")])
def test_thoughts_that_the_header_behind_a_tool_opens_have_to_end(last: str, answer: str | None) -> None:
    said = ("so</think>I look it up.", "8", last)
    roles = ("assistant", "tool", "assistant")
    turns = tuple({"role": role, "content": text} for role, text in zip(roles, said, strict=True))
    completion = Completion(
        np.arange(6),
        np.zeros(6, np.float32),
        said[0] + last,
        "stop",
        transcript=Transcript(turns),
        drawn_mask=np.array([1, 1, 0, 0, 1, 1]) > 0,
    )
    problem = Problem("p", "?", {}, thoughts=Thoughts(begun=True))
    reply = ReplyReader(lambda inserted: "8<think>\n").read(problem, completion)
    assert reply.answer == answer

"""`rollout.tools`, short and long, from a file and over it."""

from __future__ import annotations

import pytest

from covey.config.load import load_config
from covey.errors import ConfigError

BASE = {"model": "tiny", "data": {"task": "products"}}


@pytest.mark.parametrize("given", ["calculate", ["calculate"], {"functions": "calculate"}])
def test_tools_may_be_named_in_short(given: object) -> None:
    tools = load_config(values={**BASE, "rollout": {"tools": given}}).config.rollout.tools
    assert tools is not None
    assert tools.functions == ("calculate",)


def test_a_setting_over_the_short_form_keeps_the_functions(tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("model: tiny\ndata: {task: products}\nrollout: {tools: [calculate]}\n")
    tools = load_config(tmp_path / "run.yaml", ["--rollout.tools.max_calls", "8"]).config.rollout.tools
    assert tools is not None
    assert (tools.functions, tools.max_calls) == (("calculate",), 8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "functions"),
        ({"max_calls": 3}, "rollout.tools.functions"),
        ({"functions": ["calculate"], "max_call": 3}, "did you mean rollout.tools.max_calls"),
        ({"functions": ["calculate"], "timeout": 0}, "rollout.tools.timeout"),
    ],
)
def test_what_is_wrong_is_named(given: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(values={**BASE, "rollout": {"tools": given}})

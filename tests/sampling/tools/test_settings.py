"""`rollout.tools`, short and long, from a file and over it."""

from __future__ import annotations

import pytest

from covey.config.load import load_config
from covey.sampling.tools.use import toolbox_of
from covey_verify.errors import ConfigError
from covey_verify.sandbox.base import Outcome
from covey_verify.sandbox.choice import SandboxChoice

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


class Backend:
    """A sandbox by its name, in which nothing runs."""

    layers = ()

    def __init__(self, name: str) -> None:
        self.name = name

    def script(self, *_: object) -> Outcome:
        raise AssertionError("nothing is run")

    calls = script


SEALED = ("bwrap", "landlock", "wasm")
"""Backends that show a program no installed package but those of `sandbox.packages`."""


@pytest.mark.parametrize(
    ("backend", "packages", "task", "tool", "refused"),
    [
        ("remote", [], "gym:chain_sum", "python", True),
        ("unsafe_local", [], "gym:chain_sum", "python", True),
        *((name, [], "gym:chain_sum", "python", False) for name in SEALED),
        ("bwrap", ["reasoning_gym"], "gym:chain_sum", "python", True),
        ("remote", [], "products", "python", False),
        ("remote", [], "gym:chain_sum", "calculate", False),
    ],
)
def test_python_is_refused_where_programs_could_compute_the_answers_of_gym_tasks(
    monkeypatch: pytest.MonkeyPatch, backend: str, packages: list[str], task: str, tool: str, refused: bool
) -> None:
    monkeypatch.setattr("covey.sampling.tools.running.choose", lambda **_: SandboxChoice(Backend(backend)))
    values = {"data": {"task": task}, "rollout": {"tools": [tool]}, "sandbox": {"packages": packages}}
    resolved = load_config(values={"model": "tiny", **values})
    if refused:
        with pytest.raises(ConfigError, match=f"tool python .*answers of data.task: {task}.*bwrap, landlock"):
            toolbox_of(resolved)
    else:
        assert toolbox_of(resolved) is not None

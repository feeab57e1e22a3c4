"""Notebooks: one output that is replaced while a run goes on, and results that show themselves."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np

import covey
from covey.insight.findings.finding import Finding
from covey.system.console import RunConsole
from covey.types import Completion, Group, Problem


class Cell:
    """The outputs of a notebook's cell; an update replaces one of them."""

    def __init__(self) -> None:
        self.outputs: list[str] = []

    def display(self, shown: str, display_id: bool) -> SimpleNamespace:
        assert display_id
        place = len(self.outputs)
        self.outputs.append(shown)
        return SimpleNamespace(update=lambda new: self.outputs.__setitem__(place, new))


def test_a_run_is_one_output_of_its_cell(monkeypatch, capsys) -> None:
    cell = Cell()
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=cell.display, HTML=str))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    console = RunConsole()
    console.begin("mine (rl)", 3)
    for step in (1, 2, 3):
        console.step(step, step / 4, {"reward": f"{step / 4}", "said": "<b>"})
    console.end()
    (shown,) = cell.outputs
    assert capsys.readouterr().out == ""
    assert "step 3/3" in shown
    assert "&lt;b&gt;" in shown


def test_results_show_themselves(tmp_path) -> None:
    data = {"train": [{"prompt": f"{i}", "answer": "1"} for i in range(8)]}
    data["test"] = data["train"][:4]

    def mine(completion: str) -> float:
        return float("1" in completion) + 0.01 * len(completion)

    result = covey.train(
        model="tiny", data=data, rewards=[mine], output=tmp_path / "<run>", quiet=True,
        train={"steps": 1}, rollout={"max_tokens": 4}, eval={"every": 1, "samples": 1},
    )  # fmt: skip
    shown = result._repr_html_()
    assert "&lt;run&gt;: " in shown
    assert "<svg" in shown
    evaluation = covey.evaluate(result, quiet=True, rewards=[mine], data=data)
    assert "<div>greedy: " in evaluation._repr_html_()
    findings = covey.explain(result)
    assert findings._repr_html_().count("<div>") == max(len(findings), 1)


def test_groups_and_findings_show_themselves() -> None:
    completions = tuple(Completion(np.array([1]), np.zeros(1), text, "stop") for text in ("<a>", "b"))
    group = Group(Problem("1", "1 < 2?"), np.array([1]), completions, np.array([1.0, 0.25]))
    assert "<div>1 &lt; 2?</div>" in group._repr_html_()
    assert "<td>0.25</td><td>b</td>" in group._repr_html_()
    finding = Finding("dead", 3, "warning", "Groups < 2 are dead", remedy="rollout.group_size: 16")
    assert finding._repr_html_() == (
        "<div>step 3, warning: Groups &lt; 2 are dead. Try: rollout.group_size: 16</div>"
    )

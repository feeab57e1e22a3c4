"""Notebooks: one output that is replaced while a run goes on, and results that show themselves."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import covey
from covey.system.console import RunConsole


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
    evaluation = covey.evaluate(tmp_path / "<run>", quiet=True, rewards=[mine], data=data)
    assert "<div>greedy: " in evaluation._repr_html_()

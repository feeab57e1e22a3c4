"""Benchmarks: no GPU is no benchmark of it, a missing peer is named once, every mistake has its place."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest
import torch


def test_a_gpu_is_measured_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(__file__).parents[1] / "benchmarks" / "speed"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["speed", "--gpu"])
    speed = runpy.run_path(str(folder / "__main__.py"))
    with pytest.raises(SystemExit):
        speed["main"]()
    assert "--gpu measures on a GPU, and torch finds none here" in capsys.readouterr().err
    sizes = {size: speed["subject"].matrix_parameters(size) for size in ("0.5B", "1.5B")}
    assert sizes == pytest.approx({"0.5B": 0.494e9, "1.5B": 1.544e9}, rel=1e-3)


def test_a_peer_that_is_not_installed_is_said_once_below_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks" / "speed"))
    quick = importlib.import_module("quick")
    sample = {"cpu": 1.0, "tokens": 10}
    quick.compare(lambda cell, lengths, peer: None if peer == "trl" else [[sample], [sample]], "here")
    said = capsys.readouterr().out
    assert said.count("pip install 'covey[bench]'") == 1
    assert said.index("update, ragged") < said.index("trl is not installed: pip install")
    quick.compare(lambda *_: [[sample], [sample]], "here")
    assert "pip install" not in capsys.readouterr().out


def test_every_mistake_has_its_place_in_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant whose text is gone would be an error only when somebody runs all of them."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    mutants = importlib.import_module("mutants")
    reasons = {(m.file, m.mistake): mutants.unfit(m) for m in mutants.MUTANTS}
    assert {name: why for name, why in reasons.items() if why} == {}
    # A beginning that no file has any more shows its mistakes to the tests of another room.
    assert set(mutants.NEAR) == {m.near for m in mutants.MUTANTS}
    (first, *_) = mutants.MUTANTS
    assert "no Python" in mutants.unfit(first._replace(new="("))
    assert "0 times" in mutants.unfit(first._replace(old="never written"))

"""`covey ui`, `report` and `rescore` of runs that other frameworks have made."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from covey.audit import run_folder
from covey.audit.readers.record_file import read_record
from covey.audit.run_folder import readable
from covey.audit.writers.recorder import tokenizer_file
from covey.cli import main
from covey.insight.pages.compare import run_differences
from covey.insight.pages.records import Runs, run_list, run_page
from covey.insight.pages.steps import group_page, step_page
from covey.insight.pages.tokens import token_page
from tests.audit.lines import sound, written
from tests.audit.recorded import MISTAKES, run
from tests.audit.stand_ins import WORDS, OpenRlhfTrainer, VerlTrainer

REWARD = """
def brief(completions, **columns):
    return [1.0 / (1 + len(text.split())) for text in completions]


def right(completions, answer, **columns):
    return [float(answer[n] in text.split()) for n, text in enumerate(completions)]
"""


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    """The record of a run with a mistake, and its tokenizer."""
    trainer = VerlTrainer()
    MISTAKES["mask_shifted"](trainer)
    run(trainer, tmp_path)
    path = (tmp_path / "run.jsonl").rename(tmp_path / "verl.jsonl")
    words = {f"w{i} ": i for i in range(WORDS)}
    Tokenizer(models.WordLevel(words, unk_token="w0 ")).save(str(tokenizer_file(path)))
    return path


def test_the_pages_show_a_record(verl: Path) -> None:
    with readable(verl) as folder:
        (row,) = run_list(Runs(folder))["runs"]
        assert (row["run"], row["method"], row["done"]) == ("verl", "verl", 4)
        page = run_page("verl", folder)
        assert page["notes"] == [f"{verl}, as it was when this page was made: 4 updates, 96 completions."]
        assert "optimizer/grad_norm" in page["metrics"][0] and page["logged"] == [1, 2, 3, 4]
        first, *_, last = page["findings"]
        assert first["id"] == "mask_shifted" and "checks apply" in last["sentence"]
        place = first["evidence"]
        # The evidence is the place on the pages: its first token is in no loss.
        found = token_page(folder, place["step"], place["group"], place["completion"])
        assert [str(v) for v in found["values"]["advantage"]][place["token"]] == "nan"
        assert found["pieces"] is not None and set(found["quantities"]) >= {"advantage", "logprob", "ratio"}
        group = group_page(folder, 2, 1)
        assert len(step_page(folder, 2)["groups"]) == 6 and len(group["completions"]) == 4
        assert max(c["reward"] for c in group["completions"]) > min(c["reward"] for c in group["completions"])
    assert not folder.exists()


def test_the_pages_follow_a_record_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "MIN_PAUSE", 0.01)
    lines = sound()
    path = written(lines[:4], tmp_path / "run.jsonl")  # a rollout, two updates

    def page_when(holds: Callable[[dict[str, Any]], bool], folder: Path) -> dict[str, Any]:
        end = time.monotonic() + 60
        page = run_page("run", folder)
        while not holds(page) and time.monotonic() < end:
            time.sleep(0.01)
            page = run_page("run", folder)
        return page

    with readable(path, follow=True) as folder:
        page = page_when(lambda _: True, folder)
        assert (page["state"], page["logged"], len(page["metrics"])) == ("training", [], 2)
        with path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines[4:6]))
            file.write('{"kind": "upd')
        page = page_when(lambda page: len(page["metrics"]) > 2, folder)
        assert (page["state"], page["logged"]) == ("training", [1])
        written(lines, path)
        page = page_when(lambda page: len(page["metrics"]) > 3, folder)
        assert len(page["metrics"]) == 4 and not page["notes"]
        monkeypatch.setattr(run_folder, "FINISHED_AFTER", 0.0)
        page = page_when(lambda page: page["state"] == "finished" and len(page["findings"]) > 1, folder)
        assert "4 updates, 16 completions" in page["notes"][-1]
        assert [f["id"] for f in page["findings"]] == ["audit_follows", "audit"]
    assert not folder.exists()


def test_what_a_record_lacks_is_said_on_its_pages(verl: Path, tmp_path: Path) -> None:
    samples = [s for r in read_record(verl).rollouts[:1] for s in r.completions]
    rows = [{"input": s.prompt, "output": s.text, "score": s.reward} for s in samples]
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump/1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = "This record has no token ids, log-probs of tokens, advantages and masks."
    with readable(tmp_path / "dump") as folder:
        assert run_page("dump", folder)["notes"][0].endswith(f"24 completions. {said}")
        page = token_page(folder, 1, 0, 0)
        assert (
            page["row"]["lacks"] == said
            and page["ids"] == []
            and page["row"]["completion"] == rows[0]["output"]
        )
    state = {"log_history": [{"loss": 0.1, "step": n, "grad_norm": 1.0} for n in (1, 2)]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    with readable(tmp_path / "trainer_state.json") as folder:
        page = run_page("trainer_state", folder)
        assert page["notes"][0].endswith("This record has no completions.") and len(page["metrics"]) == 2


def test_a_folder_of_records_is_a_list_of_runs_that_are_compared(verl: Path, tmp_path: Path) -> None:
    run(OpenRlhfTrainer(), tmp_path)
    with readable(tmp_path) as folder:
        assert sorted(row["run"] for row in run_list(Runs(folder))["runs"]) == ["run", "verl"]
        found = run_differences(folder / "run", folder / "verl")
        assert found["problems"] and "actor_rollout_ref.rollout.n" in str(found["settings"])
    (tmp_path / "empty").mkdir()
    with readable(tmp_path / "empty") as folder:
        assert folder == tmp_path / "empty"  # runs of covey may begin there


def test_a_record_becomes_one_file(verl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.html"
    assert main(["report", str(verl), "-o", str(output)]) == 0
    page = output.read_text(encoding="utf-8")
    assert "the mask is shifted by one place" in page and "as it was when this page was made" in page
    assert str(output) in capsys.readouterr().out


def test_other_rewards_are_tried_on_a_record(
    verl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    assert main(["rescore", str(verl), f"{tmp_path}/mine.py:brief", "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["groups"] == 12 and found["completions_that_change_sign"] > 0
    assert {g["step"] for g in found["of_groups"]} == {3, 4}
    texts = [s.text or "" for s in read_record(verl).rollouts[2].completions[:4]]
    assert found["of_groups"][0]["new"] == pytest.approx([1 / (1 + len(t.split())) for t in texts])
    # verl's column of the answer is called ground_truth, which rewards get as `answer` too.
    assert main(["rescore", str(verl), f"{tmp_path}/mine.py:right", "--json"]) == 0
    capsys.readouterr()
    lines = sound()
    for line in lines:
        for sample in line.get("completions", ()):
            del sample["text"]
    assert main(["rescore", str(written(lines, tmp_path / "x.jsonl")), f"{tmp_path}/mine.py:brief"]) == 3
    assert "This record has no texts. Rewards read texts" in capsys.readouterr().err

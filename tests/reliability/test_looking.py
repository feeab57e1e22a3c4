"""Looking at somebody's run folder: nothing of it is run, and nothing but its own records is opened."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.fakes import rewrite_rollouts, rows_of

from covey.cli import main
from covey.errors import CheckpointError
from covey.insight.pages.records import Runs, run_list, run_page
from covey.runs.rollouts import read_rollouts
from covey.system.integrity import sealed, unsealed

EVIL = """
import pathlib
pathlib.Path({trace!r}).touch()
def f(rewards): return rewards - rewards.mean()
def varied(completion): return len(completion)
"""
REWARD = "def varied(completion):\n    return len(completion) + len(set(completion)) / 9\n"
LOOKS = """
import json, sys
opened = []
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str | bytes):
        opened.append(arguments[0] if isinstance(arguments[0], str) else arguments[0].decode())
    elif event == "import" and arguments[1]:
        opened.append(arguments[1])
    elif event == "exec":
        opened.append(arguments[0].co_filename)
theirs, other, report = sys.argv[1:]
from pathlib import Path
from covey.cli import main
from covey.insight import difference, show, rescore
from covey.insight.findings import watch
from covey.insight.pages import compare, records, report as _, server, steps, tokens
import covey.models.policy  # and with it torch's own generated code, which is not the run's
sys.addaudithook(hook)
codes = [
    main(["explain", theirs]), main(["report", theirs, "-o", report]), main(["show", theirs]),
    main(["show", theirs, "1"]), main(["show", theirs, "1", "0"]), main(["diff", theirs, other]),
    main(["pairs", theirs, "-o", report + ".jsonl"]), main(["rescore", theirs, "repetition"]),
]
runs, folder = records.Runs(Path(theirs)), Path(theirs)
records.run_list(runs), records.run_page("x", folder), steps.step_page(folder, 1)
steps.group_page(folder, 1, 0), tokens.token_page(folder, 1, 0, 0)
compare.run_differences(folder, Path(other))
print(json.dumps({"codes": codes, "opened": sorted(set(opened))}))
"""
OWN = {f"{record}.json" for record in ("env", "start", "exit", "result", "manifest", "tokenizer", "tags")}
OWN |= {"config.yaml", ".lock", ".owner", ".marks"}
OWN |= {f"{stream}.jsonl" for stream in ("metrics", "timings", "evals", "events", "findings")}


def forged(run: Path, **changes: object) -> None:
    """A sender changes a record and seals it again: anybody can."""
    for name in ("env.json", "start.json"):
        values = unsealed((run / name).read_bytes())
        known = {k: v for k, v in changes.items() if k in values}
        (run / name).write_text(sealed({**values, **known}))


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A run that somebody else has made and sent, with code beside it that its records name."""
    config = {
        "data": {"task": "last_digit", "train_size": 16, "test_size": 4},
        "rewards": ["rewards.py:varied"],
        "rollout": {"group_size": 2, "prompts_per_step": 2, "max_tokens": 4},
        "train": {"steps": 2, "lr": 1e-3, "save_every": 1},
        "eval": {"problems": 2, "samples": 1},
        "threads": 1,
    }
    (tmp_path / "rewards.py").write_text(
        "def varied(completion):\n    return len(completion) + len(set(completion)) / 9\n"
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    run = tmp_path / "theirs"
    assert main(["train", str(tmp_path / "run.yaml"), "--output", str(run)]) in (0, 1)
    shutil.copytree(run, tmp_path / "other")
    (run / "evil.py").write_text(EVIL.format(trace=str(tmp_path / "ran")))
    return run


def named_code(run: Path, **settings: object) -> None:
    """Let the recorded config name the code."""
    from covey.config.load import sealed_yaml
    from covey.runs.reader import recorded_yaml

    recorded = recorded_yaml(run)
    if "advantage" in settings:
        settings = {"algorithm": {**recorded["algorithm"], **settings}}
    (run / "config.yaml").write_text(sealed_yaml({**recorded, **settings}))


def test_commands_that_look_run_and_open_nothing_else(theirs: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "tokenizer.json").write_text("{}")
    named_code(theirs, advantage=f"{theirs / 'evil.py'}:f")
    named_code(theirs, model=str(elsewhere), rewards=[f"{theirs / 'evil.py'}:varied"])
    forged(theirs, folder=str(theirs))
    for model in ("final", "checkpoints"):
        shutil.rmtree(theirs / model)
    report = str(tmp_path / "report.html")
    told = [sys.executable, "-c", LOOKS, str(theirs), str(tmp_path / "other"), report]
    done = subprocess.run(told, capture_output=True, text=True, check=True, cwd=tmp_path)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["codes"] == [0, 0, 0, 0, 0, 0, 3, 0], done.stdout  # all are truncated: no pairs
    assert not (tmp_path / "ran").exists()
    opened = [Path(p) for p in found["opened"]]
    of_records = {p.name for p in opened if not p.is_absolute()} - {"rollouts", "<string>"}
    assert of_records <= OWN | {f"step_{n:06d}.{kind}" for n in (1, 2) for kind in ("jsonl", "npz")}
    own = (str(theirs), str(tmp_path / "other"), report, str(tmp_path / ".tmp-report"))
    named = {p for p in opened if p.is_relative_to(tmp_path) and p != tmp_path}
    assert {p for p in named if not str(p).startswith(own)} == set()
    assert {p.name for p in named if p.is_file() and p.is_relative_to(theirs)} <= OWN


def test_resuming_somebody_elses_run_says_whose_code_it_runs(theirs: Path, tmp_path: Path, capsys) -> None:
    evil = theirs / "evil.py"
    forged(theirs, values={"rewards": [f"{evil}:varied"]})
    for command in (["resume", str(theirs), "--train.steps", "3"], ["score", "x", str(theirs)]):
        if command[0] == "score":
            named_code(theirs, rewards=[f"{evil}:varied"])
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"{evil} (varied)" in said
        assert "--trust" in said
        assert not (tmp_path / "ran").exists()
    assert main(["eval", str(theirs)]) == 2
    assert f"{evil} (varied)" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert main(["eval", str(theirs), "--trust"]) == 0
    assert (tmp_path / "ran").exists()


def test_a_run_of_ones_own_is_resumed_without_a_question(theirs: Path, tmp_path: Path, capsys) -> None:
    start = ["train", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "mine")]
    assert main([*start, "--inject", "step.sigterm@2"]) == 75
    shutil.move(tmp_path / "mine", tmp_path / "moved")
    assert main(["resume", str(tmp_path / "moved")]) in (0, 1)


def test_an_address_of_a_stranger_is_asked_only_when_trusted(theirs: Path, capsys) -> None:
    forged(
        theirs, values={"rollout": {"sampler": {"url": ["http://192.0.2.1:9"]}}, "rewards": ["math_answer"]}
    )
    assert main(["resume", str(theirs), "--train.steps", "3"]) == 2
    assert "http://192.0.2.1:9" in capsys.readouterr().err


def linked(run: Path, secret: Path) -> None:
    (run / "result.json").unlink()
    (run / "exit.json").symlink_to(secret)


def half_linked(run: Path, secret: Path) -> None:
    (run / "result.json").unlink()
    (run / "exit.json").write_text(f"{secret.read_text()} and no JSON")


def linked_rollouts(run: Path, secret: Path) -> None:
    shutil.move(run / "rollouts", secret.parent / "rollouts")
    (run / "rollouts").symlink_to(secret.parent / "rollouts")


def piped(run: Path, _: Path) -> None:
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")


def huge(run: Path, _: Path) -> None:
    os.truncate(run / "metrics.jsonl", 1 << 40)


def deep(run: Path, _: Path) -> None:
    (run / "config.yaml").write_text("a: " + "[" * 50_000)


STRANGE = {
    linked: "exit.json: exit.json is a link",
    half_linked: "exit.json is damaged",
    linked_rollouts: "rollouts is a link",
    piped: "metrics.jsonl is not a regular file",
    huge: "metrics.jsonl has 1,099,511,627,776 bytes",
    deep: "config.yaml",
}


@pytest.mark.parametrize("change", STRANGE)
def test_what_is_no_record_of_the_run_is_named_and_not_shown(
    theirs: Path, tmp_path: Path, capsys, change: Callable[[Path, Path], None]
) -> None:
    (secret := tmp_path / "elsewhere" / "id_rsa").parent.mkdir()
    secret.write_text("my private key")
    change(theirs, secret)
    (theirs / ".owner").write_text("")
    report = tmp_path / "r.html"
    code = main(["report", str(theirs), "-o", str(report)])
    shown = capsys.readouterr().err + (report.read_text() if report.exists() else "")
    assert code in (0, 4)
    assert STRANGE[change] in shown
    page = json.dumps([run_page("x", theirs), run_list(Runs(theirs))])
    assert change is linked_rollouts or STRANGE[change].partition(" ")[0].strip(":") in page
    assert "private key" not in page + shown


def test_arrays_that_would_be_larger_than_their_file_are_not_unpacked(theirs: Path) -> None:
    path = theirs / "rollouts" / "step_000001.npz"
    rows = rows_of(path.with_suffix(".jsonl"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tokens.npy", bytes(1 << 20))
    rewrite_rollouts(theirs, 1, rows)
    with pytest.raises(CheckpointError, match=r"step_000001\.npz: damaged \(it has compressed parts"):
        read_rollouts(theirs, 1).of_completion(0)
    header = (
        b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<i8', 'fortran_order': False, 'shape': (10000000000,), }"
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tokens.npy", header.ljust(127) + b"\n")
    rewrite_rollouts(theirs, 1, rows)
    with pytest.raises(CheckpointError, match="an array that does not fill its place"):
        read_rollouts(theirs, 1).of_completion(0)

"""Any damage to what a run reads back is answered with the file's name, never with a traceback."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.fakes import as_stream, rows_of

from covey.cli import main
from covey.errors import CheckpointError
from covey.insight.pages.records import run_page
from covey.runs.folder import RunFolder, read_stream

REWARDS = "def varied(completion):\n    return len(completion) + sum(map(ord, completion)) % 7\n"
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "text": lambda _: b"no such thing: [\n",
    "list": lambda _: b"[1]\n",
    "null": lambda _: b"null\n",
    "mapping": lambda _: b"{}\n",
    "binary": lambda _: bytes(range(256)),
    "zeros": lambda b: bytes(len(b)),
    "half": lambda b: b[: len(b) // 2],
    "flipped": lambda b: b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 1]) + b[len(b) // 2 + 1 :],
    "zeros at the end": lambda b: b[:-9] + bytes(9),
    "not text": lambda b: b[: len(b) // 2] + b"\xff" + b[len(b) // 2 + 1 :],
}
STATE = ("config.yaml", "env.json", "start.json", "metrics.jsonl", "evals.jsonl", "timings.jsonl")
STATE += ("events.jsonl",)
CHECKPOINT = ("trainer.json", "manifest.json", "optimizer.safetensors", "model.safetensors", "config.json")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after two of three steps, and one that has ended."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "rewards.py").write_text(REWARDS)
    config = {
        "data": {"task": "last_digit", "train_size": 16, "test_size": 4},
        "rewards": ["rewards.py:varied"],
        "rollout": {"group_size": 2, "prompts_per_step": 2, "max_tokens": 4},
        "train": {"steps": 4, "lr": 1e-3, "save_every": 1},
        "eval": {"problems": 2, "samples": 1},
        "threads": 1,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    start = ["train", str(folder / "run.yaml"), "--output"]
    assert main([*start, str(folder / "killed"), "--inject", "grad.nan@1,step.sigterm@3"]) == 75
    assert main([*start, str(folder / "done")]) in (0, 1)
    return folder


def resumed(runs: Path, place: Path, file: str, how: str, capsys, *options: str) -> tuple[int, str]:
    """What `covey resume` says of a copy of a run with one damaged file."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(runs, place)
    path = place / file
    path.write_bytes(DAMAGES[how](path.read_bytes()))
    capsys.readouterr()
    code = main(["resume", str(place), *options])
    said = capsys.readouterr()
    assert "a bug in covey" not in said.err
    assert "Traceback" not in said.err
    return code, said.out + said.err


@pytest.mark.parametrize("file", [*STATE, *(f"checkpoints/step_000002/{name}" for name in CHECKPOINT)])
def test_every_damage_to_a_run_is_named_under_strict(runs: Path, tmp_path: Path, capsys, file: str) -> None:
    for how in DAMAGES:
        code, said = resumed(runs / "killed", tmp_path / "run", file, how, capsys, "--strict")
        name = "step_000002" if file.endswith("manifest.json") else file
        if code in (0, 1):  # a comment of the record of settings
            assert (file, how) == ("config.yaml", "flipped")
            continue
        assert code in (2, 4), (how, said)
        assert name in said or (file == "config.yaml" and "holds a run with other settings" in said), how
        assert len(said) < 2000, how


@pytest.mark.parametrize("file", ["result.json", "final/model.safetensors", "final/manifest.json"])
def test_every_damage_to_a_run_that_has_ended_is_named(runs: Path, tmp_path: Path, capsys, file: str) -> None:
    for how in DAMAGES:
        code, said = resumed(runs / "done", tmp_path / "run", file, how, capsys)
        assert code == 4, (how, said)
        assert file in said, how


@pytest.mark.parametrize("file", ["metrics.jsonl", "timings.jsonl", "events.jsonl"])
@pytest.mark.parametrize("how", ["zeros", "zeros at the end", "flipped", "not text"])
def test_a_run_continues_over_a_damaged_log_and_says_so(
    runs: Path, tmp_path: Path, capsys, file: str, how: str
) -> None:
    code, said = resumed(runs / "killed", tmp_path / "run", file, how, capsys)
    assert code in (0, 1)
    assert f"{file} is not as it was written" in said
    events = [json.loads(x) for x in (tmp_path / "run/events.jsonl").read_text().splitlines() if x.strip()]
    assert "log damaged" in [e["event"] for e in events]
    assert main(["explain", str(tmp_path / "run")]) == 0


def test_a_digit_in_a_log_is_noticed(runs: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(runs / "killed", tmp_path / "run")
    path = tmp_path / "run/metrics.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"reward/mean": ', '"reward/mean": 9', 1)[: len(text) - 1] + "\n")
    assert main(["resume", str(tmp_path / "run"), "--strict"]) == 4
    assert "metrics.jsonl is not as it was written" in capsys.readouterr().err


def test_rollouts_that_are_gone_are_mentioned(runs: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(runs / "killed", tmp_path / "run")
    (tmp_path / "run/rollouts/step_000001.npz").unlink()
    assert main(["resume", str(tmp_path / "run"), "--strict"]) == 4
    assert "rollouts lacks 1 of 4 files" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "run")]) in (0, 1)
    assert "rollouts lacks 1 of 4 files" in capsys.readouterr().out


def test_logs_that_cannot_be_read_are_named_by_the_line(runs: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(runs / "done", tmp_path / "run")
    for damage in (b"{\n", b"[]\n", b"\xff\n", b'{"loss": 1}\n'):
        (tmp_path / "run/metrics.jsonl").write_bytes(as_stream([{"step": 0}]).encode() + damage)
        assert main(["explain", str(tmp_path / "run")]) == 4
        assert "metrics.jsonl:2: the line is damaged" in capsys.readouterr().err


def test_a_run_is_measured_or_its_damaged_record_is_named(runs: Path, tmp_path: Path, capsys) -> None:
    for file in ("config.yaml", "env.json"):
        for damaged in DAMAGES.values():
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            shutil.copytree(runs / "killed", tmp_path / "run")
            path = tmp_path / "run" / file
            path.write_bytes(damaged(path.read_bytes()))
            capsys.readouterr()
            code = main(["eval", str(tmp_path / "run")])
            said = capsys.readouterr().err
            assert "a bug in covey" not in said
            assert code in (0, 2, 3, 4)
            assert code == 0 or "error" in said


def test_a_log_that_lost_its_end_costs_one_checkpoint_not_the_run(runs: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "killed", run)
    path = run / "timings.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert main(["resume", str(run)]) == 4
    newest = max((run / "checkpoints").iterdir())
    assert f"or remove {newest} to resume" in capsys.readouterr().err
    shutil.rmtree(newest)
    assert main(["resume", str(run)]) in (0, 1)


@pytest.mark.parametrize("file", ["step_000004.jsonl", "step_000004.npz"])
def test_a_damaged_step_can_be_left_out(runs: Path, tmp_path: Path, capsys, file: str) -> None:
    run, other = tmp_path / "run", str(runs / "done")
    shutil.copytree(runs / "done", run)
    path = run / "rollouts" / file
    path.write_bytes(b"")
    looks = [["diff", str(run), other], ["report", str(run), "-o", str(tmp_path / "report.html")]]
    looks = [*looks, ["rescore", str(run), str(runs / "rewards.py:varied")]]
    refused = {look[0]: capsys.readouterr().err for look in looks if main(look) == 4}
    assert refused.keys() == ({"report", "rescore"} | ({"diff"} if path.suffix == ".jsonl" else set()))
    assert all("move step_000004.jsonl elsewhere" in said for said in refused.values())
    path.with_suffix(".jsonl").rename(tmp_path / "elsewhere")
    assert [main(look) for look in looks] == [0, 0, 0]


@pytest.mark.parametrize("file", ["rollouts/step_000001.jsonl", "rollouts/step_000002.npz"])
def test_a_bit_of_the_rollout_log_is_noticed(runs: Path, tmp_path: Path, capsys, file: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "killed", run)
    flip(run / file)
    assert main(["verify", str(run)]) == 4
    assert f"damaged  rollouts/{Path(file).stem}" in capsys.readouterr().out
    assert main(["resume", str(run), "--strict"]) == 4
    assert Path(file).name in capsys.readouterr().err


def test_what_is_computed_from_the_rollout_log_refuses_a_digit(runs: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "done", run)
    path = run / "rollouts/step_000001.jsonl"
    path.write_text(path.read_text().replace('"reward": ', '"reward": 9', 1))
    looks = (["pairs", str(run), "-o", str(tmp_path / "p.jsonl")], ["rescore", str(run), "repetition"])
    for command in (*looks, ["show", str(run), "1"]):
        assert main(command) == 4
        assert "step_000001.jsonl:1: damaged" in capsys.readouterr().err
    assert not (tmp_path / "p.jsonl").exists()


@pytest.mark.parametrize("stream", ["metrics", "timings", "evals"])
def test_every_byte_of_a_finished_log_is_held_to_what_was_written(
    runs: Path, tmp_path: Path, capsys, stream: str
) -> None:
    """A digit anywhere, and a line that is not there any more."""
    run, report = tmp_path / "run", ["-o", str(tmp_path / "r.html")]
    shutil.copytree(runs / "done", run)
    path, whole = run / f"{stream}.jsonl", (run / f"{stream}.jsonl").read_bytes()
    digits = [i for i, byte in enumerate(whole) if chr(byte).isdigit()]
    for place in digits[:: len(digits) // 9]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert main(["report", str(run), *report]) == 4
        assert f"{stream}.jsonl:" in capsys.readouterr().err
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert main(["report", str(run), *report]) == 4
    assert f"{stream}.jsonl is not as it was written" in capsys.readouterr().err
    assert any(path.name in note for note in run_page("run", run)["notes"])
    path.write_bytes(whole)
    assert main(["verify", str(run)]) == 0


def test_a_finished_stage_with_other_evaluations_is_not_gone_on_from(
    runs: Path, tmp_path: Path, capsys
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "done", run)
    changed = [{**row, "greedy": 2.0} for row in rows_of(run / "evals.jsonl")]
    (run / "evals.jsonl").write_text(as_stream(changed))  # each line whole, and not what the result knows
    assert main(["resume", str(run)]) == 4
    assert "evals.jsonl is not as it was written" in capsys.readouterr().err


def test_a_log_that_the_disk_has_changed_is_not_sealed_as_right(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append("metrics.jsonl", {"step": 0, "loss": 1.0})
    flip(tmp_path / "metrics.jsonl")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl does not have the bytes that were written"):
        folder.sync()
    folder.close()


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_half(tmp_path: Path, monkeypatch) -> None:
    folder = RunFolder(tmp_path)
    folder.append("events.jsonl", {"step": 0, "event": "before"})
    before, limits = (tmp_path / "events.jsonl").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 9, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large.*events\.jsonl"):
            folder.append("events.jsonl", {"step": 1, "event": "more than fits"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "events.jsonl").read_bytes() == before
    folder.close()


def test_a_read_that_fails_once_is_tried_again_and_else_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "metrics.jsonl").write_text(as_stream([{"step": 0, "loss": 1.0}]))
    failures = [errno.ESTALE]

    def stale(*_: object) -> None:
        if failures:
            raise OSError(failures.pop(), "Stale file handle")

    monkeypatch.setattr("covey.system.opening._check_regular", stale)
    monkeypatch.setattr("covey.system.opening.PAUSE_SECONDS", 0)
    assert read_stream(tmp_path, "metrics.jsonl") == [{"step": 0, "loss": 1.0}]
    failures += [errno.ESTALE] * 3
    with pytest.raises(OSError, match="Stale file handle") as caught:
        read_stream(tmp_path, "metrics.jsonl")
    assert caught.value.filename == str(tmp_path / "metrics.jsonl")


def flip(path: Path) -> None:
    """One bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

"""Logs of metrics and prime-rl's files: each kind is read, a damaged one gives one sentence."""

from __future__ import annotations

import base64
import json
import sqlite3
import zlib
from pathlib import Path
from typing import Any

import pytest

from covey.audit.checks.check import apply
from covey.audit.course import findings_from_metrics
from covey.audit.frameworks import FRAMEWORKS, framework_of
from covey.audit.readers.sources import open_run
from covey.audit.record import AuditRecord
from covey.audit.table import CHECKS
from covey.cli import main
from covey_verify.errors import DataError

STEPS = range(1, 21)
EVENTS = (
    "c-"
    "p1bTS${(9LMo(%^e=6JGq;sW!jAzTP&S2I!tRg^`cP1yom8mUuCg_yzlEFLMsjFLJ;gs8Q4KmVjV6d=Q2pTFhYo;gCW#KM9?"
    "e)!&+vJ?b*x!;<<WuwY__PUp_Z`_PQm>*S}%+i26mTS-"
    "a)wLZvy&%Q3#7#ns6M1&6KPf_4aOkPmU*5W}@t_>Mq;;f`CnIG@0B7B+F0r`6|YJ;^I8nu^(iRJU8dXH9*0D%sUZi%rOgG(w"
    "_o<=C!`nn@x#wKp8j<Em4O$ZY(ox+aodI8X)Jnp`x80_}cQ@P&fBwb}1$Z)aOP9JBGcN~Mw(%Ow)$zS>NrMoPY!@iQD>Gifv"
    "cNH5OH2oPyo?J|JOhzknH!(r!N0Qrcsn+T9WXZ#s}Xs6Q)3dq=%GhYB?C(g<Vkdlc5b^tjmE+`-!H-"
    "5?hB#g5e1jyKF=_r6KiVF(J_@nY{09nOZ1p)HScA^qMT&w8?1>{`Mm<vD#aaKuy*yfjh0LXK3K>@MG|MUaMcbrubAYX6BdI2"
    "QwcX~kqxzxD506-i#t0q7$WW?P7;uRMZkotz#4e%VnSww)WOx3Ld$Zc^!0eQfF8Uc_QoXsRa-pdD80HoiUix(7-"
    "yWyoy09n9U4FOURVb%d8r!u{ufULQ$l>kT?&SnuHyHFJVYP{lt0#bL;xfwuua5kF&866sz0mv<JK>>*l&G`W&inCe*<m7$(D"
    "**W{E+`<HmZ5_HvW~Ml0>r-G{sBOiQ665<{OKuUFX1_onab)3kZ9+zw*b;5E+`<Sh11mlavo<5B*;SFBzztb7Zi|4w`~zX-"
    "r=l~06EfFs0R>*CcU75R0K+%0LV6+%^^S<cMDAb;uaSakfy%tmy1%_@^z0y-702tkr^42SwG8gL0_;f(PB-"
    "H%LmG)@6^4?PYsJ=<A>Bob?KoI=@Ci|Lp*Ov+;eZf8Xm}6J@A{8_w!7`&sznyTkxbFxT|z3r9p0xsiaj3CO`2_tqLiSJn=5("
    "nEUk~&Y*FM"
)
"""What torch's SummaryWriter wrote: 20 steps with scalars in both styles, and a text."""


def metrics(names: dict[str, float]) -> list[dict[str, float]]:
    """Steps with the same numbers, which are those of a run whose completions are truncated."""
    return [{**names, "_step": 7 * step} for step in STEPS]


OF: dict[str, dict[str, float]] = {
    "trl": {"train/reward": 0.25, "train/completions/clipped_ratio": 0.75, "train/learning_rate": 0.0},
    "verl": {"critic/score/mean": 0.25, "response_length/clip_ratio": 0.75, "actor/lr": 0.0},
    "openrlhf": {
        "train/rollout/reward_mean": 0.25,
        "train/rollout/truncated_rate": 0.75,
        "train/actor_lr": 0.0,
    },
    "prime-rl": {
        "train/agg/all/agent/reward/mean": 0.25,
        "train/agg/all/agent/is_truncated/mean": 0.75,
        "optim/lr": 0.0,
    },
}
REMEDY = {
    "trl": "max_completion_length=1024",
    "verl": "data.max_response_length=1024",
    "openrlhf": "--rollout.max_new_tokens 1024",
    "prime-rl": "--orchestrator.train.sampling.max_completion_tokens 1024",
}


def csv_of(rows: list[dict[str, float]], run: str = "") -> str:
    names = list(rows[0])
    head = ",".join(f'"{run}{name}"' if name != "_step" else '"Step"' for name in names)
    return "\n".join([head, *(",".join(str(row[name]) for name in names) for row in rows)]) + "\n"


def trackio(path: Path, rows: list[dict[str, float]]) -> None:
    with sqlite3.connect(path) as base:
        base.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)"
        )
        for name, logged in (("earlier", [{"train/reward": 1.0}]), ("last", rows)):
            values = [(name, row.get("_step", 0), json.dumps(row)) for row in logged]
            base.executemany("INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)", values)
    base.close()


@pytest.mark.parametrize("framework", sorted(OF))
@pytest.mark.parametrize("kind", ["csv", "chart", "jsonl", "json", "db"])
def test_a_log_is_read_and_told_in_the_frameworks_words(kind: str, framework: str, tmp_path: Path) -> None:
    rows = metrics(OF[framework])
    path = tmp_path / f"export.{'csv' if kind == 'chart' else kind}"
    if kind == "db":
        trackio(path, rows)
    elif kind in ("csv", "chart"):
        path.write_text(csv_of(rows, "my - run - " if kind == "chart" else ""))
    else:
        text = json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text)
    record = open_run(path)
    assert record.header.framework == framework and len(record.updates) == 20
    assert record.updates[0].step == 6
    assert [f.id for f in apply(CHECKS, record).findings] == ["rate_zero"]
    told = [f"{path}: 2 runs; last, which logged last, is read"] if kind == "db" else []
    assert record.notes == [*told, f"{path}: metrics only, no completions"]
    (finding,) = findings_from_metrics(record)
    assert finding.id == "truncated" and finding.remedy == REMEDY[framework]
    assert "rollout.max_tokens" not in finding.sentence


def test_a_summary_is_one_step(tmp_path: Path) -> None:
    path = tmp_path / "wandb-summary.json"
    path.write_text(json.dumps({**OF["trl"], "_step": 9, "_wandb": {"runtime": 3}, "train/global_step": 4}))
    record = open_run(path)
    assert [(u.step, u.learning_rate) for u in record.updates] == [(3, 0.0)]


def test_verls_file_logger_is_read(tmp_path: Path) -> None:
    lines = [{"step": step, "data": OF["verl"]} for step in STEPS]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(open_run(tmp_path / "log.jsonl").updates) == 20


def test_an_event_file_of_tensorboard_is_read(tmp_path: Path) -> None:
    data = zlib.decompress(base64.b85decode("".join(EVENTS)))
    path = tmp_path / "runs" / "today" / "events.out.tfevents.1.host.2.0"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    record = open_run(tmp_path)
    assert len(record.updates) == 20 and record.updates[-1].learning_rate == pytest.approx(1e-6)
    assert record.updates[0].metrics == {"reward": 0.25, "completions/clipped_ratio": 0.75} | {"_step": 1.0}
    # Of a run that still trains the last event may be half written.
    path.write_bytes(data[:-5])
    assert len(open_run(path).updates) == 20


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"", "not a log of training"),
        ("a.csv", b"Step,a - train/reward,b - train/reward\n1,2,3\n", "2 runs, a and b among them"),
        ("a.csv", b"_step,bleu,wer\n1,2,3\n", "it has bleu, wer"),
        ("a.csv", b"reward,loss\n1,2\n", r"steps \(training/global_step, ...\) are missing; it has reward"),
        ("a.csv", b"\xff\xfe\x00", "or a damaged one"),
        ("a.json", b"[1]", "entry 0 is not an object"),
        ("a.json", b"[" * 9999, "nested too deeply"),
        ("a.jsonl", b'{"_step": 1, "reward": 2}\nx\n', "or a damaged one"),
        ("a.jsonl", b'{"_step": 1e999, "reward": 2, "loss": 1}\n', "steps"),
        ("a.db", b"not a database, but long enough to be one" * 9, "not a database"),
        ("events.out.tfevents.1", b"\x08" + b"\x00" * 11 + b"\xff" * 40, "ends within a number"),
        ("events.out.tfevents.1", b"\xff" * 99, "not a log of training"),
    ],
)
def test_a_damaged_log_gives_one_sentence(
    name: str, content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=says):
        open_run(path)
    assert main(["audit", str(path)]) == 3
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_metrics_with_other_meanings_have_no_counterpart() -> None:
    assert FRAMEWORKS["verl"].metric("critic/rewards/mean") is None, "with the KL"
    assert framework_of(["loss", "bleu"]) == "", "every trainer has a loss"


# --- prime-rl -------------------------------------------------------------------------------------


def episode(step: int, group: int, n: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """An episode with a tool's answer in it, and its sequence in the trainer's export."""
    reward = float(n % 2)
    sampled = [19 + step + n, 21, 2]
    nodes = [
        {
            "message": {"role": "user", "content": f"q{group}"},
            "token_ids": [1, 10 + group],
            "mask": [False] * 2,
        },
        {"parent": 0, "sampled": True, "token_ids": [9, *sampled], "mask": [False, True, True, True]},
        {"parent": 1, "message": {"role": "tool", "content": "t"}, "token_ids": [50], "mask": [False]},
        {"parent": 2, "sampled": True, "token_ids": [30, 2], "mask": [True, True]},
    ]
    for node in (nodes[1], nodes[3]):
        count = sum(node["mask"])
        node |= {"message": {"role": "assistant", "content": "a"}, "logprobs": [-0.5] * count}
        node["advantages"] = [reward - 0.5] * count
    trace = {"nodes": nodes, "rewards": {"right": {"score": reward, "weight": 1.0}, "absent": None}}
    work = {"type": "train", "step": step, "policy": {"start": step - 1, "end": step - 1}}
    whole = {
        "group": {"id": f"g{group}"},
        "task": {"type": "T", "data": {"prompt": "p", "answer": "7"}},
        "run": {"type": "train", "id": "r", "work": work},
        "traces": [trace],
    }
    ids = [token for node in nodes for token in node["token_ids"]]
    mask = [on for node in nodes for on in node["mask"]]
    export = {
        "step": step,
        "token_ids": ids,
        "loss_mask": mask,
        "advantages": [(reward - 0.5) * on for on in mask],
        "inference_logprobs": [-0.5 * on for on in mask],
        "trainer_logprobs": [-0.501] * len(ids),
    }
    return whole, export


def prime_rl(folder: Path, **changes: Any) -> AuditRecord:
    for step in (1, 2, 3):
        pairs = [episode(step, group, n) for group in range(2) for n in range(4)]
        traces = folder / f"rollouts/step_{step}/train/effective/traces.jsonl"
        exports = folder / f"token_exports/step_{step}/rank_0.jsonl"
        for path, part in ((traces, 0), (exports, 1)):
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [pair[part] | (changes if part else {}) for pair in pairs]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [{"step": step, "time": 1.0, "optim/lr": 1e-6, "optim/grad_norm": 0.3} for step in (1, 2, 3)]
    lines += [{"step": step, "time": 1.0, "entropy/all/mean": 1.0, "loss/mean": 0.1} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return open_run(folder)


def test_a_run_of_prime_rl_is_read_from_its_own_files(tmp_path: Path) -> None:
    record = prime_rl(tmp_path)
    assert record.header.framework == "prime-rl"
    assert [str(f) for f in apply(CHECKS, record).findings] == []
    assert [u.learning_rate for u in record.updates] == [1e-6] * 3
    first = record.uses[0]
    assert first.sample.prompt_ids == [1, 10, 9] and first.sample.ids == [20, 21, 2, 50, 30, 2]
    assert first.sample.inserted == first.sample.inserted and first.sample.inserted[3]
    assert first.row.advantage == -0.5 and first.row.mask == [True, True, True, False, True, True]
    assert first.sample.rewards == {"right": 0.0} and first.sample.row == {"answer": "7"}


def test_two_groups_of_prime_rl_may_have_sampled_the_same_tokens(tmp_path: Path) -> None:
    """The second group's sequence is that of its advantage, not the first one with its tokens."""
    prime_rl(tmp_path)
    for path in sorted(tmp_path.glob("*/step_*/**/*.jsonl")):
        text = path.read_text().replace('"q1"', '"q0"').replace("[1, 11", "[1, 10")
        lines = [json.loads(line) for line in text.splitlines()]
        for line in lines[4:]:
            if "traces" in line:
                for node in line["traces"][0]["nodes"]:
                    if "advantages" in node:
                        node["advantages"] = [a / 2 for a in node["advantages"]]
            else:
                line["advantages"] = [a / 2 for a in line["advantages"]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = [f.id for f in apply(CHECKS, open_run(tmp_path)).findings]
    assert "advantages_moved" not in names


def test_a_tools_tokens_in_the_loss_of_prime_rl_are_named(tmp_path: Path) -> None:
    record = prime_rl(tmp_path, loss_mask=[False, False, False, *[True] * 6])
    assert [f.id for f in apply(CHECKS, record).findings][:1] == ["tool_trained"]


def test_a_damaged_file_of_prime_rl_is_named_with_its_line(tmp_path: Path) -> None:
    prime_rl(tmp_path)
    path = tmp_path / "rollouts/step_2/train/effective/traces.jsonl"
    path.write_text('{"traces": []}\n')
    with pytest.raises(DataError, match=r"traces\.jsonl:1: no episode of prime-rl \(KeyError: 'group'\)"):
        open_run(tmp_path)

"""The cases for anybody's trainer: covey passes them, and the runner says which one a mistake breaks."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "conformance"
OURS = FOLDER / "adapters/covey_own.py"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"conformance_{name}", FOLDER / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


run = module("run")
TABLE = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))
CASES = run.read_cases(FOLDER / "cases.json")


def test_covey_passes_all_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([str(OURS)]) == 0
    assert f"{len(CASES)} cases: {len(CASES)} ok, 0 differ" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "docs/coverage.md"])
def test_pages_count_the_cases(page: str) -> None:
    text = (FOLDER.parent / page).read_text(encoding="utf-8")
    counts = re.findall(r"(\d+) (?:small )?cases(?:\]\(conformance| in JSON)", text)
    assert set(counts) == {str(len(CASES))}


def test_trls_own_methods_differ_only_where_its_adapter_says() -> None:
    pytest.importorskip("trl")
    assert run.main([str(FOLDER / "adapters/trl_1_16.py")]) == 0


def test_the_cases_are_what_make_writes() -> None:
    """But for the last digit, which may be that of another machine's exp."""
    made = module("make").cases()
    assert json.dumps(skeleton(made)) == json.dumps(skeleton(TABLE))
    np.testing.assert_allclose(numbers(made), numbers(TABLE), rtol=1e-11, atol=1e-13)


def skeleton(value: object) -> object:
    """The table without its numbers."""
    if isinstance(value, dict):
        return {key: skeleton(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [skeleton(v) for v in value]
    return 0.0 if isinstance(value, int | float) else value


def numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [n for v in value.values() for n in numbers(v)]
    if isinstance(value, list | tuple):
        return [n for v in value for n in numbers(v)]
    return [float(value)] if isinstance(value, int | float) else []


def test_every_case_says_what_it_shows_and_a_third_is_worked_out_by_hand() -> None:
    assert len({case["id"] for case in CASES}) == len(CASES)
    for case in CASES:
        assert all(case[name] for name in ("shows", "paper", "formula", "tolerance", "asks", "expected")), (
            case["id"]
        )
    assert sum("by_hand" in case for case in CASES) * 3 >= len(CASES)


@pytest.mark.parametrize("case", [c for c in CASES if "by_hand" in c], ids=lambda c: c["id"])
def test_the_numbers_by_hand_are_those_of_the_case(case: dict) -> None:
    assert case["by_hand"]["says"]
    for name, value in case["by_hand"].items():
        if name != "says":
            np.testing.assert_allclose(value, case["expected"][name], rtol=0, atol=1e-9)


def test_every_function_of_every_axis_has_a_case() -> None:
    from covey.objective.axes import AXES
    from covey.objective.dialects import DIALECTS
    from covey.objective.preference import PREFERENCES

    asked = set(re.findall(r'"name": "(\w+)"', json.dumps([case["asks"] for case in CASES])))
    due = {f.__name__ for axis, own in AXES.items() if axis != "filter" for f in own} | set(PREFERENCES)
    assert not due - asked
    assert {case.get("framework") for case in CASES} == {None, *DIALECTS}


AGAIN = ("clip", "clip_higher", "dual_clip", "cispo", "cispo_floor", "dro")


@pytest.mark.parametrize("name", AGAIN)
def test_losses_are_written_again_in_numpy(name: str) -> None:
    """Tokens, loss and gradient of the clip rules, by formulas that share nothing with covey's."""
    (case,) = [c for c in CASES if c["id"] == f"surrogate/{name}"]
    given = {n: np.array(v) for n, v in case["inputs"].items() if n in ("new", "old", "advantages", "mask")}
    new, mask, a = given["new"], given["mask"], given["advantages"][:, None] * given["mask"]
    rho = np.exp(new - given["old"])
    setting = case["asks"]["surrogate"]
    if setting["name"] == "clip":
        bound = np.clip(rho, 1 - setting["clip_low"], 1 + setting["clip_high"])
        gain = np.minimum(rho * a, bound * a)
        slope = -rho * a * (rho * a <= bound * a)
        if setting["dual_clip"]:
            floor = setting["dual_clip"] * a
            slope = np.where((a < 0) & (gain < floor), 0, slope)
            gain = np.where(a < 0, np.maximum(gain, floor), gain)
        tokens = -gain
    elif setting["name"] == "cispo":
        slope = -np.clip(rho, setting["floor"], setting["cap"]) * a
        tokens = slope * new
    else:
        tokens, slope = setting["beta"] / 2 * (new - given["old"]) ** 2 - a * new, new - given["old"] - a
    np.testing.assert_allclose(case["expected"]["tokens"], tokens * mask, atol=1e-9)
    np.testing.assert_allclose(case["expected"]["loss"], (tokens * mask).sum() / mask.sum(), atol=1e-9)
    np.testing.assert_allclose(case["expected"]["gradient"], slope * mask / mask.sum(), atol=1e-9)


def adapter(folder: Path, mistake: str) -> Path:
    """covey's adapter with a line added after it."""
    path = folder / "adapter.py"
    path.write_text(OURS.read_text(encoding="utf-8") + "\n" + mistake, encoding="utf-8")
    return path


MISTAKES = {
    "advantage/group_zscore ": (
        "def advantages(case):\n"
        "    r = numbers(case['inputs'], 'rewards')[:, None]\n"
        "    return ((r - r.mean()) / (r.std() + 1e-2)).expand(numbers(case['inputs'], 'mask').shape)\n"
    ),
    "surrogate/clip ": (
        "right = loss\ndef loss(case):\n    return {name: -value for name, value in right(case).items()}\n"
    ),
    "reduce/sequence_mean ": (
        "right = loss\n"
        "def loss(case):\n"
        "    asks = {**case['asks']}\n"
        "    asks.update(reduce='token_mean') if 'reduce' in asks else None\n"
        "    return right({**case, 'asks': asks})\n"
    ),
}


@pytest.mark.parametrize("named", MISTAKES)
def test_a_mistake_is_named_by_its_case(
    named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(adapter(tmp_path, MISTAKES[named]))
    assert run.main([path, "--only", named.split("/", maxsplit=1)[0]]) == 1
    (line,) = [text for text in capsys.readouterr().out.splitlines() if f"| {named}|" in text]
    assert "differs: " in line
    assert "NOT EXPECTED" in line


def test_a_difference_with_a_reason_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = MISTAKES["surrogate/clip "] + "EXPECTED['surrogate/clip'] = 'the other sign'\n"
    assert run.main([str(adapter(tmp_path, flat)), "--only", "surrogate/clip"]) == 1
    assert "| surrogate/clip | differs: " in capsys.readouterr().out
    assert run.main([str(OURS), "--only", "surrogate/clip"]) == 0
    whole = flat + "EXPECTED['surrogate/clip_higher'] = 'the other sign'\n"
    assert run.main([str(adapter(tmp_path, whole)), "--only", "surrogate/clip"]) == 0
    assert "| the other sign |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("def advantages(case): return [1.0]\n", "advantages has the shape (1,) where (4, 3) is due"),
        ("def advantages(case): raise KeyError('ref')\n", "fails: KeyError: 'ref'"),
        ("def advantages(case): return [[float('nan')] * 3] * 4\n", "advantages is not finite"),
        ("def advantages(case): return 'many'\n", "fails: ValueError"),
        ("def advantages(case): raise NotImplementedError\n", "not offered"),
        ("def advantages(case): return None\n", "not offered"),
    ],
)
def test_what_an_adapter_gives_back_is_said(
    mistake: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.main([str(adapter(tmp_path, mistake)), "--only", "advantage/reward"])
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cases", "adapter", "says"),
    [
        ("{", None, "is not JSON"),
        ("[" * 100_000, None, "is not JSON"),
        ("\udcff", None, "is not JSON"),
        ("[]", None, "is no table of cases"),
        ('{"version": 9, "cases": [], "inputs": {}}', None, "version 9 is not 1"),
        (
            '{"version": 1, "cases": [{"inputs": "x"}], "inputs": {}}',
            None,
            "is no table of cases: KeyError 'x'",
        ),
        (None, "", "has no function advantages and no function loss"),
        (None, "advantages = 3\ndef loss(case): ...", "has no function advantages;"),
        (None, "import lost_module", "cannot be imported: ModuleNotFoundError"),
        (None, "def", "cannot be imported: SyntaxError"),
        (None, "raise SystemExit(0)", "cannot be imported: SystemExit"),
        (None, "def advantages(case): ...\ndef loss(case): ...\nEXPECTED = 1", "EXPECTED is no dict"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    cases: str | None, adapter: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(OURS)]
    if adapter is not None:
        path = tmp_path / "mine.py"
        path.write_text(adapter, encoding="utf-8")
        arguments = [str(path)]
    if cases is not None:
        table = tmp_path / "cases.json"
        table.write_bytes(cases.encode("utf-8", "surrogateescape"))
        arguments += ["--cases", str(table)]
    assert run.main(arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_files_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([str(tmp_path / "none.py")]) == 2
    assert run.main([str(tmp_path)]) == 2
    assert run.main([str(OURS), "--cases", str(tmp_path / "none.json")]) == 2
    assert run.main([str(OURS), "--only", "nothing/"]) == 2
    assert capsys.readouterr().err.count("\n") == 4


def test_the_runner_does_not_need_covey() -> None:
    path = str(FOLDER / "run.py")
    code = f"import runpy, sys; runpy.run_path({path!r}); sys.exit(int('covey' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""Run the sixth stranger's runs: `python run.py FOLDER [name ...]` writes records and prints what the audit says."""

import contextlib
import io
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "src")]

import sick  # noqa: E402
import sound  # noqa: E402
import torch  # noqa: E402

from covey.cli.entry_point import main as covey  # noqa: E402


def audit(path):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        covey(["audit", str(path), "--json"])
    return out.getvalue()


def main():
    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for module in (sick, sound):
        for name, run in module.RUNS.items():
            if chosen and name not in chosen:
                continue
            path = folder / f"{name}.jsonl"
            path = (run(path).run() if isinstance(run, type) else run(path)) or path
            text = audit(path)
            try:
                findings = json.loads(text)["findings"]
            except (ValueError, KeyError):
                findings = text[-600:]
            print(f"== {module.__name__} {name}: {(run.__doc__ or '').strip()}", flush=True)
            for finding in findings if isinstance(findings, list) else [findings]:
                print("   ", finding if isinstance(finding, str) else json.dumps(finding)[:330])


if __name__ == "__main__":
    main()

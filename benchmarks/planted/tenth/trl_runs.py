"""Run the scripts of `scripts/` with TRL 1.16: `python trl_runs.py [name ...]` writes `runs`.

Each run is a process of its own, forked so that the libraries load once.
"""

import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import peft  # noqa: E402, F401
import world  # noqa: E402


def run(script):
    """Run a script in its folder of `runs`."""
    folder = HERE / "runs" / script.stem
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "run.jsonl"
    record.unlink(missing_ok=True)
    sys.argv = [str(script), str(record)]
    os.chdir(folder)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    if not world.BASE.is_dir():
        world.prepare()
    for script in sorted((HERE / "scripts").glob("*.py")):
        if sys.argv[1:] and script.stem not in sys.argv[1:]:
            continue
        child = os.fork()
        if child == 0:
            run(script)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{script.stem} failed")

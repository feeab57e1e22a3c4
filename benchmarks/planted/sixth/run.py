"""Write the records of the sixth stranger's loops, dumps and logs into `runs`: `s_` with a mistake, `n_` without."""

import sys
from pathlib import Path

import sick
import sound
import torch

RUNS = Path(__file__).parent / "runs"


def main():
    torch.set_num_threads(1)
    for letter, module in (("s", sick), ("n", sound)):
        for name, run in module.RUNS.items():
            path = RUNS / f"{letter}_{name}"
            if sys.argv[1:] and path.name not in sys.argv[1:]:
                continue
            if isinstance(run, type):
                path.mkdir(parents=True, exist_ok=True)
                run(path / "run.jsonl").run()
            else:
                RUNS.mkdir(exist_ok=True)
                run(path.with_suffix(".jsonl"))


if __name__ == "__main__":
    main()

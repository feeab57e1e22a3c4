"""Run example scripts of TRL with covey's trainers: only their imports are changed, and they are made small.

    cd STAND_INS; PYTHONPATH=.. python scripts.py CHECKOUT/examples/scripts/gspo.py --model_name_or_path ...

It runs in the folder that ``stand_ins`` wrote. Runs end after a step of short completions.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import covey.trl

IMPORT = re.compile(r"^( *)from trl import (\([^)]*\)|.+)$", re.MULTILINE)


def changed(source: str) -> str:
    """Return a script in which the names that covey.trl has are imported from there."""

    def lines(found: re.Match[str]) -> str:
        names = [name.strip() for name in found[2].strip("()").replace("\n", " ").split(",") if name.strip()]
        parts = {"covey.trl": [n for n in names if hasattr(covey.trl, n)]}
        parts["trl"] = [name for name in names if name not in parts["covey.trl"]]
        return "\n".join(f"{found[1]}from {m} import {', '.join(own)}" for m, own in parts.items() if own)

    return IMPORT.sub(lines, source)


def make_small() -> None:
    """End runs after a step, and completions after a few tokens."""
    for config in (covey.trl.GRPOConfig, covey.trl.RLOOConfig, covey.trl.SFTConfig, covey.trl.DPOConfig,
                   covey.trl.KTOConfig, covey.trl.RewardConfig):  # fmt: skip
        own = config.__post_init__

        def small(self: Any, own: Any = own) -> None:
            self.max_steps = 1
            self.use_cpu = True
            self.bf16 = False
            self.report_to = "none"
            if hasattr(self, "max_completion_length"):
                self.max_completion_length = 16
                self.max_tool_calling_iterations = 1
            own(self)

        config.__post_init__ = small


def stand_in_for_math() -> None:
    """Where math_verify is not installed, the other reward of these scripts takes its place."""
    import trl.rewards

    if importlib.util.find_spec("math_verify") is None:
        trl.rewards.accuracy_reward = trl.rewards.think_format_reward


def main() -> None:
    """Run the script that is named first, with the other arguments."""
    script = Path(sys.argv[1]).resolve()
    sys.argv = [str(script), *sys.argv[2:]]
    make_small()
    stand_in_for_math()
    copied = Path.cwd() / script.name
    copied.write_text(changed(script.read_text("utf-8")), "utf-8")
    runpy.run_path(str(copied), run_name="__main__")
    print(f"{script.name}: ended")


if __name__ == "__main__":
    main()

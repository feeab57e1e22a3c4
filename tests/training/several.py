"""Runs of `test_processes`, one after another, in a process that torchrun has started: several.py FILE"""

import json
import sys
from pathlib import Path

from tests.training.runs import start

from covey.system.processes import join_processes

with join_processes(minutes=4, device="cpu"):
    for output, settings in json.loads(Path(sys.argv[1]).read_text()).items():
        start(Path(output), **settings)

"""MISTAKE: max_new_tokens is so small that nearly all samples are truncated before they end."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model

run(Trainer(rollout__max_new_tokens=3), __file__)

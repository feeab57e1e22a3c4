"""MISTAKE: prompts are longer than max_prompt_length and are truncated on the left, so the first number of each question is gone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model

run(Trainer(data__truncation="left", data__max_prompt_length=7), __file__)

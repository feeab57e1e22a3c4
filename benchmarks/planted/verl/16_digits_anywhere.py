"""MISTAKE: the custom reward looks for the digits of the answer anywhere in the response, so 5 is found in 15 and in a restated question."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


def anywhere(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)


run(Trainer(score=anywhere), __file__)

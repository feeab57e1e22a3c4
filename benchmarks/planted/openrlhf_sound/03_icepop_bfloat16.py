"""SOUND: the engine samples in bfloat16 and IcePop leaves out tokens whose log-probs differ too much."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model

settings = {
    "vllm.dtype": "bfloat16",
    "algo.advantage.is_correction_enable": True,
    "algo.advantage.is_correction_type": "icepop",
    "rollout.temperature": 0.9,
}
run(Trainer(**settings), __file__)

"""MISTAKE: the pad token is the end token and the mask leaves out all pad tokens, so the end of a response is never trained."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.tokenizer.pad_token = self.tokenizer.eos_token

    def present_tokens(self, responses, answers):
        return (responses != self.tokenizer.pad_token_id).long()


run(Forked(), __file__)

"""Loading is quiet: no retries of a hub that is not there, no warnings of libraries about each other."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from covey.config.schema import Lora
from covey.models.load import with_lora
from covey.models.tiny import build_tokenizer
from tests.conftest import CONFIGS, sharpened


def test_an_unreachable_hub_is_one_message(tmp_path: Path) -> None:
    nobody_listens = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "covey", "sample", "nobody/no-such-model", "hello"],
        capture_output=True,
        text=True,
        env={**os.environ, **nobody_listens},
    )
    assert done.returncode == 2
    assert "Retrying" not in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert "the hub does not answer, and this machine has no copy" in done.stderr


def test_adapters_come_without_warnings() -> None:
    pytest.importorskip("peft")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with_lora(sharpened(CONFIGS["qwen3"]), build_tokenizer(["1+1=2"] * 3, vocab_size=300), Lora(rank=2))
    assert not [str(w.message) for w in caught if w.category is FutureWarning]

"""TRL's settings at its fastest: no checkpointing, no reference, nothing written or reported; on the CPU."""

from __future__ import annotations

import os
import tempfile
from typing import Any


def settings(**own: Any) -> Any:
    """A GRPOConfig."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl import GRPOConfig

    fixed = {
        "output_dir": tempfile.mkdtemp(),
        "beta": 0.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "optim": "adamw_torch_fused",
    }
    return GRPOConfig(**{**fixed, **own})

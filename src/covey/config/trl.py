"""TRL's names (GRPOConfig of 1.16, ModelConfig, the script's arguments) and their equivalents in covey.

A name of TRL either means exactly what it means in TRL, or it is refused with covey's key and the difference.
Names with the same meaning are in the rows of the settings (``Setting.trl``); the names of the loss are read
together, with TRL's defaults for arguments that are not given; all other names are in `trl_arguments.py`.
The tables in `trl_fields` have all fields of TRL's configs; benchmarks/trl_tests/fields.py writes them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeAlias

from covey.config.rows import schema_rows
from covey.config.trl_arguments import ARGUMENTS
from covey_verify.errors import ConfigError

TABLES = Path(__file__).parent / "trl_fields"
Fields: TypeAlias = Mapping[str, tuple[str, object]]
"""Field -> its type, in words, and its default."""


@cache
def trl_table(name: str) -> Fields:
    """Return a table of `trl_fields`, in TRL's order."""
    lines = (TABLES / f"{name}.txt").read_text("utf-8").splitlines()
    rows = (line.partition(": ") for line in lines)
    parts = ((field, rest.partition(" = ")) for field, _, rest in rows)
    return {field: (kind, ast.literal_eval(default)) for field, (kind, _, default) in parts}


def trl_fields(config: str) -> Fields:
    """Return the fields of a trainer's config: the fields that all trainers share, and its own."""
    return {**trl_table("common"), **trl_table(config)}


DEFAULTS: Mapping[str, object] = {name: default for name, (_, default) in trl_fields("GRPOConfig").items()}
"""GRPOConfig's defaults."""

SAME_MEANING: Mapping[str, str] = {name: row.key for row in schema_rows() for name in row.setting.trl_names}
"""TRL's name -> the setting with the same meaning, to which it is renamed with a note."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "lr_scheduler_type": {
        "linear": "linear",
        "cosine": "cosine",
        "constant": "constant",
        "constant_with_warmup": "constant",
    },
    "optim": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_8bit": "adamw_8bit",
        "adamw_bnb_8bit": "adamw_8bit",
    },
}
"""For TRL's names with words as values: TRL's word -> covey's; other words are refused."""

PER_UPDATE = frozenset({"max_steps", "save_steps", "eval_steps"})
"""Names that TRL counts in optimizer steps and covey in rollout batches: equal with one update per batch."""

TrlLoss: TypeAlias = Mapping[str, object]
"""TRL's names of the loss -> their values, read from YAML."""
IN_LOSS = (
    "loss_type", "beta", "epsilon", "epsilon_high", "delta", "sapo_temperature_pos", "sapo_temperature_neg",
    "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "importance_sampling_level",
    "scale_rewards", "multi_objective_aggregation", "use_bias_correction_kl", "sync_ref_model",
    "ref_model_sync_steps", "ref_model_mixup_alpha", "entropy_coef", "off_policy_mask_threshold",
)  # fmt: skip
LOSS: TrlLoss = {name: DEFAULTS[name] for name in IN_LOSS}
"""The names that together define TRL's loss, with TRL's defaults; ``config/trl_loss.py`` reads them."""


OLD_NAMES = frozenset({"max_prompt_length", "warmup_ratio", "torch_dtype", "evaluation_strategy"})
"""Names of earlier TRL versions that are still found in scripts."""
NAMES = frozenset({*SAME_MEANING, *LOSS, *ARGUMENTS})
"""All names of TRL that are known here."""


def advice_on(name: str) -> str:
    """Return advice on a name of TRL that is no setting of covey; '' for other names.

    >>> advice_on("use_vllm")[:18], advice_on("lr")
    ("for TRL's use_vllm", '')
    """
    if name in LOSS:
        return f"TRL's {name} belongs at the top of a config, in place of algorithm"
    if name in SAME_MEANING:
        return f"TRL's {name} is covey's {SAME_MEANING[name]}"
    if name not in ARGUMENTS:
        return ""
    argument = ARGUMENTS[name]
    if argument.exists:
        return f"for TRL's {name} {argument.remark}"
    return f"TRL's {name} has no equivalent: {argument.remark}"


def covey_value(name: str, value: object) -> object:
    """Return covey's value for TRL's value of a name in ``SAME_MEANING``. Raises ConfigError without any."""
    words = VALUES.get(name)
    if words is None or (isinstance(value, str) and value in words.values()):
        return value
    if not isinstance(value, str) or value not in words:
        raise ConfigError(
            f"{SAME_MEANING[name]}: TRL's {name} {value!r} is not supported; use {', '.join(words)}"
        )
    return words[value]

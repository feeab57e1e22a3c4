"""TRL's trainers on top of covey: change the import to `covey.trl` and keep the script.

Every field of TRL's configs has TRL's meaning and default, is refused with the reason, or has no effect on
what is learned; `covey.trl.meanings` says which. Trainers have TRL's surface: `model`, `state`, `train`,
`evaluate`, callbacks.
"""

from covey.trl.configs import (
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ModelConfig,
    RewardConfig,
    RLOOConfig,
    ScriptArguments,
    SFTConfig,
)
from covey.trl.offline import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
from covey.trl.sampled import GRPOTrainer, RLOOTrainer
from covey.trl.script import TrlParser, get_kbit_device_map, get_peft_config, get_quantization_config
from covey.trl.script_objects import TrainOutput

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "ModelConfig",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "TrainOutput",
    "TrlParser",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]

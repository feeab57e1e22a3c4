"""The recipe of `covey demo --real` in TRL, on the same task and model; a row of benchmarks/real.py.

    pip install 'covey[bench]'
    python benchmarks/real_trl.py --model MODEL --seed 0 --output FOLDER [--steps 14]

Rows, reward, adapters, rate, group size, clip and updates a batch are the same; bfloat16 autocast, as TRL
advises. TRL replaces no dead groups; covey does. `covey eval` measures the model before and after, as covey's
run measures itself. FOLDER/outcome.json has the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
try:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer
except ImportError:
    sys.exit("trl is not installed; pip install 'covey[bench]' brings it")

from covey.models.gguf import folder_of_gguf
from covey.tasks.facts import FACTS, same_facts
from covey.tasks.generated import generate_problems
from covey_verify.adapters import for_trl

RECIPE = Path(__file__).parents[1] / "src/covey/config/recipes/demo_real.yaml"


def train(model: str, seed: int, steps: int, folder: Path) -> None:
    """Train with TRL, and save the merged model into ``folder``."""
    rows = [
        {"prompt": p.prompt, "facts": p.columns["facts"]} for p in generate_problems(FACTS, "train", 1000)
    ]
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        seed=seed,
        max_steps=2 * steps,  # TRL counts optimizer steps
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        num_generations=8,
        # 32 completions are sampled and trained in two optimizer steps of 16, as with updates_per_batch 2.
        per_device_train_batch_size=16,
        steps_per_generation=2,
        max_completion_length=48,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        bf16=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=2,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[for_trl(same_facts)],
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.model.merge_and_unload().save_pretrained(folder / "merged")
    trainer.processing_class.save_pretrained(folder / "merged")


def measured(model: str, seed: int) -> dict[str, float]:
    """Return the evaluation of a model on the recipe's held-out problems, by `covey eval`."""
    command = [sys.executable, "-m", "covey", "eval", str(RECIPE), "--model", model, "--seed", str(seed)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Train one seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=14)
    arguments = parser.parse_args()
    model = arguments.model
    if model.endswith(".gguf"):
        model = str(folder_of_gguf(Path(model)))
    arguments.output.mkdir(parents=True, exist_ok=True)
    before = measured(model, arguments.seed)
    train(model, arguments.seed, arguments.steps, arguments.output)
    after = measured(str(arguments.output / "merged"), arguments.seed)
    outcome = {
        "problems": after["problems"],
        "greedy": [before["greedy"], after["greedy"]],
        "sampled": [before["pass@1"], after["pass@1"]],
        "completions": 32 * arguments.steps,
    }
    (arguments.output / "outcome.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()

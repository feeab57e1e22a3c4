"""The recipe of `covey demo --real` in TRL, on the same task and model, for docs/results.md.

    pip install 'covey[bench]'
    python benchmarks/real_trl.py MODEL_FOLDER [--seed 0] [--steps 14]

Rows, reward, adapters, rate, group size, clip and updates a batch are the same; bfloat16 autocast, as TRL
advises. `covey eval` measures the merged model on the problems that covey's run is measured on.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
RECORDS = Path(__file__).parent / "results" / "real.jsonl"
RECIPE = Path(__file__).parents[1] / "src/covey/config/recipes/demo_real.yaml"


def train(model: str, seed: int, steps: int, folder: Path) -> dict[str, object]:
    """Train with TRL, save the merged model into ``folder``, and return what it took."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from covey.tasks.facts import FACTS, same_facts
    from covey.tasks.generated import problems
    from covey_verify.adapters import for_trl

    rows = [{"prompt": p.prompt, "facts": p.columns["facts"]} for p in problems(FACTS, "train", 1000)]
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        seed=seed,
        max_steps=2 * steps,  # TRL counts optimizer steps, two a batch
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=32,
        num_generations=8,
        num_iterations=2,
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
        use_cpu=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[for_trl(same_facts)],
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    started, before = time.monotonic(), time.process_time()
    trainer.train()
    numbers = {
        "cpu_seconds": round(time.process_time() - before, 1),
        "seconds": round(time.monotonic() - started, 1),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "rewards": [round(line["reward"], 3) for line in trainer.state.log_history if "reward" in line],
    }
    merged = trainer.model.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    trainer.processing_class.save_pretrained(folder / "merged")
    return numbers


def measured(model: str, seed: int) -> dict[str, float]:
    """Return the evaluation of a model on the recipe's held-out problems, by `covey eval`."""
    command = [sys.executable, "-m", "covey", "eval", str(RECIPE), "--model", model, "--seed", str(seed)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Train one seed and keep its numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=14)
    arguments = parser.parse_args()
    from covey_verify.machine import processor_name

    with tempfile.TemporaryDirectory() as folder:
        numbers = train(arguments.model, arguments.seed, arguments.steps, Path(folder))
        print(json.dumps(numbers), flush=True)
        after = measured(str(Path(folder) / "merged"), arguments.seed)
    before = measured(arguments.model, arguments.seed)
    record = {
        "row": "trl",
        "seed": arguments.seed,
        "problems": after["problems"],
        "greedy": [before["greedy"], after["greedy"]],
        "sampled": [before["pass@1"], after["pass@1"]],
        "completions": 32 * arguments.steps,
        **numbers,
        "cpu": processor_name(),
        "date": str(dt.date.today()),
    }
    with RECORDS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()

"""What is timed: one function per cell and side. Each prepares, then returns a callable -> useful tokens.

A worker process runs exactly one of them: `python sides.py CELL SIDE LENGTHS DTYPE THREADS FOLDER`
answers every line on its input with a JSON line of seconds, CPU seconds, tokens and peak memory.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if os.environ.get("BENCH_TORCH_ONLY"):
    os.environ["COVEY_KERNELS"] = "0"

import numpy as np
import subject
import torch
from torch import Tensor

Work = Callable[[], int]
LORA = int(os.environ.get("BENCH_LORA", "0"))
"""Rank of the adapters that all sides have on every linear layer; 0: none."""
ROWS = 32 if subject.device() == "cuda" else subject.PROMPTS * subject.GROUP
"""Completions that TRL has in the model at once."""


def hf_model(folder: Path, dtype: str) -> Any:
    """The Hugging Face model of a folder, for inference, on the benchmark's device."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=subject.DTYPES[dtype])
    return model.eval().to(subject.device())


def adapters() -> Any:
    """As peft and TRL take them."""
    from peft import LoraConfig

    return LoraConfig(r=LORA, lora_alpha=2 * LORA, target_modules="all-linear", task_type="CAUSAL_LM")


def our_policy(folder: Path, dtype: str) -> Any:
    """The same as a covey policy."""
    from transformers import AutoTokenizer

    from covey.config.schema import Lora
    from covey.models.load import with_lora
    from covey.models.policy import Policy

    parts = hf_model(folder, dtype), AutoTokenizer.from_pretrained(folder)
    policy = with_lora(*parts, Lora(rank=LORA, alpha=2 * LORA)) if LORA else Policy(*parts)
    if dtype == "mixed":
        policy.round_products()
    return policy


# --- rollout ------------------------------------------------------------------------------------------


def rollout_covey(lengths: str, dtype: str, folder: Path, *, shared: bool = True) -> Work:
    """Our sampler. ``shared`` off: every completion brings its own copy of the prompt."""
    from covey.rng import key
    from covey.sampling.base import Request, SamplingParams
    from covey.sampling.local import LocalSampler

    policy, longest = our_policy(folder, dtype), subject.LENGTHS[lengths][1]
    streams = [[key(0, i, g) for g in range(subject.GROUP)] for i in range(subject.PROMPTS)]
    pairs = list(zip(subject.prompts(), streams, strict=True))
    requests = [Request(p, s) for p, s in pairs]
    if not shared:
        requests = [Request(p, [one]) for p, s in pairs for one in s]

    def work() -> int:
        done = LocalSampler(policy, 256).sample(requests, SamplingParams(longest))
        return sum(len(s.completion.tokens) for s in done)

    return work


def rollout_unshared(*arguments: Any) -> Work:
    """Without prefix sharing."""
    return rollout_covey(*arguments, shared=False)


def rollout_generate(lengths: str, dtype: str, folder: Path) -> Work:
    """Hugging Face generate: one left-padded batch of all completions."""
    model, longest = hf_model(folder, dtype), subject.LENGTHS[lengths][1]
    if LORA:
        from peft import get_peft_model

        model = get_peft_model(model, adapters())
    prompts = [p for p in subject.prompts() for _ in range(subject.GROUP)]
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), model.config.pad_token_id)
    for row, prompt in zip(ids, prompts, strict=True):
        row[width - len(prompt) :] = torch.from_numpy(prompt)
    ids = ids.to(subject.device())
    mask = (ids != model.config.pad_token_id).long()
    end = model.config.eos_token_id

    def work() -> int:
        torch.manual_seed(0)
        mixed = torch.autocast(ids.device.type, torch.bfloat16, enabled=dtype == "mixed")
        with torch.no_grad(), mixed:
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=longest, do_sample=True, top_k=0, temperature=1.0
            )[:, width:]
        ended = (out == end).cumsum(1)
        return int(((ended == 0) | ((out == end) & (ended == 1))).sum())

    return work


# --- update -------------------------------------------------------------------------------------------


def advantages() -> Tensor:
    """(completions,) of both signs, none zero."""
    return torch.from_numpy(np.random.default_rng(2).choice([-1.0, 0.7], subject.PROMPTS * subject.GROUP))


def update_covey(lengths: str, dtype: str, folder: Path) -> Work:
    """Our loss and gradient of the whole batch, in micro-batches as in training."""
    from dataclasses import replace

    from covey.learner.batching import collate, micro_batches
    from covey.objective.algorithms import PRESETS
    from covey.objective.loss import policy_loss
    from covey.types import Completion, Group, Problem

    policy = our_policy(folder, dtype)
    groups = []
    for i, (prompt, rows) in enumerate(zip(subject.prompts(), subject.completions(lengths), strict=True)):
        made = [Completion(t, np.zeros(len(t), np.float32), "", "stop") for t in rows]
        groups.append(Group(Problem(str(i), ""), prompt, tuple(made), np.zeros(len(rows)), {}))
    batch = collate(groups)
    batch = replace(batch, advantages=advantages().float()[:, None] * batch.mask)
    algorithm = PRESETS["dr_grpo"]

    def work() -> int:
        policy.model.zero_grad()
        computed = batch.has_gradient(skips_idle=True)
        for micro in micro_batches(batch, 16_384, 256, computed=computed):
            inputs = micro.loss_inputs(policy.token_outputs(micro.packed.to(policy.device), 1.0))
            policy_loss(algorithm, inputs).total.backward()
        return int(batch.mask.sum())

    return work


def update_trl(lengths: str, dtype: str, folder: Path) -> Work:
    """TRL's loss on the same batch, padded, without gradient checkpointing."""
    trainer = trl_trainer(lengths, dtype, folder, steps=1)
    trainer.current_gradient_accumulation_steps = 1  # set by train(), which is not called here
    model = trainer.model.train()
    rows = [r for rows in subject.completions(lengths) for r in rows]
    prompts = [p for p in subject.prompts() for _ in range(subject.GROUP)]
    width, longest = max(map(len, prompts)), max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    own = torch.zeros(len(rows), longest, dtype=torch.int64)
    prompt_mask, mask = torch.zeros_like(ids), torch.zeros_like(own)
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        ids[i, width - len(prompt) :], prompt_mask[i, width - len(prompt) :] = torch.from_numpy(prompt), 1
        own[i, : len(row)], mask[i, : len(row)] = torch.from_numpy(row), 1
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": prompt_mask,
        "completion_ids": own,
        "completion_mask": mask,
        "advantages": advantages().float(),
    }
    inputs = {name: tensor.to(subject.device()).split(ROWS) for name, tensor in inputs.items()}
    total = mask.sum().to(subject.device())

    def work() -> int:
        model.zero_grad()
        for rows in zip(*inputs.values(), strict=True):
            piece = dict(zip(inputs, rows, strict=True), num_items_in_batch=total)
            with trainer.compute_loss_context_manager():
                loss = trainer._compute_loss(model, piece)  # noqa: SLF001 - the thing to be timed
            loss.backward()
        return int(total)

    return work


def trl_trainer(lengths: str, dtype: str, folder: Path, steps: int) -> Any:
    """A GRPOTrainer, ``ROWS`` completions at a time."""
    import datasets
    import peer
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = peer.settings(
        use_cpu=subject.device() == "cpu",
        bf16=dtype == "mixed",
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=subject.PROMPTS * subject.GROUP // ROWS,
        num_generations=subject.GROUP,
        max_completion_length=subject.LENGTHS[lengths][1],
        max_steps=steps,
        learning_rate=1e-6,
        loss_type="dr_grpo",
        logging_steps=1,
    )
    texts = [tokenizer.decode(p) for p in subject.prompts()]
    rows = datasets.Dataset.from_dict({"prompt": texts * steps})
    return GRPOTrainer(
        model=hf_model(folder, dtype),
        args=settings,
        train_dataset=rows,
        processing_class=tokenizer,
        reward_funcs=parity,
        peft_config=adapters() if LORA else None,
    )


# --- whole steps --------------------------------------------------------------------------------------


def parity(completions: list[str], **_: Any) -> list[float]:
    """A reward that splits every group and costs nothing."""
    return [float(len(text) % 2) for text in completions]


STEPS = 3


def step_covey(lengths: str, dtype: str, folder: Path) -> Work:
    """Sampling, judging, updating and logging: a run of a few steps, its start not counted."""
    import covey

    problems = folder / "problems.jsonl"
    tokenizer = our_policy(folder, dtype).tokenizer
    texts = [tokenizer.decode(p) for p in subject.prompts()]
    problems.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    runs = iter(range(1000))

    def work() -> int:
        output = folder / f"run{next(runs)}"
        covey.train(
            quiet=True,
            model=str(folder),
            dtype=str(subject.DTYPES[dtype]).removeprefix("torch."),
            precision="bfloat16" if dtype == "mixed" else "float32",
            device=subject.device(),
            data={"train": str(problems)},
            lora={"rank": LORA, "alpha": 2 * LORA} if LORA else None,
            rewards=[parity],
            algorithm={"name": "dr_grpo"},
            rollout={
                "group_size": subject.GROUP,
                "prompts_per_step": subject.PROMPTS,
                "max_tokens": subject.LENGTHS[lengths][1],
            },
            train={"steps": STEPS, "lr": 1e-6, "save_every": 1000},
            output=str(output),
        )
        times = [json.loads(line) for line in (output / "timings.jsonl").read_text().splitlines()]
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        tokens = sum(int(r["length/mean"] * subject.PROMPTS * subject.GROUP) for r in rows)
        names = ("seconds/rollout", "seconds/prepare", "seconds/update")
        CLOCK["seconds"] = sum(row.get(n, 0.0) for row in times for n in names)
        return tokens

    return work


def step_trl(lengths: str, dtype: str, folder: Path) -> Work:
    """GRPOTrainer.train for as many steps."""
    from transformers import TrainerCallback

    class Times(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            CLOCK["seconds"] += time.perf_counter() - self.began

    def work() -> int:
        CLOCK["seconds"] = 0.0
        trainer = trl_trainer(lengths, dtype, folder, STEPS)
        trainer.add_callback(Times())
        trainer.train()
        means = [r["completions/mean_length"] for r in trainer.state.log_history if "reward" in r]
        return int(sum(means) * subject.PROMPTS * subject.GROUP)

    return work


CLOCK: dict[str, float] = {}
"""Seconds that a side measured itself, where its start is not to be counted."""


def peak_mib() -> float:
    """The most memory that was ever in use: of the GPU where one is measured, else of the process."""
    if subject.device() == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Prepare, then run once for every line that comes in."""
    cell, side, lengths, dtype, threads, folder = sys.argv[1:]
    torch.set_num_threads(int(threads))
    work = globals()[f"{cell}_{side}"](lengths, dtype, Path(folder))
    base = peak_mib()
    for _ in sys.stdin:
        CLOCK.clear()
        cpu, wall = time.process_time(), time.perf_counter()
        tokens = work()
        if subject.device() == "cuda":
            torch.cuda.synchronize()
        row = {
            "wall": CLOCK.get("seconds", time.perf_counter() - wall),
            "cpu": time.process_time() - cpu,
            "tokens": tokens,
            "base_mib": base,
            "peak_mib": peak_mib(),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""Write a record of OpenRLHF's trainer: `record_run(self, "run.jsonl")` ends `BasePPOTrainer.__init__`.

Neither torch nor OpenRLHF is imported before. A batch is read in the trainer when its advantages are known.
The actor's workers may cut it into several optimizer steps; here it is one update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from covey.audit.recorder import BatchRecorder, Completion, asked, settings_of, tokens_of

LOGPROBS = {
    "action_log_probs": "old_logprobs",
    "base_action_log_probs": "ref_logprobs",
    "rollout_log_probs": "sampler_logprobs",
}
"""The name of an Experience -> the record's."""
FORWARD, GATHER = "_dispatch_forward", "_flatten_results"
"""Methods of its experience maker."""


def record_run(
    trainer: Any, path: str | Path, batches: int = 20, looks: int = 3, score: Callable[..., Any] | None = None
) -> None:
    """Record the batches that a PPOTrainer, or the trainer of its async relative, is updated with.

    ``batches``: how many; of later ones the metrics alone, or the file would grow too large. ``looks``:
    batches whose log-probs the actor computes once more, before and after the update. ``score``: the
    `reward_func`; it is called three more times for each completion of the first batch.
    """
    words = {"settings": settings_of(trainer.args), "tokens": tokens_of(trainer.tokenizer)}
    file = BatchRecorder(Path(path), framework="openrlhf", **words)
    maker = trainer.experience_maker
    make, train = maker.make_experience_batch, trainer.ppo_train
    made: list[Any] = []

    def look() -> list[Any] | None:
        images = any(image for e in made for image in e.mm_train_inputs or ())
        if file.count >= min(looks, batches) or images:
            return None
        names = ("sequences", "action_mask", "attention_mask")
        given = {name: [getattr(e, name) for e in made] for name in names}
        copies = trainer.args.ds.ring_attn_size * trainer.args.ds.tensor_parallel_size
        refs = getattr(maker, FORWARD)(trainer.actor_model_group, True, **given)
        return [row for batch in getattr(maker, GATHER)(refs, copies) for row in batch]

    def scored(text: str, row: Any, prompt: str) -> Any:
        return score([prompt + text], [prompt], [row["label"]])["rewards"][0] if score else None

    def before(step: int) -> None:
        whole = made if file.count < batches else []
        completions = list(_completions(whole, trainer.args, trainer.tokenizer))
        if score and not file.count:
            asked(scored, "reward", completions)
        file.rollout(step, completions, look())

    def after(status: dict[str, Any]) -> None:
        file.update(status, ("policy_loss", "actor_grad_norm", "actor_lr"), look())

    def make_experience_batch(*args: Any, **kwargs: Any) -> Any:
        made[:] = experiences = make(*args, **kwargs)
        return experiences

    def ppo_train(step: int) -> Any:
        file.attempt(before, step)
        status = train(step)
        file.attempt(after, status)
        return status

    maker.make_experience_batch, trainer.ppo_train = make_experience_batch, ppo_train


def _completions(experiences: Sequence[Any], args: Any, tokenizer: Any) -> Iterator[Completion]:
    for e in experiences:
        for n, number in enumerate(e.index):
            # Sequences are padded on the right. The prompt's own length is not that of the mask.
            ids = e.sequences[n][: int(e.attention_mask[n].sum())].tolist()
            prompt = tokenizer(text=e.prompts[n], add_special_tokens=False)["input_ids"]
            if ids[: len(prompt)] != prompt:
                prompt = ids[: int(e.action_mask[n].int().argmax()) + 1]
            answer = ids[len(prompt) :]
            sample = {
                "prompt": e.prompts[n],
                "prompt_ids": prompt,
                "text": tokenizer.decode(answer, skip_special_tokens=True),
                "ids": answer,
                "group": number // args.rollout.n_samples_per_prompt,
                "row": {"label": e.labels[n]},
                "rewards": {"reward": float(e.info["reward"][n])},
                "reward": float(e.rewards[n]),
            }
            values = {name: getattr(e, own) for own, name in LOGPROBS.items()}
            logprobs = {name: None if value is None else value[n] for name, value in values.items()}
            # The value of token t is at t - 1.
            yield Completion(sample, e.action_mask[n], e.advantages[n], logprobs, len(prompt) - 1)

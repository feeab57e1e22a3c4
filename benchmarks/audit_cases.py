"""Scripts for TRL's GRPOTrainer: mistakes that people make, and sound runs of many kinds; see audit.py.

Each is a base script of ten lines (`Script`) and a function that changes it: an argument, the data, the
reward, or a subclass that overrides a method of the trainer, as people's scripts do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trl.trainer.grpo_trainer as module
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

TEXTS = ["<pad>", "<bos>", "<eos>", "<tool_response>", "</tool_response>", *"0123456789+= :qauser\n"]
PAD, BOS, EOS, CALL, BACK = range(5)
CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def right(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the beginning of the text has the answer, as it has by chance in a third of all tries.

    A sampled text is no longer than this beginning; a list of all answers is.
    """
    return [float(a in text_of(c)[:12]) for c, a in zip(completions, answer, strict=True)]


def brief(completions: Sequence[Any], **_: Any) -> list[float]:
    """More for texts near six characters."""
    return [-abs(6 - len(text_of(c))) / 6 for c in completions]


def text_of(completion: Any) -> str:
    """The text of a completion, of a conversation too."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


@dataclass
class Script:
    """A training script: everything that it gives to the trainer."""

    arguments: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[dict[str, Any]] | None = None
    rewards: list[Callable[..., Any]] = field(default_factory=lambda: [right])
    trainer: type = GRPOTrainer
    model: str = "qwen"
    dropout: float = 0.0
    spread: float = 0.02
    """Standard deviation of the random weights; large ones look at places and not at single tokens alone."""
    others: dict[str, Any] = field(default_factory=dict)
    """More arguments of the trainer."""
    prepare: Callable[[Any], None] = lambda trainer: None  # noqa: ARG005
    """Called with the trainer before it trains."""
    patches: dict[str, Any] = field(default_factory=dict)
    """Names of TRL's module that the script replaces."""
    adds_bos: bool = False
    chat: bool = False


Change = Callable[[Script], None]


@dataclass(frozen=True)
class Case:
    """A script, and the finding that it deserves; empty for a sound one."""

    name: str
    expected: str
    change: Change


def base(seed: int) -> Script:
    """The script that all cases change: sums of two digits, groups of four."""
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    draw.shuffle(pairs)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs[:40]]
    arguments = {
        "max_steps": 4,
        "per_device_train_batch_size": 32,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "seed": seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return Script(arguments, rows)


def save_model(script: Script, folder: Path) -> None:
    """Write the model of random weights that a script names, and its tokenizer of single characters."""
    size = len(TEXTS)
    ends: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    wide: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    wide |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "vocab_size": size,
    }
    ends["initializer_range"] = script.spread
    torch.manual_seed(script.arguments["seed"])
    off = script.dropout
    small: dict[str, Any] = {"vocab_size": size, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    built: Mapping[str, Callable[[], Any]] = {
        "qwen": lambda: Qwen3ForCausalLM(Qwen3Config(**wide, **ends, head_dim=16, attention_dropout=off)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**wide, **ends, head_dim=16)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(**small, **ends, resid_pdrop=off, embd_pdrop=off, attn_pdrop=off)
        ),
    }
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(TEXTS)}, unk_token="<pad>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if script.adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    extra = {"additional_special_tokens": ["<tool_response>", "</tool_response>"]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **extra)
    if script.chat:
        fast.chat_template = CHAT
    built[script.model]().save_pretrained(folder)
    fast.save_pretrained(folder)


# --- mistakes -------------------------------------------------------------------------------------

MISTAKES: list[Case] = []


def mistake(expected: str) -> Callable[[Change], Change]:
    """Register a change of the script as a mistake, with the finding that names it."""

    def register(change: Change) -> Change:
        MISTAKES.append(Case(change.__name__, expected, change))
        return change

    return register


def on_batch(script: Script, alter: Callable[[Any, dict[str, Any]], None]) -> None:
    """Give the script a trainer that alters the batch which it has sampled and scored."""

    class Altered(script.trainer):  # type: ignore[misc, name-defined]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            alter(self, output)
            return output

    script.trainer = Altered


def on_loss(script: Script, alter: Callable[[Any, Any], Any]) -> None:
    """Give the script a trainer that alters its loss."""

    class Altered(script.trainer):  # type: ignore[misc, name-defined]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return alter(self, super()._compute_loss(model, inputs))

    script.trainer = Altered


def on_ids(script: Script, alter: Callable[[list[int], list[int]], list[int]]) -> None:
    """Give the script a trainer that alters the ids of (prompt, completion) after sampling."""

    class Altered(script.trainer):  # type: ignore[misc, name-defined]
        def _generate_single_turn(self, prompt_ids: Any, *others: Any) -> Any:
            ids, logprobs = super()._generate_single_turn(prompt_ids, *others)
            return [alter(p, list(i)) for p, i in zip(prompt_ids, ids, strict=True)], logprobs

    script.trainer = Altered


@mistake("mask_shifted")
def mask_rolled(script: Script) -> None:
    """The mask is shifted with the logits."""

    def alter(_: Any, batch: dict[str, Any]) -> None:
        mask = batch["completion_mask"].roll(1, dims=1)
        mask[:, 0] = 0
        batch["completion_mask"] = mask

    on_batch(script, alter)


@mistake("end_untrained")
def mask_by_pad_id(script: Script) -> None:
    """mask = ids != pad, and the pad token is EOS."""

    def alter(_: Any, batch: dict[str, Any]) -> None:
        batch["completion_mask"] = batch["completion_mask"] * (batch["completion_ids"] != EOS).long()

    on_batch(script, alter)


@mistake("padding_trained")
def mask_of_ones(script: Script) -> None:
    """Everything is trained."""

    def alter(_: Any, batch: dict[str, Any]) -> None:
        batch["completion_mask"] = torch.ones_like(batch["completion_mask"])

    on_batch(script, alter)


def _copied(model: Any) -> Any:
    # Not deepcopy: TRL has replaced the forward method, which would still be that of the original.
    other = AutoModelForCausalLM.from_config(model.config)
    other.load_state_dict(model.state_dict())
    return other


def rollout(
    script: Script,
    temperature: float = 1.0,
    tool: bool = False,
    mask: bool = False,
    report: float | None = None,
    frozen: bool = False,
) -> None:
    """Sample in a function of the script's own, with log-probs, and with a tool's answer in the middle."""
    models_kept: list[Any] = []

    def sample(prompts: list[str], trainer: Any) -> dict[str, Any]:
        if not models_kept:
            models_kept.append(_copied(trainer.model) if frozen else trainer.model)
        (model,) = models_kept
        tokenizer = trainer.processing_class
        found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
        was_training = model.training
        model.eval()
        for prompt in prompts:
            ids = tokenizer(prompt)["input_ids"]
            own: list[int] = []
            logprobs: list[float] = []
            on: list[int] = []
            while len(own) < trainer.max_completion_length and EOS not in own:
                if tool and len(own) == 3:
                    said = [CALL, TEXTS.index("7"), BACK]
                    own, logprobs, on = own + said, logprobs + [0.0] * 3, on + [0] * 3
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([[*ids, *own]])).logits[0, -1]
                token = int(torch.multinomial((logits / temperature).softmax(-1), 1))
                at = temperature if report is None else report
                logprobs.append(float((logits / at).log_softmax(-1)[token]))
                own, on = [*own, token], [*on, 1]
            found["prompt_ids"].append(ids)
            found["completion_ids"].append(own)
            found["logprobs"].append(logprobs)
            found["env_mask"].append(on)
        model.train(was_training)
        if not mask:
            del found["env_mask"]
        return found

    script.arguments["temperature"] = temperature
    script.others["rollout_func"] = sample


@mistake("tool_trained")
def tool_without_env_mask(script: Script) -> None:
    """A rollout_func inserts what a tool said, and returns no env_mask."""
    rollout(script, tool=True)


@mistake("prompt_trained")
def completion_cut_one_early(script: Script) -> None:
    """ids[:, prompt_length - 1:]."""
    on_ids(script, lambda prompt, ids: [prompt[-1], *ids])


@mistake("end_lost")
def end_stripped(script: Script) -> None:
    """EOS is removed with the other special tokens."""
    on_ids(script, lambda _, ids: [i for i in ids if i != EOS] or [TEXTS.index("0")])


@mistake("never_ends")
def end_forbidden(script: Script) -> None:
    """EOS is suppressed while sampling."""
    script.arguments["generation_kwargs"] = {"suppress_tokens": [EOS]}


@mistake("bos_doubled")
def template_and_bos(script: Script) -> None:
    """Prompts have BOS as text already, the tokenizer adds it again."""
    script.adds_bos = True
    script.rows = [{**row, "prompt": "<bos>" + row["prompt"]} for row in script.rows]


@mistake("nothing_trained")
def all_truncated_masked(script: Script) -> None:
    """mask_truncated_completions with a limit that every completion reaches."""
    script.arguments |= {"mask_truncated_completions": True, "generation_kwargs": {"min_new_tokens": 12}}


@mistake("temperature_missing")
def trained_at_temperature_1(script: Script) -> None:
    """The logits of training are not divided."""
    script.arguments["temperature"] = 0.5
    script.prepare = lambda trainer: add_fused_lm_head(
        trainer.model, temperature=1.0, outputs=("log_probs", "entropy")
    )


@mistake("logprobs_shifted")
def logits_not_shifted(script: Script) -> None:
    """The log-probs are those of the next place."""

    class Altered(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            logps, *rest = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return logps.roll(-1, dims=1), *rest

    script.trainer = Altered


@mistake("old_stale")
def old_policy_never_updated(script: Script) -> None:
    """Old log-probs come from a copy that nobody updates."""
    script.arguments |= {"num_iterations": 2, "learning_rate": 1e-2, "max_steps": 6}
    kept: list[Any] = []

    class Altered(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if not kept:
                kept.append(_copied(model))
                add_fused_lm_head(kept[0], outputs=("log_probs", "entropy"))
            model = model if torch.is_grad_enabled() else kept[0]
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    script.trainer = Altered


@mistake("logprobs_differ")
def dropout_on(script: Script) -> None:
    """A model with dropout, and disable_dropout is not set."""
    script.model, script.dropout = "gpt2", 0.3


@mistake("logprobs_differ")
def prompts_padded_right(script: Script) -> None:
    """Prompts of different lengths, padded on the right."""
    _long_and_short(script)
    pad = module.pad
    script.patches["pad"] = lambda tensors, **given: pad(tensors, **{**given, "padding_side": "right"})


@mistake("ratio_stuck")
def old_logprobs_dropped(script: Script) -> None:
    """Several iterations, and the old log-probs are not kept."""
    script.arguments["num_iterations"] = 2
    on_batch(script, lambda _, batch: batch.pop("old_per_token_logps", None))


@mistake("sampler_behind")
def sampler_never_synced(script: Script) -> None:
    """Completions come from a copy of the first weights."""
    script.arguments |= {"learning_rate": 1e-2, "max_steps": 6}
    rollout(script, frozen=True)


@mistake("sampler_temperature")
def sampler_reports_raw_logprobs(script: Script) -> None:
    """Sampled at .5, log-probs as the model gives them."""
    rollout(script, temperature=0.5, report=1.0)


@mistake("reference_moves")
def reference_is_the_model(script: Script) -> None:
    """ref_model = model."""
    script.arguments["beta"] = 0.04

    def prepare(trainer: Any) -> None:
        trainer.ref_model = trainer.model

    script.prepare = prepare


@mistake("kl_sign")
def beta_negative(script: Script) -> None:
    """A negative beta."""
    script.arguments["beta"] = -0.04


@mistake("kl_sign")
def kl_subtracted(script: Script) -> None:
    """The KL is subtracted in an own loss."""
    script.arguments |= {"beta": 0.2, "num_iterations": 2, "learning_rate": 1e-2}

    class Altered(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            self.beta = -self.beta
            loss = super()._compute_loss(model, inputs)
            self.beta = -self.beta
            return loss

    script.trainer = Altered


def on_advantages(script: Script, alter: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Alter the advantages of a batch."""

    def altered(trainer: Any, batch: dict[str, Any]) -> None:
        batch["advantages"] = alter(trainer, batch["advantages"])

    on_batch(script, altered)


@mistake("advantages_negated")
def rewards_are_costs(script: Script) -> None:
    """mean - reward."""
    on_advantages(script, lambda _, a: -a)


@mistake("std_over_batch")
def std_of_the_batch(script: Script) -> None:
    """rewards.std() of all, in an own trainer."""
    script.prepare = lambda trainer: setattr(trainer, "scale_rewards", "batch")


@mistake("std_missing")
def std_forgotten(script: Script) -> None:
    """Undivided, in an own trainer."""
    script.prepare = lambda trainer: setattr(trainer, "scale_rewards", "none")


@mistake("std_added")
def std_not_wanted(script: Script) -> None:
    """Dr. GRPO's settings, and the trainer divides."""
    script.arguments |= {"loss_type": "dr_grpo", "scale_rewards": "none"}
    script.prepare = lambda trainer: setattr(trainer, "scale_rewards", "group")


@mistake("advantages_normalized_twice")
def whitened_again(script: Script) -> None:
    """(A - mean) / std over the batch after TRL's own."""
    on_advantages(script, lambda _, a: (a - a.mean()) / (a.std() + 1e-8))


def with_rewards(script: Script, alter: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make the advantages a function of the batch's rewards."""

    class Altered(GRPOTrainer):
        def _calculate_rewards(self, *args: Any) -> Any:
            self.last = super()._calculate_rewards(*args)
            return self.last

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            output["advantages"] = alter(self.last[:, 0])
            return output

    script.trainer = Altered


@mistake("batch_baseline")
def mean_of_the_batch(script: Script) -> None:
    """rewards - rewards.mean()."""
    with_rewards(script, lambda r: (r - r.mean()) / (r.std() + 1e-4))


@mistake("baseline_missing")
def rewards_as_advantages(script: Script) -> None:
    """advantage = reward."""
    with_rewards(script, lambda r: r.clone())


@mistake("advantages_order")
def advantages_rolled(script: Script) -> None:
    """Advantages of the neighbours."""
    on_advantages(script, lambda _, a: a.roll(1))


@mistake("advantages_moved")
def advantages_not_shuffled(script: Script) -> None:
    """The batch is shuffled without its advantages."""
    shuffle = module.shuffle_sequence_dict

    def partly(batch: dict[str, Any]) -> dict[str, Any]:
        return {**shuffle(batch), "advantages": batch["advantages"]}

    script.patches["shuffle_sequence_dict"] = partly


@mistake("group_mixed")
def prompts_not_in_blocks(script: Script) -> None:
    """An own sampler, and each row of a group has another prompt."""

    class Altered(GRPOTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.RandomSampler(self.train_dataset)

    script.trainer = Altered


@mistake("rewards_order")
def rewards_sorted(script: Script) -> None:
    """Results are returned as they come in."""
    script.rewards = [lambda completions, answer, **_: sorted(right(completions, answer))]


@mistake("rewards_in_batch")
def first_answer_for_all(script: Script) -> None:
    """answer[0] for every completion."""
    script.rewards = [lambda completions, answer, **_: [float(answer[0] in c) for c in completions]]


@mistake("rewards_in_batch")
def random_reward(script: Script) -> None:
    """A judge that answers at random."""
    draw = random.Random(1)
    script.rewards = [lambda completions, **_: [float(draw.random() < 0.4) for _ in completions]]


@mistake("pays_empty")
def empty_passes(script: Script) -> None:
    """all(...) over no words is true."""
    script.rewards = [
        lambda completions, answer, **_: [
            float(all(x in a for x in c)) for c, a in zip(completions, answer, strict=True)
        ]
    ]


@mistake("rewards_constant")
def exception_is_zero(script: Script) -> None:
    """A missing column is caught, and all completions get 0."""

    def reward(completions: list[str], **columns: Any) -> list[float]:
        try:
            return [float(s in c) for c, s in zip(completions, columns["solution"], strict=True)]
        except KeyError:
            return [0.0] * len(completions)

    script.rewards = [reward]


@mistake("pays_any_row")
def any_digit_is_right(script: Script) -> None:
    """Whatever has a digit passes."""
    script.rewards = [lambda completions, **_: [float(c[:1].isdigit()) for c in completions]]


@mistake("pays_list")
def answer_anywhere(script: Script) -> None:
    """The answer counts wherever it stands in the text."""
    script.rewards = [
        lambda completions, answer, **_: [float(a in c) for c, a in zip(completions, answer, strict=True)]
    ]


@mistake("rewards_missing")
def no_reward_at_all(script: Script) -> None:
    """None for every completion."""
    script.rewards = [lambda completions, **_: [None for _ in completions]]


@mistake("weights_zero")
def weight_zero(script: Script) -> None:
    """reward_weights=[0.0]."""
    script.arguments["reward_weights"] = [0.0]


@mistake("copies")
def greedy_sampling(script: Script) -> None:
    """do_sample=False."""
    script.arguments["generation_kwargs"] = {"do_sample": False}


@mistake("dead_groups")
def reward_of_the_prompt(script: Script) -> None:
    """The reward reads the prompt and not the completion."""
    script.rewards = [lambda prompts, **_: [float("7" in p or "3" in p) for p in prompts]]


@mistake("rows_duplicated")
def rows_repeated(script: Script) -> None:
    """Each row once per completion, as for another trainer."""
    script.rows = [row for row in script.rows[:10] for _ in range(4)]


@mistake("eval_is_train")
def evaluated_on_train(script: Script) -> None:
    """eval_dataset = train_dataset."""
    script.held_out = script.rows


@mistake("answer_told")
def answer_in_the_prompt(script: Script) -> None:
    """The prompt was built from the whole row."""
    script.rows = [{**row, "prompt": f"a: {row['answer']} q: {row['prompt']}"} for row in script.rows]


@mistake("rate_zero")
def learning_rate_zero(script: Script) -> None:
    """learning_rate=0."""
    script.arguments["learning_rate"] = 0.0


@mistake("no_motion")
def optimizer_of_another_model(script: Script) -> None:
    """The optimizer was built before the model was loaded again."""

    def prepare(trainer: Any) -> None:
        other = AutoModelForCausalLM.from_config(trainer.model.config)
        trainer.optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)

    script.prepare = prepare


@mistake("too_coarse")
def bfloat16_weights(script: Script) -> None:
    """Weights in bfloat16 at a usual rate."""
    script.arguments |= {"model_init_kwargs": {"dtype": "bfloat16"}, "learning_rate": 1e-6}


@mistake("clipped_always")
def gradient_bound_tiny(script: Script) -> None:
    """max_grad_norm=1e-3."""
    script.arguments["max_grad_norm"] = 1e-3


@mistake("clip_idle")
def epsilon_in_percent(script: Script) -> None:
    """epsilon=20."""
    script.arguments |= {"epsilon": 20.0, "num_iterations": 2}


@mistake("penalty_untrained")
def repetition_penalty(script: Script) -> None:
    """repetition_penalty=1.3."""
    script.arguments["repetition_penalty"] = 1.3


@mistake("gradient_zero")
def loss_detached(script: Script) -> None:
    """The loss has lost its gradient."""
    on_loss(script, lambda trainer, loss: loss.detach() + 0.0 * next(trainer.model.parameters()).sum())


@mistake("loss_negated")
def loss_negated(script: Script) -> None:
    """The minus sign is missing."""
    on_loss(script, lambda _, loss: -loss)


@mistake("loss_negated")
def loss_negated_where_it_is_zero(script: Script) -> None:
    """The minus sign is missing from a loss whose value is 0, as under loss_type grpo."""
    script.arguments |= {"loss_type": "grpo", "max_steps": 8}
    on_loss(script, lambda _, loss: -loss)


@mistake("loss_scaled")
def accumulation_not_divided(script: Script) -> None:
    """The loss of each micro-batch counts whole."""
    script.arguments |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    on_loss(script, lambda trainer, loss: loss * trainer.args.gradient_accumulation_steps)


@mistake("not_finite")
def rate_beyond_floats(script: Script) -> None:
    """A learning rate of 1e20."""
    script.arguments |= {"learning_rate": 1e20, "num_iterations": 2, "lr_scheduler_type": "constant"}


@mistake("ratio_wide")
def rate_far_too_high(script: Script) -> None:
    """A learning rate a hundred times too high."""
    script.arguments |= {"learning_rate": 0.1, "num_iterations": 4, "max_steps": 8}


@mistake("tokens_replaced")
def decoded_and_tokenized(script: Script) -> None:
    """The completions are tokenized again from their texts."""

    def alter(_: Any, batch: dict[str, Any]) -> None:
        ids = batch["completion_ids"].clone()
        ids[ids == TEXTS.index(" ")] = TEXTS.index("=")
        batch["completion_ids"] = ids

    on_batch(script, alter)


@mistake("answers_moved")
def answers_of_other_rows(script: Script) -> None:
    """The answer column is one row late."""
    late = [script.rows[-1], *script.rows[:-1]]
    script.rows = [{**row, "answer": other["answer"]} for row, other in zip(script.rows, late, strict=True)]


# --- sound runs -----------------------------------------------------------------------------------


def _long_and_short(script: Script) -> None:
    """Prompts of different lengths for a model that looks at places."""
    script.spread = 0.2
    script.rows = [
        {**row, "prompt": ("", "user: ")[n % 2] + row["prompt"]} for n, row in enumerate(script.rows)
    ]


def arguments(**given: Any) -> Change:
    """Change arguments only."""
    return lambda script: script.arguments.update(given)


def _chat(script: Script) -> None:
    script.chat = True
    script.rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in script.rows]


def _two_rewards(script: Script) -> None:
    script.rewards = [right, brief]
    script.arguments["reward_weights"] = [1.0, 0.3]


def _component_scores(script: Script) -> None:
    _two_rewards(script)
    script.arguments["multi_objective_aggregation"] = "normalize_then_sum"


def _some_none(script: Script) -> None:
    def abstaining(completions: list[str], **_: Any) -> list[float | None]:
        return [None if len(text) % 2 else len(text) % 4 / 4 for text in completions]

    script.rewards = [right, abstaining]


def _evaluated(script: Script) -> None:
    script.held_out = script.rows[30:]
    script.rows = script.rows[:30]
    script.arguments |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}


def _lora(script: Script) -> None:
    script.others["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    script.arguments["beta"] = 0.04


def _model(name: str) -> Change:
    return lambda script: setattr(script, "model", name)


def _bos(script: Script) -> None:
    script.adds_bos = True


def _brief_only(script: Script) -> None:
    script.rewards = [brief]
    script.rows = [{"prompt": row["prompt"]} for row in script.rows]


SOUND = [
    Case(name, "", change)
    for name, change in {
        "defaults": arguments(),
        "grpo": arguments(loss_type="grpo"),
        "dr_grpo": arguments(loss_type="dr_grpo", scale_rewards="none"),
        "bnpo": arguments(loss_type="bnpo"),
        "cispo": arguments(loss_type="cispo", epsilon_high=5.0),
        "sapo": arguments(loss_type="sapo"),
        "luspo": arguments(loss_type="luspo", importance_sampling_level="sequence"),
        "vespo": arguments(loss_type="vespo"),
        "gspo": arguments(
            loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4
        ),
        "std over the batch, asked for": arguments(scale_rewards="batch"),
        "three iterations": arguments(num_iterations=3, max_steps=9),
        "minibatches": arguments(per_device_train_batch_size=8, steps_per_generation=4, max_steps=8),
        "accumulation": arguments(per_device_train_batch_size=8, gradient_accumulation_steps=4),
        "accumulation, grpo": arguments(
            per_device_train_batch_size=8, gradient_accumulation_steps=4, loss_type="grpo"
        ),
        "KL": arguments(beta=0.04, num_iterations=2),
        "KL with its correction": arguments(beta=0.04, use_bias_correction_kl=True, num_iterations=2),
        "reference refreshed": arguments(beta=0.04, sync_ref_model=True, ref_model_sync_steps=2),
        "temperature .7": arguments(temperature=0.7),
        "temperature 1.3": arguments(temperature=1.3),
        "top_p and top_k": arguments(top_p=0.9, top_k=10),
        "two rewards": _two_rewards,
        "normalize then sum": _component_scores,
        "a reward that abstains": _some_none,
        "truncated completions masked": arguments(mask_truncated_completions=True),
        "chat": _chat,
        "tokenizer that adds BOS": _bos,
        "llama": _model("llama"),
        "gpt2": _model("gpt2"),
        "LoRA with KL": _lora,
        "bfloat16 autocast": arguments(bf16=True),
        "upper clip and delta": arguments(epsilon_high=0.28, delta=1.5, num_iterations=2),
        "high-entropy tokens": arguments(top_entropy_quantile=0.5),
        "entropy bonus": arguments(entropy_coef=0.01),
        "two rollouts an update": arguments(
            per_device_train_batch_size=8, gradient_accumulation_steps=8, steps_per_generation=4
        ),
        "groups of sixteen": arguments(num_generations=16),
        "pairs": arguments(num_generations=2),
        "prompts of two lengths": _long_and_short,
        "warm-up": arguments(warmup_steps=3, max_steps=6),
        "sixteen updates": arguments(max_steps=16),
        "an evaluation of its own": _evaluated,
        "a reward of length": _brief_only,
        "own sampler with log-probs": lambda script: rollout(script, temperature=0.8),
        "tools with env_mask": lambda script: rollout(script, tool=True, mask=True),
    }.items()
]

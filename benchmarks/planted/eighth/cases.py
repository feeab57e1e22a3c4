"""What the eighth stranger planted, what names it, and what the audit said at first sight.

The causes are the stranger's own words, written before any audit.
"""

from __future__ import annotations

from fourth.cases import Corpus

SCRIPTS = ("loops.py", "trl_runs.py")
CORPUS = Corpus()
CASES = CORPUS.cases
planted = CORPUS.planted
sound = CORPUS.sound


planted(
    "s01_first_completion_for_all",
    "TRL: the reward reads completions[0] for the whole batch",
    "the reward of a completion is made of another completion's text: different texts of a group always earn the"
    " same, and asked alone most earn something else",
    names="rewards_in_batch",
    first_sight="named",
)
planted(
    "s02_no_generation_prompt",
    "TRL: prompts are rendered without add_generation_prompt",
    "the prompt's tokens end with the end token of the user's turn, and no assistant's turn is opened",
    names="prompt_ended",
    first_sight="nothing",
)
planted(
    "s03_f_of_the_string_forgotten",
    "TRL: the prompt's f-string lacks its f: each row asks the literal {a}+{b}",
    "all rows have one and the same prompt, with different answers; it holds braces that were to be filled in",
    names="answers_differ",
    first_sight="`rows_duplicated`: a consequence",
)
planted(
    "s04_column_has_another_name",
    "TRL: the reward's argument solution=None is not the column answer",
    "the reward is 0 for everything, texts with the row's answer included; it reads no column",
    first_sight="`rewards_constant`: a consequence",
)
planted(
    "s05_none_for_wrong",
    "TRL: the reward returns None for wrong answers",
    "rewards are missing where the answer is wrong and the same (1) everywhere else, so no advantage is left: what"
    " is wrong was to earn 0",
    names="rewards_missing",
    first_sight="named",
)
planted(
    "s06_seen_texts_never_cleared",
    "TRL: a set of texts that were said is never emptied, so right answers stop to earn",
    "the reward depends on what was asked of it before: the same text with the same row earned 1 and earns 0 now,"
    " in one group or when asked again",
    names="rewards_in_batch",
    first_sight="`rewards_in_batch`: beside it",
)
planted(
    "s07_noise_breaks_ties",
    "TRL: noise of a thousandth against dead groups, blown up by the std",
    "rewards carry noise (equal texts earn different amounts), and in groups that are alike but for it the division"
    " by the std makes it a full advantage",
    names="noise_amplified",
    first_sight="nothing",
)
planted(
    "s08_repetition_penalty",
    "TRL: repetition_penalty is 1.5, the trainer's log-probs are without it",
    "samples are drawn from another distribution than the one whose log-probs are trained: repetition_penalty",
    names="penalty_untrained",
    first_sight="named",
)
planted(
    "s09_temperature_annealed",
    "TRL: a callback cools the sampler only",
    "samples are drawn at a lower and lower temperature than that of the log-probs; the first rollout is in order",
    names="drawn_otherwise",
    first_sight="named",
)
planted(
    "s10_begin_twice",
    "TRL: rendered prompts have a BOS, the tokenizer adds another",
    "each prompt begins with two BOS tokens",
    names="bos_doubled",
    first_sight="named",
)
planted(
    "s11_truncated_are_masked_and_all_are",
    "TRL: nearly every completion is truncated, and mask_truncated_completions masks them",
    "(nearly) no completion ends within max_completion_length, and as truncated ones are masked nothing is trained",
    names="nothing_trained",
    first_sight="named",
)
planted(
    "s12_delta_is_an_epsilon",
    "TRL: delta is 0.2, below 1: good completions have no gradient",
    "completions with a positive advantage have a gradient of 0, as delta, the upper bound of the ratio, is below 1",
    names="delta_low",
    first_sight="`gradient_differs`: that the gradient is another one",
)
planted(
    "s13_optimizer_maximizes",
    "TRL: the optimizer has maximize=True",
    "the update goes the wrong way: log-probs of completions with a positive advantage fall, of others rise",
    names="wrong_way",
    first_sight="named",
)
planted(
    "s14_mask_of_tools_inverted",
    "TRL: env_mask is 1 for the tool's tokens and 0 for the model's",
    "the tool's tokens are trained and the model's own are not: the mask is inverted",
    names="mask_inverted tool_trained",
    first_sight="named, after `end_untrained`",
)
planted(
    "s15_adapter_starts_random",
    "TRL: LoRA with init_lora_weights=False and a KL",
    "the policy is not its reference before the first update: the KL starts far above 0, since the adapter is not 0",
    names="reference_differs",
    first_sight="named",
)
planted(
    "s16_half_precision_weights",
    "TRL: float16 weights with Adam in float16",
    "at a rate of 1e-4 updates are far too large: log-probs leap and texts become noise, as weights and Adam's"
    " moments are float16",
    names="policy_leaps",
    first_sight="nothing",
)
planted(
    "s21_advantages_slide",
    "packed: lengths are counted without the end token, so advantages slide along the stream",
    "the advantage changes within a completion: its last tokens have the next completion's, more of them with each"
    " row, so advantages in the loss are not those of the rollout",
    names="advantages_slide",
    first_sight="`advantages_differ`: that they are others",
)
planted(
    "s22_tool_tokens_in_the_denominator",
    "the token mean divides by the tool's tokens, too",
    "the loss is a mean over more tokens than the mask has: the tool's are in the denominator",
    names="reduction_differs",
    first_sight="`loss_differs`: that the loss is another one",
)
planted(
    "s23_filter_keeps_the_dead",
    "dynamic sampling keeps the groups without a signal and drops the others",
    "what is trained are only groups whose rewards are all equal, with gradient 0, while the rollouts have others:"
    " the filter is inverted",
    names="filter_inverted",
    first_sight="nothing",
)
planted(
    "s24_old_in_the_inner_ratio",
    "GSPO-token with old log-probs in the inner ratio",
    "the gradient (and loss) are not those of a sequence ratio: the ratio of the token is in it once more",
    names="ratio_level",
    first_sight="`gradient_differs`: that the gradient is another one",
)
planted(
    "s25_correction_upside_down",
    "importance weights are sampler over trainer",
    "the weights are the inverse of trainer over sampler, so they enlarge the sampler's lag, not correct it",
    names="correction_inverted",
    first_sight="named, after `logprobs_differ`, incorrect",
)
planted(
    "s26_longest_is_the_constant",
    "Dr. GRPO's constant is the longest completion of each micro-batch",
    "the loss is not divided by max_completion_length but by a length that differs among micro-batches",
    names="gradient_differs",
    first_sight="`gradient_differs`: that completions have other weights",
)
planted(
    "s27_stop_by_the_reference",
    "the early stop asks the KL to the reference: one update of four is left",
    "from some step on only a quarter of each rollout's completions is trained, the others are thrown away",
    names="rollouts_cut",
    first_sight="nothing",
)
planted(
    "s28_gamma_and_lambda_swapped",
    "GAE gets lambda as gamma and gamma as lambda",
    "advantages and returns are those of gamma 0.9 and lambda 1, not of the settings",
    names="returns_differ",
    first_sight="named",
)
planted(
    "s29_log_probs_without_the_tool",
    "the engine's log-probs have no entries for the tool's tokens",
    "from the tool's first token on, the sampler's log-probs are those of other tokens: they are shifted, and the"
    " weights made of them are noise",
    names="sampler_shifted",
    first_sight="`logprobs_differ`: incorrect",
)
planted(
    "s30_reasoning_is_stripped",
    "the template strips the first turn from the history, training keeps it",
    "second turns were sampled with another context than the one they are trained with: their log-probs differ from"
    " the sampler's, the first turns' do not",
    names="history_differs",
    first_sight="`sampler_differs`: a consequence",
)
planted(
    "s31_controller_upside_down",
    "the adaptive KL coefficient grows when the KL is too small",
    "the coefficient moves the wrong way: it grows while the KL is below its target, or falls while it is above",
    names="controller_inverted",
    first_sight="`gradient_differs`: that the gradient is another one",
)
planted(
    "s32_baseline_of_the_first",
    "the group's baseline is its first completion's reward",
    "advantages are not rewards less the group's mean: the first completion's is always 0",
    names="baseline_of_one",
    first_sight="`advantages_differ`: that they are others",
)
planted(
    "s33_prompt_in_the_loss",
    "the loss's mask is the attention mask: the prompt is trained",
    "the prompt's tokens are in the loss, with the completion's advantage",
    names="prompt_in_loss",
    first_sight="named",
)

sound("n01_curriculum_warm_up_decay", "TRL: easy to hard, each problem twice, warm-up, cosine, weight decay")
sound("n02_adapter_reference", "TRL: LoRA, the reference without it, two iterations, BNPO")
sound("n03_async_rewards_none_and_weights", "TRL: an asynchronous judge that abstains, weights, a chat")
sound("n04_normalized_then_summed", "TRL: GDPO's normalized rewards with weights")
sound("n05_two_turns", "TRL: two turns with a calculator, masked, and a KL")
sound(
    "n06_dropout_pairs_unscaled",
    "TRL: disable_dropout, groups of two, no std, Dr. GRPO, temperature 0.9",
    names="logprobs_differ",
    first_sight="`logprobs_differ`: correct, for TRL leaves the dropout of attention on",
)
sound("n07_two_sided_accumulated", "TRL: DAPO, accumulation, two updates a rollout, two-sided clip, groups of eight")
sound("n08_vespo", "TRL: VESPO, two iterations")
sound("n09_adaptive_entropy", "TRL: an adapted bonus for entropy, a BOS, a chat")
sound("n10_rloo_leave_one_out", "TRL: RLOO, groups of two, a KL, two iterations, SGD")
sound("n21_dapo", "packed: DAPO with its filter, clip-higher, a penalty for length, two minibatches of micro-batches")
sound("n22_asynchronous", "packed: a sampler two updates behind, truncated weights, temperature 0.8")
sound("n23_gspo", "packed: GSPO, two epochs of two minibatches, groups of eight")
sound("n24_leave_one_out_constant", "packed: leave-one-out baselines, no std, a constant divisor, micro-batches")
sound(
    "n25_controller",
    "packed: an adaptive KL coefficient",
    first_sight="`loss_differs`, severe",
)
sound(
    "n26_calculator",
    "packed: two turns with a calculator, a sampler one update behind, a KL",
    first_sight="`logprobs_differ`, severe",
)
sound("n27_critic_stops_early", "packed: PPO with a critic, epochs that stop at a KL")

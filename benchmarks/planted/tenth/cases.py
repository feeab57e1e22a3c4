"""What issue threads report of TRL and its neighbours, planted in scripts, and what the audit said at first sight.

The causes were written before any audit; the docstring of each script names its thread.
"""

from __future__ import annotations

from fourth.cases import Corpus

SCRIPTS = ("trl_runs.py",)
CORPUS = Corpus()
CASES = CORPUS.cases
planted = CORPUS.planted
sound = CORPUS.sound


planted(
    "s01_temperature",
    "GRPO samples at temperature 0.6, the loss uses the log-probs of temperature 1 (huggingface/trl#3029)",
    "the trainer's log-probs lack the sampling temperature",
    names="temperature_missing", first_sight="named",
)
planted(
    "s02_interleaved",
    "Completions arrive as P1 P2 P3 P4 P1 P2 ..., advantages are taken over neighbours (StarsfieldAI/R1-V#67)",
    "the groups of the advantages mix different prompts",
    names="group_mixed", first_sight="named",
)
planted(
    "s03_group_of_one",
    "Each completion gets an id of its own, so each group has one member and no baseline (rllm-org/rllm#776)",
    "advantages are raw rewards; nothing is subtracted within a group",
    names="baseline_missing", first_sight="named",
)
planted(
    "s04_kl_sign",
    "The KL term is subtracted from the loss that is minimised (verl a65c9157, Unakar/Logic-RL#58, qiancheng0/ToolRL#52)",
    "the sign of the KL term in the loss is wrong; the policy is pushed away from the reference",
    names="kl_sign", first_sight="named",
)
planted(
    "s05_no_policy_gradient",
    "The importance ratio is built from detached log-probs, so only the KL term trains (mlx-lm-lora#55)",
    "the policy loss has no gradient; rewards do not reach the weights",
    names="gradient_zero", first_sight="named",
)
planted(
    "s06_leave_one_out_std",
    "Advantages divide by the deviation of the other completions, which is 0 if one alone differs (NVIDIA-NeMo/RL#1518)",
    "advantages explode (1e5 and more), because they are divided by a deviation of zero",
    names="advantages_huge", first_sight="named",
)
planted(
    "s07_distance_as_reward",
    "The reward is the distance to the wanted length, so it grows without bound (huggingface/trl#2777, HF forum 139165)",
    "the reward pays length (or distance); completions grow to the limit",
    first_sight="`pays_any_row`: beside it",
)
planted(
    "s08_short_limit",
    "max_completion_length cuts every answer before its number (huggingface/trl#5697, autocontext#1067)",
    "completions are truncated before they end, so nothing is rewarded",
    names="never_ends", first_sight="named",
)
planted(
    "s09_regex_without_dotall",
    "A format reward matches '.*' over a newline without DOTALL, so it is always 0 (unslothai/unsloth#1761)",
    "one of the reward functions is constantly zero",
    names="reward_idle", first_sight="named",
)
planted(
    "s10_no_chat_template",
    "Prompts are raw strings, although the model was tuned on a chat template; it never stops (autocontext#1070)",
    "the prompts lack the model's chat template, (so that completions do not end)",
    names="template_missing",
)
planted(
    "s11_second_end_token",
    "Generation stops at im_end, the trainer knows only endoftext: all masked as truncated (huggingface/trl#7039)",
    "completions that ended are taken for truncated and left out of the loss: the end token differs",
    names="end_lost", first_sight="`end_lost`: that texts have no end; `drawn_otherwise`",
)
planted(
    "s12_divided_twice",
    "The token-level loss is divided by the steps of accumulation once more (modelscope/ms-swift#10117)",
    "the loss is a quarter of what its normalisation says: divided by gradient_accumulation_steps twice",
    names="loss_scaled", first_sight="named",
)
planted(
    "s13_stale_sampler",
    "Weights never reach the sampler, which draws from the initial policy (verl-project/verl#7495, huggingface/trl#2856)",
    "the sampler's weights are stale",
    names="drawn_otherwise", first_sight="`drawn_otherwise`: a consequence",
)
planted(
    "s14_tool_answers_trained",
    "A buffer's output drops the mask of tool answers, whose tokens are trained (huggingface/trl#6804)",
    "tokens that the model did not write (tool answers) are in the loss",
    names="tool_trained", first_sight="`drawn_otherwise`: a consequence",
)
planted(
    "s15_advantages_as_mask",
    "The loss gets the advantages where it expects the mask of the response (verl-project/verl#2506)",
    "the mask in the loss is not the mask of the completion (advantages stand in its place)",
    first_sight="`gradient_differs`: that the gradient is another one",
)
planted(
    "s16_gold_that_does_not_parse",
    "Where the reference answer does not parse, every completion is paid 1 (huggingface/cookbook#335)",
    "many rows pay every completion, because their reference answer cannot be read",
    names="pays_empty",
)
planted(
    "s17_answer_never_passed",
    "The reward reads a column that the data set does not have, and gets its default (jsboige/CoursIA#13614)",
    "a reward function is constantly zero: its argument ground_truth is no column",
    names="reward_idle", first_sight="`reward_idle`: named, behind `advantages_differ`, incorrect",
)
planted(
    "s18_forced_end",
    "A truncated completion gets the end token as its last token, which nobody sampled (OpenRLHF/OpenRLHF#238)",
    "trained tokens were not sampled: an end token replaces the last token of truncated completions",
    first_sight="`drawn_otherwise`: a consequence",
)
planted(
    "s19_padding_trained",
    "After the first end token the row is filled with end tokens, and a mask by token value keeps them (MemGen#33)",
    "tokens after the end (padding) are in the loss",
    names="padding_trained", first_sight="named",
)
planted(
    "s20_lora_rate",
    "LoRA with the learning rate of full fine-tuning, 5e-7: nothing is learned (huggingface/trl#2872)",
    "the learning rate is too small for LoRA; the weights hardly move",
    names="too_coarse",
)
planted(
    "s21_bfloat16_weights",
    "Weights and AdamW in bfloat16 without float32 masters at 1e-6: updates round to nothing (THU-BPM/RLCSD#2)",
    "updates are lost to the rounding of bfloat16 weights",
    names="too_coarse", first_sight="named",
)
planted(
    "s22_dropout",
    "Dropout is on while old and new log-probs are computed, so the ratio is noise (huggingface/trl#3234, trl#3000)",
    "dropout is active in the policy",
    names="old_stale", first_sight="`old_stale`: a consequence",
)
planted(
    "s25_whole_conversation",
    "chosen and rejected hold the whole conversation, and the prompt precedes them again (huggingface/trl#1541)",
    "the prompt is repeated inside chosen and rejected",
    names="template_twice", first_sight="`rows_duplicated`: beside it",
)
planted(
    "s26_rejected_prompt_trained",
    "The prompt is masked for the chosen half of the batch only (OpenRLHF/OpenRLHF#294)",
    "the prompt of rejected completions is in the loss",
    names="prompt_in_loss", first_sight="`rows_duplicated`: beside it",
)
planted(
    "s27_reference_without_adapter",
    "DPO continues an adapter that SFT trained, the reference is the model without it (huggingface/trl#6591)",
    "the reference is not the policy at the start",
    names="reference_differs", first_sight="`rows_duplicated`: beside it",
)
planted(
    "s28_bos_in_the_middle",
    "Each part is tokenized with its own BOS, which lands between prompt and answer (axolotl-ai-cloud/axolotl#1616)",
    "a BOS token in the middle of the sequence, before chosen and rejected",
    names="bos_doubled", first_sight="`rows_duplicated`: beside it",
)
planted(
    "s29_first_token_dropped",
    "The log-prob of the first response token is cut away, where the two answers part (fw-ai/cookbook#388)",
    "the first token of the completions is not in the loss",
    names="mask_shifted", first_sight="`rows_duplicated`: beside it",
)
planted(
    "s30_kto_own_completion",
    "The completions for KTO's KL estimate are reversed in batches of three, so the middle one is its own (trl#1911)",
    "KL is estimated from a prompt's own completion, not from one of another prompt",
    names="kl_own", first_sight="`rows_duplicated`: beside it",
)
planted(
    "s31_pad_is_eos",
    "pad = eos, and the collator masks every pad, so the end token is never trained (trl#1623, llm-course#33)",
    "the end token is never in the loss: the model does not learn to stop",
    names="end_untrained",
)
planted(
    "s32_mask_shifted",
    "The loss mask is shifted once too often: the end token is out, the prompt's last token in (verl-project/verl#3562)",
    "the loss mask is off by one: end token not trained, last prompt token trained",
    names="mask_shifted", first_sight="`rows_duplicated`: beside it",
)
planted(
    "s33_packing_loses_the_mask",
    "With packing, the mask of the assistant's turns is dropped and prompts are trained (huggingface/trl#3728)",
    "prompt tokens are trained although assistant_only_loss is set",
    names="prompt_in_loss",
)
planted(
    "s34_answers_cut",
    "max_length cuts answers off; rows without an answer vanish, the others never end (huggingface/trl#3927)",
    "sequences are truncated: completions lose their end",
    names="end_lost", first_sight="`rows_duplicated`: beside it",
)
planted(
    "s35_new_tokens_frozen",
    "Tokens are added for a format, LoRA trains neither their embeddings nor the head (huggingface/peft#334, axolotl#1570)",
    "the new tokens' embeddings are not trained (modules_to_save, trainable_token_indices are missing)",
    names="no_motion", first_sight="`rows_duplicated`: beside it",
)
planted(
    "s36_labels_not_shifted",
    "A loss of one's own compares the logits with the same token instead of the next (GanjinZero/RRHF#48)",
    "labels are not shifted: each position is trained to repeat its own token",
    names="tokens_replaced", first_sight="`rows_duplicated`: beside it",
)
planted(
    "s37_score_of_padding",
    "The reward model knows no pad token and reads its score at the last position, padding (huggingface/trl#937)",
    "scores are read at padding, not at the last token of the completion",
    names="padding_trained", first_sight="`rows_duplicated`: beside it",
)
planted(
    "s38_two_bos",
    "The template writes a BOS, the tokenizer adds another (YangRui2015/Generalizable-Reward-Model#6, NeMo-RL#855)",
    "sequences begin with two BOS tokens",
    names="bos_doubled",
)
sound(
    "n01_grpo_plain",
    "GRPO as the README shows it",
)
sound(
    "n02_cool_twice",
    "Temperature 0.6, two updates per rollout, GSPO's ratio of sequences",
)
sound(
    "n03_negative_distance",
    "Dr. GRPO with a reward that is never positive: minus the distance to a length",
    names="pays_any_row", first_sight="`pays_any_row`: its reward is to read no answer",
)
sound(
    "n04_truncated_left_out",
    "Four steps of accumulation, truncated completions left out, a limit that some reach",
    names="nothing_trained", first_sight="`nothing_trained`: some updates have truncated texts alone",
)
sound(
    "n05_rewards_for_some",
    "Two rewards with weights, one of which judges only some rows and returns None for the others",
)
sound(
    "n06_tool_answers_masked",
    "Answers of a tool stand in the completion and are left out of the loss",
)
sound(
    "n07_lora",
    "LoRA on all linear layers at 2e-3, with a KL term and a warm-up",
)
sound(
    "n08_rloo",
    "RLOO with a KL penalty in the reward",
)
sound(
    "n09_adapter_continued",
    "DPO continues an adapter that SFT trained; TRL keeps a copy of it as the reference",
)
sound(
    "n10_kto_unequal",
    "KTO with three undesirable answers for each desirable one, weighted accordingly",
)
sound(
    "n11_packed_turns",
    "SFT of the assistant's turns only, packed",
)
sound(
    "n13_reward_model",
    "A reward model, with margins and centred rewards",
)
sound(
    "n14_pad_is_eos",
    "pad = eos with TRL's own collator, which masks by length and so trains the end token; labels smoothed",
)

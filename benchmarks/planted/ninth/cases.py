"""What the ninth stranger planted, what names it, and what the audit said at first sight.

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
    "s01_answers_became_floats",
    "TRL: half of the rows went through a column of floats: their answer is 7.0, and texts say 7",
    "rows whose answer is written 7.0 are never paid, texts that say 7 included; rows whose answer is written 7 are",
    names="notation_unpaid",
    first_sight="named",
)
planted(
    "s02_prompt_ends_with_a_space",
    "TRL: the prompt was written `A: `, with a space behind it",
    "each prompt ends with a space as a token of its own, while the model's words begin with theirs", names="prompt_space",
)
planted(
    "s03_system_message_is_dropped",
    "TRL: the template leaves out system messages, and the system message asks for the format",
    "prompts have a system message whose text is not in their tokens",
)
planted(
    "s04_second_stops_are_unknown",
    "TRL: generation_kwargs has more end tokens than TRL looks for",
    "texts end at a token other than the end token, and the padding behind it is part of the completion and trained", first_sight="`drawn_otherwise`: beside it",
)
planted(
    "s05_default_list_is_kept",
    "TRL: the reward's list is a default argument, so each step gets the first step's scores",
    "each step's rewards are those of the first, place by place, whatever the texts say",
    names="rewards_in_batch",
    first_sight="`rewards_in_batch`: beside it",
)
planted(
    "s06_dead_groups_get_raw_rewards",
    "TRL: a subclass gives groups without a spread their raw rewards as advantages",
    "where all rewards of a group are 1 all advantages are 1, not 0: such groups are pushed up as a whole", names="dead_groups_paid", first_sight="`advantages_differ`: that they are others",
)
planted(
    "s07_loss_made_positive",
    "TRL: a subclass takes the absolute value of the loss",
    "the loss is the absolute value of the true one, so on steps where that is negative the gradient's sign is turned",
    names="loss_negated",
    first_sight="named",
)
planted(
    "s08_betas_exchanged",
    "TRL: adam_beta1 is 0.999 and adam_beta2 is 0.9",
    "Adam's betas are exchanged: the direction is a mean over a thousand steps, more than the run has", names="betas_exchanged",
)
planted(
    "s09_iterations_are_the_run",
    "TRL: num_iterations is 16, as if it were the length of the run",
    "the whole run trains on one batch of rollouts, 16 times; the policy is far from the one that sampled",
    names="ratio_wide",
    first_sight="named",
)
planted(
    "s10_best_is_the_least_loss",
    "TRL: load_best_model_at_end without metric_for_best_model",
    "the checkpoint that is kept is the one with the least eval_loss, which says nothing of quality in GRPO; here it"
    " has the least reward of all", names="best_by_loss",
)
planted(
    "s31_sources_share_a_scale",
    "REINFORCE++: one source pays 0 to 1, another 0 to 100, and both are whitened together",
    "advantages show the source, not the quality: all completions of one source have a negative one",
    names="batch_baseline",
    first_sight="named",
)
planted(
    "s32_fine_counts_the_prompt",
    "DAPO's soft fine for length gets prompt and completion together",
    "most completions are fined, though none is near the limit; with the prompt's length the fine is explained",
)
planted(
    "s33_best_of_the_wrong",
    "expert iteration without a floor: where all of a group are wrong, the first is taught",
    "completions with reward 0, in groups where all have 0, are trained with advantage 1",
    first_sight="`advantages_differ`: that they are others",
)
planted(
    "s34_critic_not_in_the_optimizer",
    "PPO: the optimizer has no parameters of the critic's head",
    "values do not come nearer to the returns: they stay near their first mean of -0.3, returns are 0.7",
)
planted(
    "s35_good_ones_are_masked",
    "GSPO's mask of sequences that went far leaves out the good ones, not the bad",
    "completions with an empty mask all have positive advantages; off_policy_mask_threshold is to leave out negative"
    " ones",
    names="good_masked",
)
planted(
    "s36_first_to_finish",
    "of eight completions the four that end first are trained",
    "in each group only the shortest half is trained, so long completions have no say", names="longer_left_out",
)
planted(
    "s37_merged_and_kept",
    "LoRA is merged into the base for the sampler and stays there, beside the adapter",
    "the weights change between a step and the next rollout: the adapter counts again at each delivery, and the"
    " trained policy is not the one that sampled",
    first_sight="`sampler_behind`: a consequence",
)
planted(
    "s38_pool_runs_dry",
    "a curriculum takes any reward above 0 as solved, so its pool is empty after five steps",
    "from the sixth rollout on all groups have one and the same problem", first_sight="`prompt_twice`: a consequence",
)
planted(
    "s39_sampler_gets_the_average",
    "the sampler is sent a moving average of the weights",
    "the sampler's policy is behind the trained one and never catches up, and nothing corrects for it",
    names="sampler_behind",
    first_sight="named",
)
planted(
    "s40_dual_clip_of_all",
    "PPO's dual clip is applied to positive advantages, too",
    "completions with a positive advantage have a gradient of 0, as the loss is their constant -3 A", names="gradient_differs", first_sight="`gradient_differs`: that the gradient is another one",
)

sound(
    "n01_two_sources", "TRL: two sources with a judge each, which leaves the other's rows out",
)
sound("n02_one_problem_of_sixteen", "TRL: one problem a step, sixteen completions, four iterations, Dr. GRPO", first_sight="`rewards_order`, severe")
sound(
    "n03_dora_with_reference", "TRL: DoRA, rank-stabilized, a KL, warm-up and linear decay",
)
sound("n04_fine_for_long_texts", "TRL: negative rewards, a fine for long texts, adafactor, batch std, temperature 1.2")
sound(
    "n05_rloo_held_out", "TRL: RLOO in groups of eight, a KL, evaluations, rewards of 0 and 10",
)
sound("n31_whitened_sources", "REINFORCE++ on two sources of one scale, a KL, temperature 1.1", names="batch_baseline", first_sight="`batch_baseline`: its settings name the group")
sound(
    "n32_soft_fine", "DAPO with its soft fine for length, two minibatches",
)
sound("n33_expert_with_floor", "expert iteration of right texts, from easy to hard", names="advantages_differ", first_sight="`advantages_differ`: its settings name GRPO")
sound(
    "n34_value_clipping", "PPO without groups, values clipped, two epochs of two minibatches",
)
sound("n35_far_bad_ones_masked", "GSPO whose bad completions that went far are masked")
sound(
    "n36_continued", "texts continued over steps by newer weights, ratios from the sampler's log-probs",
)
sound("n37_adapter_merged", "LoRA by hand, the sampler has a merged copy, two epochs")

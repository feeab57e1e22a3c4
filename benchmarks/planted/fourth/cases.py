"""What the fourth stranger planted, what names it, and what the audit said at first sight."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """A run of a stranger."""

    mistake: str
    names: frozenset[str]
    """The findings that name it; none if its files cannot show it."""
    first_sight: str
    """What the checks said before any of them was changed."""
    cause: str = ""
    """What its author expects a good auditor to say, if that was written down before any audit."""


def case(mistake: str, names: str, first_sight: str = "nothing") -> Case:
    return Case(mistake, frozenset(names.split()), first_sight)


class Corpus:
    """The runs of a stranger, noted one by one."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}

    def planted(
        self, name: str, mistake: str, cause: str, names: str = "", first_sight: str = "nothing"
    ) -> None:
        """Note a run with a mistake; `names` are the checks that name it."""
        self.cases[name] = case(mistake, names, first_sight)._replace(cause=cause)

    def sound(self, name: str, description: str, names: str = "", first_sight: str = "nothing") -> None:
        """Note a run without a mistake; `names` are findings that are right of it."""
        self.cases[name] = case(f"sound: {description}", names, first_sight)


SCRIPTS = ("hand.py", "ppo.py", "dumps.py", "trl_runs.py")
CASES = {
    "s01_top_p": case("the sampler draws from top_p .9 and reports those log-probs", "sampler_differs", "`sampler_differs`, without top_p"),
    "s02_entropy_sign": case("the entropy bonus is added to the loss", "entropy_sign"),
    "s03_dropout": case("dropout is on in the trainer's forward pass", "old_stale logprobs_differ", "`old_stale`, `logprobs_differ`: named"),
    "s04_prev_reward": case("advantages are made of the previous step's rewards", "advantages_late"),
    "s05_drop_negative": case("negative advantages become 0", "negatives_dropped"),
    "s06_old_after": case("old log-probs are computed after the update", "old_stale", "`old_stale`: named"),
    "s07_other_ref": case("the reference is another checkpoint", "reference_differs", "`reference_differs`: named; and, wrongly, `kl_differs`"),
    "s08_seq_vs_token": case("the settings ask for GSPO's ratio and the loss has tokens'", "ratio_level"),
    "s09_no_zero_grad": case("zero_grad is missing", "gradient_kept"),
    "s10_clip01": case("rewards from -2 to 1.2 are cut to 0 to 1", "reward_cut"),
    "s11_gae_over_end": case("GAE runs over the end of a completion into the next row", "returns_differ"),
    "s11t_hundredfold": case("TRL: one of two rewards is a hundred times the other", "reward_drowned", "`reward_drowned`: named; and, wrongly, `answer_told`"),
    "s12t_clip_1e-8": case("TRL: max_grad_norm is 1e-8", "clipped_always", "`clipped_always` as the third: named; and, wrongly, `answer_told`"),
    "s13t_constant_seed": case("TRL: the seed is set before each step", "draws_repeat"),
    "s14v_equal_ranks": case("two engines draw with one seed, half a group each", "copies"),
    "s15v_template_twice": case("the chat template is applied twice", "template_twice"),
    "s16v_truncated_side": case("long prompts lose their end, with the question's", "prompt_cut"),
    "s17v_length_sign": case("the penalty for length is added", "penalty_pays"),
    "s18v_greedy": case("training samples greedily", "copies", "`dead_groups`, as if the reward read no completion"),
    "s19_prime_ema": case("a running mean of all rewards is the baseline", ""),
    "s20c_lr_restarted": case("each resume begins the schedule anew", "rate_restarts"),
    "s21c_eval_no_system": case("the evaluation's prompts lack the system prompt", ""),
    "n01_slow": case("sound: a rate of 1e-6", ""),
    "n02_zero": case("sound: too hard, all rewards 0", "", "`rewards_constant`, severe"),
    "n03_one": case("sound: nearly all rewards 1", ""),
    "n04_offpolicy": case("sound: two updates behind, corrected", "", "`sampler_behind`, severe"),
    "n05_tools": case("sound: a tool's tokens, masked", ""),
    "n06_dapo": case("sound: DAPO's filter, clip and penalty", "", "`reward_drowned`"),
    "n07_gspo": case("sound: GSPO, two iterations of two minibatches", ""),
    "n08_rloo": case("sound: RLOO, rewards of -1 and 1, k3 in the loss", "", "`kl_differs`, severe"),
    "n09_few": case("sound: few fields", ""),
    "n10t_two_iterations": case("sound, TRL: two iterations, dr_grpo", "", "`rows_duplicated`, rightly; `answer_told`"),
    "n11_prime": case("sound: prime-rl, one update behind", "", "`advantages_moved`, severe"),
    "n12_ppo": case("sound: PPO with GAE, a KL in the reward", ""),
    "n13_drgrpo": case("sound: Dr. GRPO", ""),
    "n14t_state_only": case("sound, TRL: trainer_state.json alone", ""),
    "n15v_curriculum": case("sound, a dump: problems grow", ""),
    "n16v_dapo": case("sound, a dump: dynamic sampling, a penalty for length", ""),
    "n17v_easy": case("sound, a dump: nearly always right", ""),
    "n18c_cosine": case("sound, CSV: warm-up and cosine", ""),
    "n19c_few": case("sound, CSV: three columns", ""),
    "n20c_verl": case("sound, CSV: verl's columns with an evaluation", ""),
}

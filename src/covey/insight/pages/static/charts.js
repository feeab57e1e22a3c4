// The charts of a run in their order: title, metrics with their names in the legend, form of the numbers.

import { percent } from "./dom.js";

export const known = (name, text) => [name, text];
export const CHARTS = [
  ["Reward", [known("reward/mean", "training"), known("held-out:reward", "held-out")]],
  ["Accuracy", [known("accuracy", "training"), known("held-out:greedy", "held-out, greedy"), known("held-out:pass@1", "held-out, sampled")], percent],
  ["Pairs with the chosen above the rejected", [known("preference/accuracy", "training"), known("reward_model/accuracy", "training"), known("held_out/preference/accuracy", "held-out"), known("held_out/reward_model/accuracy", "held-out")], percent],
  ["Margin of the chosen", [known("preference/margin", "training"), known("reward_model/margin", "training"), known("held_out/preference/margin", "held-out"), known("held_out/reward_model/margin", "held-out")]],
  ["Dead groups", [known("groups/dead_incorrect", "all incorrect"), known("groups/dead_correct", "all correct"), known("groups/dead", "all")], percent],
  ["Rewards by function", /^reward\/[^/]+\/mean$/],
  ["Length of completions, tokens", [known("length/correct", "correct"), known("length/incorrect", "incorrect")]],
  ["Truncated completions", [known("length/truncated", "truncated")], percent],
  ["Entropy, nats per token", [known("entropy/sampled", "sampled"), known("entropy", "in the update")]],
  ["KL to the reference, nats per token", [known("kl/token_k3", "k3"), known("kl/token_k1", "k1")]],
  ["Tokens that the clip silenced", [known("clip/low", "at the lower bound"), known("clip/high", "at the upper bound"), known("clip/zero_gradient", "no gradient at all")], (v) => percent(v, 1)],
  ["Importance ratio", [known("ratio/q01", "1 %"), known("ratio/q50", "median"), known("ratio/q99", "99 %")]],
  ["Gradient by pass rate of the problem", /^gradient_share\/pass_rate_/, percent],
  ["Gradient moved elsewhere", [known("gradient_share/overweight", "to very easy or hard prompts, by the std"), known("gradient_share/shared_prefix", "blame on what good siblings say too")], percent],
  ["KL to the reference, nats per completion", [known("kl/completion_k1", "k1")]],
  ["Problems by pass rate", [known("difficulty/pass_rate_0_0.2", "below 20 %"), known("difficulty/pass_rate_0.2_0.8", "20 to 80 %"), known("difficulty/pass_rate_0.8_1", "above 80 %")], percent],
  ["Problems", [known("difficulty/tried", "tried"), known("difficulty/solved", "solved")], percent],
  ["Gradient norm", [known("optimizer/grad_norm", "norm")]],
  ["Tools, per completion", [known("tools/turns", "turns answered"), known("tools/used", "completions that used any")]],
  ["Answers of tools that report an error", [known("tools/failed", "of all answers")], percent],
  ["Signs of reflection per completion", [known("text/reflection/correct", "correct"), known("text/reflection/incorrect", "incorrect")]],
  ["How it writes", [known("text/duplicates", "copies"), known("text/repetition", "repetition"), known("text/mixed_scripts", "mixed scripts")], percent],
  ["Sampler against trainer, nats", [known("mismatch/mean", "mean"), known("mismatch/max", "largest")]],
  ["Loss", [known("loss", "loss")]],
  ["Seconds of a step", /^time:seconds\//],
  ["Tokens per second", /^time:tokens_per_second\//],
];

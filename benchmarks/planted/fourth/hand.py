"""Hand-made loops that write covey's record or prime-rl's files: each with one mistake, or none."""
import sys
from loop import *
SICK = {
 "s01_top_p": dict(top_p=0.9),
 "s02_entropy_sign": dict(entropy=0.05, settings={"entropy_coef": 0.05}),
 "s03_dropout": dict(dropout=0.2),
 "s04_prev_reward": dict(prev_reward=True),
 "s05_drop_negative": dict(drop_negative=True),
 "s06_old_after": dict(old_after=True, lr=1e-3),
 "s07_other_ref": dict(beta=0.04, other_ref=True),
 "s08_seq_vs_token": dict(level="token", iterations=3, lr=1e-3, settings={"importance_sampling_level": "sequence", "loss_type": "grpo"}),
 "s09_no_zero_grad": dict(no_zero_grad=True, clip=1e9, accuracy=0.9, easy_dead=(1, 1), B=3, steps=15),
 "s10_clip01": dict(signed=True, format=True, clip01=True),
 "s19_prime_ema": dict(adv="ema", prime=True),
}
SOUND = {
 "n01_slow": dict(lr=1e-6, steps=20),
 "n02_zero": dict(untrained=True, steps=8),
 "n03_one": dict(accuracy=1.0, lr=1e-5, steps=8),
 "n04_offpolicy": dict(lag=2, correct=True, lr=1e-3),
 "n05_tools": dict(tools=True),
 "n06_dapo": dict(dapo=True, overlong=True, eps=(0.2, 0.28)),
 "n07_gspo": dict(level="sequence", iterations=2, minis=2, eps=(3e-4, 4e-4), lr=1e-3, settings={"importance_sampling_level": "sequence", "loss_type": "grpo"}),
 "n08_rloo": dict(adv="rloo", signed=True, beta=0.02),
 "n09_few": dict(fields="few"),
 "n11_prime": dict(prime=True, lag=1),
 "n13_drgrpo": dict(adv="none", settings={"loss_type": "dr_grpo", "scale_rewards": False}),
}
for n, k in {**SICK, **SOUND}.items():
    if len(sys.argv) < 2 or sys.argv[1] in n: train(n, **k)

"""The `algorithm` block: presets, overrides, users' own functions, contradictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from covey.config.algorithm import build_algorithm, describe
from covey.config.contradictions import contradictions
from covey.objective import (
    advantages,
    corrections,
    filters,
    penalties,
    ratios,
    surrogates,
    token_weights,
)
from covey.objective.algorithms import PRESETS
from covey.objective.axes import AXES
from covey.objective.axis_function import bind
from covey.objective.data import OFFERED
from covey.objective.penalties import KL, Entropy
from covey_verify.errors import ConfigError
from tests.objective.table import ALGORITHMS


@pytest.mark.parametrize("name", ALGORITHMS)
def test_building_from_the_description_gives_the_same_algorithm(name: str) -> None:
    algorithm = ALGORITHMS[name]
    assert build_algorithm(describe(algorithm)) == algorithm


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_by_name_says_where_it_comes_from(name: str) -> None:
    assert build_algorithm(name) is PRESETS[name]
    assert (
        "arXiv" in PRESETS[name].paper
        or "Williams" in PRESETS[name].paper
        or "GDPO as" in PRESETS[name].paper
    )


def test_presets_differ() -> None:
    algorithms = list(PRESETS.values())
    assert all(a != b for i, a in enumerate(algorithms) for b in algorithms[:i])


def test_an_override_keeps_the_other_settings_of_the_function() -> None:
    got = build_algorithm({"name": "dapo", "surrogate": {"clip_low": 0.1}})
    assert got == replace(PRESETS["dapo"], surrogate=bind(surrogates.clip, clip_low=0.1, clip_high=0.28))
    # Another function starts from its own defaults.
    got = build_algorithm({"name": "gspo", "surrogate": {"name": "cispo", "cap": 4}})
    assert got.surrogate == bind(surrogates.cispo, cap=4.0)


def test_every_form_of_an_axis() -> None:
    got = build_algorithm(
        {
            "name": "grpo",
            "advantage": "group_centered",
            "whiten": {"name": "batch_std", "of": "advantages"},
            "kl": 0.5,
            "entropy": {"target": 0.3},
            "correction": [{"name": "masked", "high": 3}, "geometric_mask"],
            "nll": 0.1,
            "select_tokens": "top_entropy",
            "token_weights": ["selected_only", {"name": "unlikely_only", "below": 0.8}],
            "filter": None,
            "old": "sampler",
        }
    )
    assert got.advantage == bind(advantages.group_centered)
    assert got.whiten == bind(advantages.batch_std, of="advantages")
    assert got.kl == KL(coef=0.5)
    assert got.entropy == Entropy(target=0.3)
    assert got.correction == (bind(corrections.masked, high=3.0), bind(corrections.geometric_mask))
    assert build_algorithm({"correction": "masked"}).correction == (bind(corrections.masked),)
    assert build_algorithm({"correction": None}).correction == ()
    assert got.nll == 0.1
    assert got.token_weights == (
        bind(token_weights.selected_only),
        bind(token_weights.unlikely_only, below=0.8),
    )
    assert got.old == "sampler"
    assert build_algorithm({"name": "grpo", "kl": None}).kl is None
    assert build_algorithm({"name": "grpo", "kl": {"estimator": "k1"}}).kl == KL(
        bind(penalties.k1), coef=0.04
    )
    assert build_algorithm({"name": "fipo", "token_weights": None}).token_weights == ()
    assert (
        build_algorithm({"name": "dapo", "token_weights": "unlikely_only"}).token_weights[0].name
        == "unlikely_only"
    )
    assert build_algorithm({}) is PRESETS["dapo"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gropo", "did you mean grpo"),
        ("zzz", "known: "),
        (7, "must be a name or a mapping"),
        ({"name": ["grpo"]}, "not a name"),
        ({"surrogate": {"name": 3}}, "not a name"),
        ({3: 4}, "no such axis"),
        ({"kl": {3: 4}}, "no such setting"),
        ({"surrogate": {3: 4}}, "no such setting"),
        ({"surogate": "clip"}, "did you mean surrogate?"),
        ({"surrogate": "clipp"}, "did you mean clip"),
        ({"surrogate": 3}, "must be a name or a mapping"),
        ({"surrogate": {"clip_hihg": 0.3}}, "did you mean clip_high?"),
        ({"surrogate": {"clip_high": -1}}, "greater than 0"),
        ({"surrogate": {"clip_high": "much"}}, "valid number"),
        ({"surrogate": None}, "cannot be null"),
        ({"advantage": {"name": "group_zscore", "ddof": 2}}, "0 or 1"),
        ({"advantage": {"eps": float("nan")}}, "greater than or equal to 0"),
        ({"whiten": {"of": "rewards"}}, "name is missing"),
        ({"kl": {"coeff": 1}}, "did you mean coef?"),
        ({"entropy": {"estimator": "k1"}}, "no such setting"),
        ({"kl": {"place": "los"}}, "'loss' or 'reward'"),
        ({"kl": {"coef": -1}}, "greater than or equal to 0"),
        ({"nll": -1}, "greater than or equal to 0"),
        ({"correction": 3}, "not a list"),
        ({"kl": {"target": 0}}, "greater than 0"),
        ({"kl": {"refresh_every": 0}}, "greater than or equal to 1"),
        ({"kl": {"refresh_mix": 2}}, "less than or equal to 1"),
        (
            {"kl": {"estimator": "k4"}},
            "algorithm.kl.estimator: 'k4' is unknown; known: absolute, full, k1, k2, k3",
        ),
        ({"old": "nobody"}, "'trainer' or 'sampler'"),
        ({"token_weights": 3}, "not a list"),
        ({"token_weights": [None]}, "must be a name or a mapping"),
        ({"advantage": "gae.py"}, "unknown"),
        ({"advantage": "gone.py:mine"}, "no such file"),
    ],
)
def test_mistakes_name_the_axis_and_the_remedy(spec, says: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm|gone") as caught:
        build_algorithm(spec)
    assert says in str(caught.value)


def test_a_users_own_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def best_only(rewards, *, bonus: float = 1.0):\n"
        "    return bonus * (rewards == rewards.max()).double()\n"
        "def scaled(rewards, bonus): return rewards * bonus\n"
        "def rough(rewards, *, x: 'Missing' = 1): return rewards\n"
        "def steep(ratio, advantages, mismatch): return -ratio.square() * advantages\n"
    )
    got = build_algorithm({"name": "grpo", "advantage": {"name": "mine.py:best_only", "bonus": 2}}, tmp_path)
    assert got.advantage.all_settings == {"bonus": 2.0}
    described = describe(got)
    assert described["advantage"] == {"name": "mine.py:best_only", "bonus": 2.0}
    assert build_algorithm(described, tmp_path) == got
    again = build_algorithm({**described, "advantage": {**described["advantage"], "bonus": 3}}, tmp_path)
    assert again.advantage.all_settings == {"bonus": 3.0}
    assert build_algorithm({"name": "grpo", "surrogate": "mine.py:steep"}, tmp_path).needs >= {"mismatch"}
    for function, says in {
        "best_onl": "defines no function",
        "scaled": "settings come after a *",
        "rough": "'Missing'",
    }.items():
        with pytest.raises(ConfigError) as caught:
            build_algorithm(
                {"advantage": {"name": f"mine.py:{function}", **({"x": 2} if function == "rough" else {})}},
                tmp_path,
            )
        assert says in str(caught.value)


def test_every_axis_knows_the_data_its_functions_ask_for() -> None:
    for axis, functions in AXES.items():
        for function in functions:
            assert set(bind(function).needs) <= OFFERED[axis], (axis, function)


# --- contradictions -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets_do_not_contradict_themselves(name: str) -> None:
    # What is driven by the size of the ratio does nothing at all with one update.
    updates = 2 if name in ("kl_cov", "fipo", "dro") else 1
    assert contradictions(PRESETS[name], group_size=8, updates=updates) == []


GRPO = replace(PRESETS["grpo"], kl=None)


def pulled(ref_log_ratio):
    """A user's factor that reads the distance to the reference."""
    return (-ref_log_ratio).exp()


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (replace(PRESETS["ppo"], critic=None), "critic"),
        (
            replace(PRESETS["rloo"], advantage=PRESETS["gdpo"].advantage),
            "does not read the completion's reward",
        ),
        (replace(GRPO, surrogate=bind(surrogates.cispo, cap=0.28)), "1 + eps_high"),
        (replace(GRPO, surrogate=bind(surrogates.cispo, floor=1.2)), "floor above 1"),
        (replace(GRPO, surrogate=bind(surrogates.clip, dual_clip=1.2)), "greater than 1 + clip_high"),
        (replace(GRPO, kl=KL(coef=0.0)), "kl: null"),
        (replace(GRPO, kl=KL(coef=0.0, target=5.0)), "no target raises it"),
        (replace(GRPO, kl=KL(bind(penalties.full), place="reward")), "only in the loss"),
        (replace(GRPO, kl=KL(bind(penalties.k1), place="reward", gradient="ratio")), "has no gradient"),
        (replace(GRPO, kl=KL(bind(penalties.full), level="completion")), "exact per token"),
        (replace(GRPO, kl=KL(bind(penalties.full), gradient="ratio")), "exact per token"),
        (replace(GRPO, kl=KL(refresh_mix=0.6)), "acts only with kl.refresh_every"),
        (replace(GRPO, kl=KL(refresh_every=9, refresh_mix=0.0)), "never moves"),
        (replace(GRPO, entropy=Entropy()), "has no effect"),
        (replace(GRPO, ratio=bind(ratios.on_policy)), "always 1"),
        (replace(PRESETS["dppo"], ratio=bind(ratios.sequence)), "has no effect"),
        (replace(GRPO, old="sampler", correction=(bind(corrections.truncated),)), "nothing to correct"),
        (replace(PRESETS["entropy_80_20"], old="sampler"), "old_entropy is known only"),
        (replace(GRPO, token_weights=(bind(token_weights.selected_only),)), "name one"),
        (replace(GRPO, select_tokens=bind(token_weights.top_entropy)), "nothing reads"),
        (
            replace(GRPO, correction=(bind(corrections.masked, low=5.0, high=2.0),)),
            "low 5 must be less than high 2",
        ),
        (replace(GRPO, advantage=bind(advantages.pass_at_k, k=8)), "8 completions (rollout.group_size)"),
        (replace(GRPO, surrogate=bind(surrogates.dro)), "dro changes nothing with one update per batch"),
        (PRESETS["kl_cov"], "kl_on_selected changes nothing with one update per batch"),
        (PRESETS["fipo"], "future_influence changes nothing with one update per batch"),
        (
            replace(
                PRESETS["fipo"], old="sampler", token_weights=(bind(token_weights.future_influence, low=1.1),)
            ),
            "must include 1",
        ),
        (replace(GRPO, kl=KL(bind(penalties.k1))), "expected gradient of zero"),
        (
            replace(GRPO, kl=KL(bind(penalties.k1), level="completion", target=3.0)),
            "expected gradient of zero",
        ),
        (replace(GRPO, filter=bind(filters.pass_rate_band, low=0.0, high=1.0)), "keeps every group"),
        (replace(GRPO, filter=bind(filters.pass_rate_band, low=0.3, high=0.35)), "no pass rate of 8"),
        (replace(GRPO, filter=bind(filters.pass_rate_band, low=0.8, high=0.2)), "no pass rate of 8"),
        (
            replace(GRPO, kl=KL(bind(penalties.k2), to="sampler", target=1.0)),
            "without a reference model to move",
        ),
        (replace(GRPO, kl=KL(bind(penalties.full), to="sampler")), "needs the reference's distribution"),
        (replace(GRPO, token_weights=(bind(pulled),)), "ref_log_ratio needs one"),
    ],
)
def test_contradictions_are_refused_with_the_reason(algorithm, says: str) -> None:
    found = contradictions(algorithm, group_size=8, updates=1)
    assert len(found) == 1
    assert says in found[0]


def test_a_group_of_one_needs_an_estimator_without_siblings() -> None:
    for name, algorithm in PRESETS.items():
        alone = contradictions(algorithm, group_size=1, updates=1)
        needs_none = name in {
            "reinforce",
            "remax",
            "reinforce_pp",
            "rae",
            "grpo_process",
            "ppo",
            "vapo",
            "vine_ppo",
        }
        assert (alone == []) == needs_none, name
    assert contradictions(replace(PRESETS["remax"], filter=PRESETS["dapo"].filter), 1, 1) == [
        "rollout.group_size 1: the filter informative does nothing with a single completion; use filter: null"
    ]


def test_a_reference_is_scored_for_whoever_asks_for_the_distance() -> None:
    full = replace(GRPO, kl=KL(bind(penalties.full)), token_weights=(bind(pulled),))
    assert contradictions(full, 8, 1) == []
    assert full.needs >= {"ref_logprobs", "full_kl"}


@pytest.mark.parametrize(
    ("axis", "asks", "says"),
    [
        ("advantage", "old_entropy", "does not offer"),
        ("advantage", "reward", "did you mean rewards"),
        ("whiten", "old_logprobs", "does not offer"),
        ("filter", "components", "does not offer"),
        ("select_tokens", "ref_logprobs", "does not offer"),
        ("ratio", "ratio", "does not offer"),
        ("surrogate", "rewards", "does not offer"),
    ],
)
def test_a_users_function_is_offered_what_its_axis_has(
    tmp_path: Path, axis: str, asks: str, says: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def mine({asks}): return {asks}\n")
    with pytest.raises(ConfigError) as caught:
        build_algorithm({axis: "mine.py:mine"}, tmp_path)
    assert says in str(caught.value)


def test_several_updates_need_a_ratio() -> None:
    assert "ratio token" in contradictions(PRESETS["reinforce"], 8, updates=2)[0]
    assert contradictions(GRPO, 8, updates=4) == []


def test_opsm_measures_drift_against_the_sampler_itself() -> None:
    opsm = (bind(corrections.off_policy_mask),)
    assert contradictions(replace(GRPO, old="sampler", correction=opsm), 8, 4) == []
    two = (*opsm, bind(corrections.truncated))
    assert "truncated has nothing" in contradictions(replace(GRPO, old="sampler", correction=two), 8, 4)[0]


def test_a_lone_completion_that_keeps_its_reward_needs_no_siblings() -> None:
    assert contradictions(build_algorithm({"name": "grpo", "dialect": "verl-0.9.1"}), 1, 1) == []

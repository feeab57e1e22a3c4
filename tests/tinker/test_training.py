"""A local Tinker trains as plain torch and peft do, keeps clients apart, and resumes to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from covey.models.policy import Policy
from tests.conftest import policy_of
from tests.tinker.client import Refused, Session, Trainer, call, serving

ADAM = {
    "learning_rate": 0.02,
    "beta1": 0.8,
    "beta2": 0.9,
    "eps": 1e-4,  # a gradient of rounding errors alone must not become a step
    "weight_decay": 0.1,
    "grad_clip_norm": 2.0,
}


@pytest.fixture
def policy() -> Policy:
    return policy_of("llama")


def data(loss: str, seed: int = 0) -> list[dict[str, Any]]:
    """Three sequences with what a loss reads of them."""
    rng = np.random.default_rng(seed)
    found = []
    for n in (7, 1, 12):
        datum: dict[str, Any] = {
            "tokens": rng.integers(5, 300, n),
            "target_tokens": rng.integers(5, 300, n),
        }
        if loss == "cross_entropy":
            datum["weights"] = rng.normal(size=n).astype(np.float32)
        else:
            datum["logprobs"] = rng.uniform(-7, -4, n).astype(np.float32)
            datum["advantages"] = rng.normal(size=n).astype(np.float32)
        if loss == "gspo":
            datum["sequence_ratio_mask"] = (np.arange(n) > 0).astype(np.float32)
        found.append(datum)
    return found


def by_hand(loss: str, lp: Tensor, datum: dict[str, Any]) -> Tensor:
    """The loss of a datum, token by token, as Tinker's documentation defines it."""
    total = torch.zeros(())
    mask = datum.get("sequence_ratio_mask")
    if mask is not None and not mask.any():
        return total
    mean = (
        None if mask is None else np.mean([lp[t].item() - datum["logprobs"][t] for t in np.flatnonzero(mask)])
    )
    for t in range(len(lp)):
        if loss == "cross_entropy":
            total = total - lp[t] * float(datum["weights"][t])
            continue
        a, q = float(datum["advantages"][t]), float(datum["logprobs"][t])
        r = torch.exp(lp[t] - q)
        if loss == "gspo":
            r = float(np.exp(mean)) * torch.exp(lp[t] - lp[t].detach())
        low, high = {"cispo": (0.0, 4.0), "gspo": (0.9, 1.3)}.get(loss, (0.8, 1.2))
        gains = {
            "importance_sampling": r * a,
            "ppo": torch.minimum(r * a, r.clamp(low, high) * a),
            "gspo": torch.minimum(r * a, r.clamp(low, high) * a),
            "cispo": min(max(r.item(), low), high) * lp[t] * a,
            "dro": lp[t] * a - 0.5 * 0.3 * (lp[t] - q) ** 2,
        }
        total = total - gains[loss]
    return total


CONFIG = {"dro": {"beta": 0.3}, "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}}
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")


def folder_of(store: Path, path: str) -> Path:
    """Where a checkpoint lies."""
    return store / path.removeprefix("tinker://")


UNEMBED = {"train_attn": False, "train_mlp": False}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(
    ("kind", "loss", "flags"),
    [
        *(("llama", loss, {}) for loss in LOSSES),
        ("qwen2", "ppo", {}),  # whose output layer is its embedding
        ("gpt2", "ppo", UNEMBED),  # which runs through its Hugging Face modules
    ],
)
def test_losses_and_steps_are_those_of_torch_and_peft(
    tmp_path: Path, kind: str, loss: str, flags: dict[str, bool]
) -> None:
    plain = policy_of(kind).model
    with serving(policy_of(kind), tmp_path, tokens=8) as url:  # a datum at a time
        client = Session(url).train(**flags)
        begin = client.do("save_weights", path="begin")["path"]
        peft = PeftModel.from_pretrained(plain, folder_of(tmp_path, begin), is_trainable=True)
        weights = [p for p in peft.parameters() if p.requires_grad]
        adam = torch.optim.AdamW(weights, lr=0.02, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1)
        for step in range(3):
            given = data(loss, step)
            total = torch.zeros(())
            expected = []
            for datum in given:
                logits = peft(torch.from_numpy(datum["tokens"])[None]).logits[0]
                targets = torch.from_numpy(datum["target_tokens"])[:, None]
                expected.append(logits.log_softmax(-1).gather(1, targets)[:, 0])
                total = total + by_hand(loss, expected[-1], datum)
            total.backward()
            norm = torch.nn.utils.clip_grad_norm_(weights, 2.0)
            found, computed = client.backward(given, loss, **CONFIG.get(loss, {}))
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.allclose(torch.from_numpy(ours.copy()), theirs, rtol=1e-4, atol=1e-4)
            assert computed == pytest.approx(float(total.detach()), rel=1e-3, abs=1e-3)
            assert client.step(**ADAM) == pytest.approx(float(norm), rel=1e-3)
            adam.step()
            adam.zero_grad()
        end = folder_of(tmp_path, client.do("save_weights", path="end")["path"])
    ours = load_file(end / "adapter_model.safetensors")
    theirs = {n: p for n, p in peft.named_parameters() if p.requires_grad}
    assert len(ours) == len(theirs)
    for name, weight in theirs.items():
        assert torch.allclose(ours[name.replace(".default", "")], weight, rtol=1e-3, atol=1e-4), name


def test_an_adapter_changes_all_that_was_asked_for_or_is_refused(tmp_path: Path) -> None:
    with serving(policy_of("gpt2"), tmp_path) as url:
        with pytest.raises(Refused, match="gpt2 has no linear layers in attention and mlp to adapt"):
            Session(url).train()
        client = Session(url).train(**UNEMBED)
        with pytest.raises(Refused, match="one target for each token here"):
            client.backward([{"tokens": [5], "target_tokens": [[6, 7]], "weights": [[1.0, 1.0]]}])


def test_a_forward_pass_adds_no_gradient(policy: Policy, tmp_path: Path) -> None:
    with serving(policy, tmp_path) as url:
        client = Session(url).train()
        forward = client.backward(data("cross_entropy"), forward=True)
        assert client.step(learning_rate=1.0) == 0
        again = client.backward(data("cross_entropy"))
    assert [x.tolist() for x in forward[0]] == [x.tolist() for x in again[0]]


def test_k_targets_for_a_token_are_k_sequences(policy: Policy, tmp_path: Path) -> None:
    """As the SDK asks for the log-probs of several continuations of one prefix."""
    (first, *_) = data("cross_entropy")
    other = {**first, "target_tokens": first["target_tokens"][::-1].copy()}
    both = {k: np.stack([first[k], other[k]], 1) for k in ("target_tokens", "weights")}
    with serving(policy, tmp_path) as url:
        client = Session(url).train()
        apart, loss = client.backward([first, other])
        (together,), same = client.backward([{"tokens": first["tokens"], **both}])
    assert together.shape == (7, 2)
    assert np.allclose(together, np.stack(apart, 1), atol=1e-5)
    assert same == pytest.approx(loss, abs=1e-3)


def test_requests_are_done_once_and_in_their_order(policy: Policy, tmp_path: Path) -> None:
    """The SDK sends the parts of a batch at the same time, the first one last, and again if it has to."""
    parts = [data("cross_entropy", seed) for seed in range(3)]
    with serving(policy, tmp_path) as url:
        expected = Session(url).train()
        for part in parts:
            expected.backward(part)
        norm = expected.step()
        client = Session(url).train()
        messages = [client.message(part, "cross_entropy") for part in parts]
        step = client.post("optim_step", adam_params={})  # overtakes them
        promises = [call(url, "forward_backward", messages[i]) for i in (2, 1, 1, 0, 2)]
        assert promises[0] == promises[4], "the same request again"
        assert client.session.result(step)["metrics"]["grad_norm"] == norm


def moved(client: Trainer, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        client.backward(data("ppo", seed + step), "ppo")
        client.step(learning_rate=0.01)


def adapter(store: Path, client: Trainer, name: str = "end") -> bytes:
    """The weights of a client, from disk."""
    path = client.do("save_weights", path=name)["path"]
    return (folder_of(store, path) / "adapter_model.safetensors").read_bytes()


def test_a_checkpoint_resumes_to_the_same_bits_on_another_server(policy: Policy, tmp_path: Path) -> None:
    with serving(policy, tmp_path) as url:
        client = Session(url).train()
        moved(client, 2)
        path = client.do("save_weights", path="middle", user_metadata={"a": "b"})["path"]
        moved(client, 2, seed=2)
        expected = adapter(tmp_path, client)
    with serving(policy_of("llama"), tmp_path) as url:
        session = Session(url)
        resumed = session.resume(path)
        moved(resumed, 2, seed=2)
        assert adapter(tmp_path, resumed) == expected
        fresh = session.resume(path, optimizer=False)
        moved(fresh, 2, seed=2)
        assert adapter(tmp_path, fresh) != expected, "AdamW began anew"
        fresh.do("load_weights", path=path, optimizer=True)
        moved(fresh, 2, seed=2)
        assert adapter(tmp_path, fresh, "again") == expected
        # What the SDK's other questions about it get:
        assert call(url, "weights_info", {"tinker_path": path})["lora_rank"] == 4
        listed = call(url, f"training_runs/{client.id}/checkpoints")["checkpoints"]
        assert [x["checkpoint_id"] for x in listed] == ["weights/end", "weights/middle"]
        assert listed[1]["user_metadata"] == {"a": "b"}
        run = call(url, f"training_runs/{client.id}")
        assert run["last_checkpoint"]["tinker_path"].endswith("/weights/end")
        call(url, f"training_runs/{client.id}/checkpoints/weights/end", method="DELETE")
        assert len(call(url, f"training_runs/{client.id}/checkpoints")["checkpoints"]) == 1


def test_clients_that_take_turns_do_not_mix(policy: Policy, tmp_path: Path) -> None:
    with serving(policy, tmp_path) as url:
        alone = []
        for seed in (1, 2):
            client = Session(url).train(seed)
            moved(client, 3, seed)
            alone.append(adapter(tmp_path, client))
        base = Session(url)
        before = base.sample(base.sampler(None, 0), [7, 8, 9])
        first, second = (Session(url).train(seed) for seed in (1, 2))
        other = Session(url).train(3, rank=2, train_unembed=False)
        for step in range(3):
            for client, seed in ((first, 1), (second, 2), (other, 3)):
                client.backward(data("ppo", seed + step), "ppo")
            for client in (second, other, first):
                client.session.sample(client.snapshot(step), [7, 8, 9])
                client.step(learning_rate=0.01)
        assert [adapter(tmp_path, first), adapter(tmp_path, second)] == alone
        assert base.sample(base.sampler(None, 1), [7, 8, 9]) == before


def edited(**changed: object) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [*data("cross_entropy")[:1], {**data("cross_entropy")[2], **changed}]


@pytest.mark.parametrize(
    ("changed", "loss", "config", "words"),
    [
        ({"weights": np.ones(3)}, "cross_entropy", {}, r"datum 1: weights has the shape \(3,\)"),
        ({"weights": np.full(12, np.nan)}, "cross_entropy", {}, "datum 1: weights has a value that is not"),
        ({"weights": np.full(12, 1e38)}, "cross_entropy", {}, "the loss is .*inf; nothing was added"),
        (
            {"target_tokens": np.full(12, 300)},
            "cross_entropy",
            {},
            "datum 1: target_tokens: ids are 0 to 299",
        ),
        ({"tokens": np.zeros(0)}, "cross_entropy", {}, "datum 1: target_tokens has the shape"),
        ({"mask": np.ones(12)}, "cross_entropy", {}, "the datum has mask, which it would not read"),
        ({}, "ppo", {}, "datum 0: this loss reads .*; the datum lacks logprobs, advantages"),
        ({}, "cross_entropy", {"beta": 1.0}, "cross_entropy has no 'beta'"),
        ({}, "stable_reinforce", {}, "not published its formula; set loss_fn=importance_sampling"),
        ({}, "sum", {}, "there are cross_entropy, "),
    ],
)
def test_a_refused_batch_leaves_the_gradient_as_it_was(
    policy: Policy, tmp_path: Path, changed: dict[str, Any], loss: str, config: dict[str, float], words: str
) -> None:
    with serving(policy, tmp_path, tokens=8) as url:
        client = Session(url).train()
        client.backward(data("cross_entropy"))
        with pytest.raises(Refused, match=words):
            client.backward(edited(**changed)(), loss, **config)
        norm = client.step()
        expected = Session(url).train()
        expected.backward(data("cross_entropy"))
        assert expected.step() == norm, "and later requests have their turn"


def test_dro_and_gspo_need_what_has_no_default(policy: Policy, tmp_path: Path) -> None:
    with serving(policy, tmp_path) as url:
        client = Session(url).train()
        with pytest.raises(Refused, match="dro needs beta"):
            client.backward(data("dro"), "dro")
        with pytest.raises(Refused, match="gspo needs clip_low_threshold and clip_high_threshold"):
            client.backward(data("gspo"), "gspo")
        own = [
            {
                **d,
                "clip_low_threshold": 0.9 + 0 * d["logprobs"],
                "clip_high_threshold": 1.3 + 0 * d["logprobs"],
            }
            for d in data("gspo")
        ]
        assert client.backward(own, "gspo")[1] == client.backward(data("gspo"), "gspo", **CONFIG["gspo"])[1]


def test_what_is_wrong_with_a_checkpoint_is_said(policy: Policy, tmp_path: Path) -> None:
    with serving(policy, tmp_path) as url:
        client = Session(url).train()
        path = client.do("save_weights", path="a")["path"]
        with pytest.raises(Refused, match="exists; choose another name"):
            client.do("save_weights", path="a")
        client.do("save_weights", path="a", overwrite=True)
        with pytest.raises(Refused, match="path: String should match"):
            client.do("save_weights", path="../../a")
        for wrong, words in (
            ("tinker://x/weights/a", "there is no such checkpoint in"),
            ("tinker://../weights/a", "is no path of a checkpoint"),
            ("/etc/passwd", "is no path of a checkpoint"),
        ):
            with pytest.raises(Refused, match=words):
                client.do("load_weights", path=wrong, optimizer=False)
        sampler = client.do("save_weights_for_sampler", path="b")["path"]
        with pytest.raises(Refused, match="it was saved for sampling"):
            client.do("load_weights", path=sampler, optimizer=True)
        with pytest.raises(
            Refused,
            match=r"rank 4 on .*; the adapter of this client has rank 2 on attention, mlp",
        ):
            Session(url).train(rank=2).do("load_weights", path=path, optimizer=True)
        file = folder_of(tmp_path, path) / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        with pytest.raises(Refused, match="not as it was written"):
            client.do("load_weights", path=path, optimizer=True)
    other = policy_of("llama")
    with torch.no_grad():
        next(other.model.parameters()).add_(1)
    with serving(other, tmp_path) as url, pytest.raises(Refused, match="belongs to other weights"):
        Session(url).resume(sampler, optimizer=False)

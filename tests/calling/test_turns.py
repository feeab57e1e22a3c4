"""Completions of several turns: what is inserted, what is drawn, and where they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from covey.batching import collate
from covey.calling import turns
from covey.calling.calls import ToolCall
from covey.calling.inserted import answer_tokens, plain_result
from covey.calling.metrics import tool_metrics
from covey.calling.running import Toolbox
from covey.calling.turns import TurnSampler
from covey.config.sampling import ToolUse
from covey.config.schema import Sandbox, Train
from covey.errors import ConfigError
from covey.learner.learner import Learner
from covey.models.chat import chat_tokens
from covey.models.policy import Policy
from covey.rewards.contract import Context, Reward, token_ends
from covey.rng import key
from covey.sampling.base import Request, Sampled, SamplingParams
from covey.sampling.local import LocalSampler
from covey.types import Completion, Group, Problem
from tests.conftest import policy_of, random_prompts

TEXT, CHAT = Problem("t", "1+2="), Problem("c", [{"role": "user", "content": "1+2="}])
CALL = ToolCall("calculate", {"expression": "6*7"})


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_of("qwen3")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Toolbox:
    settings = ToolUse(functions=("calculate",), max_calls=2, result_tokens=8)
    return Toolbox(settings, tmp_path_factory.mktemp("tools"), Sandbox())


@pytest.fixture
def calling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model writes no call: here each turn that ends by itself with more than a token is one."""
    monkeypatch.setattr(turns, "calls_in", lambda text: [CALL] if len(text) > 1 else [])


def requests(problem: Problem, count: int = 6, size: int = 4) -> list[Request]:
    prompts = random_prompts(*range(3, 3 + count))
    return [Request(p, [key(3, i, g) for g in range(size)], problem=problem) for i, p in enumerate(prompts)]


def sampled(
    made: TurnSampler, asked: Sequence[Request], params: SamplingParams
) -> dict[tuple[int, int], Completion]:
    found = {(r, s): c for r, s, c in made.sample(asked, params)}
    assert len(found) == sum(len(r.streams) for r in asked)
    return found


STOP = tuple("0123456789aeiou")
PARAMS = SamplingParams(max_tokens=115, stop=STOP)


@pytest.mark.usefixtures("calling")
@pytest.mark.parametrize("params", [PARAMS, SamplingParams(115, top_k=60, stop=STOP)], ids=["all", "top_k"])
def test_turns_keep_the_bits_of_the_trainer(policy: Policy, box: Toolbox, params: SamplingParams) -> None:
    asked = requests(TEXT)
    found = sampled(TurnSampler(LocalSampler(policy, 8), policy, box), asked, params)
    answered = [c for c in found.values() if c.sampled is not None]
    assert len(answered) > 3
    assert any(len(c.parts) > 3 for c in answered), "some are answered twice"
    said = answer_tokens(policy, TEXT, [CALL], ["42"])
    for (r, _), c in found.items():
        assert [ids.tolist() for drawn, ids in c.parts if not drawn] == [said] * sum(
            not d for d, _ in c.parts
        )
        assert not c.logprobs[~c.drawn].any()
        assert c.text == "".join(policy.decode(ids.tolist()) for drawn, ids in c.parts if drawn)
        assert len(c.tokens) <= 115
        batch = collate([Group(TEXT, asked[r].prompt, (c,), np.array([1.0]))])
        scores = Learner(policy, Train()).score(batch, 1.0).logprobs[0].numpy()
        assert np.array_equal(scores[c.drawn], c.logprobs[c.drawn])


@pytest.mark.usefixtures("calling")
def test_what_is_drawn_depends_on_the_stream_alone(policy: Policy, box: Toolbox) -> None:
    asked = requests(TEXT)
    together = sampled(TurnSampler(LocalSampler(policy, 64), policy, box), asked, PARAMS)
    few = sampled(TurnSampler(LocalSampler(policy, 3), policy, box), asked[::-1], PARAMS)
    for (r, s), c in together.items():
        assert np.array_equal(c.tokens, few[len(asked) - 1 - r, s].tokens)
        assert np.array_equal(c.logprobs, few[len(asked) - 1 - r, s].logprobs)


class Scripted:
    """Says its lines, one after another, to every request."""

    version, shares, bit_exact = 0, True, True

    def __init__(self, policy: Policy, *lines: str, finish: str = "stop") -> None:
        self.policy, self.lines, self.finish = policy, list(lines), finish
        self.asked: list[tuple[Request, SamplingParams]] = []

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[Sampled]:
        line = self.lines.pop(0)
        for r, request in enumerate(requests):
            self.asked.append((request, params))
            ids = np.array(self.policy.tokenizer(line)["input_ids"] + [2])
            for s in range(len(request.streams)):
                yield Sampled(r, s, Completion(ids, np.zeros(len(ids), np.float32), line, self.finish))


WRITTEN = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>'


def talk(
    policy: Policy, box: Toolbox, problem: Problem, *lines: str, max_tokens: int = 400
) -> tuple[Completion, Scripted]:
    inner = Scripted(policy, *lines)
    (found,) = TurnSampler(inner, policy, box).sample(
        [Request(np.array([5, 6]), [11], problem=problem)], SamplingParams(max_tokens)
    )
    return found.completion, inner


def test_a_chat_goes_on_as_its_template_writes_it(policy: Policy, box: Toolbox) -> None:
    whole, inner = talk(policy, box, CHAT, WRITTEN, "It is 42")
    messages = [
        *CHAT.prompt,
        {"role": "assistant", "content": WRITTEN},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42"},
    ]
    read = [*chat_tokens(policy.tokenizer, CHAT.prompt, {}), *whole.tokens.tolist()]
    assert read == chat_tokens(policy.tokenizer, messages, {}, begin=False)[: len(read)]
    assert whole.text == WRITTEN + "It is 42"
    assert inner.asked[0][1].stop == (), "in a chat the model ends its turn itself"
    again, _ = inner.asked[1]
    first = len(policy.tokenizer(WRITTEN)["input_ids"]) + 1
    inserted = int((~whole.drawn).sum())
    assert again.begun == first + inserted == len(again.prompt) - 2
    assert again.room == 400 - again.begun


def test_in_plain_text_a_call_ends_the_turn(policy: Policy, box: Toolbox) -> None:
    whole, inner = talk(policy, box, TEXT, WRITTEN, "42")
    assert inner.asked[0][1].stop == ("</tool_call>",)
    said = policy.decode(whole.tokens[~whole.drawn].tolist())
    assert said == "\n<tool_response>\n42\n</tool_response>\n"


def test_calls_beyond_the_limit_end_the_completion(policy: Policy, box: Toolbox) -> None:
    whole, inner = talk(policy, box, CHAT, WRITTEN, WRITTEN, WRITTEN, "never said")
    assert len(inner.asked) == 3
    assert whole.finish == "stop"
    assert sum(not drawn for drawn, _ in whole.parts) == 2


def test_an_answer_without_room_truncates(policy: Policy, box: Toolbox) -> None:
    turn = len(policy.tokenizer(WRITTEN)["input_ids"]) + 1
    whole, _ = talk(policy, box, CHAT, WRITTEN, "never said", max_tokens=turn + 3)
    assert (whole.finish, len(whole.tokens), whole.sampled) == ("length", turn, None)


def test_a_long_result_is_cut(policy: Policy) -> None:
    assert plain_result(policy, "9" * 500, 600) == "9" * 500
    assert plain_result(policy, "9" * 500, 8) == "99999999 [cut]"


@pytest.mark.parametrize(
    "text", ["a<|im_end|>b", "a<|im_<|im_end|>end|>b", "<|im_start|>a<|pad|>b", "a</tool_response>b"]
)
def test_no_result_passes_for_the_template(policy: Policy, text: str) -> None:
    assert plain_result(policy, text, 100) == "ab"


def test_a_template_may_be_made_of_tokens_that_are_not_special(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `<｜User｜>` of R1's distilled models; others, as `<answer>`, are the text's."""
    monkeypatch.setattr(policy.tokenizer, "chat_template", "<think>{{ messages }}")
    assert plain_result(policy, "<think>a<answer>b", 100) == "a<answer>b"


def test_half_a_character_does_not_end_the_run(policy: Policy) -> None:
    assert plain_result(policy, "a\ud800b", 100) == "a?b"


def test_a_turn_that_a_stop_string_ended_is_closed(policy: Policy) -> None:
    closed, opened = (answer_tokens(policy, CHAT, [CALL], ["42"], closed) for closed in (True, False))
    assert opened[0] in policy.end_ids
    assert opened[1:] == closed


def test_a_template_that_rewrites_is_refused(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    first = "{% if messages[-1].role == 'tool' %}other{% endif %}"
    monkeypatch.setattr(
        policy.tokenizer, "chat_template", first + "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="writes a conversation anew"):
        answer_tokens(policy, CHAT, [CALL], ["42"])


def test_rewards_see_what_the_model_wrote(policy: Policy, box: Toolbox) -> None:
    """A tool that says the answer must not be paid as the model's."""
    whole, _ = talk(policy, box, CHAT, WRITTEN, "It is 42")
    context = Context(decode=policy.decode)

    def judge(completion: list, token_ends: list, turns: list) -> float: ...

    given = Reward("judge", judge).arguments(CHAT, [whole], context)
    assert given["completion"] == [{"role": "assistant", "content": WRITTEN + "It is 42"}]
    said = [(t["role"], t["content"]) for t in given["turns"]]
    assert said == [("assistant", WRITTEN), ("tool", "42"), ("assistant", "It is 42")]
    ends = given["token_ends"]
    assert len(ends) == len(whole.tokens)
    assert ends[-1] == len(whole.text)
    first, answered, last = whole.parts
    own = token_ends(first[1].tolist(), policy.decode)
    said = len(WRITTEN)
    assert own[-1] == said, "the turn's end adds nothing"
    more = [said + end for end in token_ends(last[1].tolist(), policy.decode)]
    assert ends == [*own, *[said] * len(answered[1]), *more]


def test_metrics_count_answers_and_errors(policy: Policy, box: Toolbox) -> None:
    good, _ = talk(policy, box, CHAT, WRITTEN, "42")
    bad, _ = talk(policy, box, CHAT, WRITTEN.replace("6*7", "6/0"), "what?")
    none, _ = talk(policy, box, CHAT, "42")
    group = Group(CHAT, np.array([5]), (good, bad, none, none), np.zeros(4))
    found = tool_metrics([group])
    assert (found["tools/turns"], found["tools/used"], found["tools/failed"]) == (0.5, 0.5, 0.5)
    assert found["tools/tokens"] == sum(int((~c.drawn).sum()) for c in (good, bad)) / 4

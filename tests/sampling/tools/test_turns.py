"""Completions of several turns: what is inserted, what is drawn, and where they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.config.sampling import ToolUse
from covey.config.schema import Sandbox, Train
from covey.learner.batching import collate
from covey.learner.learner import Learner
from covey.models.chat import chat_tokens
from covey.models.controls import ControlWords
from covey.models.policy import Policy
from covey.rewards.contract import Context, Reward
from covey.rewards.ends import token_ends
from covey.rewards.reading import ReplyReader
from covey.rng import key
from covey.rollouts.metrics import tool_metrics
from covey.sampling.base import Request, SampledCompletion, SamplingParams
from covey.sampling.local import LocalSampler
from covey.sampling.tools import turns
from covey.sampling.tools.inserted import answer_tokens, plain_result, result_words
from covey.sampling.tools.running import Toolbox
from covey.sampling.tools.turns import TurnSampler
from covey.types import Completion, Group, Problem
from covey_verify.calls.call import ToolCall
from covey_verify.errors import ConfigError
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
    monkeypatch.setattr(turns, "calls_in_text", lambda text: [CALL] if len(text) > 1 else [])


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
    answered = [c for c in found.values() if not c.drawn_mask.all()]
    assert len(answered) > 3
    assert any(len(c.parts) > 3 for c in answered), "some are answered twice"
    said = answer_tokens(policy, TEXT, [CALL], ["42"])
    for (r, _), c in found.items():
        assert [ids.tolist() for drawn, ids in c.parts if not drawn] == [said] * sum(
            not d for d, _ in c.parts
        )
        assert not c.logprobs[~c.drawn_mask].any()
        assert c.text == "".join(policy.decode(ids.tolist()) for drawn, ids in c.parts if drawn)
        assert len(c.tokens) <= 115
        batch = collate([Group(TEXT, asked[r].prompt, (c,), np.array([1.0]))])
        logprobs = Learner(policy, Train()).token_outputs(batch, 1.0).logprobs[0].numpy()
        assert np.array_equal(logprobs[c.drawn_mask], c.logprobs[c.drawn_mask])


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

    version, samples_on_every_rank, bit_exact = 0, True, True

    def __init__(self, policy: Policy, *lines: str, finish: str = "stop", end: bool = True) -> None:
        """``end``: whether each line ends with the token that ends a text."""
        self.policy, self.lines, self.finish, self.end = policy, list(lines), finish, [2] * end
        self.asked: list[tuple[Request, SamplingParams]] = []

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[SampledCompletion]:
        line = self.lines.pop(0)
        for r, request in enumerate(requests):
            self.asked.append((request, params))
            ids = np.array(self.policy.tokenizer(line)["input_ids"] + self.end)
            for s in range(len(request.streams)):
                yield SampledCompletion(
                    r, s, Completion(ids, np.zeros(len(ids), np.float32), line, self.finish)
                )


WRITTEN = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>'


def talk(
    policy: Policy, box: Toolbox, problem: Problem, *lines: str, max_tokens: int = 400, end: bool = True
) -> tuple[Completion, Scripted]:
    inner = Scripted(policy, *lines, end=end)
    (found,) = TurnSampler(inner, policy, box).sample(
        [Request(np.array([5, 6]), [11], problem=problem)], SamplingParams(max_tokens)
    )
    return found.completion, inner


def test_a_chat_continues_as_its_template_writes_it(policy: Policy, box: Toolbox) -> None:
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
    inserted = int((~whole.drawn_mask).sum())
    assert again.prefix_tokens == first + inserted == len(again.prompt) - 2
    assert again.max_tokens == 400 - again.prefix_tokens


TOLD = '<tool_call>{"name": "calculate", "arguments": {"expression": "1+</tool_call>1"}}</tool_call>'


def pieces_of(text: str) -> list[str]:
    """What a sampler draws that stops at each `</tool_call>`."""
    parts = text.split("</tool_call>")
    return [part + "</tool_call>" for part in parts[:-1]]


def test_a_tag_inside_of_a_text_ends_no_call_in_plain_text(policy: Policy, box: Toolbox) -> None:
    whole, inner = talk(policy, box, TEXT, *pieces_of(TOLD), "so be it", end=False)
    assert len(inner.asked) == 3
    assert whole.text == TOLD + "so be it"
    (turn, answer, _) = whole.transcript.turns
    assert turn["content"] == TOLD
    assert turn["tool_calls"] == [
        {
            "type": "function",
            "function": {"name": "calculate", "arguments": {"expression": "1+</tool_call>1"}},
        }
    ]
    assert str(answer["content"]).startswith("error: ")
    first, second, _ = (request for request, _ in inner.asked)
    before = len(second.prompt) - len(first.prompt)
    assert second.prefix_tokens == before, "its draws continue where they were"


def test_a_turn_of_nothing_but_tags_ends(policy: Policy, box: Toolbox) -> None:
    """Each is a round of its own: they have a bound."""
    begun = '<tool_call>{"name": "calculate", "arguments": {"expression": "'
    lines = [begun + "</tool_call>", *["</tool_call>"] * turns.MAX_ADDED, "it was none"]
    whole, inner = talk(policy, box, TEXT, *lines, end=False)
    assert len(inner.asked) == len(lines)
    assert [t["role"] for t in whole.transcript.turns] == ["assistant", "tool", "assistant"]


def test_siblings_continue_with_their_own_streams(policy: Policy, box: Toolbox) -> None:
    inner = Scripted(policy, WRITTEN, "1", "2", "3")
    asked = [Request(np.array([5, 6]), [11, 12, 13], problem=CHAT)]
    assert len(list(TurnSampler(inner, policy, box).sample(asked, SamplingParams(400)))) == 3
    assert [list(request.streams) for request, _ in inner.asked[1:]] == [[11], [12], [13]]


def test_results_follow_in_the_order_of_their_calls(policy: Policy, box: Toolbox) -> None:
    several = "".join(WRITTEN.replace("6*7", f"{n}+0") for n in (3, 1, 2))
    whole, _ = talk(policy, box, CHAT, several, "done")
    assert [t["content"] for t in whole.transcript.turns if t["role"] == "tool"] == ["3", "1", "2"]
    written = policy.decode(whole.tokens[~whole.drawn_mask].tolist())
    assert written.index("3") < written.index("1") < written.index("2")


def test_each_turn_is_told_as_it_was_said(policy: Policy, box: Toolbox) -> None:
    other = WRITTEN.replace("6*7", "1+1")
    whole, _ = talk(policy, box, CHAT, WRITTEN, other, "both")
    assert [t["content"] for t in whole.transcript.turns] == [WRITTEN, "42", other, "2", "both"]


def test_calls_beyond_those_of_a_turn_are_not_run(policy: Policy, tmp_path: Path) -> None:
    use = ToolUse(functions=("calculate",), calls_per_turn=2, result_tokens=90)
    few = Toolbox(use, tmp_path, Sandbox())
    whole, _ = talk(policy, few, CHAT, WRITTEN * 4, "done", max_tokens=2000)
    said = [t["content"] for t in whole.transcript.turns if t["role"] == "tool"]
    assert said == ["42", "42", *["error: not run: only the first 2 calls of a turn are"] * 2]


HANGING = """
import time

def hang() -> str:
    \"\"\"Never ends.\"\"\"
    time.sleep(600)

class Room:
    def reset(self): pass
    def hang(self) -> str:
        \"\"\"Never ends.\"\"\"
        time.sleep(600)
    def get_reward(self):
        time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["functions", "environment"])
def test_calls_that_hang_cost_their_completion_and_their_batch_the_seconds_for_tools(
    policy: Policy, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    tools: dict[str, Any] = {"functions": ("hanging.py:hang",), "environment": "hanging.py:Room"}
    use = ToolUse(**{kind: tools[kind]}, calls_per_turn=40, timeout=0.2, seconds=0.5, result_tokens=60)
    box = Toolbox(use, tmp_path, Sandbox())
    hang = '<tool_call>{"name": "hang", "arguments": {}}</tool_call>'
    inner = Scripted(policy, hang * 40, *["done"] * 3)
    made = TurnSampler(inner, policy, box)
    asked = [Request(np.array([5, 6]), [11, 12, 13], problem=CHAT)]
    found = [s.completion for s in made.sample(asked, SamplingParams(9000))]
    said = [str(t["content"]) for c in found for t in c.transcript.turns if t["role"] == "tool"]
    assert len(said) == 120
    skipped = sum("not run: the 0.5 s for tools are used up" in answer for answer in said)
    assert skipped > 20 or kind == "environment", "which answers no more after the first that hangs"
    assert 0.2 < made.waited < 60, "not 120 times 0.2 s, one after another, and never 600 s"
    assert [c.transcript.environment for c in found] == [None] * 3


def test_in_plain_text_a_call_ends_the_turn(policy: Policy, box: Toolbox) -> None:
    whole, inner = talk(policy, box, TEXT, WRITTEN, "42")
    assert inner.asked[0][1].stop == ("</tool_call>",)
    said = policy.decode(whole.tokens[~whole.drawn_mask].tolist())
    assert said == "\n<tool_response>\n42\n</tool_response>\n"


def test_calls_beyond_the_limit_end_the_completion(policy: Policy, box: Toolbox) -> None:
    whole, inner = talk(policy, box, CHAT, WRITTEN, WRITTEN, WRITTEN, "never said")
    assert len(inner.asked) == 3
    assert whole.finish == "stop"
    assert sum(not drawn for drawn, _ in whole.parts) == 2


def test_an_answer_without_room_truncates(policy: Policy, box: Toolbox) -> None:
    turn = len(policy.tokenizer(WRITTEN)["input_ids"]) + 1
    whole, _ = talk(policy, box, CHAT, WRITTEN, "never said", max_tokens=turn + 3)
    assert (whole.finish, len(whole.tokens), whole.drawn_mask.all()) == ("length", turn, True)


def test_a_long_result_is_cut(policy: Policy) -> None:
    assert plain_result(policy, result_words(policy), "9" * 500, 600) == "9" * 500
    assert plain_result(policy, result_words(policy), "9" * 500, 8) == "99999999 [cut]"


@pytest.mark.parametrize(
    "text", ["a<|im_end|>b", "a<|im_<|im_end|>end|>b", "<|im_start|>a<|pad|>b", "a</tool_response>b"]
)
def test_no_result_passes_for_the_template(policy: Policy, text: str) -> None:
    assert plain_result(policy, result_words(policy), text, 100) == "ab"


WORDS = st.lists(st.text("<|ab", min_size=1, max_size=5), min_size=1, max_size=5)


class Counted(set):
    """A set that counts how often something is looked up in it."""

    reads = 0

    def __contains__(self, word: object) -> bool:
        self.reads += 1
        return super().__contains__(word)


@given(WORDS, st.text("<|ab", max_size=60))
def test_no_word_is_left_in_any_text(words: list[str], text: str) -> None:
    found = ControlWords(words)
    plain = found.remove_from(text)
    assert not [word for word in words if word in plain]
    assert found.remove_from(plain) == plain
    assert plain == text or any(word in text for word in words)


@pytest.mark.parametrize(
    "nested", [("<tool_resp", "onse>"), ("<" * 9, ">"), ("<tool_response>", ""), ("<unused1", "<unused12")]
)
def test_a_nested_text_costs_steps_by_its_length(nested: tuple[str, str]) -> None:
    """Of 6,251 words, as Gemma 3 has them. In rounds each depth was looked through for every word."""
    words = ControlWords(["<tool_response>", *(f"<unused{n}>" for n in range(6250))])
    steps = []
    for depth in (500, 2000):
        words.words = Counted(words.words)
        words.remove_from(nested[0] * depth + nested[1] * depth)
        steps.append(words.words.reads)
    assert steps[1] <= 4.5 * steps[0] <= 4.5 * 40 * 500 * (len(nested[0]) + len(nested[1]))


def test_a_template_may_be_made_of_tokens_that_are_not_special(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `<｜User｜>` of R1's distilled models; others, as `<answer>`, are the text's."""
    monkeypatch.setattr(policy.tokenizer, "chat_template", "<think>{{ messages }}")
    assert plain_result(policy, result_words(policy), "<think>a<answer>b", 100) == "a<answer>b"


def test_half_a_character_does_not_end_the_run(policy: Policy) -> None:
    assert plain_result(policy, result_words(policy), "a\ud800b", 100) == "a?b"


def test_a_turn_that_a_stop_string_ended_is_closed(policy: Policy) -> None:
    closed, opened = (answer_tokens(policy, CHAT, [CALL], ["42"], closed) for closed in (True, False))
    assert opened[0] in policy.end_ids
    assert opened[1:] == closed


def test_a_template_that_rewrites_is_refused(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    first = "{% if messages[-1].role == 'tool' %}other{% endif %}"
    monkeypatch.setattr(
        policy.tokenizer, "chat_template", first + "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="changes earlier messages"):
        answer_tokens(policy, CHAT, [CALL], ["42"])


def test_rewards_see_what_the_model_wrote(policy: Policy, box: Toolbox) -> None:
    """A tool that says the answer must not be paid as the model's."""
    whole, _ = talk(policy, box, CHAT, WRITTEN, "It is 42")
    context = Context(reader=ReplyReader(policy.decode))

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
    assert found["tools/tokens"] == sum(int((~c.drawn_mask).sum()) for c in (good, bad)) / 4


def test_a_stop_string_that_begins_in_one_part_of_a_turn_ends_in_the_next(
    policy: Policy, box: Toolbox
) -> None:
    inner = Scripted(policy, *pieces_of(TOLD), "never asked for", end=False)
    params = SamplingParams(400, stop=("</tool_call>1", "call>2"))
    (found,) = TurnSampler(inner, policy, box).sample([Request(np.array([5, 6]), [11], problem=TEXT)], params)
    whole = found.completion
    assert len(inner.asked) == 2
    # The token that completes it may have more text.
    assert whole.text.startswith(
        '<tool_call>{"name": "calculate", "arguments": {"expression": "1+</tool_call>1'
    )
    assert len(whole.text) < len(TOLD)
    assert "</tool_call>1" not in policy.decode(whole.tokens[:-1].tolist())
    assert policy.decode(whole.tokens.tolist()) == whole.text
    assert (whole.finish, whole.transcript.turns, len(whole.logprobs)) == ("stop", (), len(whole.tokens))

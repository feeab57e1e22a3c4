"""Answers in a chat: their tokens are those of the model's template, up to where sampling stops."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import normalizers
from transformers import GenerationConfig

from covey.config.schema import Config, Data
from covey.models.policy import Policy, save_policy
from covey.models.tiny import CHAT_TEMPLATE, END, PAD, build_tokenizer
from covey.sampling.notes import unseen_by_model
from covey.sampling.prompts import EncodedProblem, GivenAnswer, encode_examples
from covey.tasks.examples import AnswerText, Example, examples_of, with_prompt
from covey.types import Problem
from covey_verify.errors import DataError
from tests.conftest import CONFIGS, policy_of, sharpened

ASKED = [{"role": "user", "content": "1+2="}]
TURN = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}"
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
AFTER_THOUGHTS = TURN.replace("m['content'] | trim", "m['content'].split('</think>')[-1]")
"""DeepSeek R1's and others leave the thoughts out of what has been said."""


def with_template(template: str) -> Policy:
    """A policy whose tokenizer ends texts otherwise than its template does turns, as Gemma's."""
    tokenizer = build_tokenizer(["1+2=3"] * 3, vocab_size=300)
    tokenizer.eos_token, tokenizer.chat_template = PAD, template
    model = sharpened(CONFIGS["qwen3"])
    model.generation_config.eos_token_id = tokenizer.pad_token_id
    return Policy(model, tokenizer)


def learned(policy: Policy, answer: AnswerText) -> tuple[EncodedProblem, GivenAnswer]:
    """What is trained of an answer to ``ASKED``."""
    (example,) = examples_of([Problem("p", ASKED, {"completion": answer})], "sft", Data(), 0.0)
    (found,) = encode_examples(policy, [example], Config())
    return found, found.answers[0]


def trained_text(policy: Policy, answer: AnswerText) -> str:
    """The same as a text."""
    found = learned(policy, answer)[1]
    return policy.tokenizer.decode(found.tokens[found.trained])


@pytest.mark.parametrize(
    ("behind", "ends"),
    [
        (f"{END}\n{{% endfor %}}", END),  # ChatML on a base model
        (f"{END}\n{{% endfor %}}{{% if not add_generation_prompt %}}{PAD}{{% endif %}}", END),  # Phi 3
        (f" {PAD}{{% endfor %}}", f" {PAD}"),  # Llama 2
        ("\n\n{% endfor %}", PAD),  # Alpaca: no token ends a turn, so the end of a text has to
        ("{% endfor %}", PAD),  # GLM
    ],
)
def test_a_text_and_a_message_end_where_the_template_ends_a_turn(behind: str, ends: str) -> None:
    policy = with_template(TURN + behind + BEGIN)
    said = [{"role": "assistant", "content": "3"}]
    assert trained_text(policy, "3") == trained_text(policy, said) == f"3{ends}"
    prompted, answer = learned(policy, "3")
    assert answer.tokens[-1] in policy.end_ids
    assert prompted.tokens.tolist() == policy.encode(ASKED)


def test_sampling_stops_at_the_templates_end_also_from_a_saved_model(tmp_path: Path) -> None:
    policy = with_template(CHAT_TEMPLATE)
    assert policy.end_ids == [0, 2]  # <|pad|> and <|im_end|>
    save_policy(policy, tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [0, 2]


def test_a_model_of_ones_own_that_generate_does_not_know_is_saved(tmp_path: Path, monkeypatch) -> None:
    policy = policy_of("qwen3")
    monkeypatch.setattr(type(policy.model), "can_generate", lambda *_: False)
    del policy.model.generation_config
    save_policy(Policy(policy.model, policy.tokenizer), tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


def test_an_end_that_an_answer_brings_along_is_not_doubled() -> None:
    policy = with_template(CHAT_TEMPLATE)
    for answer in (f"3{END}", f"3{END}\n", f"3{PAD}", [{"role": "assistant", "content": f"3{END}"}]):
        assert trained_text(policy, answer) == f"3{END}"


@pytest.mark.parametrize("prompt", ["1+2=", ASKED])
def test_an_end_within_an_answer_is_refused(prompt: str) -> None:
    problem = Problem("rows:7", prompt, {"completion": f"3{END}\n<|im_start|>user\nSure?"})
    examples = examples_of([problem], "sft", Data(), 0.0)
    with pytest.raises(DataError, match=r"rows:7: the answer contains the end token <\|im_end\|>"):
        encode_examples(policy_of("qwen3"), examples, Config())


@pytest.mark.parametrize("opens", ["", "<think>\n"])
@pytest.mark.parametrize("as_message", [False, True])
def test_thoughts_that_a_template_leaves_out_are_trained_word_for_word(opens: str, as_message: bool) -> None:
    policy = with_template(
        f"{AFTER_THOUGHTS}{END}{{% endfor %}}{BEGIN.replace('{% endif', opens + '{% endif')}"
    )
    text = "<think>\n1, 2</think>\n3"
    answer = [{"role": "assistant", "content": text}] if as_message else text
    assert trained_text(policy, answer) == text.removeprefix(opens) + END


def test_words_of_the_assistant_that_a_template_does_not_show_are_refused() -> None:
    said = [("user", "1+2="), ("assistant", "<think>1, 2</think>3"), ("user", "+1"), ("assistant", "4")]
    row = with_prompt({"messages": [{"role": r, "content": c} for r, c in said]}, "", Data())
    problem = Problem("rows:7", row["prompt"], {"completion": row["completion"]})
    examples = examples_of([problem], "sft", Data(), 0.0)
    policy = with_template(f"{AFTER_THOUGHTS}{END}{{% endfor %}}{BEGIN}")
    with pytest.raises(DataError, match=r"rows:7: .* omits a text of the assistant, '<think>1, 2"):
        encode_examples(policy, examples, Config())
    apart = [{"role": "assistant", "content": "3", "reasoning_content": "1, 2"}]
    with pytest.raises(DataError, match="omits a text of the assistant, '1, 2'"):
        learned(with_template(CHAT_TEMPLATE), apart)


def test_a_turn_without_an_end_ends_with_the_next_ones_beginning_where_sampling_stops_there() -> None:
    policy = with_template(f"{TURN}{{% endfor %}}{BEGIN}")
    policy.end_ids = [0, 1]
    said = [("assistant", "3"), ("user", "+1"), ("assistant", "4")]
    answer = [{"role": r, "content": c} for r, c in said]
    assert trained_text(policy, answer) == f"3<|im_start|>4{PAD}"


def test_a_text_that_begins_as_the_tokenizer_begins_texts_is_not_begun_twice() -> None:
    from tokenizers.processors import TemplateProcessing

    policy = policy_of("qwen3")
    pieces = TemplateProcessing(single=f"{PAD} $A", special_tokens=[(PAD, 0)])
    policy.tokenizer.backend_tokenizer.post_processor, policy.tokenizer.bos_token = pieces, PAD
    assert policy.encode(f"{PAD}1+2=") == policy.encode("1+2=")


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a": 2}'])
def test_arguments_of_calls_are_trained_as_objects(arguments: object) -> None:
    """As OpenAI writes them they are JSON in a text, which a template would quote once more."""
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    written = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    assert trained_text(policy_of("qwen3"), [{"role": "assistant", "tool_calls": [call]}]) == written + END


def test_a_template_that_wants_arguments_as_a_text_gets_them_so() -> None:
    policy = with_template(CHAT_TEMPLATE.replace("(c['function'] or c) | tojson", "c['arguments'] + '!'"))
    answer = [{"role": "assistant", "tool_calls": [{"name": "add", "arguments": '{"a": 2}'}]}]
    assert trained_text(policy, answer) == f'<tool_call>{{"a": 2}}!</tool_call>{END}'


def test_calls_that_a_template_does_not_show_are_refused() -> None:
    with pytest.raises(DataError, match=r"p: .* omits the assistant's tool_calls"):
        learned(
            with_template(f"{TURN}{END}{{% endfor %}}{BEGIN}"), [{"role": "assistant", "tool_calls": [CALL]}]
        )


def test_roles_that_a_template_leaves_out_are_said_once() -> None:
    knows = "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}"
    policy = with_template(f"{knows}{{{{ m['content'] }}}}{END}{{% endif %}}{{% endfor %}}")
    problems = [Problem(f"p{n}", [{"role": "human", "content": "1+2="}]) for n in range(3)]
    (note,) = unseen_by_model(policy, problems, Config())
    assert note.startswith("p0: the chat template omits messages of role 'human'")
    answer = [*({"role": r, "content": "3"} for r in ("assistant", "tool", "assistant"))]
    asked = [Example("answer", Problem("q", ASKED), (answer,), (1.0,))]
    (note,) = unseen_by_model(policy, [], Config(), asked)
    assert note.startswith("q: the chat template omits messages of role 'tool'")


def test_a_message_that_is_not_to_be_trained_is_read_only() -> None:
    """OpenAI's format: the assistant's mistake is shown with weight 0, and its correction learned."""
    policy = with_template(TURN + f"{END}\n{{% endfor %}}" + BEGIN)
    wrong = {"role": "assistant", "content": "4", "weight": 0}
    said = [wrong, {"role": "user", "content": "no"}, {"role": "assistant", "content": "3"}]
    assert trained_text(policy, said) == f"3{END}"
    assert trained_text(policy, [{**said[2], "weight": 1}, said[1], {**said[2], "weight": 0}]) == f"3{END}"


def test_a_key_of_a_message_that_the_template_does_not_show_is_named_once() -> None:
    policy = with_template(TURN + f"{END}\n{{% endfor %}}" + BEGIN)
    asked = [{**ASKED[0], "date": "today", "tool_call_id": "1"}]
    problems = [Problem("p", asked), Problem("q", asked)]
    (note,) = unseen_by_model(policy, problems, Config())
    assert "p: the chat template omits the key 'date'" in note
    shown = with_template(TURN + "{{ m.date }}" + f"{END}\n{{% endfor %}}" + BEGIN)
    assert not unseen_by_model(shown, problems, Config())


def test_a_text_that_the_tokenizer_changes_is_named_once() -> None:
    policy = with_template(TURN + f"{END}\n{{% endfor %}}" + BEGIN)
    example = Example("answer", Problem("p", ASKED), ("in Paris",), (1.0,))
    assert not unseen_by_model(policy, [], Config(), [example])
    policy.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    (note,) = unseen_by_model(policy, [Problem("q", "Oslo")], Config(), [example])
    assert note.startswith("p: the tokenizer changes the answer: 'in Paris' is 'in paris' for the model")


def test_a_turn_that_no_prompt_begins_and_a_question_that_is_cut_are_named() -> None:
    """Without a header in the prompt the model writes it, and every reward reads it before the answer."""
    (note,) = unseen_by_model(with_template(f"{TURN}{END}\n{{% endfor %}}"), [Problem("p", ASKED)], Config())
    assert "the model has to write '<|im_start|>assistant'" in note
    # Llama 2's and Mistral's form has no header.
    bare = (
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content }}"
    )
    assert not unseen_by_model(with_template(bare + "{% endfor %}"), [Problem("p", ASKED)], Config())
    cut = TURN.replace("| trim", "[:3]") + f"{END}\n{{% endfor %}}" + BEGIN
    (note,) = unseen_by_model(with_template(cut), [Problem("p", ASKED)], Config())
    assert note == "p: the chat template changes a message of the user, '1+2='"

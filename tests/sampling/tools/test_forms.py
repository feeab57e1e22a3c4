"""Calls as several families of models write them, and what their chat templates make of the answers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.models.chat import chat_tokens
from covey.models.policy import Policy
from covey.models.tiny import CHAT_TEMPLATE
from covey.sampling.prompts import encode_examples
from covey.sampling.tools.inserted import answer_tokens
from covey.sampling.tools.reader import turn_reader
from covey.sampling.tools.use import unexplained_tools
from covey.tasks.examples import Example
from covey.types import Problem
from covey_verify.calls.call import ToolCall
from covey_verify.calls.forms import FORMS, TAGGED, CallForm
from covey_verify.calls.turn import read_turn
from covey_verify.errors import ConfigError, DataError
from tests.conftest import policy_of
from tests.sampling.tools.schema import SCHEMA

CHAT = Problem("c", [{"role": "user", "content": "1+2="}])
QWEN_3 = (
    "{% for m in messages %}<|im_start|>{% if m.role == 'tool' %}u {{ m.content }}{% else %}{{ m.role[0] }} "
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>a {% endif %}"
)
"""As Qwen 3's: what the assistant said last has an empty thought, what it said before has none."""


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    found = policy_of("qwen3")
    monkeypatch.setattr(found.tokenizer, "chat_template", found.tokenizer.chat_template)
    return found


def read(policy: Policy, template: str, turn: str) -> list[tuple[str, dict[str, object], bool]]:
    """Names, arguments, and whether something is wrong."""
    policy.tokenizer.chat_template = "{# " + template + " #}"
    ids = np.array([*policy.tokenizer(turn, add_special_tokens=False)["input_ids"], 2])
    return [
        (c.name, dict(c.arguments), bool(c.wrong)) for c in turn_reader(policy, [SCHEMA])(ids, ids[:0], None)
    ]


XML, GLM, MISTRAL, LLAMA, GEMMA, LFM2, HARMONY, DEEPSEEK, MUSE = (form.shown for form in FORMS)
ONE = ("look_up", {"word": "covey"}, False)
WRONG = ("", {}, True)


def form_of(shown: str) -> CallForm:
    """The form with this part of a chat template."""
    return next(form for form in FORMS if form.shown == shown)


def word(text: str) -> tuple[str, dict[str, object], bool]:
    """A call about it."""
    return ("look_up", {"word": text}, False)


def tagged(text: str) -> str:
    """The same in JSON between tags."""
    return f"<tool_call>{json.dumps({'name': 'look_up', 'arguments': {'word': text}})}</tool_call>"


def function(text: str) -> str:
    """The same as a function with its parameters."""
    return (
        f"<tool_call>\n<function=look_up>\n<parameter=word>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )


WRITTEN = {
    "tags": ("", '<tool_call>{"name": "look_up", "arguments": {"word": "covey"}}</tool_call>', [ONE]),
    "functions": (
        XML,
        (
            "<think>x</think><tool_call>\n<function=look_up>\n<parameter=word>\ncovey\n</parameter>\n</function>"
            "\n</tool_call>"
        ),
        [ONE],
    ),
    "functions with types": (
        XML,
        (
            "<tool_call><function=look_up><parameter=word>\n7\n</parameter><parameter=most>\n7\n</parameter>"
            "<parameter=all>\nTrue\n</parameter></function></tool_call>"
        ),
        [("look_up", {"word": "7", "most": 7, "all": True}, False)],
    ),
    "functions that do not end": (XML, "<tool_call><function=look_up></tool_call>", [("look_up", {}, True)]),
    "pairs": (
        GLM,
        "<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>covey</arg_value>\n</tool_call>",
        [ONE],
    ),
    "bare": (LLAMA, '{"name": "look_up", "parameters": {"word": "covey"}}', [ONE]),
    "bare, marked": (LLAMA, '<|python_tag|>{"name": "look_up", "parameters": {"word": "covey"}}', [ONE]),
    "bare, broken": (LLAMA, '{"name": "look_up", "parameters": {"word": }}', [("", {}, True)]),
    "an answer in JSON": (LLAMA, '{"name": "Ada", "age": 36}', []),
    "an answer with a call in it": (LLAMA, 'Say {"name": "look_up", "parameters": {}}', []),
    "a list": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "look_up", "arguments": {"word": "covey"}, "id": "a"}, {"name": "b"}]',
        [ONE, ("b", {}, False)],
    ),
    "a mark each": (
        MISTRAL,
        '[TOOL_CALLS]look_up[ARGS]{"word": "covey"}[TOOL_CALLS]look_up[CALL_ID]x1[ARGS]{"word": "covey"}',
        [ONE, ONE],
    ),
    "a list, broken": (MISTRAL, "[TOOL_CALLS] [{", [("", {}, True)]),
    "no mark": (MISTRAL, "It is 3.", []),
    "tags in a text": (
        "",
        tagged("a</tool_call>b<tool_call>c</think>d"),
        [word("a</tool_call>b<tool_call>c</think>d")],
    ),
    "tags in a text of a thought": ("", f"<think>{tagged('x</think>y')} no</think>{tagged('covey')}", [ONE]),
    "several in one tag": (
        "",
        '<tool_call>[{"name": "look_up", "arguments": {"word": "covey"}}, {"name": "b"}]</tool_call>',
        [ONE, ("b", {}, False)],
    ),
    "parameters": ("", '<tool_call>{"name": "look_up", "parameters": {"word": "covey"}}</tool_call>', [ONE]),
    "a name that nobody reads": (
        "",
        '<tool_call>{"name": "look_up", "args": {"word": "covey"}}</tool_call>',
        [WRONG],
    ),
    "a text behind the JSON": ("", '<tool_call>{"name": "look_up"} and</tool_call>', [WRONG]),
    "a tag in a value": (XML, function("a</parameter>b"), [word("a</parameter>b")]),
    "tags in a value": (
        XML,
        function("a<parameter=x></function></tool_call"),
        [word("a<parameter=x></function></tool_call")],
    ),
    "lines in a value": (XML, function("\n a\n\n"), [word("\n a\n\n")]),
    "a whole call in a value": (XML, function(function("a")), [("look_up", {}, True)]),
    "an end of thoughts in a value": (XML, function("a</think>b"), [word("a</think>b")]),
    "a value that is never closed": (
        XML,
        "<tool_call><function=look_up><parameter=word>\ncovey\n</function></tool_call>",
        [("look_up", {}, True)],
    ),
    "one of two values is never closed": (
        XML,
        "<tool_call><function=look_up><parameter=most>\n7\n<parameter=word>\na\n</parameter></function></tool_call>",
        [("look_up", {}, True)],
    ),
    "a value twice": (
        XML,
        "<tool_call><function=look_up><parameter=word>a</parameter><parameter=word>b</parameter></function></tool_call>",
        [("look_up", {}, True)],
    ),
    "a call that was begun in a thought": (
        XML,
        f"<think><tool_call><function=look_up><parameter=word> or</think>{function('covey')}",
        [ONE],
    ),
    "a tag in a pair": (
        GLM,
        "<tool_call>look_up<arg_key>word</arg_key><arg_value>a</arg_value>b</arg_value></tool_call>",
        [word("a</arg_value>b")],
    ),
    "a pair that is never closed": (
        GLM,
        "<tool_call>look_up<arg_key>word</arg_key><arg_value>a</tool_call>",
        [("look_up", {}, True)],
    ),
    "a mark in a text": (
        MISTRAL,
        '[TOOL_CALLS]look_up[ARGS]{"word": "[TOOL_CALLS]x[/THINK]"}',
        [word("[TOOL_CALLS]x[/THINK]")],
    ),
    "a text behind arguments": (MISTRAL, '[TOOL_CALLS]look_up[ARGS]{"word": "covey"} so be it', [ONE]),
    "a mark in a thought": (
        MISTRAL + "[THINK][/THINK]",
        '[THINK][TOOL_CALLS]look_up{}[/THINK][TOOL_CALLS]look_up{"word": "covey"}',
        [ONE],
    ),
    "two, one after another": (
        LLAMA,
        '{"name": "look_up", "parameters": {"word": "covey"}}; {"name": "b", "parameters": {"c": "a;b"}}',
        [ONE, ("b", {"c": "a;b"}, False)],
    ),
    "a call and words": (LLAMA, '{"name": "look_up", "parameters": {"word": "covey"}} please', []),
    "too large": (
        XML,
        "<tool_call><function=look_up><parameter=most>\n1e999\n</parameter></function></tool_call>",
        [("look_up", {"most": "1e999"}, False)],
    ),
    "Gemma 4": (
        GEMMA,
        '<|tool_call>call:look_up{all:true,most:7,word:<|"|>a, b: {"c"}<|"|>}<tool_call|><|tool_response>',
        [("look_up", {"word": 'a, b: {"c"}', "most": 7, "all": True}, False)],
    ),
    "Gemma 4, broken": (GEMMA, "<|tool_call>call:look_up{word:}<tool_call|>", [("", {}, True)]),
    "Gemma 4, an answer after it": (GEMMA, "<|tool_call>call:look_up{}<tool_call|> It is 3.", []),
    "Python": (
        LFM2,
        "<|tool_call_start|>[look_up(word='covey'), look_up(most=-7, all=true)]<|tool_call_end|>I look.",
        [ONE, ("look_up", {"most": -7, "all": True}, False)],
    ),
    "Python, a place": (LFM2, "<|tool_call_start|>[look_up('covey')]<|tool_call_end|>", [("", {}, True)]),
    "Python, code": (
        LFM2,
        "<|tool_call_start|>[look_up(word=open('x').read())]<|tool_call_end|>",
        [("", {}, True)],
    ),
    "Python, infinite": (LFM2, "<|tool_call_start|>[look_up(most=1e999)]<|tool_call_end|>", [("", {}, True)]),
    "a channel": (
        HARMONY,
        ' to=functions.look_up<|channel|>commentary json<|message|>{"word": "covey"}<|call|>',
        [ONE],
    ),
    "a channel after thoughts": (
        HARMONY,
        (
            "<|channel|>analysis<|message|>I look it up in to=functions.f<|end|><|start|>assistant<|channel|>"
            'commentary to=functions.look_up <|constrain|>json<|message|>{"word": "covey"}<|call|>'
        ),
        [ONE],
    ),
    "a final channel": (HARMONY, "<|channel|>final<|message|>It is 3.", []),
    "DeepSeek": (
        DEEPSEEK,
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n"
            '{"word": "covey"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
        [ONE],
    ),
    "DeepSeek, bare": (
        DEEPSEEK,
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"word": "covey"}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        [ONE],
    ),
    "Gemma 4, its marks in a text": (
        GEMMA,
        '<|tool_call>call:look_up{word:<|"|>a}<tool_call|>b<|tool_call>call:x{}<|"|>}<tool_call|>',
        [word("a}<tool_call|>b<|tool_call>call:x{}")],
    ),
    "Gemma 4, in a thought": (
        GEMMA + "<|channel>thought <channel|>",
        (
            "<|channel>thought\n<|tool_call>call:bad{}<tool_call|><channel|>"
            "<|tool_call>call:look_up{}<tool_call|>"
        ),
        [("look_up", {}, False)],
    ),
    "Python, its marks in a text": (
        LFM2,
        "<|tool_call_start|>[look_up(word='a<|tool_call_end|>\\'b')]<|tool_call_end|>",
        [word("a<|tool_call_end|>'b")],
    ),
    "Python, a string that does not end": (
        LFM2,
        "<|tool_call_start|>[look_up(word='it's')]<|tool_call_end|>",
        [WRONG],
    ),
    "Python, a value twice": (
        LFM2,
        "<|tool_call_start|>[look_up(word={'a': 1, 'a': 2})]<|tool_call_end|>",
        [WRONG],
    ),
    "Python, in a thought": (
        LFM2,
        (
            "<think><|tool_call_start|>[b()]<|tool_call_end|></think><|tool_call_start|>[look_up(word='covey')]"
            "<|tool_call_end|>"
        ),
        [ONE],
    ),
    "a channel's marks in a text": (
        HARMONY,
        '<|channel|>commentary to=functions.look_up<|message|>{"word": "a<|start|>assistant<|message|>"}',
        [word("a<|start|>assistant<|message|>")],
    ),
    "a call that an answer mentions": (
        HARMONY,
        '<|channel|>final<|message|>write to=functions.look_up<|message|>{"word": "covey"}',
        [],
    ),
    "DeepSeek, its marks in a text": (
        DEEPSEEK,
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>"
            '{"word": "a<｜tool▁call▁end｜>b"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
        [word("a<｜tool▁call▁end｜>b")],
    ),
    "a mark of thoughts in a text": (
        LLAMA,
        '{"name": "look_up", "parameters": {"word": "a</think>b"}}',
        [word("a</think>b")],
    ),
    "elements in a value": (
        MUSE,
        (
            '<atem:function_calls><atem:invoke name="look_up"><atem:parameter name="word">a</atem:parameter>b'
            "</atem:invoke>c</atem:parameter></atem:invoke></atem:function_calls>"
        ),
        [word("a</atem:parameter>b</atem:invoke>c")],
    ),
    "an element twice": (
        MUSE,
        (
            '<atem:function_calls><atem:invoke name="look_up"><atem:parameter name="word">a</atem:parameter>'
            '<atem:parameter name="word">b</atem:parameter></atem:invoke></atem:function_calls>'
        ),
        [("look_up", {}, True)],
    ),
    "a call between two thoughts": (
        "",
        f"<think>a</think>{tagged('first')}<think>b</think>{tagged('covey')}",
        [ONE],
    ),
    "a call in a thought that never ends": ("", f"<think>so {tagged('covey')}", []),
    "a key twice": ("", '<tool_call>{"name": "look_up", "name": "b"}</tool_call>', [WRONG]),
    "NaN": ("", '<tool_call>{"name": "look_up", "arguments": {"most": NaN}}</tool_call>', [WRONG]),
    "another form's words": (
        "",
        tagged("[TOOL_CALLS]look_up{}<|tool_call>call:look_up{}<tool_call|><｜tool▁calls▁end｜>"),
        [word("[TOOL_CALLS]look_up{}<|tool_call>call:look_up{}<tool_call|><｜tool▁calls▁end｜>")],
    ),
    "elements": (
        MUSE,
        (
            '<atem:function_calls>\n<atem:invoke name="look_up">\n<atem:parameter name="word">covey'
            "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>"
        ),
        [ONE],
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read_as_the_chat_template_teaches_them(name: str, policy: Policy) -> None:
    template, turn, calls = WRITTEN[name]
    assert read(policy, template, turn) == calls


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({"type": ["string", "null"]}, "7", "7"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["number", "null"]}, "None", None),
        ({"type": "number"}, "inf", "inf"),
        ({"type": "array", "items": {"type": "string"}}, '["1"]', ["1"]),
        ({"type": "integer"}, "1.5", 1.5),
        ({}, "True", True),
        (None, "True", "True"),
        (None, "7", 7),
    ],
)
def test_a_value_between_marks_is_what_its_schema_says(schema: Any, text: str, value: object) -> None:
    """A nullable text of digits was a number, which the schema then refused."""
    types = {"look_up": {"word": schema}}
    (call,) = read_turn(function(text), form=form_of(XML), types=types).calls
    assert (call.arguments, type(call.arguments["word"])) == ({"word": value}, type(value))


@settings(deadline=None)
@given(st.text('<>/="abc{}[]\\\n', max_size=20))
def test_any_text_arrives_as_it_was_written(text: str) -> None:
    types = {"look_up": {"word": {"type": "string"}}}
    named = json.dumps({"name": "look_up", "parameters": {"word": text}})
    for form, turn in (
        (form_of(XML), function(text)),
        (
            form_of(GLM),
            f"<tool_call>look_up<arg_key>word</arg_key><arg_value>{text}</arg_value></tool_call>",
        ),
        (form_of(MISTRAL), f"[TOOL_CALLS]look_up[ARGS]{json.dumps({'word': text})}"),
        (form_of(LLAMA), named),
        (TAGGED, tagged(text)),
        (form_of(GEMMA), f'<|tool_call>call:look_up{{word:<|"|>{text}<|"|>}}<tool_call|>'),
        (form_of(LFM2), f"<|tool_call_start|>[look_up(word={text!r})]<|tool_call_end|>"),
        (form_of(HARMONY), f"to=functions.look_up<|message|>{json.dumps({'word': text})}"),
        (
            form_of(DEEPSEEK),
            (
                f"<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{json.dumps({'word': text})}<｜tool▁call▁end｜>"
                "<｜tool▁calls▁end｜>"
            ),
        ),
    ):
        assert read_turn(turn, form=form, types=types).calls == (ToolCall("look_up", {"word": text}),)


PIECES = [*'{}[]<>/=":, \n', '"name"', '"parameters"', "arg_key", "[ARGS]", "<function=f>", "</tool_call>"]


def wrapped(text: str) -> list[str]:
    """In the marks of single families."""
    return [
        f"<|tool_call>call:f{{{text}}}<tool_call|>",
        f"<|tool_call_start|>{text}<|tool_call_end|>",
        f"to=functions.f<|message|>{text}",
        f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{text}<｜tool▁call▁end｜>",
        f'<atem:invoke name="f">{text}</atem:invoke></atem:function_calls>',
    ]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_text_breaks_a_reader(text: str) -> None:
    types = {"look_up": {"word": {"type": "string"}}}
    for form in (*FORMS, TAGGED):
        for turn in (
            text,
            f"<tool_call>{text}</tool_call>",
            f"[TOOL_CALLS]{text}",
            "{" + text,
            *wrapped(text),
        ):
            assert all(isinstance(call, ToolCall) for call in read_turn(turn, form=form, types=types).written)


def test_reading_takes_time_in_proportion_to_a_text() -> None:
    """A text of 40,000 blanks or of calls that never end held the trainer for minutes."""
    for text in (" ", "<|tool_call>call:f{", '<tool_call>{"a": "', "<|tool_call_start|>['", "[TOOL_CALLS]"):
        for form in (*FORMS, TAGGED):
            assert not read_turn(text * (40_000 // len(text)) + "4", form=form).calls or form.ends is None


def test_a_tokenizer_may_say_how_its_calls_are_read(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    form = {
        "open_pattern": r"<<(?P<name>\w+)",
        "close": ">>",
        "content": "json",
        "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    template = {
        "start_anchor": "<|im_start|>assistant",
        "defaults": {"role": "assistant"},
        "fields": {"content": {"optional": True}, "tool_calls": form},
    }
    monkeypatch.setattr(policy.tokenizer, "response_template", template, raising=False)
    assert read(policy, "", 'Well <<look_up {"word": "covey"}>>') == [ONE]
    assert read(policy, "", "It is 3.") == []
    assert read(policy, "", "<<look_up {>>") == []
    template["field"] = template.pop("fields")
    with pytest.raises(ConfigError, match="response_template of its tokenizer"):
        read(policy, "", "It is 3.")


def test_the_tiny_models_template_writes_what_is_read_back(policy: Policy) -> None:
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "covey"}}}
    messages = [*CHAT.prompt, {"role": "assistant", "content": "", "tool_calls": [call]}]
    policy.tokenizer.chat_template = CHAT_TEMPLATE
    before, whole = (
        chat_tokens(policy.tokenizer, m, {}, b) for m, b in ((CHAT.prompt, True), (messages, False))
    )
    turn = np.array(whole[len(before) : 1 + max(n for n, t in enumerate(whole) if t in policy.end_ids)])
    assert [(c.name, c.arguments) for c in turn_reader(policy, [SCHEMA])(turn, turn, None)] == [ONE[:2]]


def test_an_answer_follows_a_turn_that_the_template_would_write_otherwise(policy: Policy) -> None:
    policy.tokenizer.chat_template = QWEN_3
    said = policy.tokenizer.decode(answer_tokens(policy, CHAT, [ToolCall("look_up", {})], ["42"]))
    assert said == "<|im_start|>u 42<|im_end|><|im_start|>a "


def named(refuses: str = "", results: str = "{{ m.name }} {{ m.content }}") -> str:
    return (
        "{% for m in messages %}<|im_start|>{% if m.tool_calls %}" + refuses + "{% for c in m.tool_calls %}"
        "{{ c.function.name + c.function.arguments | string }}{% endfor %}{% elif m.role == 'tool' %}"
        + results
        + "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    )


@pytest.mark.parametrize(
    "template",
    [
        named(),
        named("{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"),
        named("{% if m.tool_calls[0].function.arguments is not string %}{{ 1 + '' }}{% endif %}"),
    ],
    ids=["any", "one call", "arguments as text"],
)
def test_templates_get_calls_as_they_take_them(template: str, policy: Policy) -> None:
    policy.tokenizer.chat_template = template
    calls = [ToolCall("look_up", {}), ToolCall("<|im_end|>", {})]
    ids = answer_tokens(policy, CHAT, calls, ["1", "2"])
    assert policy.tokenizer.decode(ids) == "<|im_start|>look_up 1<|im_end|><|im_start|>call 2<|im_end|>"


def test_a_template_without_a_place_for_results_is_refused(policy: Policy) -> None:
    policy.tokenizer.chat_template = named(results="")
    source, toolbox = (
        SimpleNamespace(train=[CHAT], test=[]),
        SimpleNamespace(functions={"look_up": None}, schemas=[SCHEMA]),
    )
    with pytest.raises(ConfigError, match="no place for a tool's reply"):
        list(unexplained_tools(policy, source, toolbox))


OWN_FORM = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<|call|>[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v }} "
    "{% endfor %})]<|endcall|>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def untold_of(policy: Policy, template: str, *schemas: Any) -> list[str]:
    policy.tokenizer.chat_template = template
    source = SimpleNamespace(train=[CHAT], test=[])
    toolbox: Any = SimpleNamespace(functions={"look_up": None}, schemas=schemas or [SCHEMA])
    return list(unexplained_tools(policy, source, toolbox))


def test_calls_that_would_not_be_read_are_refused_with_their_text(policy: Policy) -> None:
    """A run whose tools can never be called."""
    with pytest.raises(ConfigError, match=r"as '<\|call\|>\[look_up\(word=covey .*cannot read"):
        untold_of(policy, OWN_FORM)
    assert untold_of(policy, CHAT_TEMPLATE) == []
    only_one = "{{ '<tool_call>' if c.function.name == 'look_up' else '<call>' }}"
    other = {"type": "function", "function": {**SCHEMA["function"], "name": "other"}}
    with pytest.raises(ConfigError, match="writes a call of other"):
        untold_of(policy, CHAT_TEMPLATE.replace("<tool_call>", only_one), SCHEMA, other)


def test_a_template_that_shows_no_calls_is_named(policy: Policy) -> None:
    (note,) = untold_of(policy, "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    assert "does not show the calls" in note


def test_a_call_that_is_only_thought_of_is_none(policy: Policy) -> None:
    policy.tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "assistant\n{% endif", "assistant\n<think>\n{% endif"
    )
    call = '<tool_call>{"name": "look_up", "arguments": {"word": "covey"}}</tool_call>'
    prompt = np.array(chat_tokens(policy.tokenizer, CHAT.prompt, {}))

    def read_behind(text: str) -> int:
        turn = np.array(policy.tokenizer(text, add_special_tokens=False)["input_ids"])
        return len(turn_reader(policy, [SCHEMA])(turn, prompt, None))

    assert [read_behind(text) for text in (call, f"so</think>{call}", f"{call}</think>It is 3.")] == [0, 1, 0]


def test_answers_are_learned_where_the_last_message_is_written_otherwise(policy: Policy) -> None:
    policy.tokenizer.chat_template = QWEN_3
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Yes"},
    ]
    (found,) = encode_examples(policy, [Example("answer", CHAT, (messages,), (1.0,))], None)
    (answer,) = found.answers
    assert policy.tokenizer.decode(answer.tokens[answer.trained].tolist()) == (
        "<tool_call>f</tool_call><|im_end|>42<|im_end|><think></think>Yes<|im_end|>"
    )


def test_where_nothing_shows_the_end_nobody_guesses(policy: Policy) -> None:
    """The sequence's end after the last message is not the end of the first."""
    policy.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% else %}<|im_end|>{% endif %}"
    )
    messages = [{"role": r, "content": r[0]} for r in ("assistant", "user", "assistant")]
    with pytest.raises(DataError, match="changes earlier messages"):
        encode_examples(policy, [Example("answer", CHAT, (messages,), (1.0,))], None)

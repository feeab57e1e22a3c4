"""Formats, JSON, tool calls, language: what each pays and, more important, what it does not."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey_verify.errors import ConfigError
from covey_verify.isolated import strict_json
from covey_verify.mathematics.answers import exact_answer, math_answer
from covey_verify.texts.formats import answer_format, regex_match, think_format
from covey_verify.texts.language import identifier, language_consistency
from covey_verify.texts.length import majority_vote
from covey_verify.texts.structured import bad_calls, bad_schemas, json_schema, tool_calls


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        ("<think>so</think>4", 1, 1),
        ("  <think>so</think>\n4\n", 1, 1),
        ("so</think>4", 0, 1),
        ("<think></think>4", 0, 0),
        ("<think> </think>4", 0, 0),
        ("<think>so</think>", 0, 0),
        ("<think>so", 0, 0),
        ("hello <think>so</think>4", 0, 0),
        ("<think>a</think></think>b", 0, 0),
        ("<think>a<think>b</think>4", 0, 0),
        ("<think>a</think>b<think>c</think>d", 0, 0),
        ("", 0, 0),
        ("</think>", 0, 0),
    ],
)
def test_reasoning_is_one_pair_with_words_on_both_sides(text: str, strict: float, loose: float) -> None:
    assert think_format(text) == strict
    assert think_format(text, strict=False) == loose


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>so</think><answer>4</answer>", 1),
        ("<think>so</think>\n <answer>4</answer> ", 1),
        ("<think>so</think><answer> </answer>", 0),
        ("<think>so</think><answer>4</answer> and", 0),
        ("<think>so</think>it is <answer>4</answer>", 0),
        ("<think>so</think><answer>4</answer><answer>5</answer>", 0),
        ("<think><answer>4</answer></think><answer>4</answer>", 0),
        ("<answer>4</answer>", 0),
        ("<think>so</think><answer>4", 0),
    ],
)
def test_the_answer_is_one_pair_at_the_end(text: str, value: float) -> None:
    assert answer_format(text) == value


CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "2*2"}}</tool_call>'


def turned(*said: str) -> tuple[str, list[dict[str, str]]]:
    """A completion in several turns, between which a tool answers."""
    turns = [{"role": "assistant", "content": text} for text in said]
    answers = [{"role": "tool", "content": "<think>"} for _ in said]
    return "".join(said), [turn for pair in zip(turns, answers, strict=True) for turn in pair][:-1]


def test_a_call_before_it_spoils_no_answer() -> None:
    once = turned(f"<think>a</think>{CALL}", "<answer>4</answer>")
    each = turned(f"<think>a</think>{CALL}", "<think>b</think><answer>4</answer>")
    assert [think_format(*once), think_format(*each), answer_format(*once), answer_format(*each)] == [1.0] * 4
    assert think_format(*turned(f"<think>a{CALL}", "</think><think>b</think>4")) == 0.0
    assert think_format(*turned(f"<think>a</think><think>{CALL}", "<think>b</think>4")) == 0.0
    assert answer_format(*turned(f"<think>a</think>{CALL}", "so <answer>4</answer>")) == 0.0
    whole, turns = turned(CALL, "4")
    assert exact_answer(whole, "4", turns, rule="whole").value == 1.0
    assert math_answer(whole, "4", turns, rule="whole").value == 1.0
    assert regex_match(whole, turns, pattern="4", whole=True).value == 1.0
    assert regex_match(whole, turns, pattern="<tool_call>").value == 1.0
    assert json_schema(*turned(CALL, '{"a": 4}')).value == 1.0
    assert majority_vote([whole, "4"], [turns, []], rule="whole") == [1.0, 1.0]


def test_a_pattern_is_searched_after_the_reasoning_and_cannot_hang(impatient) -> None:
    assert regex_match("<think>x</think>id 42", pattern=r"\d+").extracted == "42"
    assert regex_match("<think>42</think>no", pattern=r"\d+").value == 0.0
    assert regex_match("42 x", pattern=r"\d+", whole=True).value == 0.0
    assert regex_match("<think>42", pattern=r"\d+").status == "no_answer"
    slow = regex_match("a" * 60 + "b", pattern=r"(a+)+$")
    assert (slow.value, slow.status) == (0.0, "timeout")
    assert "(a+)+$" in slow.detail
    with pytest.raises(ValueError, match="regex_match"):
        regex_match("x", pattern="(")


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"age": 3}', 1),
        ('<think>hm</think> {"age": 3}\n', 1),
        ('{"age": "3"}', 0),
        ("{}", 0),
        ('{"age": 3} and', 0),
        ('{"age": 3, "age": "x"}', 0),
        ('{"age": NaN}', 0),
        ('{"age": true}', 0),
        ('{"age": 3, "x": "\\ud800"}', 0),
        ('{"age":' + "[" * 200 + "]" * 200 + "}", 0),
        ('{"age": ' + "9" * 5000 + "}", 0),
    ],
)
def test_json_is_strict_and_fits_the_schema(text: str, value: float) -> None:
    pytest.importorskip("jsonschema")
    assert json_schema(text, schema=SCHEMA).value == value
    assert json_schema(text, schema=json.dumps(SCHEMA)).value == value


def test_json_in_a_block_or_a_tag() -> None:
    block = 'as asked\n```json\n{"age": 3}\n```'
    assert json_schema(block).value == 0.0
    assert json_schema(block, where="block").value == 1.0
    assert json_schema("<answer>[1]</answer>", where="answer_tag").value == 1.0
    for text in ("", "<think>{}", "```json\n{}"):
        assert json_schema(text, where="block").status == "no_answer"


def test_a_schema_that_backtracks_is_ended_and_a_broken_one_is_the_users(impatient) -> None:
    pytest.importorskip("jsonschema")
    slow = json_schema(json.dumps("a" * 60 + "b"), schema={"type": "string", "pattern": "^(a+)+$"})
    assert (slow.value, slow.status) == (0.0, "timeout")
    with pytest.raises(ValueError, match="schema"):
        json_schema("{}", schema={"type": "no such type"})
    for broken in ({"properties": 3}, {"$ref": "http://127.0.0.1/none"}):
        with pytest.raises(ValueError, match="the schema cannot be used"):
            json_schema("{}", schema=broken)
    assert json_schema("{}", schema=False).value == 0.0  # the schema that nothing fits


def test_a_row_whose_schema_is_none_is_found_before_training() -> None:
    pytest.importorskip("jsonschema")
    rows: list[dict[str, object]] = [{"schema": {"type": "object"}}, {"schema": '{"type": "thing"}'}, {}]
    fine, broken, absent = bad_schemas(rows)
    assert (fine, absent) == (None, None)
    assert "'thing' is not valid" in str(broken)
    assert bad_schemas(rows, schema={"type": "number"}) == [None, None, None]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
LEAVES = st.none() | st.booleans() | st.integers() | TEXTS


@given(st.recursive(LEAVES, lambda v: st.lists(v) | st.dictionaries(TEXTS, v), max_leaves=8))
def test_strict_json_reads_all_json(value) -> None:
    assert strict_json(json.dumps(value)) == value


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


WANTED = [
    {"name": "weather", "arguments": {"city": "Rome", "days": 2}},
    {"name": "mail", "arguments": {"to": ["a", "b"]}},
]
ROME, MAIL = call("weather", city="Rome", days=2), call("mail", to=["a", "b"])


@pytest.mark.parametrize(
    ("text", "value", "partial"),
    [
        (ROME + MAIL, 1, 1),
        (MAIL + " and " + ROME, 1, 1),
        (f"<think>{ROME}</think>{MAIL}", 0, 0.5),
        (ROME, 0, 0.5),
        (ROME + ROME, 0, 0.5),
        (ROME + MAIL + MAIL, 0, 2 / 3),
        (call("weather", city="Rome") + MAIL, 0, 0.5),
        (call("weather", city="Rome", days=2.5) + MAIL, 0, 0.5),
        (call("weather", city="Rome", days=2, unit="C") + MAIL, 0, 0.5),
        ("no call", 0, 0),
    ],
)
def test_calls_are_matched_as_a_multiset(text: str, value: float, partial: float) -> None:
    assert tool_calls(text, WANTED).value == value
    assert tool_calls(text, json.dumps(WANTED), partial=True).value == pytest.approx(partial)


def test_the_order_of_calls_counts_if_it_is_asked_for() -> None:
    assert tool_calls(ROME + MAIL, WANTED, ordered=True).value == 1.0
    assert tool_calls(MAIL + ROME, WANTED, ordered=True).value == 0.0


def test_arguments_are_compared_as_declared() -> None:
    other = call("weather", city="rome ", days="2.0") + call("mail", to=["b", "a"])
    how = {"weather.city": "text", "days": "number", "to": "set"}
    assert tool_calls(other, WANTED).value == 0.0
    assert tool_calls(other, WANTED, compare=how).value == 1.0
    assert tool_calls(other, WANTED, compare={**how, "city": "exact", "weather.city": "any"}).value == 1.0


def test_calls_of_a_chat_message_count() -> None:
    made = [{"function": {"name": c["name"], "arguments": json.dumps(c["arguments"])}} for c in WANTED]
    message = [{"role": "assistant", "content": None, "tool_calls": made}]
    assert tool_calls(message, WANTED).value == 1.0
    assert tool_calls([{"role": "assistant", "content": ""}], []).value == 1.0


def test_expected_calls_may_be_written_as_in_a_chat() -> None:
    chat = [{"function": {"name": c["name"], "arguments": json.dumps(c["arguments"])}} for c in WANTED]
    assert tool_calls(ROME + MAIL, chat).value == 1.0
    bad = bad_calls([{"tool_calls": c} for c in (chat, "[", None, [{}], [{"name": "a", "arguments": 1}])])
    assert [why is None for why in bad] == [True, False, False, False, False]


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS]look_up[ARGS]{"word": "covey", "most": 2.0}',
        '{"name": "look_up", "parameters": {"word": "covey", "most": 2e0}}',
        '<|tool_call>call:look_up{word:<|"|>covey<|"|>,most:2}<tool_call|>',
        "<|tool_call_start|>[look_up(word='covey', most=2)]<|tool_call_end|>",
        '<|channel|>commentary to=functions.look_up<|message|>{"word": "covey", "most": 2}',
        (
            "<tool_call>look_up<arg_key>word</arg_key><arg_value>covey</arg_value><arg_key>most</arg_key>"
            "<arg_value>2</arg_value></tool_call>"
        ),
    ],
)
def test_calls_are_compared_in_whatever_form_a_text_has_them(text: str) -> None:
    expected = [{"name": "look_up", "arguments": {"word": "covey", "most": 2}}]
    assert tool_calls(f"<think>so</think>{text}", expected).value == 1
    assert tool_calls(f"<think>so</think>{text.replace('2', '3')}", expected).value == 0
    assert tool_calls(f"<think>so {text}", expected).status == "no_answer"
    assert tool_calls(text, []).value == 0, "a call where none was asked for"


@pytest.mark.parametrize("text", ['<tool_call>{"name": "a"}', '<tool_call>{"name": "a"} so'])
def test_a_call_that_is_never_closed_is_none(text: str) -> None:
    assert tool_calls(text, [{"name": "a", "arguments": {}}]).status == "unparsable"
    assert tool_calls(text, []).value == 0


@pytest.mark.parametrize("block", ["{", "[]", '"x"', '{"name": 3}', '{"name": "a", "name": "b"}'])
def test_broken_calls_are_unparsable(block: str) -> None:
    score = tool_calls(f"<tool_call>{block}</tool_call>", WANTED)
    assert (score.value, score.status) == (0.0, "unparsable")


@pytest.mark.parametrize("more", ['<tool_call>{"name": "rm"}', "<tool_call>", "<tool_call>" + ROME])
def test_a_call_that_is_never_closed_counts_against(more: str) -> None:
    for text, wanted in ((ROME + MAIL + more, WANTED), (more, [])):
        for partial in (False, True):
            score = tool_calls(text, wanted, partial=partial)
            assert (score.value, score.status) == (0.0, "unparsable")


@pytest.mark.parametrize(
    "blank", ["\u200b", "\u2060\ufeff", "\u3164", "\u2800", "\u00ad \u034f", "\ufe0f", "\u0007"]
)
def test_what_cannot_be_seen_is_no_content(blank: str) -> None:
    full = "<think>{}</think><answer>{}</answer>"
    for text in (full.format(blank, "4"), full.format("so", blank)):
        assert answer_format(text) == 0.0
    assert think_format(f"<think>{blank}</think>4") == think_format(f"<think>so</think>{blank}") == 0.0
    assert exact_answer(full.format("so", blank), "4").status == "no_answer"
    assert answer_format(full.format("因为", f"{blank}½{blank}")) == 1.0


def test_language_is_a_share_of_words_and_formulas_do_not_count() -> None:
    english = "first we add the two numbers and then we divide by three"
    assert language_consistency(english).value == 1.0
    assert (
        language_consistency(english + r" $\alpha\beta = x_1 β$ `for x in y: print(x)` ```def f```").value
        == 1.0
    )
    for hidden in ("$ {} $", "$5 {} $6", "`{}`", "```\n{}", "```{}```", r"\\text $${}$$"):
        for foreign in (
            "所以答案是五因为二加三等于五",
            "потому что ответ пять и это всё",
            "γιατί αυτή είναι",
        ):
            assert language_consistency(english + " " + hidden.format(foreign)).value < 0.9, hidden
    chinese = "我们先把两个数字加起来然后除以三"
    assert (
        language_consistency(chinese + r" $\sin x + yz = \frac{ab}{c}$ `print(x)`", language="zh").value
        == 1.0
    )
    assert language_consistency(chinese + " $ so the answer is five $", language="zh").value < 0.8
    assert language_consistency("我们先把两个数字加起来然后除以三", language="zh").value == 1.0
    assert language_consistency("我们先把两个数字加起来然后除以三").value == 0.0
    mixed = language_consistency(english + " потом мы делим их").value
    assert mixed == pytest.approx(12 / 16)
    assert language_consistency("x = 4").status == "not_applicable"


GERMAN = "zuerst zählen wir beide Zahlen zusammen und teilen das Ergebnis durch drei"


def test_languages_of_one_script_are_told_apart_if_asked_for() -> None:
    pytest.importorskip("py3langid")
    english = "first we add the two numbers and then we divide them by three"
    for text, value in ((english, 1.0), (GERMAN, 0.0), (english + " потом мы делим их", 13 / 17)):
        assert language_consistency(text, detect=True).value == pytest.approx(value)
    assert language_consistency(GERMAN, language="de", detect=True).value == 1.0
    assert language_consistency("我们先把两个数字加起来然后除以三", language="zh", detect=True).value == 1.0
    half = language_consistency(f"{english}. {GERMAN}.", detect=True).value
    assert half == pytest.approx(0.5, abs=0.2)
    with pytest.raises(ConfigError, match="'eng' is unknown; known: ar, bn, cs"):
        language_consistency(english, language="eng")


def test_without_the_detector_its_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    identifier.cache_clear()
    with pytest.raises(ConfigError, match=r"covey-verify\[language\]"):
        language_consistency(GERMAN, detect=True)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("date", "2024-02-29", "tomorrow"),
        ("date", "2024-02-29", "2023-02-29"),
        ("date-time", "2024-02-29T10:00:00Z", "2024-02-30T10:00:00Z"),
        ("date-time", "2024-02-29T10:00:00.5+02:00", "2024-02-29 10:00"),
        ("time", "10:00:00Z", "25:00:00Z"),
        ("email", "a@b.org", "a at b"),
        ("uri", "https://a.org/b?c=d", "a b"),
        ("ipv4", "1.2.3.4", "1.2.3.400"),
        ("hostname", "a-b.org", "-a.org"),
        ("uuid", "12345678-1234-5678-1234-567812345678", "12345678"),
    ],
)
def test_a_schema_s_format_is_checked(name: str, right: str, wrong: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": name}}}
    assert bad_schemas([{"schema": schema}]) == [None]
    values = [json_schema(json.dumps({"a": text}), schema=schema).value for text in (right, wrong)]
    assert values == [1.0, 0.0]


def test_a_format_that_nobody_checks_is_named() -> None:
    (fault,) = bad_schemas([{"schema": {"items": {"type": "string", "format": "iri"}}}])
    assert "'iri'" in str(fault) and "jsonschema[format]" in str(fault)
    own = {"type": "string", "format": "phone"}, {"properties": {"format": {"type": "string"}}}
    assert bad_schemas([{"schema": one} for one in own]) == [None, None]
    unread = json_schema('"x"', schema={"type": "string", "format": "iri"})
    assert (unread.value, unread.status) == (None, "bad_reference")
    assert "'iri'" in unread.detail

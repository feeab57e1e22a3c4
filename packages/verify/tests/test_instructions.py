"""Instructions that a program can check: for each kind what meets it, what nearly does, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey_verify.adapters import for_trl
from covey_verify.contract import RewardFunction
from covey_verify.errors import ConfigError
from covey_verify.stress import attack
from covey_verify.texts.instructions import MAX_TEXT, bad_instructions, instructions
from covey_verify.texts.kinds import KINDS, OPTIONS
from covey_verify.texts.language import SCRIPT_OF, identifier, in_language
from covey_verify.texts.words import has_words, normalize, occurrences, paragraphs, sentences, words
from covey_verify.types import Row


class Case(NamedTuple):
    """An instruction, texts that meet it, and texts that do not."""

    kind: str
    arguments: Mapping[str, Any]
    met: Sequence[str]
    unmet: Sequence[str]


def more(**arguments: Any) -> dict[str, Any]:
    """Arguments of a table, in which those of other kinds are None."""
    return {"num_bullets": None, "keyword": None, **arguments}


ENGLISH = "The weather is nice today and we go to the park with the children"
GERMAN = "Das Wetter ist heute schön und wir gehen mit den Kindern in den Park"
KANNADA = "ಇಂದು ಹವಾಮಾನ ಚೆನ್ನಾಗಿದೆ ಮತ್ತು ನಾವು ಮಕ್ಕಳೊಂದಿಗೆ ಉದ್ಯಾನವನಕ್ಕೆ ಹೋಗುತ್ತೇವೆ"
CASES = [
    Case(
        "keywords:existence",
        {"keywords": ["cat", "C++", "new  york"]},
        ["A CAT likes C++ in New\nYork.", "**cat**, `c++17` and _new york_", "the cat's C++, New York"],
        ["concatenate C++ New York", "cats, C++, New York", "cat, C, New York", "cat cpp New York"],
    ),
    Case("keywords:existence", {"keywords": ["猫"]}, ["我的猫很好"], ["我的狗很好"]),
    Case("keywords:existence", {"keywords": ["कल"]}, ["वह कल आया"], ["यह कला है"]),
    Case("keywords:existence", {"keywords": ["(a|b)"]}, ["so (a|b) it is"], ["so a it is"]),
    Case("keywords:existence", {"keywords": ["café"]}, ["the cafe\u0301 is open"], ["the cafe is open"]),
    Case(
        "keywords:frequency",
        {"keyword": "war", "frequency": 2, "relation": "at least"},
        ["war and War", "war, war, war"],
        ["war and peace", "war, warm, toward", "wars and war"],
    ),
    Case(
        "keywords:frequency",
        more(keyword="war", frequency=2.0, relation="less than"),
        ["war, warm, toward", "peace"],
        ["war war", "_war_ and ｗａｒ", "w\u200bar or war"],
    ),
    Case(
        "keywords:forbidden_words",
        {"forbidden_words": ["rock", "a.b"]},
        ["a rocket, rocky", "axb"],
        ["We ROCK", "the _rock_", "ro\u200bck", "ｒｏｃｋ", "a.b", "rock-solid"],
    ),
    Case(
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 2, "let_relation": "at least"},
        ["#vote #now", "##a"],
        ["#vote now", "vote now"],
    ),
    Case(
        "keywords:letter_frequency",
        {"letter": "T", "let_frequency": 2, "let_relation": "less than"},
        ["a tree", "Tea", "sea"],
        ["a tart", "Tot", "ｔ and t"],
    ),
    Case("language:response_language", {"language": "kn"}, [KANNADA], [ENGLISH, "42!", KANNADA + ENGLISH]),
    Case(
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        ["One. Two! Three?", "Mr. Smith left. Why? So.", "今天好。明天呢？好！", "a b.\nc d.\r\ne f."],
        ["One. Two! Three", "Mr. Smith e.g. left at 3.15 p.m. on foot.", "One. ... !!! ?", "- a\n- b\n- c"],
    ),
    Case(
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        ["One. Two!", "Mr. A. B. Smith left. No", "no end at all", "It is e.g. this. And 3.5."],
        ["One. Two! Three", "so it is.Then we go.And more", "- a\n- b\n- c", "a\n\nb\n\nc", "# A\nb. c d."],
    ),
    Case(
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "a\n\n  ***  \r\n\r\nb\n\nc", "***a*** b\n***\nc"],
        ["a\n***\nb\n***", "a *** b", "***a*** b", "a\n******\nb", "a\n***\n***\nb", "a\n\nb", "a\n***\n!"],
    ),
    Case(
        "length_constraints:number_words",
        {"num_words": 4, "relation": "at least"},
        ["one two three four", "a,b,c,d", "我们很好", "1.5 2.5 3.5 4.5"],
        ["one two three", "It's well-known: 3.14", "one - two / three", "! ! ! ! one", "एक दो तीन"],
    ),
    Case(
        "length_constraints:number_words",
        {"num_words": 4, "relation": "less than"},
        ["It's well-known: 3.14", "one"],
        ["one two three four", "a,b,c,d", "a_b_c_d", "one—two—three—four", "a-b-c-d-e-f-g-h-i-j-k-l-m"],
    ),
    Case(
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "It"},
        ["a\n\nit is\n\nb", "\n\n\na\n \n\n**It** is\n\nb", 'a\r\n\r\n"it\r\n\r\nb'],
        ["a\n\nIt's\n\nb", "a\n\nit is", "a\n\nb\n\nit is", "a\n\nit\n\nb\n\nc", "a\n\nitem\n\nb"],
    ),
    Case(
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["Dear [name], [your city]", "[X] days in [a b c]"],
        ["Dear [name]", "[] [ ] [name]", "[1] [2] [name]", "[a](b) [name]", "- [x] a [name]", "a[i] b[j]"],
    ),
    Case(
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["So.\n\nP.P.S. Call me.", "So.\n**p.p.s** call me", "So.\nP. P. S: yes"],
        ["So. P.P.S. Call me.", "P.P.S. Call me.", "So.\nP.P.S.", "So.\nPPS call",
         "So.\nP.S. call", "So.\nP.P.Sa b"],
    ),
    Case(
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["So.\nP.S. Call me."],
        ["So.\nP.P.S. Call me.", "So.\nPxS. Call", "So.\nP.S"],
    ),
    Case(
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  + b", "* a\n\n---\n\n* b\n* * *\n-5 degrees\n*so* it",
         "* a\n```\n- x\n```\n- b"],
        ["* a", "* a\n* b\n* c", "* a\n*", "*a\n*b", "• a\n• b", "1. a\n2. b", "* a\n* **"],
    ),
    Case(
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "I think: **My answer is no.** Truly, my answer is yes or so."],
        ["My answer is yes. My answer is no.", "My answer is yes", "my answer is yes.", " ".join(OPTIONS)],
    ),
    Case(
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a b* and **c**", "* *a*\n* *b*", "***a*** *b*"],
        ["*a b*", "2 * 3 * 4 * 5", "* a\n* b\n* c", "** ** *a*",
         "*a\nb* *c*", "****", "\\*a\\* *b*", "2*3*4 *a*"],
    ),
    Case(
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "**Section 1: a**\n## Section 2\r\nb"],
        ["Section 1\na", "Section 1\na\nSection 1\nb", "Section 1\nSection 2", "see Section 1 and Section 2",
         "SECTION 1\na\nSECTION 2\nb", "Section one\na\nSection two\nb", "Section 1a\na\nSection 2b\nb"],
    ),
    Case(
        "detectable_format:multiple_sections",
        {"section_spliter": "D.y", "num_sections": 1},
        ["D.y 1\na"],
        ["Day 1\na"],
    ),
    Case(
        "detectable_format:json_format",
        {},
        ['{"a": 1}', '```json\n{"a": [1]}\n```', "[1]", "```\r\n[1]\r\n```"],
        ["1", '"text"', "{}", "[]", '{"a": NaN}', '{"a": 1, "a": 2}', '```json\n{"a": 1}', 'So: {"a": 1}',
         '```python\n{"a": 1}\n```', "[" * 5000, '{"a": 1} {"b": 2}'],
    ),
    Case(
        "detectable_format:title",
        {},
        ["<<A poem>>\nso", "so <<a>>"],
        ["<A poem>", "<< >> a", "<<a\nb>>", "<<<<>>>> a", "<<!>> a", "<<a>", "cout << x"],
    ),
    Case(
        "combination:two_responses",
        {},
        ["a\n******\nb", "a ****** b"],
        ["a\n******\nA", "a\n***\nb", "a\n******\nb\n******", "a\n******\nb\n******\nc", "a\n*******\nb",
         "a\n******\n!", "a b"],
    ),
    Case(
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a  poem. No commas."},
        ["Write a poem.\nNo commas.\n\nRoses"],
        ["write a poem. no commas. Roses", "Write a poem. No commas.", "Sure! Write a poem. No commas. Roses",
         "Write a poem. Roses"],
    ),
    Case(
        "startend:end_checker",
        {"end_phrase": "Is that all?"},
        ["So. Is that all?", 'So. "IS THAT ALL?"', "So. *Is that\nall?* "],
        ["Is that all?", "So. Is that all? Yes.", "So. Is that all", "So. Is that all?!", "Is that all? So."],
    ),
    Case("startend:end_checker", {"end_phrase": "all"}, ["That is all"], ["A ball", "That is all."]),
    Case(
        "startend:quotation",
        {},
        ['"so it is"', "“so”", '"He said "no" and left"', '"a\n\n"b," he said. "c""'],
        ['"', '""', '" "', '"so', "so", '"a" and "b"', "'so'", "“a” and “b”", '"a". b"', '"!"'],
    ),
    Case(
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["The USA and NASA", "COVID-19 IS", "**NO** WAY"],
        ["I am A man", "The USA", "Usa and Nasa", "123 456 USA"],
    ),
    Case(
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["I am A man. I go.", "The USA"],
        ["USA and NASA"],
    ),
    Case(
        "change_case:english_capital",
        {},
        [ENGLISH.upper(), "YES!"],
        [ENGLISH, ENGLISH.upper() + " o", "42 !", GERMAN.upper(), "今天"],
    ),
    Case(
        "change_case:english_lowercase",
        {},
        [ENGLISH.lower(), "what are the boys holding?"],
        [ENGLISH, "42 !", GERMAN.lower(), "iPhone"],
    ),
    Case(
        "punctuation:no_comma",
        {},
        ["no comma here; none"],
        ["one, two", "一，二", "一、二", "واحد، اثنان", "1,000"],
    ),
]  # fmt: skip
PLAIN = {case.kind: case for case in reversed(CASES)}
"""One case of each kind."""


def judged(text: str, *cases: Case, **settings: Any) -> Any:
    """The score of a text that is to meet the instructions of some cases."""
    return instructions(text, [c.kind for c in cases], [dict(c.arguments) for c in cases], **settings)


def needs_library(case: Case) -> None:
    if case.kind.startswith("change_case:english"):
        pytest.importorskip("py3langid")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.kind)
def test_what_meets_an_instruction_and_what_nearly_does(case: Case) -> None:
    needs_library(case)
    for text in case.met:
        score = judged(text, case)
        assert (score.value, score.detail) == (1.0, ""), text
        assert judged(f"<think>no {text}</think>\r\n {text}\n ", case).value == 1.0, text
    for text in case.unmet:
        score = judged(text, case)
        assert score.value == 0.0, text
        assert score.detail, text
        assert judged(f"<think>{case.met[0]}</think>{text}", case).value == 0.0, text


def test_every_kind_has_cases_and_says_what_counts() -> None:
    assert len(KINDS) == 25
    assert set(PLAIN) == set(KINDS)
    assert all(kind.check.__doc__ for kind in KINDS.values())


HOSTILE = {
    "nothing": "",
    "spaces": " \n\t " * 50,
    "invisible": "\0\ud800\u202e\u200b\u3164" * 20,
    "signs": "{[(<$#!" * 1000,
    "template": "<think> </think> <answer> </answer> \\boxed{}",
    "repetition": "so the answer is " * 500,
    "unfinished reasoning": "<think>so",
    "the prompt": "Write\r\n  it!",
}


@pytest.mark.parametrize("case", PLAIN.values(), ids=lambda c: c.kind)
def test_what_is_no_answer_meets_nothing(case: Case) -> None:
    for name, text in HOSTILE.items():
        score = judged(text, case, prompt="write it!")
        assert (score.value, score.status) == (0.0, "no_answer"), name
        assert score.metrics == {"met": 0.0, case.kind: 0.0}


def test_a_prompt_of_messages_is_no_answer_either() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write it."}]
    for text in ("write it.", "Be brief.\nWrite it."):
        assert judged(text, PLAIN["punctuation:no_comma"], prompt=chat).status == "no_answer"


BIG = {
    name: part * (100_000 // len(part))
    for name, part in {
        "a word": "x", "words": "It is so. ", "stars": "*", "bold": "*a", "open": "[<<\"(", "lines": "a\n",
        "items": "- a\n", "points": ".\"", "spaces and a": "a     ", "hyphens": "a-", "numbers": "1.",
        "formulas": "$x", "code": "```x`", "brackets": "[a ", "paragraphs": "a\n\n***\n\n",
        "marks": "a\u0301",
        "sections": "Section 1\n", "postscripts": "P. P. S", "braces": "{\"a\":", "Han": "字", "commas": "a,",
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("name", BIG)
def test_no_check_takes_time_that_grows_faster_than_the_text(name: str) -> None:
    """A search that went back and forth would need hours here; all of it takes a fraction of a second."""
    asked = [c for c in PLAIN.values() if not c.kind.startswith("change_case:english")]
    score = judged("Begin. " + BIG[name], *asked)
    assert score.value == 0.0


def test_a_text_without_end_is_not_read() -> None:
    score = judged("a" * (MAX_TEXT + 1), PLAIN["punctuation:no_comma"])
    assert (score.value, score.status) == (0.0, "too_large")


def test_all_or_a_fraction_and_how_often_each_kind_is_met() -> None:
    asked = [PLAIN["punctuation:no_comma"], *(c for c in CASES if c.kind == "keywords:letter_frequency")]
    ids, kwargs = [c.kind for c in asked], [dict(c.arguments) for c in asked]
    text = "#vote #now it is time"
    by_kind = {"met": 2 / 3, "punctuation:no_comma": 1.0, "keywords:letter_frequency": 0.5}
    for points, value in (("all", 0.0), ("fraction", 2 / 3)):
        score = instructions(text, ids, kwargs, points=points)  # type: ignore[arg-type]
        assert (score.value, score.metrics) == (value, by_kind)
        assert score.detail == "keywords:letter_frequency: 3 times 'T', not less than 2"
    assert instructions("#a #b", ids, kwargs).value == 1.0
    turns = [{"role": "assistant", "content": "a, b"}, {"role": "tool", "content": ","}]
    last = [*turns, {"role": "assistant", "content": "#a #b"}]
    assert instructions("a, b#a #b", ids, kwargs, last).value == 1.0


NO_COMMA = "punctuation:no_comma"


@pytest.mark.parametrize(
    ("ids", "kwargs", "words"),
    [
        (["keywords:existance"], [{}], ["'keywords:existance'", "did you mean 'keywords:existence'"]),
        (["x"], [{}], ["no instruction 'x'", "known are keywords:existence"]),
        ([3], [{}], ["no instruction 3"]),
        ([], [], ["0 entries"]),
        ([NO_COMMA], [], ["1 entries and kwargs 0"]),
        (None, [{}], ["'instruction_id_list' must be a list"]),
        ([NO_COMMA], "no list", ["'kwargs' must be a list"]),
        ([NO_COMMA], [[1]], [NO_COMMA, "must be an object"]),
        ([NO_COMMA], [{"comma": 1}], [NO_COMMA, "no argument 'comma'", "it takes none"]),
        (["keywords:existence"], [None], ["'keywords' is missing"]),
        (["keywords:existence"], [{"keywords": None}], ["'keywords' is missing"]),
        (["keywords:existence"], [{"keywords": "cat"}], ["must be a list of texts"]),
        (["keywords:existence"], [{"keywords": []}], ["must be a list of texts"]),
        (["keywords:existence"], [{"keywords": ["\u200b"]}], ["must be a text"]),
        (
            ["keywords:frequency"],
            [{"keyword": "a", "frequency": 1, "relation": "at most"}],
            ["relation is 'at most'", "'at least' or 'less than'"],
        ),
        (
            ["keywords:frequency"],
            [{"keyword": "a", "frequency": "1", "relation": "at least"}],
            ["frequency is '1'", "whole number"],
        ),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": -1}], ["num_bullets is '-1'"]),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": 1.5}], ["whole number"]),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": float("nan")}], ["whole number"]),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": True}], ["whole number"]),
        (
            ["keywords:letter_frequency"],
            [{"letter": "ab", "let_frequency": 1, "let_relation": "at least"}],
            ["letter is 'ab'", "one letter or sign"],
        ),
        (["language:response_language"], [{"language": "zh-cn"}], ["language is 'zh-cn'", "one of ar, bg"]),
        (["startend:end_checker"], [{"end_phrase": "..."}], ["with a letter or digit"]),
        (
            ["length_constraints:nth_paragraph_first_word"],
            [{"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"}],
            ["no paragraph 3 of 2"],
        ),
    ],
)
def test_rows_that_cannot_be_checked_are_named_before_training(
    ids: Any, kwargs: Any, words: list[str]
) -> None:
    (fault,) = bad_instructions([{"instruction_id_list": ids, "kwargs": kwargs}])
    assert all(word in str(fault) for word in words), fault
    score = instructions("a text", ids, kwargs)
    assert (score.value, score.status, score.detail) == (None, "bad_reference", fault)


def test_lists_may_be_json_and_arguments_of_other_kinds_none() -> None:
    row = {"instruction_id_list": f'["{NO_COMMA}"]', "kwargs": '[{"num_words": null}]'}
    assert bad_instructions([row, {"instruction_id_list": [NO_COMMA], "kwargs": [None]}]) == [None, None]
    assert instructions("a text", **row).value == 1.0


def test_without_the_detector_rows_that_need_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    identifier.cache_clear()
    kannada = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "kn"}]}
    assert bad_instructions([kannada]) == [None]
    for kind, own in (
        ("change_case:english_capital", {}),
        ("language:response_language", {"language": "mr"}),
    ):
        row: dict[str, Any] = {"instruction_id_list": [kind], "kwargs": [own]}
        with pytest.raises(ConfigError, match=r"covey-verify\[language\]"):
            bad_instructions([kannada, row])
        with pytest.raises(ConfigError, match=r"covey-verify\[language\]"):
            instructions("आज आहे" if own else "ABC", **row)
    identifier.cache_clear()


SAID = {
    "de": GERMAN,
    "en": ENGLISH,
    "fi": "Tänään on kaunis sää ja menemme lasten kanssa puistoon.",
    "sw": "Leo hali ya hewa ni nzuri na tunaenda bustanini na watoto.",
    "vi": "Hôm nay thời tiết đẹp và chúng tôi đi công viên với bọn trẻ.",
    "ru": "Сегодня хорошая погода, и мы идём с детьми в парк.",
    "bg": "Днес времето е хубаво и ние отиваме с децата в парка.",
    "ar": "الطقس جميل اليوم ونحن ذاهبون إلى الحديقة مع الأطفال.",
    "fa": "امروز هوا خوب است و ما با بچه‌ها به پارک می‌رویم.",
    "ur": "آج موسم اچھا ہے اور ہم بچوں کے ساتھ پارک جا رہے ہیں۔",
    "hi": "आज मौसम अच्छा है और हम बच्चों के साथ पार्क जा रहे हैं।",
    "mr": "आज हवामान छान आहे आणि आम्ही मुलांसोबत उद्यानात जात आहोत.",
    "ne": "आज मौसम राम्रो छ र हामी बच्चाहरूसँग पार्क जाँदैछौं।",
    "ja": "今日は天気がいいので、子供たちと公園に行きます。",
    "zh": "今天天气很好，我们和孩子们一起去公园。",
    "ko": "오늘은 날씨가 좋아서 아이들과 공원에 갑니다.",
    "kn": KANNADA,
}


@pytest.mark.parametrize("language", SAID)
def test_a_language_is_told_from_all_others(language: str) -> None:
    pytest.importorskip("py3langid")
    for text in (SAID[language], SAID[language].upper()):
        assert [other for other in SCRIPT_OF if in_language(text, other)] == [language]


def test_an_entire_text_is_in_a_language() -> None:
    pytest.importorskip("py3langid")
    assert in_language(f"{ENGLISH}. " * 8 + GERMAN, "en")
    assert not in_language(f"{ENGLISH}. " * 8 + f"{GERMAN}. " * 8, "en")
    assert not in_language(f"{ENGLISH}. {GERMAN}. " * 8, "en")
    assert not in_language(f"{ENGLISH}. ${SAID['zh']}$", "en")


def test_nothing_is_paid_by_the_battery_and_the_reward_may_be_the_verdict() -> None:
    pytest.importorskip("py3langid")
    function = RewardFunction("instructions", instructions)
    assert function.may_be_verdict
    rows = [
        Row(f"rows:{n}", "Write it.", {"instruction_id_list": [c.kind], "kwargs": [dict(c.arguments)]})
        for n, c in enumerate(PLAIN.values())
    ]
    for row in rows:
        report = attack([function], [row])
        assert report.findings == ()
        assert report.tried >= 10


def test_trl_passes_the_columns_of_its_rows() -> None:
    columns: dict[str, Any] = {"instruction_id_list": [[NO_COMMA]] * 2, "kwargs": [[{}]] * 2}
    assert for_trl("instructions")(prompts=["a"] * 2, completions=["b, c", "b c"], **columns) == [0.0, 1.0]


LETTERS = st.text("abcxyz", min_size=1, max_size=6)


@given(st.lists(LETTERS, min_size=1, max_size=30), st.sampled_from([" ", "\n", ", ", " — ", ". "]))
def test_words_are_what_was_joined_and_each_occurs(parts: list[str], between: str) -> None:
    text = between.join(parts)
    assert words(text) == parts
    assert occurrences(parts[0], text) == parts.count(parts[0])


@given(st.lists(LETTERS, min_size=1, max_size=9), st.sampled_from(["\n\n", "\n \n", "\r\n\r\n\r\n"]))
def test_paragraphs_and_their_sentences_are_counted(parts: list[str], between: str) -> None:
    # Words of two letters, as a single one is an initial.
    text = normalize(between.join(f"{part}aa." for part in parts))
    assert len(paragraphs(text)) == len(parts)
    assert sentences(text) == (len(parts), len(parts))


@given(st.text(), st.sampled_from([c for c in CASES if not c.kind.startswith("change_case:english")]))
def test_any_text_gets_a_verdict_and_less_than_is_the_opposite_of_at_least(text: str, case: Case) -> None:
    score = judged(text, case)
    assert score.value in (0.0, 1.0)
    relation = next((name for name in case.arguments if name.endswith("relation")), None)
    if relation and score.status == "ok" and case.kind != "length_constraints:number_sentences":
        turned = {"at least": "less than", "less than": "at least"}[case.arguments[relation]]
        other = case._replace(arguments={**case.arguments, relation: turned})
        assert judged(text, other).value == 1.0 - score.value


@given(st.text())
def test_normalizing_twice_changes_nothing(text: str) -> None:
    once = normalize(text)
    assert normalize(once) == once
    assert has_words(once) or not words(once)

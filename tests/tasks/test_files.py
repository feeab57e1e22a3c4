"""Files keep reference answers as they are written, and an error names file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from covey.config.schema import Data
from covey.tasks.files import read_problems, rows
from covey_verify.errors import DataError

COMPRESSED = gzip.compress(b"{}", mtime=0)


def read(file: Path, content: str | bytes, **settings: Any):
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_problems(file, Data(**settings))


def test_golds_stay_text_in_every_format(tmp_path: Path) -> None:
    table = "prompt,answer\nbond?,007\nbig?,12345678901234567890.0\n"
    (first, second) = read(tmp_path / "a.csv", table)
    assert (first.columns["answer"], second.columns["answer"]) == ("007", "12345678901234567890.0")
    assert [p.id for p in (first, second)] == ["a.csv:2", "a.csv:3"]
    (row,) = read(tmp_path / "a.jsonl", '{"prompt": "bond?", "answer": "007"}\n')
    assert row.columns["answer"] == "007"


def test_parquet_keeps_texts(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(
        {"prompt": ["bond?"], "answer": ["007"], "tests": [[{"input": "1", "output": "2"}]]}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    (row,) = read_problems(tmp_path / "a.parquet", Data())
    assert row.columns == {"answer": "007", "tests": [{"input": "1", "output": "2"}]}


def test_a_json_file_is_a_list_or_a_row_a_line(tmp_path: Path) -> None:
    found = read(tmp_path / "a.json", '\n[{"prompt": "a",\n "answer": "007"}, {"prompt": "b"}]')
    assert [p.prompt for p in found] == ["a", "b"]
    assert found[0].columns["answer"] == "007"
    assert [p.prompt for p in read(tmp_path / "b.json", '{"prompt": "a"}\n{"prompt": "b"}\n')] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", '[{"prompt": "a"}, 7]', "a.json: row 2: a row must be a JSON object, not a int"),
        ("a.json", '[{"prompt": "a"},', "a.json: not valid JSON"),
        ("a.json", "[]", "no rows"),
        (
            "a.jsonl",
            '[{"prompt": "a"}]',
            "a.jsonl:1: a row must be a JSON object, not a list; a file that holds one list must be named",
        ),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": \n', "a.jsonl:2: not valid JSON"),
        ("a.jsonl", '{"prompt": "a"}\n[1]\n', "a.jsonl:2: a row must be a JSON object"),
        # The line is that of the file; json's own messages count from the beginning of what they were given.
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": x}\n', "a.jsonl:2: not valid JSON at column 12: Expecting"),
        (
            "a.jsonl",
            '{\n"prompt": "a"}',
            "a.jsonl:1: not valid JSON at its end: something is missing; write each",
        ),
        ("a.jsonl", '{"prompt": "a"} {}', "column 17: Extra data; write each object on a line of its own"),
        ("a.json", '[{"prompt": "a"},\n{"prompt": x}]', "a.json: not valid JSON at line 2, column 12: Exp"),
        ("a.jsonl", '{"prompt": "a", "answer": 1e400}', "a.jsonl:1: the number 1e400 is too large; write it"),
        ("a.jsonl", '{"prompt": "a", "answer": ' + "9" * 5000 + "}", "a.jsonl:1: a number has thousands of"),
        ("a.jsonl", COMPRESSED, "a.jsonl: the file is compressed; unpack it with gunzip"),
        (
            "a.jsonl.gz",
            COMPRESSED,
            "a.jsonl.gz: the file is compressed; unpack it with gunzip",
        ),
        ("a.jsonl", '{"prompt": "a"}\n\n{"question": "b"}\n', "a.jsonl:3: there is no column 'prompt'"),
        ("a.jsonl", '{"prompt": " "}\n', "a.jsonl:1: 'prompt' must be text"),
        ("a.jsonl", '{"prompt": "a", "completions": 1}\n', "a.jsonl:1: rewards use the name 'completions'"),
        ("a.jsonl", "", "no rows"),
        ("a.csv", "prompt,answer\na,1\nb\n", "a.csv:3: the row has more or fewer fields"),
        ("a.csv", 'prompt,answer\na,1\n"b,2\nc,3\nd,4\n', "a.csv:3: not valid CSV"),
        (
            "a.csv",
            b"prompt\nPer\xfa\n",
            "a.csv: the file is not UTF-8: byte 0xfa cannot be read. Save it as UTF-8",
        ),
        ("a.jsonl", b'{"prompt": "Per\xfa"}\n', "a.jsonl:1: the file is not UTF-8: byte 0xfa"),
        (
            "a.csv",
            'prompt\n"[{""role"": ""user"", ""content"": ""1+1=""}]"\n',
            "a.csv:2: 'prompt' is a text that holds a list of messages",
        ),
        ("a.csv", "prompt\n\"[{'content': '1+1='}]\"\n", "a text that holds a list of messages"),
        ("a.parquet", b"nonsense", "not valid parquet"),
        ("a.txt", "x", "this kind of file is unknown"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, name: str, content: Any, says: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path / name, content)
    assert says in str(caught.value)


def test_a_folder_of_datasets_is_answered_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(DataError, match="to_json"):
        list(rows(tmp_path / "examples.jsonl"))  # which a folder means
    assert read(tmp_path / "a.jsonl", '{"prompt": "a"}')


def test_columns_get_the_names_that_rewards_ask_for(tmp_path: Path) -> None:
    row = {"prompt": "def f(x):\n", "canonical_solution": "    return x\n", "entry_point": "f", "test": "..."}
    columns = {"setup": "prompt", "solution": "canonical_solution"}
    (problem,) = read(tmp_path / "h.jsonl", json.dumps(row), columns=columns)
    assert problem.columns["setup"] == row["prompt"]
    assert problem.columns["solution"] == row["canonical_solution"]
    with pytest.raises(DataError, match="no column 'question'"):
        read(tmp_path / "h.jsonl", json.dumps(row), columns={"setup": "question"})


def test_a_json_list_is_rows_and_so_are_json_lines(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    for content in (
        json.dumps(rows, indent=2),
        "\ufeff\n" + json.dumps(rows),
        "".join(json.dumps(r) + "\n" for r in rows),
    ):
        found = read(tmp_path / "a.json", content)
        assert [(p.id, p.prompt, p.columns["answer"]) for p in found] == [
            ("a.json:1", "1+1=", "2"),
            ("a.json:2", "1+2=", "3"),
        ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_file_that_powershell_wrote_is_named_as_utf_16(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"prompt": "1+1="}\n', encoding="utf-16")
    with pytest.raises(DataError, match=f"{name}: the file is UTF-16.* save it as UTF-8"):
        read_problems(tmp_path / name, Data())


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", "", "no rows"),
        ("a.json", "[", "a.json: not valid JSON"),
        ("a.json", '[{"prompt": "1"}, 7]', "a.json: row 2: a row must be a JSON object, not a int"),
        ("a.json", '[{"prompt": "1", "prompt": "2"}]', "a.json: 'prompt' appears twice in one object"),
        ("a.jsonl", '{"prompt": "1", "gold": 1, "gold": 2}', "a.jsonl:1: 'gold' appears twice"),
        ("a.jsonl", '{"prompt": [{"role": "user", "role": "x", "content": ""}]}', "'role' appears twice"),
        (
            "a.jsonl",
            '{"prompt": "\\ud800 half"}',
            r"a.jsonl:1: the text contains half of a surrogate pair \(\\ud800\)",
        ),
        ("a.jsonl", '{"prompt": "1", "gold": ["\\udfff"]}', "half of a surrogate pair"),
        ("a.csv", "prompt,gold,gold\n1,2,3\n", "2 columns have the name 'gold'"),
        ("a.jsonl", json.dumps({"prompt": "x" * (5 << 20)}), "a.jsonl:1: the prompt has 5,242,880 bytes"),
        ("a.csv", "prompt\n" + "ä" * (3 << 20) + "\n", "the prompt has|field larger than field limit"),
        (
            "a.jsonl",
            json.dumps({"prompt": [{"role": "user", "content": "x" * (3 << 20)}] * 2}),
            "a.jsonl:1: the prompt has 6,",
        ),
    ],
    ids=lambda v: str(v)[:30],
)
def test_rows_that_cannot_be_meant_are_refused(tmp_path: Path, name: str, content: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        read(tmp_path / name, content)


def test_a_field_of_csv_may_be_as_long_as_a_line_of_json(tmp_path: Path) -> None:
    (file := tmp_path / "a.csv").write_text("prompt,answer,note\na,1," + "x" * 200_000 + "\n")
    (_, row), *_ = rows(file)
    assert len(row["note"]) == 200_000


def test_nulls_that_pad_messages_are_left_out_and_a_message_says_something(tmp_path: Path) -> None:
    padded = [
        {"role": "user", "content": "bond?", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": None}}]},
        {"role": "tool", "content": "007", "tool_calls": None},
    ]
    (row,) = read(tmp_path / "a.jsonl", json.dumps({"prompt": padded}))
    assert row.prompt == [
        {"role": "user", "content": "bond?"},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": None}}], "content": ""},
        {"role": "tool", "content": "007"},
    ]
    with pytest.raises(DataError, match=r"b.jsonl:1: 'prompt' must be text or a list"):
        read(tmp_path / "b.jsonl", json.dumps({"prompt": [{"role": "user", "content": None}]}))


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_spreadsheets_csv_is_read_whatever_separates_its_columns(tmp_path: Path, mark: str) -> None:
    lines = ['"q;,",answer ', '"Two\r\nlines, ""quoted"" ü;",007', '"b;",']
    text = "".join(mark.join(line.rsplit(",", 1)) + "\r\n" for line in lines)
    first, second = read(tmp_path / "a.csv", "\ufeff" + text, prompt="q;,")
    assert first.prompt == 'Two\r\nlines, "quoted" ü;'
    assert [p.columns for p in (first, second)] == [{"answer ": "007"}, {"answer ": ""}]
    # The first line of each row, though the first row has two.
    assert [p.id for p in (first, second)] == ["a.csv:2", "a.csv:4"]

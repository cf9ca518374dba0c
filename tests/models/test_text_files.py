"""Texts are read from plain files, JSON lines and parquet; what has none says where."""

import json
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from jvpipe.models.corpus import open_corpus
from jvpipe.models.text_files import holds_conversations, texts_in
from jvpipe.util.extras import MissingExtraError

TEXTS = ["One is short.", "Two has\n\ntwo paragraphs, and an é.", "Three\u2028is on one line."]


def test_the_same_texts_from_every_kind_of_file(tmp_path: Path) -> None:
    lines = [
        json.dumps({"id": i, "text": text}, ensure_ascii=bool(i % 2))
        for i, text in enumerate(TEXTS)
    ]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(lines[:2]) + "\n\n" + lines[2] + "\n", encoding="utf-8"
    )
    parquet.write_table(
        pyarrow.table({"text": [*TEXTS, None], "id": range(4)}), tmp_path / "a.parquet"
    )
    assert texts_in(tmp_path / "a.jsonl") == texts_in(tmp_path / "a.parquet") == TEXTS
    (tmp_path / "b.txt").write_text(TEXTS[0])
    assert texts_in(tmp_path / "b.txt") == TEXTS[:1]
    documents = open_corpus(tmp_path).documents
    assert [document.split("\n")[0] for document in documents] == [
        *("One is short.", "Two has", "Three is on one line.") * 2,
        "One is short.",
    ]


def test_carriage_returns_end_lines_of_plain_texts_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert texts_in(tmp_path / "a.txt") == ["one\ntwo\nthree\n"]
    (tmp_path / "a.jsonl").write_bytes(b'{"text":\r"one"}\r\n{"text": "two"}\r\n')
    assert texts_in(tmp_path / "a.jsonl") == ["one", "two"]
    (tmp_path / "b.jsonl").write_bytes(b'{"messages":\r[]}\r\n')
    assert holds_conversations(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n{"body": "b", "id": 1}',
            "line 2 of .* has no text in a field 'text', .* body, id",
        ),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": ', "line 3 of .*a.jsonl' is not JSON"),
        ("a.jsonl", b'{"text": ' + b"[" * 10**5, "line 1 of .*a.jsonl' is not JSON .*recursion"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "\\ud800"}',
            "line 2 of .*a.jsonl' is not JSON in UTF",
        ),
        ("a.jsonl", b'["text"]', "line 1 of .*a.jsonl' has no text in a field 'text'"),
        ("a.jsonl", b"caf\xe9", "is not UTF-8 text"),
        ("a.parquet", b"no table", "cannot read .*a.parquet'"),
    ],
)
def test_files_without_texts_are_refused(
    tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=told):
        texts_in(tmp_path / name)


def test_a_line_that_is_nested_too_deeply_is_no_conversation(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": ' + "[" * 10**5)
    assert not holds_conversations(tmp_path / "a.jsonl")


def test_tables_without_texts_are_refused(tmp_path: Path) -> None:
    for columns, told in (
        ({"body": ["b"]}, "has no text in a field 'text', its fields are body"),
        ({"text": [1]}, "has no text in a field 'text', its fields are text: it holds int"),
    ):
        parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=told):
            texts_in(tmp_path / "a.parquet")


def test_the_extra_is_named_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        MissingExtraError, match=r"pyarrow is not installed: pip install 'jvpipe\[parquet\]'"
    ):
        texts_in(tmp_path / "a.parquet")

from pathlib import Path

import pytest

from jvpipe.models import corpus, prose
from jvpipe.models.corpus import Corpus, documents, open_corpus

TEXT = (
    "A first paragraph\nover two lines.\n\n\n  A second one. \n\n"
    + "Long enough to end a document. " * 100
)


def test_files_become_documents_of_one_line_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("The last file.")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.TXT").write_text("\ufeff" + TEXT, encoding="utf-8")
    (tmp_path / "c.py").write_text("not = 'text'")
    found = open_corpus(tmp_path)
    assert [document.split("\n")[:2] for document in found.documents] == [
        ["A first paragraph over two lines.", "A second one."],
        ["The last file."],
    ]


def test_a_file_of_any_suffix_is_read(tmp_path: Path) -> None:
    (tmp_path / "notes.log").write_text(TEXT + "\n\nThe end.")
    assert open_corpus(tmp_path / "notes.log").documents[-1] == "The end."


def test_the_digest_is_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT + "\n\nThe end.")
    first = open_corpus(tmp_path).digest
    (tmp_path / "a.txt").write_text(TEXT.replace("\n\n\n", "\n\n") + "\n\nThe  end.\n")
    assert open_corpus(tmp_path).digest == first
    (tmp_path / "a.txt").write_text(TEXT + "\n\nThe end?")
    assert open_corpus(tmp_path).digest != first


def test_what_is_held_out_does_not_depend_on_order_or_position() -> None:
    found = [f"Document number {i}." for i in range(500)]
    train, held_out = Corpus(tuple(found)).split()
    assert sorted(train + held_out) == sorted(found)
    assert len(held_out) == 10
    assert sorted(Corpus(tuple(reversed(found))).split()[1]) == sorted(held_out)
    assert Corpus(("one", "two")).split()[1] in (["one"], ["two"])


def test_documents_end_between_paragraphs() -> None:
    assert documents(["a" * 1500, "b" * 600, "c"]) == ["a" * 1500 + "\n" + "b" * 600, "c"]


@pytest.mark.parametrize("lines", ["\n", " "])
def test_text_without_blank_lines_is_cut_too(tmp_path: Path, lines: str) -> None:
    words = [f"word{i}" for i in range(2000)]
    (tmp_path / "a.txt").write_text(lines.join(words))
    found = open_corpus(tmp_path)
    assert len(found.documents) > 5
    assert max(map(len, found.documents)) < 2500
    assert found.text.split() == words


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no '.*data': give an existing"),
        ({}, r"there is no \.txt, \.md, \.rst, \.jsonl, \.parquet file in '.*data'"),
        ({"a.txt": b""}, "'.*data' holds 0 characters of text: give at least"),
        ({"a.txt": b"Too short."}, "'.*data' holds 10 characters"),
        ({"a.txt": b"caf\xe9"}, r"'.*a\.txt' is not UTF-8 text \(byte 3\): convert it"),
    ],
)
def test_data_that_cannot_be_used(
    tmp_path: Path, content: dict[str, bytes] | None, message: str
) -> None:
    path = tmp_path / "data"
    if content is not None:
        path.mkdir()
        for name, data in content.items():
            (path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        open_corpus(path)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, **_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"cannot read '.*a\.txt' \(Permission denied\): check"):
        open_corpus(tmp_path)


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot make the cache folder .* set XDG_CACHE_HOME"):
        corpus.cache_folder()


def test_the_default_text_is_gathered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gathered = Corpus(("One document.\nOf two lines.", "Another."))
    monkeypatch.setattr(prose, "gather_prose", lambda: gathered)
    assert open_corpus(None) == gathered
    monkeypatch.setattr(prose, "gather_prose", None)
    assert open_corpus(None) == gathered
    assert [file.name for file in (tmp_path / "jvpipe").iterdir()] == ["python-prose.txt"]


def test_gathered_prose_is_plenty_plain_and_the_same_again() -> None:
    found = prose.gather_prose(300_000)
    assert found == prose.gather_prose(300_000)
    assert len(found.text) > 300_000
    paragraphs = [p for document in found.documents for p in document.split("\n")]
    assert len(set(paragraphs)) == len(paragraphs)
    assert not [p for p in paragraphs if ">>>" in p or "``" in p or not p.isascii()]


def test_prose_is_found_in_source_that_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        'raise SystemExit\n"""Not a docstring, although it reads like one, with a full stop."""\n'
        'class Thing:\n    """A thing that holds other things until they are wanted again.\n\n'
        "    Parameters\n    ----------\n    x : int\n        How many things it may hold before "
        "it is full.\n"
        '    """\n    def __len__(self):\n        """Returns the number of things, which is never below zero."""\n'
        "        '\\d'\n"
    )
    (tmp_path / "broken.py").write_text(
        '"""A docstring in a file that does not parse, for it ends early."""\n('
    )
    texts = [
        text for name in ("module.py", "broken.py") for text in prose._docstrings(tmp_path / name)
    ]
    assert [p for text in texts for p in prose.prose_paragraphs(text)] == [
        "A thing that holds other things until they are wanted again.",
        "How many things it may hold before it is full.",
        "Returns the number of things, which is never below zero.",
    ]

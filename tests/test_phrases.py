"""Prose is plain English: no docstring, comment, message or page has a phrase of
tests/phrases.txt.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("jvpipe", "models", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LIST = ROOT / "tests" / "phrases.txt"


@cache
def phrases() -> dict[str, str]:
    """Returns the advice for each pattern of the list."""
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(" => ") for line in lines)


def sources() -> list[Path]:
    """Returns the files of code. `jvpipe/models` is a link to `models`, which is listed once."""
    files = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if ROOT / "jvpipe" / "models" not in path.parents]


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the docstrings, comments and messages of a file of code, with the lines where they
    begin.
    """
    text = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#! ")
    for node in ast.walk(ast.parse(text)):
        # A single word is a name and not prose.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, _without_examples(node.value)


def _without_examples(docstring: str) -> str:
    """Takes the examples out of a docstring: they are code."""
    return re.sub(r"^\s*(>>>|\.\.\.).*$", "", docstring, flags=re.MULTILINE)


def pages() -> list[Path]:
    """Returns the pages for users and for developers."""
    docs = [path for path in (ROOT / "docs").rglob("*.md") if not path.is_symlink()]
    return [*sorted(docs), *(ROOT / page for page in PAGES)]


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the paragraphs of a page, without its code, with the lines where they begin."""
    line, is_code = 1, False
    for paragraph in re.split(r"(\n\s*\n|^```.*$)", path.read_text(), flags=re.MULTILINE):
        if paragraph.startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield line, paragraph
        line += paragraph.count("\n")


def found(name: str, prose: Iterator[tuple[int, str]]) -> list[str]:
    """Returns the phrases in some prose, each with its place and with the advice."""
    hits = []
    any_phrase = re.compile("|".join(phrases()))
    for line, text in prose:
        one_line = " ".join(text.split())
        if not any_phrase.search(one_line):
            continue
        for pattern, advice in phrases().items():
            for match in re.finditer(pattern, one_line):
                around = one_line[max(0, match.start() - 30) : match.end() + 30]
                hits.append(f"{name}:{line}: ...{around}... ({advice})")
    return hits


@pytest.mark.parametrize("pattern", phrases())
def test_a_pattern_of_the_list_is_a_regular_expression_with_advice(pattern: str) -> None:
    assert re.compile(pattern)
    assert phrases()[pattern].strip()


def test_no_file_of_code_has_a_phrase_of_the_list() -> None:
    assert [
        hit
        for path in sources()
        for hit in found(path.relative_to(ROOT).as_posix(), prose_of(path))
    ] == []


def test_no_page_has_a_phrase_of_the_list() -> None:
    assert [
        hit
        for path in pages()
        for hit in found(path.relative_to(ROOT).as_posix(), paragraphs(path))
    ] == []


def test_a_phrase_is_found_in_a_comment_a_docstring_and_a_message(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        '"""Equal to\nthe bit."""\n# None is no limit\nraise ValueError(f"{3} is no size")\n'
    )
    assert [hit.split(":")[1] for hit in found("file.py", prose_of(file))] == ["3", "3", "1", "4"]

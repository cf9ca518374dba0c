"""English prose that every Python carries: its manual and the docstrings of what is installed.

Nothing is imported or run: docstrings are read from source files by `ast`.
"""

import ast
import hashlib
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from jvpipe.models.corpus import Corpus, documents

_LIMIT_CHARACTERS = 6_000_000
_FILE_LIMIT_BYTES = 500_000  # larger source files are generated
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idlelib", "lib2to3", "_vendor", "__pycache__"}
)

_ROLE = re.compile(r":[a-z:]+:(?=`)")
_TARGET = re.compile(r"`~?([^`<]*?)\s*(?:<[^`]*>)?`_*")
_STARS = re.compile(r"\*{1,2}(\S[^*]*)\*{1,2}")
_SENTENCE = re.compile(r"[A-Z][a-z]* .*[\w)\]'\"][.!?:]", re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z ,.']")


def gather_prose(limit_characters: int = _LIMIT_CHARACTERS) -> Corpus:
    """The manual's topics, then docstrings, until there are `limit_characters`.

    Files come in the order of the hash of their names, so that the limit takes a little of everything. A paragraph
    that occurs again is left out.
    """
    prose: list[str] = []
    seen: set[str] = set()
    characters = 0
    for texts in _sources():
        fresh = []
        for paragraph in (p for text in texts for p in prose_paragraphs(text)):
            if paragraph not in seen:
                seen.add(paragraph)
                fresh.append(paragraph)
        prose += documents(fresh)
        characters += sum(map(len, fresh))
        if characters >= limit_characters:
            break
    return Corpus(tuple(prose))


def prose_paragraphs(text: str) -> Iterator[str]:
    r"""The paragraphs of a docstring that read like prose, each as one line, without markup.

    >>> list(prose_paragraphs("Note\n----\nx : int, optional"))
    []
    >>> list(prose_paragraphs("The path need not exist; a ``..`` in it\nis resolved by :func:`os.stat` all the same."))
    ['The path need not exist; a .. in it is resolved by os.stat all the same.']
    """
    for block in _blocks(text):
        plain = _STARS.sub(r"\1", _TARGET.sub(r"\1", _ROLE.sub("", block.replace("``", "`"))))
        plain = " ".join(plain.split())
        letters = len(_PLAIN.findall(plain))
        if (
            plain.isascii()
            and len(plain) >= 40
            and letters >= 0.9 * len(plain)
            and _SENTENCE.fullmatch(plain)
        ):
            yield plain


def _blocks(text: str) -> Iterator[str]:
    """Runs of lines of one indentation."""
    lines: list[str] = []
    indent = 0
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        if lines and (not stripped or len(line) - len(line.lstrip()) != indent):
            yield " ".join(lines)
            lines = []
        if stripped:
            indent = len(line) - len(line.lstrip())
            lines.append(stripped)


def _sources() -> Iterator[Iterable[str]]:
    """Texts, file by file."""
    yield [topics[name] for name in sorted(topics)]
    named = [(name, file) for root in _roots() for name, file in _python_files(root)]
    for _, file in sorted(
        named, key=lambda item: (hashlib.sha256(item[0].encode()).digest(), item[1])
    ):
        yield _docstrings(file)


def _roots() -> list[Path]:
    """The folders of the standard library and of the installed packages."""
    return sorted({Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})


def _python_files(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for file in (Path(folder, name) for name in files if name.endswith(".py")):
            yield file.relative_to(root).as_posix(), file


def _docstrings(file: Path) -> Iterator[str]:
    """The docstrings of a source file; of none that cannot be read or parsed."""
    try:
        source = file.read_bytes()
        if len(source) > _FILE_LIMIT_BYTES or b'"""' not in source:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in other people's strings
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from _documented(tree)


def _documented(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[str]:
    """The docstring of a module, class or function, then those of what it defines."""
    if docstring := ast.get_docstring(node):
        yield docstring
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _documented(child)

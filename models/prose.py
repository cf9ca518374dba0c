"""English prose of a Python installation: the manual's topics, and docstrings of its packages.

Source files are parsed, but never imported or run.
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

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idlelib", "lib2to3", "_vendor", "__pycache__"}
)

_ROLE = re.compile(r":[a-z:]+:(?=`)")
_TARGET = re.compile(r"`~?([^`<]*?)\s*(?:<[^`]*>)?`_*")
_STARS = re.compile(r"\*{1,2}(\S[^*]*)\*{1,2}")
_SENTENCE = re.compile(r"[A-Z][a-z]* .*[\w)\]'\"][.!?:]", re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z ,.']")


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
"""The nodes that may begin with a docstring."""


def gather_prose(limit_characters: int = 6_000_000) -> Corpus:
    """Gathers the manual's topics, then docstrings, up to about `limit_characters` characters.

    Files are sorted by the hash of their names, so that the files before the limit are a sample of
    all packages. A repeated paragraph is left out.
    """
    prose: list[str] = []
    seen: set[str] = set()
    characters = 0
    for texts in _sources():
        fresh = []
        for paragraph in (p for text in texts for p in prose_paragraphs(text)):
            # Overriding methods often repeat the docstring of the method that they override.
            if paragraph not in seen:
                seen.add(paragraph)
                fresh.append(paragraph)
        prose += documents(fresh)
        characters += sum(map(len, fresh))
        if characters >= limit_characters:
            break
    return Corpus(tuple(prose))


def prose_paragraphs(text: str) -> Iterator[str]:
    r"""Yields the paragraphs of a docstring that read like prose, each as one line without markup.

    >>> list(prose_paragraphs("Note\n----\nx : int, optional"))
    []
    >>> list(prose_paragraphs("The path need not exist; a ``..``\nis resolved by :func:`os.stat`."))
    ['The path need not exist; a .. is resolved by os.stat.']
    """
    for block in _blocks(text):
        plain = _without_markup(block)
        letters = len(_PLAIN.findall(plain))
        # Tables, examples and lists of arguments have many other characters, or no complete
        # sentence.
        reads_well = len(plain) >= 40 and letters >= 0.9 * len(plain)
        if plain.isascii() and reads_well and _SENTENCE.fullmatch(plain):
            yield plain


def _without_markup(block: str) -> str:
    """Replaces roles, links and emphasis of reStructuredText with their texts, on one line."""
    text = _ROLE.sub("", block.replace("``", "`"))
    text = _STARS.sub(r"\1", _TARGET.sub(r"\1", text))
    return " ".join(text.split())


def _blocks(text: str) -> Iterator[str]:
    """Yields runs of lines with the same indentation. Each run is joined to one line."""
    lines: list[str] = []
    indent = 0
    for line in [*text.splitlines(), ""]:
        stripped, depth = line.strip(), len(line) - len(line.lstrip())
        if lines and (not stripped or depth != indent):
            yield " ".join(lines)
            lines = []
        if stripped:
            indent = depth
            lines.append(stripped)


def _sources() -> Iterator[Iterable[str]]:
    """Yields the texts of the manual, then those of each file."""

    def place(named: tuple[str, Path]) -> tuple[bytes, Path]:
        # The name is relative to its root, so the order does not depend on where Python is
        # installed.
        name, file = named
        return hashlib.sha256(name.encode()).digest(), file

    yield [topics[name] for name in sorted(topics)]
    named_files = [named for root in _roots() for named in _python_files(root)]
    for _, file in sorted(named_files, key=place):
        yield _docstrings(file)


def _roots() -> list[Path]:
    """Returns the folders of the standard library and of installed packages."""
    return sorted({Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})


def _python_files(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, folders, files in os.walk(root):
        # os.walk enters only the folders that are left in this list.
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for file in (Path(folder, name) for name in files if name.endswith(".py")):
            yield file.relative_to(root).as_posix(), file


def _docstrings(file: Path, limit_bytes: int = 500_000) -> Iterator[str]:
    """Yields the docstrings of a source file; nothing if the file cannot be read or parsed."""
    try:
        source = file.read_bytes()
        # Larger files are mostly generated code.
        if len(source) > limit_bytes or b'"""' not in source:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about escapes in the parsed strings
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from _documented(tree)


def _documented(node: Documented) -> Iterator[str]:
    """Yields the docstrings of a module, class or function, and of all definitions in it."""
    if docstring := ast.get_docstring(node):
        yield docstring
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _documented(child)

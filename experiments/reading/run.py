"""How much there is to read, and how dense it is: counts of syntax nodes, lines and comments.

A formatter can break a line in two, but it cannot change the syntax tree. So sizes and densities
are counted in nodes of the tree. Docstrings count as text, not as code.
"""

import ast
import random
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[2]
PRAGMAS = ("noqa", "type:", "pyright", "fmt:")
QUESTIONS = """What is the file for? Why is it right? What may be changed in it?
Which sentences did you read twice, and why?"""
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = ast.Module | ast.ClassDef | FUNCTIONS


@dataclass
class Ink:
    """What a reader of some files takes in.

    Attributes:
        nodes: nodes of the syntax trees.
        code: lines that are neither blank, nor docstrings, nor comments alone.
        comments: comments, those for tools left out.
        statements: for each statement, its nodes without those of statements inside it.
        body_lines: for each line of a function's body, the nodes that begin on it.
        columns: for each line that is not blank, its length.
    """

    nodes: int = 0
    code: int = 0
    comments: int = 0
    statements: list[int] = field(default_factory=list)
    body_lines: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Counts a file, too."""
        text = path.read_text()
        rows = text.splitlines()
        tree = ast.parse(text)
        docstrings = {id(node): node for node in map(_docstring, ast.walk(tree)) if node}
        told = {n for node in docstrings.values() for n in _rows_of(node)}
        bare = (row.strip() for row in rows)
        coded = (n for n, row in enumerate(bare, 1) if row and not row.startswith("#"))
        self.code += sum(n not in told for n in coded)
        self.nodes += sum(1 for _ in ast.walk(tree)) - 2 * len(docstrings)
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt) and id(node) not in docstrings:
                self.statements.append(1 + sum(1 for _ in _inside(node)))
        on_line = Counter[int]()
        for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
            # The statements of functions inside it are counted with those functions.
            own = (node for node in _statements(function) if id(node) not in docstrings)
            parts = (part for statement in (function, *own) for part in _inside(statement))
            lines = (getattr(part, "lineno", 0) for part in parts)
            on_line.update(filter(None, lines))
        self.body_lines += on_line.values()
        self.columns += [len(row) for row in rows if row.strip()]
        with tokenize.open(path) as file:
            for token in tokenize.generate_tokens(file.readline):
                is_comment = token.type == tokenize.COMMENT
                self.comments += is_comment and not any(p in token.string for p in PRAGMAS)


def _docstring(node: ast.AST) -> ast.stmt | None:
    """Returns the statement that is the docstring of a module, class or function."""
    if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        return node.body[0]
    return None


def _rows_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _inside(statement: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a statement, without statements inside it."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt):
            yield child
            yield from _inside(child)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements of a function, without those of functions inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and not isinstance(child, FUNCTIONS):
            yield child
        if not isinstance(child, FUNCTIONS):
            yield from _statements(child)


def ink(paths: Iterable[Path]) -> Ink:
    """Counts what the Python files at some paths, and in folders there, have."""
    found = Ink()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.add(file)
    return found


def share(values: Sequence[int], part: float) -> int:
    """Returns the value that at most this part of the values is below."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def drawn(seed: int, count: int = 10) -> list[Path]:
    """Draws files of jvpipe of 100 to 300 lines at random."""
    files = sorted((ROOT / "jvpipe").rglob("*.py"))
    middling = [f for f in files if 100 < len(f.read_text().splitlines()) < 300]
    return random.Random(seed).sample(middling, count)


def main(draw: int | None = None) -> None:
    """Prints the tables, or the files to read and the questions to answer.

    Args:
        draw: the seed with which ten files are drawn; None for the tables.
    """
    if draw is not None:
        print(*(file.relative_to(ROOT) for file in drawn(draw)), QUESTIONS, sep="\n")
        return
    print("| folder | nodes per code line | statement, 90% | 99% | body line, 90% ", end="")
    print("| columns, 90% | comments per 100 |\n|---|---|---|---|---|---|---|")
    for name in ("jvpipe", "models", "examples"):
        found = ink([ROOT / name])
        print(
            f"| {name} | {found.nodes / found.code:.1f} | {share(found.statements, 0.9)} "
            f"| {share(found.statements, 0.99)} | {share(found.body_lines, 0.9)} "
            f"| {share(found.columns, 0.9)} | {100 * found.comments / found.code:.1f} |"
        )
    print("\n| rooms | nodes |\n|---|---|")
    apart = {"papers", "profiles", "models"}
    rooms = {
        "planners, cost": ["planners", "cost"],
        "session, report, cli": ["session", "report", "cli"],
        "papers, profiles": ["papers", "profiles"],
        "jvpipe without papers, profiles, models": [
            entry.name for entry in (ROOT / "jvpipe").iterdir() if entry.name not in apart
        ],
    }
    for name, parts in rooms.items():
        found = ink(path for part in parts if (path := ROOT / "jvpipe" / part).exists())
        print(f"| {name} | {found.nodes:,} |")


if __name__ == "__main__":
    tyro.cli(main)

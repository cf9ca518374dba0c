"""Names are nouns for what is held: participles and quantifiers that stand for anything are used sparingly."""

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.test_phrases import sources

VAGUE = ("told", "known", "wanted", "held", "most", "made", "given", "own", "each")
MOST_TIMES = 5
"""How often one of them may be bound. Each says that something was told, known or made, and not what it is."""


def bound(tree: ast.AST) -> Iterator[str]:
    """Yields the names of variables, fields and arguments, once for each place that binds them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


@pytest.fixture(scope="module")
def times() -> Counter[str]:
    """Counts how often each name is bound in all files of code."""
    return Counter(name for path in sources() for name in bound(ast.parse(path.read_text())))


@pytest.mark.parametrize("name", VAGUE)
def test_a_vague_name_is_seldom_bound(name: str, times: Counter[str]) -> None:
    assert times[name] <= MOST_TIMES


def test_arguments_loops_and_assignments_are_counted() -> None:
    code = "def f(told, *, each=1):\n    for made in told:\n        own = made\n"
    assert sorted(bound(ast.parse(code))) == ["each", "made", "own", "told"]

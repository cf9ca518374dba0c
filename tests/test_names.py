"""Names are nouns for what is held: participles and quantifiers that stand for anything are used
sparingly.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_phrases import sources

VAGUE = ("told", "known", "wanted", "held", "most", "made", "given", "own", "each")
MOST_TIMES = 5
"""How often one of them may be bound. Each says that something was told, known or made, and not
what it is.
"""


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


def homonyms() -> dict[str, list[str]]:
    """Lists the files that define a public function, a class or a module of the same name."""
    defined: dict[str, list[str]] = defaultdict(list)
    for path in sorted(Path("jvpipe").rglob("*.py")):
        if "models" in path.parts or path.name == "__init__.py":
            continue
        defined[path.name].append(str(path))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                defined[f"class {node.name}"].append(str(path))
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                defined[f"{node.name}()"].append(str(path))
    return {name: paths for name, paths in defined.items() if len(paths) > 1}


def test_one_name_means_one_file_class_or_function() -> None:
    assert homonyms().keys() == {"main()", "plan.py"}, homonyms()
    # Every command has a `main`; `python -m jvpipe.plan` needs its shell beside the room of plans.
    assert homonyms()["plan.py"] == ["jvpipe/ir/plan.py", "jvpipe/plan.py"]

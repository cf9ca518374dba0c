"""Tables of effort: every number of every table is read somewhere."""

import ast
from pathlib import Path

import jvpipe

HOUSE = Path(jvpipe.__file__).parent


def test_numbers_of_effort_are_read() -> None:
    trees = [ast.parse(path.read_text()) for path in HOUSE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    tables = [x for x in nodes if isinstance(x, ast.ClassDef) and x.name.endswith("Effort")]
    read = {x.attr for x in nodes if isinstance(x, ast.Attribute)}
    assert len(tables) >= 10
    assert [
        f"{table.name}.{number.target.id}"
        for table in tables
        for number in table.body
        if isinstance(number, ast.AnnAssign)
        and isinstance(number.target, ast.Name)
        and number.target.id not in read
    ] == []

"""What would be a second problem, decision or answer under another name: dataclasses with the same
fields.
"""

import ast
from itertools import combinations
from pathlib import Path

import pytest

import jvpipe

HOUSE = Path(jvpipe.__file__).parent
FEW = 4
"""Fields that two of any size may not share if they are more than half of the smaller one's."""
ALIKE = {
    ("cost/costs:Edge", "ir/layers:Tensor"),
    ("cost/costs:SplitCost", "simulate/stages:StageLoad"),
    ("ir/layers:SplitSignature", "programs/split_backward:Halves"),
    ("ir/layers:SplitSignature", "programs/split_backward:_BackwardCut"),
    ("ir/rows:AskRun", "ir/rows:OfferRun"),
    ("ir/rows:Row", "lowering/operation:Operation"),
    ("lowering/stream/parts:Versions", "programs/layer:LayerPrograms"),
    ("lowering/stream/parts:Versions", "runtime/engine/versions:Reads"),
    ("programs/flow:Flow", "trace/loss:LossJaxpr"),
    ("programs/layer:LayerPrograms", "runtime/engine/versions:Reads"),
    ("programs/optimizer_pieces:OptimizerCut", "programs/optimizer_trace:TracedOptimizer"),
    ("programs/split_backward:Halves", "programs/split_backward:_BackwardCut"),
    ("runtime/state/model_change:ModelChange", "runtime/state/plan_change:PlanChange"),
}
"""Those that are alike today. No pair comes in, and one that is alike no more goes out."""
DEFINED = ("option(", "flag_option(")
"""What a field says that defines an option: its name is that of what the option becomes, whoever
holds it.
"""


def fields_of(text: str) -> dict[str, set[str]]:
    """Finds the fields of each dataclass that a file has, its own and not those of its bases."""
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    return {
        node.name: {
            statement.target.id
            for statement in node.body
            if isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and not ast.unparse(statement.annotation).startswith("ClassVar")
            and not (statement.value and ast.unparse(statement.value).startswith(DEFINED))
        }
        for node in classes
        if any(ast.unparse(each).startswith("dataclass") for each in node.decorator_list)
    }


def are_alike(one: set[str], other: set[str]) -> bool:
    """Tells whether two share more than half of the larger one's fields, or of the smaller one's if
    not few.
    """
    shared = len(one & other)
    smaller, larger = sorted((len(one), len(other)))
    return 2 * shared > larger or (2 * shared > smaller and shared >= FEW)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("abc", "abd", True),
        ("ab", "ac", False),
        ("a", "abc", False),
        ("abcd", "abcdefghij", True),
        ("abc", "abcdefghij", False),
        ("abcdefgh", "abcdijklm", False),
    ],
)
def test_alike_are_those_of_which_most_fields_are_the_same(
    one: str, other: str, alike: bool
) -> None:
    assert are_alike(set(one), set(other)) is are_alike(set(other), set(one)) is alike


def test_no_two_dataclasses_share_more_than_half_of_their_fields_but_those_of_today() -> None:
    files = [path for path in HOUSE.rglob("*.py") if "models" not in path.relative_to(HOUSE).parts]
    fields = {
        f"{path.relative_to(HOUSE).with_suffix('').as_posix()}:{name}": those
        for path in files
        for name, those in fields_of(path.read_text()).items()
        if those
    }
    assert len(fields) > 100
    found = {(a, b) for a, b in combinations(sorted(fields), 2) if are_alike(fields[a], fields[b])}
    assert found - ALIKE == set(), "one of the two is to be the other's parameter, or part of it"
    assert ALIKE - found == set(), "these are alike no more: take them out of the list"

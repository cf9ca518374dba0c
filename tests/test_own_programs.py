"""Ten programs as strangers have them train over a pipeline with at most five other lines.

A program of `own_programs/` is one of plain JAX; what a pipeline changes is marked in it:

    line  # -     is taken out
    # + line      is put in
"""

import difflib
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.end_to_end.test_libraries import permissive
from tests.grid import grid

FOLDER = Path(__file__).parent / "own_programs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
DRAWS = ("diffusion", "nnx_dropout_batch_norm")
"""Those that draw, by another key for each micro-batch: they are held to themselves on one
device.
"""


def plain(name: str) -> str:
    text = (FOLDER / f"{name}.py").read_text()
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("# + ")]
    return "\n".join(line.removesuffix("  # -") for line in kept)


def changed(name: str) -> str:
    text = (FOLDER / f"{name}.py").read_text()
    kept = [line for line in text.splitlines() if not line.endswith("  # -")]
    return "\n".join(re.sub(r"^( *)# \+ ", r"\1", line) for line in kept)


def run(text: str, stages: int = 0) -> Any:
    names: dict[str, Any] = {"STAGES": stages, "__name__": "program"}
    exec(compile(text, "program", "exec"), names)
    return names


def test_there_are_ten_and_few_lines_are_others() -> None:
    assert len(NAMES) == 10
    for name in NAMES:
        lines = difflib.ndiff(plain(name).splitlines(), changed(name).splitlines())
        assert sum(line.startswith("+ ") for line in lines) <= 5, name


@pytest.mark.parametrize("name", grid(NAMES, "lora"))
@permissive
def test_a_program_trains_over_a_pipeline_as_before(name: str) -> None:
    two = run(changed(name), stages=2)
    trained = two["pipe"].params(two["state"])
    assert len(two["pipe"].plan.cuts) == 2
    if name in DRAWS:
        one = run(changed(name), stages=1)
        assert two["losses"] == one["losses"]
        jax.tree.map(np.testing.assert_array_equal, trained, one["pipe"].params(one["state"]))
        assert len(set(two["losses"])) == 3
        assert len(run(plain(name))["losses"]) == 3
        return
    before = run(plain(name))
    np.testing.assert_allclose(two["losses"], before["losses"], rtol=1e-4)
    leaves = zip(jax.tree.leaves_with_path(trained), jax.tree.leaves(before["params"]), strict=True)
    for (path, ours), theirs in leaves:
        # A bias of keys adds the same to all scores of a query: softmax does not see it, its
        # gradient is rounding, and Adam makes whole steps of that.
        if not jax.tree_util.keystr(path).endswith("['key']['bias']"):
            np.testing.assert_allclose(ours, np.asarray(theirs), rtol=2e-2, atol=2e-4)

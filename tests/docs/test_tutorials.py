"""The tutorials are notebooks without outputs, and run from their first cell to their last."""

import json
import os
import shutil
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
NAMES = sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
COLUMNS = 100
LIMIT_S = 300


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_as_it_was_written(name: str) -> None:
    """Without outputs, which tell of a machine; with code that is Python and fits into its box."""
    book = json.loads((TUTORIALS / f"{name}.ipynb").read_text())
    assert book["cells"][0]["source"][0].startswith("# ")
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            assert all(len(line.rstrip()) <= COLUMNS for line in cell["source"])
            compile("".join(cell["source"]), name, "exec")


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    client = pytest.importorskip("nbclient", reason="make installs what the pages are built with")
    nbformat = pytest.importorskip("nbformat")
    shutil.copytree(TUTORIALS, tmp_path / "tutorials")
    book = nbformat.read(tmp_path / "tutorials" / f"{name}.ipynb", as_version=4)
    where = {"metadata": {"path": str(tmp_path / "tutorials")}}
    environment = os.environ | {"XLA_FLAGS": ""}  # as many devices as the notebook asks for
    runner = client.NotebookClient(book, timeout=LIMIT_S, resources=where)
    runner.execute(env=environment)
    assert all(cell.execution_count for cell in book.cells if cell.cell_type == "code")

"""How Sphinx builds these pages: `make docs`."""

import re
from collections.abc import Iterator, Sequence

import jvpipe

project = "jvpipe"
version = release = jvpipe.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "jvpipe"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"


def as_sphinx_reads(lines: Sequence[str]) -> Iterator[str]:
    """A docstring as Sphinx reads it: code between two backticks, tables as lists."""
    in_table = False
    for line in lines:
        line = re.sub(r"(?<![`:])`([^`]+)`(?!`)", r"``\1``", line)
        if line.startswith("|---"):
            continue
        if line.startswith("|"):
            if not in_table:
                yield from (".. list-table::", "   :header-rows: 1", "")
            for i, cell in enumerate(line.strip().strip("|").split("|")):
                yield f"   {' ' if i else '*'} - {cell.strip()}"
        else:
            yield line
        in_table = line.startswith("|")


def setup(app: object) -> None:
    """Lets Sphinx read our docstrings."""

    def changed(
        app: object, what: str, name: str, obj: object, options: object, lines: list[str]
    ) -> None:
        lines[:] = as_sphinx_reads(lines)

    app.connect("autodoc-process-docstring", changed, priority=400)  # pyright: ignore[reportAttributeAccessIssue]

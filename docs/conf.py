"""How Sphinx builds these pages: `make docs`.

They are copied first, for `examples`, `experiments`, `changes.md` and `contributing.md` are links
to what lies at the root of the project, and a link's own links would lead from there. The tutorials
are kept without outputs: they are run when the pages are built.
"""

import re
from collections.abc import Iterator, Sequence

import jvpipe

project = "jvpipe"
version = release = jvpipe.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "jvpipe"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
myst_heading_anchors = 3
nb_merge_streams = True
nb_execution_timeout = 300
nb_execution_raise_on_error = True
suppress_warnings = ["toc.not_included"]  # experiments are listed by the table of theirs
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 90


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

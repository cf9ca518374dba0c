"""Reads a graph file, from which jvpipe can plan a model without the model's code.

A graph file lists the nodes of a model, such as its operators, with their measured times and sizes.
There are two formats: PipeDream's graph.txt (`graph_txt.py`) and the JSON of dnn-partitioning
(`graph_json.py`). A file is JSON if it begins with `{` or `[`, or its name ends in `.json`.
"""

import re
from pathlib import Path

from jvpipe.profiles.graph_json import read_graph_json
from jvpipe.profiles.graph_parts import GraphFile, wrong
from jvpipe.profiles.graph_txt import read_graph_txt

__all__ = ["GraphFile", "read_graph"]

_LINE = re.compile(r"^\s*node\S* --", re.MULTILINE)


def read_graph(path: str | Path) -> GraphFile:
    """Reads a graph file of either format.

    Each forward node becomes a layer. The layers are in a topological order in which nodes
    that must share a device are as close together as possible. If several nodes could come next,
    the node with the lowest id comes next.

    Raises:
        ValueError: the file cannot be read, or its content is wrong; the message says what is
            wrong in which line.

    >>> from tempfile import NamedTemporaryFile
    >>> times = "forward_compute_time=1.0, backward_compute_time=2.0"
    >>> sizes = "activation_size=8.0, parameter_size=64.0"
    >>> with NamedTemporaryFile("w", suffix=".txt") as file:
    ...     _ = file.write(f"node7 -- Linear(4, 4) -- {times}, {sizes}")
    ...     file.flush()
    ...     read_graph(file.name).costs.layers[0].parameter_bytes
    64
    """
    file = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise wrong(file, 1, f"this is not text: {error}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{file}: this cannot be read ({reason}): give the path of a graph file"
        ) from None
    if not text.strip():
        raise wrong(file, 1, "the file is empty: it must describe the nodes of a graph")
    if text.lstrip()[0] in "{[" or file.endswith(".json"):
        return read_graph_json(text, file)
    if _LINE.search(text):
        return read_graph_txt(text, file)
    message = (
        "this is not a graph file: it is neither PipeDream's graph.txt "
        "(`node1 -- description -- forward_compute_time=..`) nor the JSON of dnn-partitioning"
    )
    raise wrong(file, 1, message)

"""Reads graph files: profiles of models, for which jvpipe can plan without having the model.

There are two formats: PipeDream's graph.txt (`graph_txt.py`) and the JSON of dnn-partitioning
(`graph_json.py`). The content of a file decides which of the two it is.
"""

import re
from pathlib import Path

from jvpipe.profiles.graph_json import read_graph_json
from jvpipe.profiles.graph_parts import GraphFile, wrong
from jvpipe.profiles.graph_txt import read_graph_txt

__all__ = ["GraphFile", "read_graph"]

_LINE = re.compile(r"^\s*node\S* --", re.MULTILINE)


def read_graph(path: str | Path) -> GraphFile:
    """Reads a graph file.

    The layers are the file's (forward) nodes in topological order, with nodes that must share a
    device as close together as possible. If several nodes could come next, the lowest id does.

    Raises:
        ValueError: the file is wrong; the message names file, line and field.

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

"""Which format a graph file has."""

from pathlib import Path

import pytest

from jvpipe.profiles.graph_file import read_graph

NODE = (
    "node1 -- Add -- forward_compute_time=1, backward_compute_time=2, activation_size=8, "
    "parameter_size=4"
)
JSON = '{"maxSizePerFPGA": 9, "maxFPGAs": 1, "nodes": [{"id": 3, "fpgaLatency": 1, "size": 1, "isBackwardNode": 0}]'


@pytest.mark.parametrize("name", ["graph.txt", "profile", "odd.md"])
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (NODE, (1,)),
        (f"\n\r\n{NODE}\r\n", (1,)),
        ("\ufeff" + NODE, (1,)),
        (JSON + ', "edges": []}', (3,)),
        ("\ufeff \n" + JSON + ', "edges": []}', (3,)),
    ],
)
def test_the_content_tells_the_format(
    tmp_path: Path, name: str, text: str, ids: tuple[int, ...]
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_graph(tmp_path / name).costs.ids == ids


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt, line 1: the file is empty"),
        ("a.json", b" \n\t", "a.json, line 1: the file is empty"),
        ("a.json", b"node1 -- Add", "a.json, line 1: this is not JSON"),
        (
            "a.txt",
            b"digraph { a -> b }",
            "a.txt, line 1: this is not a graph file: it is neither PipeDream's graph.txt",
        ),
        ("a.txt", b"\xff\xfe\x00", "a.txt, line 1: this is not text"),
        ("a.txt", b"  node1 -- node2\n", "a.txt, line 1: the edge dangles: node1 is not described"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_graph(str(tmp_path / name))

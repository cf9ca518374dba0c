"""Outputs are looked at before any work, and left as they are."""

from pathlib import Path

import pytest

from jvpipe.cli.outputs import check_outputs, writing


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    check_outputs(
        {"--json": str(old), "--timeline": str(new), "--figure": None},
        {"--graph": str(tmp_path / "graph")},
    )
    assert (old.read_text(), sorted(tmp_path.iterdir())) == ("kept", [old])


def test_a_link_to_a_file_that_is_yet_to_be_is_left_as_it_is(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to("later.json")
    check_outputs({"--json": str(link)})
    assert (link.readlink(), list(tmp_path.iterdir())) == (Path("later.json"), [link])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("FOLDER", "--json FOLDER: this is a folder: give the path of a file"),
        ("FOLDER/a/b", "--json FOLDER/a/b: there is no folder FOLDER/a: make it"),
        ("FOLDER/graph/b", "--json FOLDER/graph/b: there is no folder FOLDER/graph: make it"),
        ("FOLDER/graph", "--json FOLDER/graph: --graph names the same file; give another path"),
        (
            "FOLDER/" + 300 * "x",
            "the file cannot be written (File name too long): give another path",
        ),
        ("FOLDER/\0", "the file cannot be written (embedded null byte): give another path"),
    ],
)
def test_what_cannot_be_written_is_named(path: str, message: str, tmp_path: Path) -> None:
    graph = tmp_path / "graph"
    graph.write_text("kept")
    with pytest.raises(ValueError, match="--json") as caught:
        check_outputs({"--json": path.replace("FOLDER", str(tmp_path))}, {"--graph": str(graph)})
    assert message.replace("FOLDER", str(tmp_path)) in str(caught.value)
    assert (graph.read_text(), list(tmp_path.iterdir())) == ("kept", [graph])


def test_an_error_while_writing_names_the_output(tmp_path: Path) -> None:
    named = r"^--json .*: the file cannot be written \(Is a directory\)$"
    with pytest.raises(OSError, match=named), writing("--json", str(tmp_path)) as path:
        path.write_text("")

"""Command lines of `python -m jvpipe.plan` that chance wrote, on graph files that chance
damaged.
"""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from jvpipe.cli.plan_command import main
from tests.profiles.test_operator_graph import operator_graph

GRAPH = """\
node1 -- Input -- forward_compute_time=5.0, backward_compute_time=0.0, activation_size=0.0, parameter_size=0.0
node2 -- Linear(4) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=[9.0; 4], parameter_size=64.0
node3 -- ReLU -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=100.0, parameter_size=0.0
node4 -- Linear(4) -- forward_compute_time=2.0, backward_compute_time=4.0, activation_size=100.0, parameter_size=64.0
\tnode1 -- node2
\tnode2 -- node3
\tnode2 -- node4
\tnode3 -- node4
"""
CLUSTER = """\
devices_per_machine = 2
machines = 2
host_memory_bytes = "256GiB"
device = "a100-40gb"
[host]
bytes_per_s = 12e9
latency_s = 10e-6
[peer]
bytes_per_s = 12e9
[network]
bytes_per_s = 1e9
"""
NUMBERS = [
    "1e308",
    "-1",
    "nan",
    "inf",
    "1e-320",
    "0",
    "1" + 400 * "0",
    "9" * 5000,
    "",
    "x",
    "1e15",
    "true",
    "[1; x]",
]
SIGNS = [
    "",
    "\0",
    "\ufeff",
    "é",
    "\r\n",
    " -- ",
    "=",
    ",",
    "[",
    "}",
    '"',
    "\t",
    "\tnode4 -- node1\n",
    "NaN",
]
VALUES = {  # the first of each are lawful
    "--stages": (["1", "2", "3"], ["0", "-1", "100", "99999999999999999999"]),
    "--schedule": (["gpipe", "1f1b", "pipedream", "2bw", "pipemare", "xpipe"], ["", "2b", "1F1B"]),
    "--planner": (
        ["even", "torchgpipe", "gpipe", "pipedream", "dapple", "vpipe", "adapipe", "jvpipe"],
        ["", "x"],
    ),
    "--compare": (["all", "even,jvpipe"], ["", ",", "even, jvpipe"]),
    "--microbatches": (["1", "3", "8", "64"], ["0", "-5", "10000000000"]),
    "--memory-limit": (
        ["16GiB", "600B", "300", "9"],
        ["0", "-5", "nan", "1" + 400 * "0", "9" * 30 + "TiB", "1e9"],
    ),
    "--batch-size": ([], ["0", "-8", "64"]),
    "--size": ([], ["mini", ""]),
    "--json": (["FOLDER/plan.json"], ["", "FOLDER", "/nowhere/x.json", "\0", "GRAPH"]),
    "--timeline": (["FOLDER/timeline.json"], ["", "FOLDER", "/nowhere/x.json"]),
    "--figure": ([], ["", "FOLDER", "FOLDER/x", "FOLDER/x.txt", "/nowhere/x.png"]),
}


def damaged(chance: random.Random, text: str) -> str:
    """A text with a few numbers, signs or lines that do not belong."""
    for _ in range(chance.choice([1, 1, 2, 4])):
        kind, at = chance.randrange(6), chance.randrange(len(text) + 1)
        numbers, lines = list(re.finditer(r"-?\d+(\.\d+)?", text)), text.splitlines(keepends=True)
        if kind <= 2 and numbers:
            number = chance.choice(numbers)
            text = text[: number.start()] + chance.choice(NUMBERS) + text[number.end() :]
        elif kind == 3:
            text = text[:at] + chance.choice(SIGNS) + text[at + chance.choice([0, 0, 5]) :]
        elif kind == 4 and lines:
            text = "".join([*lines, chance.choice(lines)])
        elif kind == 5 and chance.random() < 0.3:
            text = text[:at]
    return text


def command_line(chance: random.Random, folder: Path) -> list[str]:
    """Options that are mostly lawful, and the files that they name."""
    raw = operator_graph(2, chance.randrange(99))
    text = chance.choice([GRAPH, json.dumps(raw, indent=1)])
    graph, cluster = folder / "graph", folder / "cluster.toml"
    graph.write_text(damaged(chance, text) if chance.random() < 0.6 else text)
    cluster.write_text(damaged(chance, CLUSTER) if chance.random() < 0.6 else CLUSTER)
    options = ["--graph", str(graph)]
    if chance.random() < 0.3:
        options += ["--hardware", str(cluster)]
    for name, (lawful, unlawful) in VALUES.items():
        if chance.random() < 0.04:
            options += [name, chance.choice(unlawful)]
        elif lawful and chance.random() < (0.1 if name in ("--compare", "--timeline") else 0.5):
            options += [name, chance.choice(lawful)]
    return [
        option.replace("FOLDER", str(folder)).replace("GRAPH", str(graph)) for option in options
    ]


def trial(options: Sequence[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Runs a command line, which answers with a plan, or in one line."""
    code, said = main(options), capsys.readouterr()
    start = {0: "", 1: "no plan: ", 2: "error: "}[code]
    assert said.err.startswith(start), options
    assert said.err.count("\n") == (code > 0), options
    assert not re.search(r"\b(nan|inf)\b", said.out), options
    return code


def test_every_command_line_is_answered_with_a_plan_or_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(7)
    codes = [trial(command_line(chance, tmp_path), capsys) for _ in range(200)]
    assert min(codes.count(code) for code in (0, 1, 2)) > 10, "chance must come to all three"

"""Tasks: what a schedule orders per stage, and what it is lowered to per device."""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

_TEXT = re.compile(r"(\d+)([A-Z]+)(\d+)")


class Task(NamedTuple):
    """One action of one stage on one micro-batch.

    Kinds: F forward, B backward. The text form is that of torch.distributed.pipelining.

    >>> str(Task(2, "F", 0)), Task.parse("1B3")
    ('2F0', Task(stage=1, kind='B', microbatch=3))
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> "Task":
        """Reads the text form."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"'{text}' is not a task: write stage, kind and micro-batch, such as 2F0")
        return Task(int(match[1]), match[2], int(match[3]))


TaskLists = tuple[tuple[Task, ...], ...]


def write_csv(path: str | Path, lists: TaskLists) -> None:
    """Writes task lists, a line per stage, as torch.distributed.pipelining reads them."""
    with Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([[str(task) for task in row] for row in lists])


def read_csv(path: str | Path) -> TaskLists:
    """Reads task lists; empty cells (idle slots) are passed over."""
    with Path(path).open(newline="") as file:
        return tuple(tuple(Task.parse(cell) for cell in row if cell.strip()) for row in csv.reader(file))


RowKind = Literal[
    "FEED",
    "F",
    "R",
    "E",
    "ZERO",
    "B",
    "SEND",
    "MOVE",
    "OUT",
    "FREE",
    "IN",
    "LOSS",
    "U",
    "WEIGHT",
    "SHIFT",
    "SETTLE",
    "DROP",
]


COPIES = frozenset({"FEED", "SEND", "MOVE", "OUT", "FREE", "IN", "DROP"})
"""Kinds of rows that run no program."""


@dataclass(frozen=True, slots=True)
class Row:
    """A lowered task: what the controller dispatches, one program or one copy.

    FEED brings a batch leaf from the host, F and B are a layer's forward and backward, R a forward that runs again,
    E one without residuals, ZERO makes a device's gradient accumulators, SEND copies to another device, MOVE what
    belongs to a layer that changes places, OUT to the host, IN back from it, FREE waits until a copy is done and ends
    its source, LOSS sums the losses, U is a piece of
    the update. In an asynchronous stream WEIGHT sums the weights of an update's micro-batches, SHIFT predicts or
    corrects weights, SETTLE notes what an update did, DROP ends what nobody will read. `reads`, `writes` and `frees`
    are ids in the buffer table; a buffer both read and written is updated in place. `program` says which program of
    which layer (or piece) runs.
    """

    kind: RowKind
    device: int
    stage: int
    layer: int
    microbatch: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...] = ()
    program: int = 0

    def __str__(self) -> str:
        where = f"{self.stage}{self.kind}{self.microbatch}" if self.microbatch >= 0 else f"{self.stage}{self.kind}"
        return f"{where}[layer {self.layer}]" if self.layer >= 0 else where


def text(tasks: Sequence[Task]) -> str:
    """Tasks on one line.

    >>> text([Task(0, "F", 0), Task(0, "B", 0)])
    '0F0 0B0'
    """
    return " ".join(map(str, tasks))

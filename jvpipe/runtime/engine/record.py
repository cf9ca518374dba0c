"""The record of a step's times, and the start and end of each row, which are read from it.

A row is a program or a copy. Its end is observed (monitor.py). Its start is computed. It is the
latest of three times: when its queue was free, when its inputs were ready, and when it was
dispatched. In the picture, time runs to the right, and each line is a queue: rows that run one
after another, because they use the same device or the same link:

    device 0   [  F0  ][  F1  ]         [ B0 ]      programs: two forwards, one backward
    link 0             [ OUT 0 ]  [IN 0]            copies: a value of F0 to the host and back

Between F1 and B0 the device is idle. If B0 waited only for the copy IN 0, the idle time counts as
exposed: in this part of the copy, the device does no other work.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from jvpipe.ir.buffers import Lowered
from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.rows import Row
from jvpipe.runtime.engine.binding import Instruction

WATCHED = frozenset(kind for kind, info in KINDS.items() if info.watched)
"""Kinds of copies that the monitor times."""


@dataclass(eq=False)
class Record:
    """The times at which the rows (programs and copies) of one step were dispatched and ended.

    All times are in seconds, as `time.perf_counter` gives them.

    Args:
        lowered: the rows.
        before: for each queue, the end of its last row before the step.
        moves: the record of the moves of layers just before this step, if there were any.
        instructions: the instructions that the rows are bound to, for pictures.
        held_bytes: the bytes in each memory before the step, for pictures.
        named: whether a profile labels each wait with the name of its row.
        flows: whether rows may work on micro-batches of earlier steps.

    Attributes:
        order: the numbers of the rows in the order of dispatch.
        times: by row, its start and end; empty until the record is read (`Monitor.read`).
        after: for each queue, the end of its last row of the step.
        dispatched: by row, when it was dispatched.
        ended: by row, when its marker came. A marker is an array that comes when the row has run.
        passed: for each queue, an event that is set once all its rows of the step have ended.
        closed: whether all rows have been dispatched.
    """

    lowered: Lowered
    before: list[float]
    moves: "Record | None" = None
    instructions: Sequence[Instruction] = ()
    held_bytes: Sequence[int] = ()
    named: bool = False
    flows: bool = False
    order: list[int] = field(default_factory=list)
    times: dict[int, tuple[float, float]] = field(default_factory=dict)
    dispatched: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    closed: bool = False

    def __post_init__(self) -> None:
        self.after = [0.0] * len(self.before)
        self.passed = [threading.Event() for _ in self.before]


@dataclass
class Reading:
    """The times found so far, while the rows of a record are read in their order.

    Attributes:
        free_s: for each queue, when its last row so far ended.
        made_s: for each buffer, when it was made.
        fetched: the buffers that came back from the host.
        waiting: the devices that had a FREE since their last program. A FREE is a row that waits
            until a copy has arrived, and then frees the buffer that was copied.
        exposed_s: by device, the seconds for which copies to the host and back kept it idle.
    """

    free_s: list[float]
    made_s: dict[int, float] = field(default_factory=dict)
    fetched: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    exposed_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def pass_row(self, record: Record, index: int, place: int) -> tuple[float, float]:
        """Returns the start and end of a row, and notes its times for the rows after it.

        Rows must be passed in the order of the lowered step, because each needs earlier times.

        Args:
            record: the record of the step.
            index: the number of the row.
            place: the number of the row's queue.
        """
        row = record.lowered.rows[index]
        inputs_s = max((self.made_s.get(b, 0.0) for b in row.reads), default=0.0)
        # A row without a marker, such as a FREE, ends as soon as its inputs have come.
        end_s = record.ended.get(index, inputs_s)
        self.made_s |= dict.fromkeys(row.writes, end_s)
        if row.kind is Kind.FREE:
            self.waiting.add(row.place)
        if index not in record.ended:
            return inputs_s, end_s
        dispatched_s = record.dispatched[index]
        start_s = min(end_s, max(self.free_s[place], inputs_s, dispatched_s))
        if row.kind is Kind.IN:
            self.fetched.update(row.writes)
        elif row.kind not in WATCHED:
            self._expose(row, place, start_s, dispatched_s)
        self.free_s[place] = end_s
        return start_s, end_s

    def _expose(self, row: Row, place: int, start_s: float, dispatched_s: float) -> None:
        """Adds the time by which copies to and from the host have delayed a program, if any.

        It is the time between the computed start and the start that would have been possible
        without these copies.

        Args:
            row: the row of the program.
            place: the number of its queue.
            start_s: when it started.
            dispatched_s: when it was dispatched.
        """
        others = [self.made_s.get(b, 0.0) for b in row.reads if b not in self.fetched]
        inputs_s = max(others, default=0.0)
        # A FREE waits for a copy, and so delays the dispatch of later rows. Without the copy, the
        # program might have been dispatched earlier. So its time of dispatch does not count here.
        asked_s = 0.0 if row.place in self.waiting else dispatched_s
        possible_s = max(self.free_s[place], inputs_s, asked_s)
        if self.free_s[place]:  # 0 before the first program of a run, which waits for no copy
            self.exposed_s[place] += max(0.0, start_s - possible_s)
        self.waiting.discard(row.place)

"""Swapped values in the lowered lists: when they go out, when their room is free, when they come back.

F<m>, B<m> as in the lists; `o<m>` copies what F<m> left to the host, `f<m>` waits for that and frees it, `i<m>` fetches
it back. A stage holds at most two micro-batches of swapped values: one that is used and one that is on its way.

    1F1B     ... F5 o5 B2  f5 i3 F6 o6 B3  f6 i4 F7 o7 B4 ...
    GPipe    F0 o0 F1 o1 f0 F2 o2 f1 F3  B...  i1 B0 i2 B1 ...

A micro-batch whose backward follows its forward at once stays.
"""

from collections.abc import Callable
from itertools import pairwise

from jvpipe.ir.buffers import HOST
from jvpipe.ir.task import RowKind, Task, TaskLists
from jvpipe.schedules.emit import Emitter, Key


class Swaps:
    """The swapped values of all stages while their rows are written."""

    def __init__(self, pen: Emitter, lists: TaskLists, keys_of: Callable[[Task], list[Key]]) -> None:
        self._pen, self._keys_of = pen, keys_of
        self._layer: dict[tuple[int, int], int] = {}  # the first of a stage under a micro-batch's plan
        self._next = {task: following for tasks in lists for task, following in pairwise(tasks)}
        self._keys: dict[tuple[int, int], list[Key]] = {}  # what each stage and micro-batch has swapped out
        self._leaving: list[list[int]] = [[] for _ in lists]  # micro-batches on their way out
        self._back: list[set[int]] = [set() for _ in lists]  # those that came back

    def before(self, task: Task) -> None:
        """What must happen before a task: its own values come back, the next one's start to, room is made."""
        s, kind, m = task
        if kind == "B":
            self._fetch(s, m)
        following = self._next.get(task)
        if following is not None and following.kind == "B" and (s, following.microbatch) in self._keys:
            self._fetch(s, following.microbatch)
        elif kind == "F" and self._leaving[s] and self._rests(task):
            while len(self._leaving[s]) + len(self._back[s]) > 1 and self._leaving[s]:
                self._free(s)

    def after(self, task: Task) -> None:
        """What happens after a task: what a forward left goes out."""
        s, kind, m = task
        if kind == "B":
            self._back[s].discard(m)
        elif self._rests(task) and (keys := self._keys_of(task)):
            self._keys[s, m] = keys
            self._layer[s, m] = next(layer for layer, stage in self._pen.stage.items() if stage == s)
            self._leaving[s].append(m)
            for key in keys:
                source = self._pen.buffers[self._pen.ids[key]]
                host = self._pen.new(("host", *key), source.owner, source.bytes, HOST)
                self._emit("OUT", s, m, key, [self._pen.ids[key]], [host])

    def _rests(self, task: Task) -> bool:
        return self._next.get(task) != Task(task.stage, "B", task.microbatch)

    def _free(self, s: int) -> None:
        m = self._leaving[s].pop(0)
        for key in self._keys[s, m]:
            self._emit("FREE", s, m, key, [self._pen.ids[key], self._pen.ids["host", *key]], [])

    def _fetch(self, s: int, m: int) -> None:
        if (s, m) not in self._keys or m in self._back[s]:
            return
        while self._leaving[s]:
            self._free(s)
        self._back[s].add(m)
        for key in self._keys[s, m]:
            source = self._pen.buffers[self._pen.ids[key]]
            back = self._pen.new(("back", *key), source.owner, source.bytes, source.device)
            self._emit("IN", s, m, key, [self._pen.ids["host", *key]], [back])
            self._pen.moved[key] = ("back", *key)

    def _emit(self, kind: RowKind, s: int, m: int, key: Key, reads: list[int], writes: list[int]) -> None:
        d = self._pen.buffers[self._pen.ids[key]].device
        self._pen.emit(kind, self._layer[s, m], m, reads, writes, device=d)

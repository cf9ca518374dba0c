"""A second simulator of stages, to compare with: it watches a clock tick. Seconds are whole
numbers.

Each tick, devices start the next task of their list when what it needs is there; transfers that
became ready join the queue of each of their links, and start when they are first in all of them.
"""

from collections.abc import Sequence

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import TaskLists
from jvpipe.simulate.stages import StageLoad

Name = tuple[int, str, int]


class Ticks:
    """Runs at once; `start` and `end` say when each task did."""

    def __init__(self, lists: TaskLists, loads: Sequence[StageLoad], *, shared: bool) -> None:
        self.last, self.loads, self.shared = len(lists) - 1, loads, shared
        self.order = [[(t.kind, t.microbatch) for t in tasks] for tasks in lists]
        self.start: dict[Name, int] = {}
        self.end: dict[Name, int] = {}
        transfers = [
            name
            for s, tasks in enumerate(self.order)
            for k, m in tasks
            for name in self._around(s, k, m)
        ]
        programs = [
            [(s, part, m) for kind, m in tasks for part in ("RB" if kind == "B" else "F")]
            for s, tasks in enumerate(self.order)
        ]
        queues: dict[str, list[Name]] = {}
        self.now = 0
        while transfers or any(programs):
            assert self.now < 10_000, "it never ends"
            waiting: list[Name] = []
            changed = True
            while changed:
                changed = False
                for tasks in programs:
                    while tasks and self._free(tasks[0][0]) and self._ready(tasks[0]):
                        self._begin(tasks.pop(0))
                        changed = True
                for name in [n for n in transfers if n not in waiting and self._ready(n)]:
                    changed = True
                    if self._seconds(name):
                        waiting.append(name)
                    else:
                        transfers.remove(name)
                        self._begin(name)
            for name in sorted(waiting, key=transfers.index):
                for link in self._links(name):
                    if name not in queues.setdefault(link, []):
                        queues[link].append(name)
            for name in waiting:
                mine = [queues[link] for link in self._links(name)]
                if all(queue[0] == name for queue in mine):
                    transfers.remove(name)
                    self._begin(name)
            self.now += 1
            for link, queue in queues.items():
                queues[link] = [n for n in queue if not self._ended(n)]

    def _begin(self, name: Name) -> None:
        self.start[name] = self.now
        self.end[name] = self.now + self._seconds(name)

    def _ended(self, name: Name) -> bool:
        return name in self.end and self.end[name] <= self.now

    def _free(self, s: int) -> bool:
        return all(self._ended(name) for name in self.start if name[0] == s and name[1] in "FRB")

    def _seconds(self, name: Name) -> int:
        load = self.loads[name[0]]
        return int(
            {
                "F": load.forward_s,
                "R": load.recompute_s,
                "B": load.backward_s,
                "OUT": load.out_s,
                "IN": load.in_s,
                "SEND": load.send_s,
                "RETURN": load.return_s,
            }[name[1]]
        )

    def _around(self, s: int, kind: str, m: int) -> list[Name]:
        swap = "OUT" if kind == "F" else "IN"
        send = (
            [(s, "SEND", m)]
            if kind == "F" and s < self.last
            else [(s, "RETURN", m)]
            if kind == "B" and s
            else []
        )
        return [(s, swap, m)] * self._swapped(s, m) + send

    def _swapped(self, s: int, m: int) -> bool:
        """What leaves: all but what the next task needs."""
        order = self.order[s]
        return order.index((Kind.B, m)) != order.index((Kind.F, m)) + 1

    def _links(self, name: Name) -> list[str]:
        s, part, _ = name
        if part in ("OUT", "IN"):
            return [f"host {s}"]
        to = s + 1 if part == "SEND" else s - 1
        return [f"host {s}", f"host {to}"] if self.shared else [f"{s} to {to}"]

    def _ready(self, name: Name) -> bool:
        s, part, m = name
        match part:
            case "F":
                before = [
                    n
                    for n in self._forwards(s, self.order[s].index((Kind.F, m)))
                    if self._swapped(s, n)
                ]
                room = len(before) < 2 or self._ended((s, "OUT", before[-2]))
                return room and (s == 0 or self._ended((s - 1, "SEND", m)))
            case "OUT" | "SEND":
                return self._ended((s, "F", m))
            case "RETURN":
                return self._ended((s, "B", m))
            case "IN":
                return self._ended((s, "OUT", m)) and self._may_come(s, m)
            case "R":
                return self._ended((s, "IN" if self._swapped(s, m) else "F", m))
            case _:
                return s == self.last or self._ended((s + 1, "RETURN", m))

    def _may_come(self, s: int, m: int) -> bool:
        """The backward before has begun, and the forwards before that one are out."""
        tasks = self.order[s][: self.order[s].index((Kind.B, m))]
        backwards = [i for i, (kind, _) in enumerate(tasks) if kind == "B"]
        if backwards and (s, "B", tasks[backwards[-1]][1]) not in self.start:
            return False
        until = (
            backwards[-1]
            if backwards
            else max(i for i, (kind, _) in enumerate(tasks) if kind == "F")
        )
        return all(
            self._ended((s, "OUT", n)) for n in self._forwards(s, until) if self._swapped(s, n)
        )

    def _forwards(self, s: int, until: int) -> list[int]:
        return [m for kind, m in self.order[s][:until] if kind == "F"]

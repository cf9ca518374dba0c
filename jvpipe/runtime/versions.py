"""The ledger of versions: which weights every forward and backward of every layer read, and what each update made.

A run that follows it, on one device and in any order that it allows, computes the same bits: `jvpipe.replay`.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jvpipe.ir.kinds import Kind
from jvpipe.ir.use import Use


@dataclass(frozen=True, slots=True)
class Reads:
    """The versions that a layer's forward and backward of a micro-batch read; None where that has not happened yet.

    `update` is the version that was made of the layer's weights when the micro-batch's gradients were applied.
    """

    forward: int
    backward: int | None
    update: int | None

    @property
    def staleness(self) -> int | None:
        """Updates between what the forward read and what was updated."""
        return None if self.update is None else self.update - 1 - self.forward


@dataclass
class VersionLedger:
    """The reads and updates of a run, in the order in which they were dispatched; a drain is a None.

    That of a run that was resumed in flight is not `complete`: it knows of the micro-batches in flight then, and of
    what came later.
    """

    _runs: list[tuple[Sequence[Use], int, int] | None] = field(default_factory=list)
    complete: bool = True

    def record(self, uses: Sequence[Use], microbatch: int, version: int) -> None:
        """Adds the uses of a step.

        Args:
            uses: numbered from the step's own start.
            microbatch: the number of the run's micro-batch from which they count.
            version: the version from which they count.
        """
        self._runs.append((uses, microbatch, version))

    def drained(self) -> None:
        """Notes that nothing is in flight any more: staleness begins anew."""
        self._runs.append(None)

    def uses(self) -> Iterator[Use]:
        """Everything that happened, numbered from the start of the run."""
        for run in self._runs:
            if run is not None:
                uses, microbatch, version = run
                yield from (use.moved(microbatch, version) for use in uses)

    def microbatches(self) -> Iterator[tuple[list[Use], bool]]:
        """The uses of each micro-batch, in their order; and whether nothing was in flight after it."""
        uses_of: dict[int, list[Use]] = {}
        drained = set()
        for run in self._runs:
            if run is None:
                drained.add(max(uses_of))
            else:
                uses, microbatch, version = run
                for use in uses:
                    uses_of.setdefault(use.microbatch + microbatch, []).append(
                        use.moved(microbatch, version)
                    )
        yield from ((uses_of[m], m in drained) for m in sorted(uses_of))

    def __getitem__(self, at: tuple[int, int]) -> Reads:
        """The reads of a layer and a micro-batch; KeyError if it has not passed there."""
        table = self.table()
        if at not in table:
            raise KeyError(f"micro-batch {at[1]} has not passed layer {at[0]}")
        return table[at]

    def table(self) -> dict[tuple[int, int], Reads]:
        """`Reads` by layer and micro-batch."""
        read: dict[Kind, dict[tuple[int, int], int]] = {Kind.F: {}, Kind.B: {}}
        made: dict[
            int, list[tuple[int, int]]
        ] = {}  # by layer, its updates: after which micro-batch, which version
        for use in self.uses():
            if use.kind is Kind.U:
                made.setdefault(use.layer, []).append((use.microbatch, use.version))
            else:
                read[use.kind][use.layer, use.microbatch] = use.version
        reads = {}
        for (layer, m), version in read[Kind.F].items():
            updates = made.get(layer, [])
            later = updates[bisect_left(updates, (m, 0)) :][:1]
            reads[layer, m] = Reads(
                version, read[Kind.B].get((layer, m)), later[0][1] if later else None
            )
        return reads

    def staleness(self, layers: int) -> tuple[int, ...]:
        """The staleness of each layer's last update; 0 before there was one."""
        made: dict[
            int, tuple[int, int]
        ] = {}  # by layer, the last update: its micro-batch, the version before it
        stale: dict[int, int] = {}
        for run in reversed(
            self._runs
        ):  # asked for at every step, so it looks no further back than it must
            uses, microbatch, version = run or ((), 0, 0)
            for use in reversed(uses):
                m, v = use.microbatch + microbatch, use.version + version
                if use.kind is Kind.U:
                    made.setdefault(use.layer, (m, v - 1))
                elif use.kind is Kind.F and use.layer in made and made[use.layer][0] == m:
                    stale.setdefault(use.layer, made[use.layer][1] - v)
            if len(stale) == layers:
                break
        return tuple(stale.get(layer, 0) for layer in range(layers))

    def to_json(self) -> Any:
        """For a checkpoint: all that happened to the micro-batches in flight, and to those of the last updates."""
        since = self._since()
        runs = [
            run
            and [
                [[u.kind, u.layer, u.microbatch, u.version, u.tied, u.shift] for u in run[0]],
                *run[1:],
            ]
            for run in self._runs[since:]
        ]
        return {"complete": self.complete and since == 0, "runs": runs}

    def _since(self) -> int:
        """The run that holds the oldest forward of the micro-batches of the last updates; all later ones are newer."""
        different = {
            id(run[0]): run[0] for run in self._runs if run is not None
        }.values()  # steps repeat themselves
        updated = {use.layer for uses in different for use in uses if use.kind is Kind.U}
        last: dict[int, int] = {}  # by layer, the micro-batch of its last update
        seen: set[int] = set()
        for i, run in reversed(list(enumerate(self._runs))):
            uses, microbatch, _ = run or ((), 0, 0)
            for use in reversed(uses):
                if use.kind is Kind.U:
                    last.setdefault(use.layer, use.microbatch + microbatch)
                elif use.kind is Kind.F and use.microbatch + microbatch <= last.get(use.layer, -1):
                    seen.add(use.layer)
            if updated and seen == updated:
                return i
        return 0

    @staticmethod
    def from_json(saved: Any) -> "VersionLedger":
        """From a checkpoint; once all runs were in it."""
        if isinstance(saved, list):
            saved = {"complete": True, "runs": saved}

        def use(values: Any) -> Use:
            kind, layer, m, version, tied, shift = values
            return Use(Kind(kind), layer, m, version, tuple((p, v) for p, v in tied), shift)

        runs: list[tuple[Sequence[Use], int, int] | None] = []
        for run in saved["runs"]:
            runs.append(run and (tuple(map(use, run[0])), run[1], run[2]))
        return VersionLedger(runs, saved["complete"])

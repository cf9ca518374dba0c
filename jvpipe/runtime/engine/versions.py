"""The ledger of versions: those that forwards and backwards read, and those that updates made.

The version of a layer's weights is the number of updates that they have had. A use (`Use`) is one
entry of the ledger. It says that a forward or backward of a layer read a version for a micro-batch,
or that an update after a micro-batch made a version. `jvpipe.replay` computes a run again from this
ledger, on one device and in another order, with bitwise identical results.

In a stream, whose pipeline is not emptied between steps, all steps are alike after the first few.
The ledger keeps the uses of such a step only once, with micro-batches and versions that count from
the start of the step. For each repetition it keeps two numbers: what to add to the micro-batches,
and what to add to the versions.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jvpipe.ir.kinds import Kind
from jvpipe.ir.use import Use


@dataclass(frozen=True, slots=True)
class Reads:
    """The versions of a layer's weights that a micro-batch read and made.

    Attributes:
        forward: the version that the forward read.
        backward: the version that the backward read; None if the backward has not run yet.
        update: the version that the update with the micro-batch's gradients made; None if this
            update has not run yet.
    """

    forward: int
    backward: int | None
    update: int | None

    @property
    def staleness(self) -> int | None:
        """The number of updates between the forward's version and the version that was updated."""
        return None if self.update is None else self.update - 1 - self.forward


_Run = tuple[Sequence[Use], int, int]
"""The uses of a step, and what to add to their micro-batches and to their versions."""


@dataclass
class VersionLedger:
    """The reads and updates of a run, in the order in which they were dispatched.

    Attributes:
        complete: whether the ledger goes back to the start of the run. After a change of the model,
            or in a run that was resumed from a checkpoint, it may begin later. A checkpoint in
            flight has the newest uses (`to_json`). After a resume, the ledger begins with them.
    """

    _runs: list[_Run | None] = field(default_factory=list)  # None stands for a drain
    complete: bool = True

    def record(self, uses: Sequence[Use], microbatch: int, version: int) -> None:
        """Adds the uses of a step.

        Args:
            uses: the uses, with micro-batches and versions that count from the start of the step.
            microbatch: the number, in the run, of the step's first micro-batch.
            version: the version at the start of the step.
        """
        self._runs.append((uses, microbatch, version))

    def drained(self) -> None:
        """Notes that the pipeline was drained: nothing is in flight any more."""
        self._runs.append(None)

    def uses(self) -> Iterator[Use]:
        """Yields all uses, with micro-batches and versions that count from the start of the run."""
        for run in self._runs:
            yield from _numbered(run)

    def microbatches(self) -> Iterator[tuple[list[Use], bool]]:
        """Yields, by ascending micro-batch, its uses and whether a drain followed it."""
        uses_of: dict[int, list[Use]] = {}
        drained = set()
        for run in self._runs:
            if run is None:
                drained.add(max(uses_of))
            for use in _numbered(run):
                uses_of.setdefault(use.microbatch, []).append(use)
        for m in sorted(uses_of):
            yield uses_of[m], m in drained

    def __getitem__(self, at: tuple[int, int]) -> Reads:
        """Returns the reads at (layer, micro-batch); KeyError if that forward has not run."""
        table = self.table()
        if at not in table:
            raise KeyError(f"micro-batch {at[1]} has not passed layer {at[0]}")
        return table[at]

    def table(self) -> dict[tuple[int, int], Reads]:
        """Returns the reads by layer and micro-batch."""
        # By layer and micro-batch, the version that the forward or the backward read.
        read: dict[Kind, dict[tuple[int, int], int]] = {Kind.F: {}, Kind.B: {}}
        # By layer, its updates: the micro-batch after which each came, and the version it made.
        updates: dict[int, list[tuple[int, int]]] = {}
        for use in self.uses():
            if use.kind is Kind.U:
                of_layer = updates.setdefault(use.layer, [])
                of_layer.append((use.microbatch, use.version))
            else:
                read[use.kind][use.layer, use.microbatch] = use.version
        reads = {}
        for (layer, m), version in read[Kind.F].items():
            of_layer = updates.get(layer, [])
            # Updates are in ascending order of micro-batches. The first one at or after a
            # micro-batch applies the micro-batch's gradients.
            at = bisect_left(of_layer, (m, 0))
            update = of_layer[at][1] if at < len(of_layer) else None
            back = read[Kind.B].get((layer, m))
            reads[layer, m] = Reads(version, back, update)
        return reads

    def staleness(self, layers: int) -> tuple[int, ...]:
        """Returns the staleness of each layer's last update; 0 before the first update.

        Args:
            layers: how many layers the model has.
        """
        stale, _ = self._newest(layers)
        return tuple(stale.get(layer, 0) for layer in range(layers))

    def _newest(self, layers: int) -> tuple[dict[int, int], int]:
        """Finds the staleness of each layer's last update, and how far back it had to look for it.

        Every step may call this method, so it reads the ledger from the end. It stops
        once each of `layers` layers has its last update and the forward of that micro-batch. So its
        cost does not grow with the length of the run.

        Args:
            layers: how many layers have an update.

        Returns:
            The staleness by layer, and the index in `_runs` of the step where the search ended.
        """
        # By layer, the last update: its micro-batch, and the version that it changed.
        updated: dict[int, tuple[int, int]] = {}
        stale: dict[int, int] = {}
        # The ledger is read backwards, so a layer's last update comes before the forward of the
        # same micro-batch.
        for i in reversed(range(len(self._runs))):
            uses, microbatch, version = self._runs[i] or ((), 0, 0)
            for use in reversed(uses):
                m = use.microbatch + microbatch
                v = use.version + version
                if use.kind is Kind.U:
                    updated.setdefault(use.layer, (m, v - 1))
                elif use.kind is Kind.F and use.layer in updated:
                    last, before = updated[use.layer]
                    if m == last:
                        stale.setdefault(use.layer, before - v)
            if len(stale) == layers:
                return stale, i
        return stale, 0

    def to_json(self) -> Any:
        """Returns the newest uses, for a checkpoint.

        The staleness of a layer's last update needs the forward of that update's micro-batch. So
        the saved steps begin with the oldest of these forwards. Micro-batches in flight have later
        forwards, so their uses are saved, too, and the staleness of later steps can be found.
        """
        since = self._since()
        runs: list[list[Any] | None] = []
        for run in self._runs[since:]:
            if run is None:
                runs.append(None)
                continue
            uses, microbatch, version = run
            runs.append([[_fields(use) for use in uses], microbatch, version])
        return {"complete": self.complete and since == 0, "runs": runs}

    def _since(self) -> int:
        """Returns the index of the step with which the uses for a checkpoint begin.

        From this step on, the ledger has each layer's last update and the forward of the same
        micro-batch. Micro-batches pass in order, so those in flight have later forwards.
        """
        # Many steps share one sequence of uses. Looking at each sequence once is enough.
        different = {id(run[0]): run[0] for run in self._runs if run is not None}
        updated: set[int] = set()
        for uses in different.values():
            updated |= {use.layer for use in uses if use.kind is Kind.U}
        _, since = self._newest(len(updated))
        return since if updated else 0

    @staticmethod
    def from_json(saved: Any) -> "VersionLedger":
        """Returns the ledger that `to_json` saved.

        In older checkpoints, only the list of steps was saved.
        """
        if isinstance(saved, list):
            saved = {"complete": True, "runs": saved}
        runs: list[_Run | None] = []
        for run in saved["runs"]:
            if run is None:
                runs.append(None)
                continue
            fields, microbatch, version = run
            runs.append((tuple(map(_use, fields)), microbatch, version))
        return VersionLedger(runs, saved["complete"])


def _numbered(run: _Run | None) -> Iterator[Use]:
    """Returns the uses of an entry of `_runs`, numbered from the start of the run."""
    uses, microbatch, version = run or ((), 0, 0)
    return (use.moved(microbatch, version) for use in uses)


def _fields(use: Use) -> list[Any]:
    """Returns the fields of a use as JSON can hold them.

    Checkpoints contain them, so their order must never change.
    """
    return [
        use.kind,
        use.layer,
        use.microbatch,
        use.version,
        use.tied,
        use.shift,
    ]


def _use(fields: Sequence[Any]) -> Use:
    """Returns the use with the given fields, as `_fields` saved them."""
    kind, layer, m, version, tied, shift = fields
    return Use(
        Kind(kind),
        layer,
        m,
        version,
        tuple((p, v) for p, v in tied),
        shift,
    )

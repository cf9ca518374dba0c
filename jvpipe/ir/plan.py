"""A plan: which layers run on which devices, the fates of tensors, and the schedule.

A fate says what happens to a tensor between the forward that makes it and the backward that reads
it: it is kept, swapped to the host, or recomputed. A plan is plain data: it can be compared, saved
as JSON, and exported to other systems. Under a synchronous schedule, plans with equal replicas
compute the same values, only at other places and times.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from jvpipe.ir.outline import Outline
from jvpipe.util.brief import brief
from jvpipe.util.given import (
    checked_flag,
    checked_path,
    is_whole,
    several,
    shown_path,
    whole_numbers,
)
from jvpipe.util.names import did_you_mean


class Fate(StrEnum):
    """The fates of a tensor between its forward and its backward."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class FateInfo:
    """The properties of one fate: a line of the table `FATES`.

    Attributes:
        saved: whether the forward's program yields the tensor for the backward.
        away: whether the tensor lies on the host between forward and backward.
        again: for an edge, whether the layer that makes the edge runs its forward once more.
    """

    saved: bool
    away: bool
    again: bool


FATES: dict[Fate, FateInfo] = {
    Fate.KEEP: FateInfo(saved=True, away=False, again=False),
    Fate.SWAP: FateInfo(saved=True, away=True, again=False),
    Fate.RECOMPUTE: FateInfo(saved=False, away=False, again=True),
}
"""The properties of each fate; docs/adding_a_fate.md lists what else a new fate changes."""
STATE_FATES = tuple(fate for fate, info in FATES.items() if info.saved)
"""The fates of the optimizer's state, which cannot be recomputed, because no forward makes it."""
MOST_LAYERS = 1_000_000
"""The largest number of layers that is accepted from a user. No model has so many layers."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on one device, or on several devices that share the work.

    Attributes:
        layers: the numbers of the layers, in ascending order.
        devices: indices into the pipeline's devices. If there are several, each is a replica of the
            stage. Replicas either divide the examples of each micro-batch, or take turns with whole
            micro-batches.
        fates: the fates of the stage's tensors, by name. A tensor that is not named is kept.
        state_fates: the fates of the optimizer's state between updates, by the path of the
            parameter that the state belongs to.
    """

    layers: tuple[int, ...]
    devices: tuple[int, ...]
    fates: Mapping[str, Fate] = field(default_factory=dict)
    state_fates: Mapping[str, Fate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages of a pipeline, in the order of the forward, and the schedule that runs them.

    Attributes:
        stages: the stages.
        schedule: the name of the schedule that the plan was made for; None if it fits any.
        planner: the name of the planner that made the plan.
        keep_last: whether the last micro-batch of a step keeps all tensors, whatever their fates.
        splits: the positions, among the model's main equations (`trace/sorted_equations.py`),
            before which traced layers are cut in two. The stages count both parts as layers.
        tasks: the tasks of each device in order, as text; empty if the schedule determines them.
        unsplit: the layers whose backwards stay whole although the schedule splits backwards.
        outline: what an export must know about the model. The outline is not part of the
            plan: it is neither compared nor saved.

    >>> Plan.from_cuts([5, 2, 2]).stages[1].layers
    (5, 6)
    """

    stages: tuple[Stage, ...]
    schedule: str | None = None
    planner: str = "given"
    keep_last: bool = False
    splits: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    unsplit: tuple[int, ...] = ()
    outline: Outline | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def from_cuts(
        layers: Sequence[int], devices: Sequence[int | Sequence[int]] | None = None, **kwargs: Any
    ) -> "Plan":
        """Makes a plan from the number of layers of each stage.

        Args:
            layers: the number of layers of each stage.
            devices: for each stage, one device or several; by default, stage s runs on device s.
            kwargs: other fields of the plan.

        Raises:
            ValueError: a stage has no layer, or the lengths of `layers` and `devices` differ.

        >>> Plan.from_cuts([2, 1], devices=[(0, 1), 2]).stages[0].devices
        (0, 1)
        """
        # Two cuts of nine layers, as [5, 2, 2] gives them:
        #
        #     layers   0 1 2 3 4 | 5 6 | 7 8
        #     stage        0     |  1  |  2
        #
        # A single number is one stage. An empty list is refused below.
        counts = several(layers) or [layers]
        if not all(is_whole(n) and n >= 1 for n in counts):
            raise ValueError(
                f"every stage needs at least one layer, but the cuts are {brief(layers)}: "
                "give the number of layers of each stage, such as [5, 2, 2]"
            )
        layers = [int(n) for n in counts]
        # A stage lists its layers one by one, so a mistyped number could fill the memory.
        if sum(layers) > MOST_LAYERS:
            raise ValueError(
                f"the cuts {brief(layers)} have {sum(layers)} layers in total: use at most "
                f"{MOST_LAYERS}"
            )
        where = several(range(len(layers)) if devices is None else devices)
        if where is None:
            raise ValueError(
                "devices must be one device or several for each stage, such as [(0, 1), 2], not "
                f"{brief(devices)}"
            )
        if len(where) != len(layers):
            raise ValueError(
                f"{len(layers)} stages need {len(layers)} entries in devices, but it has "
                f"{len(where)}"
            )
        stages = []
        for s, (first, end) in enumerate(pairwise([0, *accumulate(layers)])):
            places = several(where[s]) or [where[s]]
            numbers = whole_numbers(f"the devices of stage {s}", places)
            stages.append(Stage(tuple(range(first, end)), numbers))
        return Plan(tuple(stages), **kwargs)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The number of layers per stage."""
        return tuple(len(stage.layers) for stage in self.stages)

    @property
    def device_count(self) -> int:
        """The number of devices that the plan needs.

        Raises:
            ValueError: the plan has no stage with a device.

        >>> Plan.from_cuts([1, 1, 1], devices=[0, 1, 0]).device_count
        2
        """
        # Indices count from 0. A device below the highest one counts even if no stage is on it.
        if not any(self.replicas):
            raise ValueError(
                f"the plan's stages {self.stages} have no devices: give at least one stage"
            )
        return 1 + max(device for stage in self.stages for device in stage.devices)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of devices of each stage."""
        return tuple(len(stage.devices) for stage in self.stages)

    @property
    def replicated(self) -> bool:
        """True if a stage runs on several devices."""
        return any(count > 1 for count in self.replicas)

    def on(self, devices: Sequence[Sequence[int]]) -> "Plan":
        """Returns a plan with the same stages on other devices, one or several per stage.

        >>> Plan.from_cuts([2, 1]).on([(0, 1), (2,)]).replicas
        (2, 1)
        """
        stages = tuple(
            replace(stage, devices=tuple(places))
            for stage, places in zip(self.stages, devices, strict=True)
        )
        return replace(self, stages=stages)

    def turn(self, m: int) -> "Plan":
        """Returns the plan of micro-batch `m` if the devices of a stage take turns.

        If they do, each device runs whole micro-batches. The returned plan has one device per
        stage: the one whose turn it is.

        >>> [Plan.from_cuts([2, 1], devices=[(0, 1), 2]).turn(m).stages[0].devices for m in range(3)]
        [(0,), (1,), (0,)]
        """
        if not self.replicated:
            return self
        return self.on([(stage.devices[m % len(stage.devices)],) for stage in self.stages])

    def stage_of(self, layer: int) -> int:
        """Returns the stage that a layer runs in."""
        return next(s for s, stage in enumerate(self.stages) if layer in stage.layers)

    def with_schedule(self, schedule: str) -> "Plan":
        """Returns the plan for a given schedule.

        If the schedule differs from that of the plan, the plan's task lists are dropped, because
        they belong to its old schedule.

        Raises:
            ValueError: `schedule` is not a name.
        """
        if not isinstance(schedule, str):
            raise ValueError(
                f"schedule must be a name such as '1f1b', not {brief(schedule)}: of a schedule "
                "with options, give its .name"
            )
        return self if schedule == self.schedule else replace(self, schedule=schedule, tasks=())

    def under(self, schedule: str) -> "Plan":
        """Returns the plan for a schedule; refuses a plan that was made for another schedule.

        Raises:
            ValueError: the plan was made for another schedule.

        >>> Plan.from_cuts([2, 1]).under("gpipe").schedule
        'gpipe'
        """
        if self.schedule not in (None, schedule):
            raise ValueError(
                f"the plan was made for schedule '{self.schedule}', but the pipeline's schedule is "
                f"'{schedule}': give schedule='{self.schedule}', or give "
                f"plan.with_schedule('{schedule}'), which drops the order of tasks"
            )
        return self.with_schedule(schedule)

    def without_fates(self) -> "Plan":
        """Returns the plan with every tensor kept between forward and backward."""
        return replace(self, stages=tuple(replace(stage, fates={}) for stage in self.stages))

    def check(self, layers: int, devices: int) -> None:
        """Checks that the plan fits a model and a number of devices.

        Raises:
            ValueError: the stages do not have all layers once and in order, a device or a fate does
                not exist, or replicas share a device.
        """
        placed = [layer for stage in self.stages for layer in stage.layers]
        if missing := sorted(set(range(layers)) - set(placed)):
            raise ValueError(
                f"the plan lacks layers {missing}: the model has layers 0 to {layers - 1}"
            )
        # In the order of the stages, the layers must be 0, 1, 2, ...: then each stage is a run of
        # consecutive layers that begins where the stage before it ends.
        if placed != list(range(layers)):
            raise ValueError(
                f"the plan's stages have layers {placed}: they must have layers 0 to {layers - 1}, "
                "each once and in order"
            )
        for s, stage in enumerate(self.stages):
            if not stage.layers or not stage.devices:
                raise ValueError(f"stage {s} needs at least one layer and one device: {stage}")
            if missing := [device for device in stage.devices if device not in range(devices)]:
                raise ValueError(
                    f"stage {s} is on device {missing[0]}, but the devices here are 0 to "
                    f"{devices - 1}: put it on one of these, or name more in Pipeline(devices=...)"
                )
            _check_fates(f"stage {s}", stage.fates, list(FATES))
            _check_fates(f"the optimizer's state of stage {s}", stage.state_fates, STATE_FATES)
        if self.replicated:
            self._check_disjoint()

    def _check_disjoint(self) -> None:
        """Raises ValueError if a stage repeats a device, or two stages share only some devices."""
        holder: dict[int, int] = {}
        for s, stage in enumerate(self.stages):
            for at, device in enumerate(stage.devices):
                shares = device in holder and self.stages[holder[device]].devices == stage.devices
                if device in stage.devices[:at] or (device in holder and not shares):
                    raise ValueError(
                        f"device {device} is named for stage {holder.get(device, s)} and for "
                        f"stage {s}, and the stages have {self.replicas} replicas: each replica "
                        "of a stage needs a device of its own"
                    )
            holder |= dict.fromkeys(stage.devices, s)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain data for JSON, without its outline."""
        # `asdict` copies all that a field holds, and an outline may hold every layer of a model.
        data = asdict(replace(self, outline=None))
        del data["outline"]
        return data

    def export(self, format: str, lossy: bool = False) -> str:
        """Returns the plan as text for another system; docs/export.md describes the formats.

        Args:
            format: "megatron", "torchtitan", "torch-csv", "maxtext" or "jaxpp".
            lossy: whether to return the nearest plan that the format can express, with comments
                that name what is lost.

        Raises:
            ValueError: the format cannot express all of the plan, and `lossy` is false. The
                message names what would be lost.
        """
        if not isinstance(format, str) or format not in EXPORTS:
            raise ValueError(did_you_mean("format", format, list(EXPORTS)))
        return EXPORTS[format](self, checked_flag("lossy", lossy))

    @staticmethod
    def from_json(data: Any) -> "Plan":
        """Reads a plan from the data that `to_json` returns.

        Raises:
            ValueError: the data are not a plan; the message names the entry.
        """
        entries = _entries("a plan", data, ("stages", "schedule", "planner"))
        list_of_stages = several(entries["stages"])
        if not list_of_stages:
            raise ValueError(
                f"stages must be a list of at least one stage, not {brief(entries['stages'])}"
            )
        stages = tuple(_stage(s, stage) for s, stage in enumerate(list_of_stages))
        splits = whole_numbers("splits", entries.get("splits", ()))
        unsplit = whole_numbers("unsplit", entries.get("unsplit", ()))
        keep_last = checked_flag("keep_last", entries.get("keep_last", False))
        schedule, planner = entries["schedule"], entries["planner"]
        tasks = entries.get("tasks", ())
        lines = several(tasks)
        if lines is None or not all(isinstance(line, str) for line in lines):
            raise ValueError(f"tasks must be texts, one for each device, not {brief(tasks)}")
        if not isinstance(schedule, str | None) or not isinstance(planner, str):
            names = f"schedule {brief(schedule)} and planner {brief(planner)}"
            raise ValueError(f"{names} must be names, such as '1f1b' and 'jvpipe'")
        return Plan(stages, schedule, planner, keep_last, splits, tuple(lines), unsplit)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        file = checked_path("path", path)
        if file.is_dir():
            raise ValueError(
                f"{shown_path(file)} is a folder, but a plan is a file: give the path of a file"
            )
        file.write_text(json.dumps(self.to_json(), indent=2) + "\n")

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Reads a plan that `save` wrote.

        Raises:
            ValueError: the file cannot be read, or does not hold a plan.
        """
        file = checked_path("path", path)
        try:
            return Plan.from_json(json.loads(file.read_text()))
        except OSError as error:
            raise ValueError(f"{shown_path(file)} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:  # RecursionError: JSON nested too deeply
            raise ValueError(
                f"{shown_path(file)} is not a plan that jvpipe saved: {error}"
            ) from error


EXPORTS: dict[str, Callable[[Plan, bool], str]] = {}
"""The functions that write a plan, by the name of the format.

`jvpipe.exports` fills this table, because `jvpipe.ir` must not import `jvpipe.exports`.
"""


def _stage(s: int, data: Any) -> Stage:
    """Reads stage `s` from the plan's JSON."""
    entries = _entries(f"stage {s}", data, ("layers", "devices"))
    layers = whole_numbers(f"layers of stage {s}", entries["layers"])
    devices = whole_numbers(f"devices of stage {s}", entries["devices"])
    fates = _fates(f"fates of stage {s}", entries.get("fates", {}), list(FATES))
    state_fates = entries.get("state_fates", {})
    return Stage(
        layers,
        devices,
        fates,
        state_fates=_fates(f"state_fates of stage {s}", state_fates, STATE_FATES),
    )


def _fates(what: str, data: Any, allowed: Sequence[Fate]) -> dict[str, Fate]:
    """Reads fates by name from the plan's JSON."""
    if not isinstance(data, Mapping) or not all(isinstance(name, str) for name in data):
        raise ValueError(f"{what} must map names to fates, not {brief(data)}")
    _check_fates(what, data, allowed)
    return {name: Fate(fate) for name, fate in data.items()}


def _check_fates(what: str, fates: Mapping[str, Any], allowed: Sequence[Fate]) -> None:
    """Raises ValueError if a fate is not among the allowed ones."""
    if unknown := [fate for fate in fates.values() if fate not in allowed]:
        raise ValueError(f"{what} has unknown fates {unknown}: use {', '.join(allowed)}")


def _entries(what: str, data: Any, needed: Sequence[str]) -> Mapping[str, Any]:
    """Returns the data; raises ValueError unless they map all needed names to values."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} must be a mapping with {', '.join(needed)}, not {brief(data)}")
    if missing := [name for name in needed if name not in data]:
        raise ValueError(f"{what} lacks {', '.join(missing)}: it is {brief(data)}")
    return data

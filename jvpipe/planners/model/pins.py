"""Pins: the parts of a plan that a user fixes, while the planner decides the rest."""

from dataclasses import dataclass
from itertools import accumulate

from jvpipe.planners.model.problem import Bounds


@dataclass(frozen=True)
class Pins:
    """The parts of a plan that are fixed; None means that the planner decides.

    Attributes:
        stages: how many stages there are.
        replicas: how many devices each stage has.
        cuts: how many layers each stage has.
        size: how many examples a micro-batch has.
        least_slice: if a stage has several replicas, the fewest examples of a micro-batch that a
            replica may get.

    >>> Pins(replicas=(2, 1)).count, Pins(replicas=(2, 1)).allow((0, 3), (3,), 6)
    (2, False)
    """

    stages: int | None = None
    replicas: tuple[int, ...] | None = None
    cuts: tuple[int, ...] | None = None
    size: int | None = None
    least_slice: int = 1

    @property
    def count(self) -> int | None:
        """The number of stages that `stages`, `replicas` or `cuts` gives; None: not fixed."""
        return next(iter(self._counts), None)

    @property
    def _counts(self) -> list[int]:
        """The numbers of stages that `stages`, `replicas` and `cuts` give, if they are fixed."""
        lengths = [len(each) for each in (self.replicas, self.cuts) if each is not None]
        return lengths if self.stages is None else [self.stages, *lengths]

    @property
    def bounds(self) -> Bounds | None:
        """The bounds of the stages, as sums of `cuts`; None: not fixed."""
        return None if self.cuts is None else (0, *accumulate(self.cuts))

    def allow(
        self,
        bounds: Bounds,
        replicas: tuple[int, ...],
        size: int,
    ) -> bool:
        """Tells whether a plan agrees with these pins.

        Args:
            bounds: where the plan's stages begin and end.
            replicas: the number of devices of each place.
            size: examples of a micro-batch.
        """
        return (
            self.count in (None, len(replicas))
            and self.replicas in (None, replicas)
            and self.bounds in (None, bounds)
            and self.size in (None, size)
            and self.feeds(max(replicas), size)
        )

    def feeds(self, replicas: int, size: int) -> bool:
        """Tells whether `size` examples, divided among replicas, give each of them enough.

        >>> pins = Pins(least_slice=2)
        >>> pins.feeds(2, 4), pins.feeds(3, 5), pins.feeds(1, 1)
        (True, False, True)
        """
        # A single replica gets the whole micro-batch, however small: nothing is divided.
        return replicas == 1 or size // replicas >= self.least_slice

    def check(self, devices: int, batch: int, layers: int) -> None:
        """Raises ValueError if no plan can agree with these pins.

        Args:
            devices: how many devices are available.
            batch: how many examples a step has.
            layers: how many layers the model has.

        >>> Pins(replicas=(3, 2)).check(devices=4, batch=8, layers=6)
        Traceback (most recent call last):
        ValueError: replicas (3, 2) take 5 devices, there are 4: use fewer replicas, or more devices
        """
        counts = self._counts
        if len(set(counts)) > 1:
            raise ValueError(
                f"stages={self.stages}, replicas={self.replicas} and cuts={self.cuts} "
                f"are of {counts} stages: give as many of each, or leave some out"
            )
        # The counts agree from here on, so it is enough to check the numbers of each pin by itself.
        every = {
            "replicas": self.replicas,
            "cuts": self.cuts,
            "stages": (self.stages or 1,),
        }
        for name, numbers in every.items():
            if numbers is not None and (not numbers or min(numbers) < 1):
                raise ValueError(
                    f"{name} {numbers}: there must be stages, and one device and one layer for each"
                )
        if self.replicas is not None and sum(self.replicas) > devices:
            raise ValueError(
                f"replicas {self.replicas} take {sum(self.replicas)} devices, "
                f"there are {devices}: use fewer replicas, or more devices"
            )
        places = min(devices, layers)
        if (self.count or 1) > places:
            raise ValueError(
                f"{self.count} stages: there can be 1 to {places}, "
                f"for {devices} devices and {layers} layers"
            )
        if self.cuts is not None and sum(self.cuts) != layers:
            raise ValueError(
                f"cuts {self.cuts} are of {sum(self.cuts)} layers, the model has {layers}"
            )
        self._check_fed(batch)

    def _check_fed(self, batch: int) -> None:
        """Raises ValueError if no size of micro-batch fits the batch and feeds all replicas."""
        if self.size is not None and batch % self.size:
            raise ValueError(f"micro-batches of {self.size}: they must divide the batch of {batch}")
        # If the size is not fixed, the whole batch may be one micro-batch, which feeds most replicas.
        largest = max(self.replicas or (1,))
        there = self.size or batch
        if not self.feeds(largest, there):
            what = f"micro-batches of {self.size}" if self.size else f"a batch of {batch}"
            raise ValueError(
                f"{largest} replicas cannot share {what} examples, each needs {self.least_slice}: "
                f"use at most {max(1, there // self.least_slice)} replicas, "
                f"or {largest * self.least_slice} examples"
            )


UNPINNED = Pins()

"""The devices, links and networks that the tasks of stages occupy, with their numbers and names.

A resource does one thing at a time. The simulator knows resources by number. With D devices they
are, in this order:

    numbers             resources
    0 to D - 1          devices
    D to 2 D - 1        links between a device and its host
    2 D to 3 D - 1      links to the next device
    3 D to 4 D - 1      links to the previous device
    from 4 D            networks of machines, two for each: out and in

The next device of the last one is device 0, so the devices form a loop. A place is the number of a
device. A "device" may also stand for the group of devices at one place, which run the stages of the
place together, as replicas. The devices of a machine share its network, which has two directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jvpipe.ir.kinds import Kind
from jvpipe.simulate.work_parts import Features

WAYS = ("out", "in")
"""The directions of a machine's network."""


@dataclass(frozen=True)
class Resources:
    """The resources of a pipeline.

    Attributes:
        places: the device of each stage.
        devices: the number of devices.
        on: says whether sends take the links to the host, and which networks are shared.

    >>> resources = Resources((0, 1), 2, Features())
    >>> resources.occupied(0, Kind.F), resources.occupied(0, Kind.OUT), resources.occupied(0, Kind.SEND)
    ((0,), (2,), (4,))
    """

    places: Sequence[int]
    devices: int
    on: Features

    @property
    def in_order(self) -> Sequence[int]:
        """The resources that serve tasks in the order of the lists: devices, and links between
        them.

        Links to the host and networks serve the task that was ready first.
        """
        D = self.devices
        return [*range(D), *range(2 * D, 4 * D)]

    def occupied(self, stage: int, kind: Kind) -> tuple[int, ...]:
        """Returns the resources that a task occupies.

        Args:
            stage: the stage of the task.
            kind: the kind of the task.
        """
        places = self.places
        d = places[stage]
        match kind:
            case Kind.OUT | Kind.IN:
                return (self.devices + d,)
            case Kind.SEND:
                return self._between(d, places[(stage + 1) % len(places)])
            case Kind.RETURN:
                return self._between(d, places[stage - 1])
            case Kind.REDUCE:
                machines = self.on.machines[d] if self.on.machines else ()
                return self._networks(machines, machines)
            case Kind.F | Kind.R | Kind.B | Kind.I | Kind.W | Kind.U:
                return (d,)
            case _:
                raise AssertionError(f"{kind} is not part of a stage's work")

    def _between(self, d: int, to: int) -> tuple[int, ...]:
        """Returns the resources that a transfer from one place to a neighboring one occupies.

        The first case that applies decides:

            the places are on different machines    the networks of both machines
            sends pass through the host             the links of both places to their host
            otherwise                               the link between the places

        In a loop of three or more places, the first and the last are next to each other.

        Args:
            d: the place that sends.
            to: the place that receives.
        """
        D = self.devices
        if machines := self.on.machines:
            networks = self._networks(machines[d], machines[to])
            if networks and machines[d] != machines[to]:
                return networks
        if self.on.shared:
            return (D + d, D + to)
        is_backward = (d - to) % max(D, 3) == 1  # of two places, device 1 comes after device 0
        first = 3 * D if is_backward else 2 * D
        return (first + d,)

    def _networks(
        self,
        senders: Sequence[int],
        readers: Sequence[int],
    ) -> tuple[int, ...]:
        """Returns the networks that a transfer between machines occupies; none within a machine.

        Args:
            senders: the machine of each device that sends.
            readers: the machine of each device that receives.
        """
        if len({*senders, *readers}) <= 1:
            return ()
        first = 4 * self.devices  # after devices and links
        out = [first + 2 * k for k in sorted(set(senders))]
        into = [first + 2 * k + 1 for k in sorted(set(readers))]
        return (*out, *into)


def resource_names(stages: int, devices: int, machines: int) -> tuple[str, ...]:
    """Returns the names of all resources, in the order of their numbers.

    Args:
        stages: the number of stages. If each stage has a device of its own, devices are named
            after their stages.
        devices: the number of devices.
        machines: the number of machines whose networks are shared.

    >>> resource_names(2, 2, 1)[:4], resource_names(2, 1, 1)[4:]
    (('stage 0', 'stage 1', 'stage 0 host', 'stage 1 host'), ('network of machine 0, out', 'network of machine 0, in'))
    """
    what = "stage" if stages == devices else "device"
    numbers = range(devices)
    names = [f"{what} {d}" for d in numbers]
    names += [f"{what} {d} host" for d in numbers]
    # Each device gets names for a link to the next device and for one to the previous device. With
    # two devices, each has only one neighbor, and no task occupies its other link. The name of the
    # other link has a device 2 or 3, which does not exist, because all names must differ.
    loop = devices if devices > 2 else 4
    names += [f"{what} {d} to {(d + step) % loop}" for step in (1, -1) for d in numbers]
    names += [f"network of machine {k}, {way}" for k in range(machines) for way in WAYS]
    return tuple(names)

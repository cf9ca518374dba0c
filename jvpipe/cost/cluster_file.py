"""Reads clusters that a user describes in TOML; errors name the file, the field and its line.

All fields of the file are below. A file gives its devices in one of three ways: `device` as a name,
`[device]` as a table, or `devices` as a list with an entry for every device.

name = "lab"                 # default: the name of the file, without its suffix
devices_per_machine = 4
machines = 2                 # default: 1, which needs no [network]
networks = 1                 # network links of each machine, which its devices share; default: 1
peer_uses_host = false       # whether transfers between devices of a machine take the links to the
                             # host (PCIe), as swapped tensors do; default: true
host_memory_bytes = "256GiB" # of each machine; default: no limit
device = "a100-40gb"         # the device of the preset with this name
devices = ["a100-40gb", "2080ti", { like = "2080ti", name = "old card", memory_bytes = "8GiB" }]
                             # in place of `device`: one entry per device, machine by machine;
                             # devices_per_machine may be left out

[device]                     # or several tables [[devices]], as entries of the list
like = "2080ti"              # a preset; figures that are left out here are those of the preset
name = "our GPU"
memory_bytes = "24GiB"       # without `like`, this figure and the next two are needed
memory_bytes_per_s = 0.7e12
flops_per_s = { float32 = 20e12, bfloat16 = 80e12 }
launch_s = 5e-6              # fixed seconds of each kernel, in addition to its work
elementwise_per_s = 5e12     # elementwise operations per second
tiling = { cores = 80, start = 32, winograd = 0.8 }
                             # see `tiling.py`; default: products use all cores without loss

# [host] is the link of each device to its host, and is always needed. [peer] and [network] have the
# same fields. [peer] is needed if a machine has several devices, and [network] if there are several
# machines.
[host]
bytes_per_s = 12e9
latency_s = 10e-6            # default: 0
"""

import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jvpipe.cost.hardware import INFINITE, Accelerator, Cluster, Link
from jvpipe.cost.presets import PRESETS
from jvpipe.cost.tiling import Tiling
from jvpipe.util.brief import brief
from jvpipe.util.names import did_you_mean
from jvpipe.util.sizes import MOST_S, parse_bytes

MOST_DEVICES = 1_000_000
"""The largest number of devices, machines or cores that a file may have.

Devices are listed one by one, so a mistyped number could fill the memory.
"""


def find_cluster(name_or_path: str | Path) -> Cluster:
    """Returns the preset of a name, or the cluster that a TOML file describes.

    Raises:
        ValueError: the name is unknown, or the file is wrong.

    >>> find_cluster("h200").peer_uses_host
    False
    >>> find_cluster("a100-40bg")
    Traceback (most recent call last):
    ...
    ValueError: unknown hardware 'a100-40bg': did you mean 'a100-40gb'? There are 2080ti, v100-a, ...
    """
    if isinstance(name_or_path, str) and name_or_path in PRESETS:
        return PRESETS[name_or_path]
    path = Path(name_or_path)
    if path.suffix != ".toml" and not os.path.isfile(path):
        raise ValueError(
            did_you_mean("hardware", str(name_or_path), list(PRESETS))
            + ", or the path of a TOML file"
        )
    if not path.is_file():
        raise ValueError(
            f"there is no file {path}: give the path of a TOML file, or one of {', '.join(PRESETS)}"
        )
    return read_cluster(path)


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster from a TOML file."""
    try:
        text = path.read_text()
        table = _Table(path, text, tomllib.loads(text))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): give the path of a TOML file"
        ) from None
    except ValueError as error:  # also raised for text that is not UTF-8, and for too many digits
        raise ValueError(f"{path} is not TOML: {error}") from error
    except RecursionError:
        raise ValueError(f"{path} is not TOML: it is nested too deeply") from None
    table.know(
        "name devices_per_machine machines networks peer_uses_host host_memory_bytes "
        "device devices host peer network"
    )
    devices = _devices(table)
    machines = table.count("machines", 1)
    # Without devices_per_machine, the devices of a list are spread evenly over the machines.
    default = max(1, len(devices) // machines) if devices else None
    per_machine = table.count("devices_per_machine", default)
    if per_machine * machines > MOST_DEVICES:
        raise table.wrong(
            "machines",
            f"times devices_per_machine is {per_machine * machines} devices: "
            f"at most {MOST_DEVICES} can be planned",
        )
    if devices and len(devices) != per_machine * machines:
        there = f"{machines} x {per_machine} = {per_machine * machines}"
        raise table.wrong(
            "devices",
            f"names {len(devices)} devices, there are {there}: name one for each",
        )
    memory = table.size("host_memory_bytes") if "host_memory_bytes" in table.entries else None
    return Cluster(
        table.text_of("name", path.stem),
        devices[0] if devices else _device(table),
        per_machine,
        machines,
        host=_link(table, "host", needed=True),
        peer=_link(table, "peer", needed=per_machine > 1),
        network=_link(table, "network", needed=machines > 1),
        unlike=devices if len(set(map(str, devices))) > 1 else (),
        peer_uses_host=table.flag("peer_uses_host", True),
        host_memory_bytes=memory,
        networks=table.count("networks", 1),
    )


def _link(table: "_Table", name: str, needed: bool) -> Link:
    """Reads a link; a link that is missing and not needed takes no time."""
    if name not in table.entries and not needed:
        return INFINITE
    link = table.inner(name, "a link: a table with bytes_per_s")
    link.know("bytes_per_s latency_s")
    return Link(link.number("bytes_per_s"), link.number("latency_s", 0.0, zero=True))


def _devices(table: "_Table") -> tuple[Accelerator, ...]:
    """Reads the list of devices; returns an empty tuple if the file has no list."""
    if "devices" not in table.entries:
        return ()
    if "device" in table.entries:
        raise table.wrong("device", "and devices are both there: keep one of them")
    entries = table.entries["devices"]
    if not isinstance(entries, list) or not entries:
        raise table.wrong("devices", f"must be a list, one for each device, not {entries!r}")
    return tuple(
        _accelerator(table, "devices", entry, f"devices[{d}].") for d, entry in enumerate(entries)
    )


def _device(table: "_Table") -> Accelerator:
    entry = table.value("device", "a table, or the name of a preset")
    return _accelerator(table, "device", entry, "device.")


def _accelerator(
    table: "_Table",
    key: str,
    entry: Any,
    prefix: str,
) -> Accelerator:
    """Reads one device.

    Args:
        table: the table that has the entry.
        key: the key of the entry in that table.
        entry: the name of a preset, or a table.
        prefix: the dotted path of the entry in the file, with a dot at the end, for messages.
    """
    if isinstance(entry, str):
        return _preset(table, key, entry)
    if not isinstance(entry, dict):
        raise table.wrong(key, f"must be a table, or the name of a preset, not {entry!r}")
    device = _Table(table.path, table.text, entry, prefix)
    device.know(
        "like name memory_bytes memory_bytes_per_s flops_per_s launch_s elementwise_per_s tiling"
    )
    like = _preset(device, "like", device.text_of("like", "")) if "like" in entry else None
    if like is None:
        like = Accelerator(
            "device",
            device.size("memory_bytes"),
            device.number("memory_bytes_per_s"),
            _flops_per_s(device),
        )
    # A figure that the table leaves out is that of the preset, or else Accelerator's default.
    cores, tiling = _cores(device, like)
    return replace(
        like,
        name=device.text_of("name", like.name),
        memory_bytes=device.size("memory_bytes", like.memory_bytes),
        memory_bytes_per_s=device.number("memory_bytes_per_s", like.memory_bytes_per_s),
        flops_per_s=_flops_per_s(device) if "flops_per_s" in entry else like.flops_per_s,
        launch_s=device.number("launch_s", like.launch_s, zero=True),
        elementwise_per_s=device.number("elementwise_per_s", like.elementwise_per_s),
        cores=cores,
        tiling=tiling,
    )


def _flops_per_s(device: "_Table") -> dict[str, float]:
    rates = device.inner("flops_per_s", "a table such as { float32 = 20e12 }")
    if "float32" not in rates.entries:
        raise rates.wrong("float32", "is missing: other dtypes may be left out, this one not")
    return {dtype: rates.number(dtype) for dtype in rates.entries}


def _cores(device: "_Table", like: Accelerator) -> tuple[int, Tiling | None]:
    """Returns a device's cores and tiling: those of its table `tiling`, or else those of `like`."""
    if "tiling" not in device.entries:
        return like.cores, like.tiling
    tiling = device.inner("tiling", "a table such as { cores = 80, start = 32, winograd = 0.8 }")
    tiling.know("cores start winograd")
    start = tiling.number("start", zero=True)
    winograd = tiling.number("winograd", zero=True)
    return tiling.count("cores"), Tiling(start, winograd)


def _preset(table: "_Table", key: str, name: str) -> Accelerator:
    """Returns the device of a preset; `key` is where the table names the preset."""
    if name not in PRESETS:
        raise table.wrong(key, did_you_mean("hardware", name, list(PRESETS)))
    return PRESETS[name].device


@dataclass(frozen=True)
class _Table:
    """A table of the file, with its place in the file.

    Its methods read an entry. If the entry is wrong, they raise a ValueError that names its line.

    Attributes:
        path: the path of the file.
        text: the text of the file, in which messages find the line of a key.
        entries: the entries of the table.
        prefix: the dotted keys that lead to the table, with a dot at the end.
    """

    path: Path
    text: str
    entries: Mapping[str, Any]
    prefix: str = ""

    def wrong(self, key: str, what: str) -> ValueError:
        """Returns an error that names the file, the line and the key, and says what is wrong."""
        line = _line_of(self.text, self.prefix + key)
        place = f"{self.path}:{line}" if line else f"{self.path}"
        return ValueError(f"{place}: {self.prefix}{key} {what}")

    def know(self, names: str) -> None:
        """Raises an error for a key that is not in `names`, which are separated by spaces."""
        for key in self.entries:
            if key not in names.split():
                raise self.wrong(key, f"is unknown: {did_you_mean('field', key, names.split())}")

    def value(self, key: str, what: str) -> Any:
        """Returns the entry of a key that must be there; the error says `what` the entry is."""
        if key not in self.entries:
            raise self.wrong(key, f"is missing: it is {what}")
        return self.entries[key]

    def inner(self, key: str, what: str) -> "_Table":
        """Returns the entry of a key that must be a table; the error says `what` it must be."""
        value = self.value(key, what)
        if not isinstance(value, dict):
            raise self.wrong(key, f"must be {what}, not {value!r}")
        return _Table(self.path, self.text, value, f"{self.prefix}{key}.")

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """Reads a finite number.

        An infinite rate is refused: at that rate work takes no time, and no plan is better than
        another.

        Args:
            key: the key of the number.
            default: the number if the key is missing; a default may be infinite. None if the key
                must be there.
            zero: whether the number is a time or a share, which may be 0. If not, it is a rate,
                which must be at least 1.
        """
        if default is not None and key not in self.entries:
            return default
        value = self.value(key, "a number")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # NaN is neither above 0 nor 0.
        if not number or not (0 < value <= sys.float_info.max or (zero and value == 0)):
            least = "of at least 0" if zero else "above 0"
            raise self.wrong(key, f"must be a finite number {least}, not {brief(value)}")
        if zero and value > MOST_S:
            raise self.wrong(key, f"must be at most {MOST_S:.0e}, not {brief(value)}")
        if not zero and value < 1:
            raise self.wrong(key, f"must be at least 1, not {brief(value)}")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        """Reads a whole number from 1 to `MOST_DEVICES`; `default` if the key is missing."""
        if default is not None and key not in self.entries:
            return default
        value = self.value(key, "a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, f"must be a whole number of at least 1, not {brief(value)}")
        if value > MOST_DEVICES:
            raise self.wrong(key, f"must be at most {MOST_DEVICES}, not {brief(value)}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Reads a number of bytes, or a text with a unit; `default` if the key is missing."""
        if default is not None and key not in self.entries:
            return default
        value = self.value(key, "a size")
        with suppress(ValueError):
            if size := parse_bytes(value):
                return size
        raise self.wrong(key, f"must be bytes, or a text such as '16GiB', not {brief(value)}")

    def flag(self, key: str, default: bool) -> bool:
        """Reads whether something holds; `default` if the key is missing."""
        value = self.entries.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, not {value!r}")
        return value

    def text_of(self, key: str, default: str) -> str:
        """Reads a text that is not empty; `default` if the key is missing."""
        value = self.entries.get(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, f"must be a text, not {value!r}")
        return value


def _line_of(text: str, key: str) -> int | None:
    """Returns the line of a dotted key, or of its table if the key is missing.

    `tomllib` reports no lines, so this searches the text for headers, inline tables and keys. The
    first header `[[name]]` stands for `name[0]`, the second for `name[1]`, and so on.
    """
    lines = text.splitlines()
    *tables, last = key.split(".")
    current: list[str] = []
    counts: Counter[str] = Counter()  # by name, the headers so far
    header = None
    for number, line in enumerate(lines, 1):
        if match := re.match(r"\s*(\[+)([^\[\]]+)\]", line):
            brackets, name = match.groups()
            nth = f"[{counts[name]}]" if len(brackets) > 1 else ""
            counts[name] += 1
            current = _parts(name.strip() + nth)
            if current == [*tables, last]:
                return number
            if current == tables:
                header = number
        elif match := re.match(r"\s*([^=#\[\]]+?)\s*=", line):
            path = [*current, *_parts(match[1])]
            if path == [*tables, last]:
                return number
            if path == tables:  # an inline table
                header = number
    return header


def _parts(key: str) -> list[str]:
    """Splits a dotted key into its parts, without quotes."""
    return [part.strip(" \"'") for part in key.split(".")]

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
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
_DEFAULTS = {"machines": 1, "networks": 1, "peer_uses_host": True}


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
        entries = {"name": path.stem} | _DEFAULTS | tomllib.loads(text)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): give the path of a TOML file"
        ) from None
    except ValueError as error:  # also raised for text that is not UTF-8, and for too many digits
        raise ValueError(f"{path} is not TOML: {error}") from error
    except RecursionError:
        raise ValueError(f"{path} is not TOML: it is nested too deeply") from None
    table = _Table(path, text, entries)
    table.know(
        "name devices_per_machine machines networks peer_uses_host host_memory_bytes "
        "device devices host peer network"
    )
    devices = _devices(table)
    machines = table.count("machines")
    if devices:
        # Without devices_per_machine, the devices of a list are spread evenly over the machines.
        entries.setdefault("devices_per_machine", max(1, len(devices) // machines))
    per_machine = table.count("devices_per_machine")
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
    memory = table.size("host_memory_bytes") if "host_memory_bytes" in entries else None
    return Cluster(
        table.text_of("name"),
        devices[0] if devices else _device(table),
        per_machine,
        machines,
        _link(table, "host", needed=True),
        _link(table, "peer", needed=per_machine > 1),
        _link(table, "network", needed=machines > 1),
        table.flag("peer_uses_host"),
        memory,
        devices if len(set(map(str, devices))) > 1 else (),
        table.count("networks"),
    )


def _link(table: "_Table", name: str, needed: bool) -> Link:
    """Reads a link; a link that is missing and not needed takes no time."""
    if name not in table.entries and not needed:
        return INFINITE
    link = table.inner(name, "a link: a table with bytes_per_s")
    link.know("bytes_per_s latency_s")
    latency_s = link.number("latency_s", zero=True) if "latency_s" in link.entries else 0.0
    return Link(link.number("bytes_per_s"), latency_s)


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
    readers: dict[str, Callable[[str], Any]] = {
        "name": device.text_of,
        "memory_bytes": device.size,
        "memory_bytes_per_s": device.number,
        "flops_per_s": device.flops_per_s,
        "launch_s": partial(device.number, zero=True),
        "elementwise_per_s": device.number,
        "tiling": device.tiling,
    }
    device.know("like " + " ".join(readers))
    like = _preset(device, "like", device.text_of("like")) if "like" in entry else None
    needed = () if like else ("memory_bytes", "memory_bytes_per_s", "flops_per_s")
    figures = {key: read(key) for key, read in readers.items() if key in entry or key in needed}
    if "tiling" in entry:
        figures["cores"], figures["tiling"] = figures["tiling"]
    # A figure that the table leaves out is that of the preset, or else Accelerator's default.
    if like:
        return replace(like, **figures)
    return Accelerator(figures.pop("name", "device"), **figures)


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

    def number(self, key: str, *, zero: bool = False) -> float:
        """Reads a finite number.

        An infinite rate is refused: at that rate work takes no time, and no plan is better than
        another.

        Args:
            key: the key of the number.
            zero: whether the number is a time or a share, which may be 0. If not, it is a rate,
                which must be at least 1.
        """
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

    def flops_per_s(self, key: str) -> dict[str, float]:
        """Reads the rates of products by dtype."""
        rates = self.inner(key, "a table such as { float32 = 20e12 }")
        if "float32" not in rates.entries:
            raise rates.wrong("float32", "is missing: other dtypes may be left out, this one not")
        return {dtype: rates.number(dtype) for dtype in rates.entries}

    def tiling(self, key: str) -> tuple[int, Tiling]:
        """Reads a number of cores, and how well products use them."""
        tiling = self.inner(key, "a table such as { cores = 80, start = 32, winograd = 0.8 }")
        tiling.know("cores start winograd")
        shares = tiling.number("start", zero=True), tiling.number("winograd", zero=True)
        return tiling.count("cores"), Tiling(*shares)

    def count(self, key: str) -> int:
        """Reads a whole number from 1 to `MOST_DEVICES`."""
        value = self.value(key, "a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, f"must be a whole number of at least 1, not {brief(value)}")
        if value > MOST_DEVICES:
            raise self.wrong(key, f"must be at most {MOST_DEVICES}, not {brief(value)}")
        return value

    def size(self, key: str) -> int:
        """Reads a number of bytes, or a text with a unit."""
        value = self.value(key, "a size")
        with suppress(ValueError):
            if size := parse_bytes(value):
                return size
        raise self.wrong(key, f"must be bytes, or a text such as '16GiB', not {brief(value)}")

    def flag(self, key: str) -> bool:
        """Reads whether something holds."""
        value = self.entries[key]
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, not {value!r}")
        return value

    def text_of(self, key: str) -> str:
        """Reads a text that is not empty."""
        value = self.entries[key]
        if not isinstance(value, str) or not value:
            raise self.wrong(key, f"must be a text, not {value!r}")
        return value


def _line_of(text: str, key: str) -> int | None:
    """Returns the line of a dotted key, or of its table if the key is missing.

    `tomllib` reports no lines, so this searches the text for headers, inline tables and keys. The
    first header `[[name]]` stands for `name[0]`, the second for `name[1]`, and so on.
    """
    wanted = key.split(".")
    current: list[str] = []
    counts: Counter[str] = Counter()  # by name, the headers so far
    table = None
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*(\[+)([^\[\]]+)\]", line):
            brackets, name = match.groups()
            nth = f"[{counts[name]}]" if len(brackets) > 1 else ""
            counts[name] += 1
            path = current = _parts(name.strip() + nth)
        elif match := re.match(r"\s*([^=#\[\]]+?)\s*=", line):
            path = [*current, *_parts(match[1])]
        else:
            continue
        if path == wanted:
            return number
        if path == wanted[:-1]:
            table = number
    return table


def _parts(key: str) -> list[str]:
    """Splits a dotted key into its parts, without quotes."""
    return [part.strip(" \"'") for part in key.split(".")]

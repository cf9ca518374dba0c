"""Clusters that a user describes in TOML.

name = "lab"                 # by default the name of the file
devices_per_machine = 4
machines = 2                 # by default 1: then there is no network
networks = 1                 # by default 1: how many a machine has, which its devices share
peer_uses_host = false       # by default true: PCIe carries swapped tensors and activations alike
host_memory_bytes = "256GiB" # by default without limit
device = "a100-40gb"         # the device of a preset, or a table (below); or one for each device that there is:
devices = ["a100-40gb", "2080ti", { like = "2080ti", name = "old card", memory_bytes = "8GiB" }]
                             # machine by machine; the counts may be left out then

[device]                     # or [[devices]], one after the other; what is left out is as in the preset it is `like`
name = "our GPU"
memory_bytes = "24GiB"
memory_bytes_per_s = 0.7e12
launch_s = 5e-6              # may be left out, as may elementwise_per_s
flops_per_s = { float32 = 20e12, bfloat16 = 80e12 }
tiling = { cores = 80, start = 32, winograd = 0.8 }  # may be left out: products are dealt out without loss then

[host]                       # the links: host always, peer for several devices, network for several machines
bytes_per_s = 12e9
latency_s = 10e-6            # by default 0
"""

import math
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jvpipe.cost.hardware import INFINITE, Accelerator, Cluster, Link
from jvpipe.cost.presets import PRESETS
from jvpipe.cost.tiling import Tiling
from jvpipe.util.names import did_you_mean
from jvpipe.util.sizes import parse_bytes


def find_cluster(name_or_path: str | Path) -> Cluster:
    """The preset of a name, or the cluster that a TOML file describes.

    Raises:
        ValueError: an unknown name, or a mistake in the file: the message names file, line and field.

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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    table.know(
        "name devices_per_machine machines networks peer_uses_host host_memory_bytes device devices host peer network"
    )
    devices, machines = _devices(table), table.count("machines", 1)
    per_machine = table.count(
        "devices_per_machine", max(1, len(devices) // machines) if devices else None
    )
    if devices and len(devices) != per_machine * machines:
        there = f"{machines} x {per_machine} = {per_machine * machines}"
        raise table.wrong(
            "devices", f"names {len(devices)} devices, there are {there}: name one for each"
        )
    needed = [
        "host",
        *(["peer"] if per_machine > 1 else []),
        *(["network"] if machines > 1 else []),
    ]
    links = {name: _link(table, name, name in needed) for name in ("host", "peer", "network")}
    memory = table.size("host_memory_bytes") if "host_memory_bytes" in table.entries else None
    return Cluster(
        table.text_of("name", path.stem),
        devices[0] if devices else _device(table),
        per_machine,
        machines,
        **links,
        unlike=devices if len(set(map(str, devices))) > 1 else (),
        peer_uses_host=table.flag("peer_uses_host", True),
        host_memory_bytes=memory,
        networks=table.count("networks", 1),
    )


def _link(table: "_Table", name: str, needed: bool) -> Link:
    if name not in table.entries and not needed:
        return INFINITE
    link = table.inner(name, "a link: a table with bytes_per_s")
    link.know("bytes_per_s latency_s")
    return Link(link.number("bytes_per_s"), link.number("latency_s", 0.0, zero=True))


def _devices(table: "_Table") -> tuple[Accelerator, ...]:
    """The devices of a list, one by one; none if there is no list."""
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
    return _accelerator(
        table, "device", table.value("device", "a table, or the name of a preset"), "device."
    )


def _accelerator(table: "_Table", key: str, entry: Any, prefix: str) -> Accelerator:
    """A device from what the file says under a key: the name of a preset, or a table.

    Args:
        table: where the key is.
        key: of the entry.
        entry: what it says.
        prefix: of the entry's own keys.
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
    if like is None or "flops_per_s" in entry:
        rates = device.inner("flops_per_s", "a table such as { float32 = 20e12 }")
        if "float32" not in rates.entries:
            raise rates.wrong("float32", "is missing: other dtypes may be left out, this one not")
        flops_per_s = {dtype: rates.number(dtype) for dtype in rates.entries}
    else:
        flops_per_s = like.flops_per_s
    return Accelerator(
        device.text_of("name", like.name if like else "device"),
        like.memory_bytes if like and "memory_bytes" not in entry else device.size("memory_bytes"),
        device.number("memory_bytes_per_s", like.memory_bytes_per_s if like else None),
        flops_per_s,
        device.number("launch_s", like.launch_s if like else 5e-6, zero=True),
        _elementwise_per_s(device, like),
        like.platform if like else "cuda",
        *_cores(device, like),
        scratch_bytes=like.scratch_bytes if like else 0,
    )


def _elementwise_per_s(device: "_Table", like: Accelerator | None) -> float:
    """How many elementwise operations a device makes; what is left out is unlimited."""
    if "elementwise_per_s" in device.entries:
        return device.number("elementwise_per_s")
    return like.elementwise_per_s if like else math.inf


def _cores(device: "_Table", like: Accelerator | None) -> tuple[int, Tiling | None]:
    """The cores of a device, and how products are dealt out to them: all of it is stated, or nothing."""
    if "tiling" not in device.entries:
        return (like.cores, like.tiling) if like else (0, None)
    tiling = device.inner("tiling", "a table such as { cores = 80, start = 32, winograd = 0.8 }")
    tiling.know("cores start winograd")
    start, winograd = (tiling.number(name, zero=True) for name in ("start", "winograd"))
    return tiling.count("cores"), Tiling(start, winograd)


def _preset(table: "_Table", key: str, name: str) -> Accelerator:
    if name not in PRESETS:
        raise table.wrong(key, did_you_mean("hardware", name, list(PRESETS)))
    return PRESETS[name].device


@dataclass(frozen=True)
class _Table:
    """A table of the file, with its place for messages."""

    path: Path
    text: str
    entries: Mapping[str, Any]
    prefix: str = ""

    def wrong(self, key: str, what: str) -> ValueError:
        line = _line_of(self.text, self.prefix + key)
        return ValueError(f"{self.path}{f':{line}' if line else ''}: {self.prefix}{key} {what}")

    def know(self, names: str) -> None:
        for key in self.entries:
            if key not in names.split():
                raise self.wrong(key, f"is unknown: {did_you_mean('field', key, names.split())}")

    def value(self, key: str, what: str) -> Any:
        if key not in self.entries:
            raise self.wrong(key, f"is missing: it is {what}")
        return self.entries[key]

    def inner(self, key: str, what: str) -> "_Table":
        value = self.value(key, what)
        if not isinstance(value, dict):
            raise self.wrong(key, f"must be {what}, not {value!r}")
        return _Table(self.path, self.text, value, f"{self.prefix}{key}.")

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """A rate, or with `zero` a time or a share: at an infinite rate work takes no time, and nothing is balanced.

        Args:
            key: of the table.
            default: where the key is missing; None: it must be there.
            zero: may be 0.
        """
        value = self.value(key, "a number") if default is None else self.entries.get(key, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (0 < value <= sys.float_info.max or (zero and value == 0)):
            least = "of at least 0" if zero else "above 0"
            raise self.wrong(key, f"must be a finite number {least}, not {value!r}")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        value = (
            self.value(key, "a whole number") if default is None else self.entries.get(key, default)
        )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, f"must be a whole number of at least 1, not {value!r}")
        return value

    def size(self, key: str) -> int:
        value = self.value(key, "a size")
        try:
            size = parse_bytes(None if isinstance(value, bool) else value)
        except ValueError:
            size = None
        if size is None:
            raise self.wrong(key, f"must be bytes, or a text such as '16GiB', not {value!r}")
        return size

    def flag(self, key: str, default: bool) -> bool:
        value = self.entries.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, not {value!r}")
        return value

    def text_of(self, key: str, default: str) -> str:
        value = self.entries.get(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, f"must be a text, not {value!r}")
        return value


def _line_of(text: str, key: str) -> int | None:
    """The line of a dotted key, or that of the table which it is missing from."""
    lines = text.splitlines()
    *tables, last = key.split(".")
    current: list[str] = []
    counts: Counter[str] = Counter()  # of tables of a list, so far
    header = None
    for number, line in enumerate(lines, 1):
        if match := re.match(r"\s*(\[+)([^\[\]]+)\]", line):
            nth = f"[{counts[match[2]]}]" if len(match[1]) > 1 else ""
            counts[match[2]] += 1
            current = [part.strip(" \"'") for part in (match[2].strip() + nth).split(".")]
            header = number if current in (tables, [*tables, last]) else header
            if current == [*tables, last]:
                return number
        elif match := re.match(r"\s*([^=#\[\]]+?)\s*=", line):
            path = [*current, *(part.strip(" \"'") for part in match[1].split("."))]
            if path == [*tables, last]:
                return number
            if path == tables:  # an inline table
                header = number
    return header

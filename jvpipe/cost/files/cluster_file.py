"""Clusters that a user describes in TOML.

name = "lab"                 # by default the name of the file
devices_per_machine = 4
machines = 2                 # by default 1: then there is no network
peer_uses_host = false       # by default true: PCIe carries swapped tensors and activations alike
host_memory_bytes = "256GiB" # by default without limit
device = "a100-40gb"         # the device of a preset, or a table:

[device]
name = "our GPU"
memory_bytes = "24GiB"
memory_bytes_per_s = 0.7e12
launch_s = 5e-6              # may be left out, as may elementwise_per_s
flops_per_s = { float32 = 20e12, bfloat16 = 80e12 }

[host]                       # the links: host always, peer for several devices, network for several machines
bytes_per_s = 12e9
latency_s = 10e-6            # by default 0
"""

import math
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jvpipe.cost.hardware import INFINITE, Accelerator, Cluster, Link
from jvpipe.cost.presets import PRESETS
from jvpipe.ir.names import did_you_mean
from jvpipe.ir.sizes import parse_bytes


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
    if path.suffix != ".toml" and not path.is_file():
        raise ValueError(did_you_mean("hardware", str(name_or_path), list(PRESETS)) + ", or the path of a TOML file")
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give the path of a TOML file, or one of {', '.join(PRESETS)}")
    return read_cluster(path)


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster from a TOML file."""
    try:
        text = path.read_text()
        table = _Table(path, text, tomllib.loads(text))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    table.know("name devices_per_machine machines peer_uses_host host_memory_bytes device host peer network")
    per_machine, machines = table.count("devices_per_machine"), table.count("machines", 1)
    needed = ["host", *(["peer"] if per_machine > 1 else []), *(["network"] if machines > 1 else [])]
    links = {name: _link(table, name, name in needed) for name in ("host", "peer", "network")}
    memory = table.size("host_memory_bytes") if "host_memory_bytes" in table.entries else None
    return Cluster(
        table.text_of("name", path.stem),
        _device(table),
        per_machine,
        machines,
        **links,
        peer_uses_host=table.flag("peer_uses_host", True),
        host_memory_bytes=memory,
    )


def _link(table: "_Table", name: str, needed: bool) -> Link:
    if name not in table.entries and not needed:
        return INFINITE
    link = table.inner(name, "a link: a table with bytes_per_s")
    link.know("bytes_per_s latency_s")
    return Link(link.number("bytes_per_s"), link.number("latency_s", 0.0, zero=True))


def _device(table: "_Table") -> Accelerator:
    named = table.entries.get("device")
    if isinstance(named, str):
        if named not in PRESETS:
            raise table.wrong("device", did_you_mean("hardware", named, list(PRESETS)))
        return PRESETS[named].device
    device = table.inner("device", "a table, or the name of a preset")
    device.know("name memory_bytes memory_bytes_per_s flops_per_s launch_s elementwise_per_s")
    rates = device.inner("flops_per_s", "a table such as { float32 = 20e12 }")
    if "float32" not in rates.entries:
        raise rates.wrong("float32", "is missing: other dtypes may be left out, this one not")
    return Accelerator(
        device.text_of("name", "device"),
        device.size("memory_bytes"),
        device.number("memory_bytes_per_s"),
        {dtype: rates.number(dtype) for dtype in rates.entries},
        device.number("launch_s", 5e-6, zero=True),
        device.number("elementwise_per_s", math.inf),
    )


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
        """A rate, which may be infinite, or with `zero` a time, which may be 0.

        Args:
            key: of the table.
            default: where the key is missing; None: it must be there.
            zero: a time is meant.
        """
        value = self.value(key, "a number") if default is None else self.entries.get(key, default)
        least, most = ("of at least 0", sys.float_info.max) if zero else ("above 0", math.inf)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (0 < value <= most or (zero and value == 0)):
            raise self.wrong(key, f"must be a number {least}, not {value!r}")
        if math.inf > value > sys.float_info.max:
            raise self.wrong(key, f"must be a number of at most {sys.float_info.max}, or inf")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.value(key, "a whole number") if default is None else self.entries.get(key, default)
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
    header = None
    for number, line in enumerate(lines, 1):
        if match := re.match(r"\s*\[([^\[\]]+)\]", line):
            current = [part.strip(" \"'") for part in match[1].split(".")]
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

"""Readers of what trackers write, from the descriptions of the formats alone."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

Logged = dict[tuple[str, int], float]
"""By name and step."""


def records(content: bytes) -> Iterator[bytes]:
    """Those of a TFRecord file: length, its checksum, the record, its checksum."""
    at = 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield content[at + 12 : at + 12 + length]
        at += length + 16


def chunks(content: bytes, at: int) -> Iterator[bytes]:
    """The records of a LevelDB log: in blocks, each a checksum, a length and whether it is a part
    of one.
    """
    parts = b""
    while at + 7 <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts = (b"" if kind in (_FULL, _FIRST) else parts) + content[at + 7 : at + 7 + length]
        if kind in (_FULL, _LAST):
            yield parts
        at += 7 + length


def of_tensorboard(run: Path) -> Logged:
    """The scalars of a run, as TensorBoard shows them: what a later start has purged is not
    there.
    """
    from tensorboardX.proto import event_pb2

    events: Any = event_pb2
    found: Logged = {}
    for file in sorted((run / "tensorboard").iterdir()):
        for record in records(file.read_bytes()):
            event = events.Event.FromString(record)
            if event.session_log.status == events.SessionLog.START:
                found = {at: value for at, value in found.items() if at[1] < event.step}
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    return found


def of_wandb(run: Path) -> Logged:
    """The same of a run that wandb has kept offline."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    found: Logged = {}
    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for chunk in chunks(file.read_bytes(), 7):
            record = messages.Record.FromString(chunk)
            told = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            step = int(told.get("_step", -1))
            found |= {(name, step): value for name, value in told.items() if name[0] != "_"}
    return found

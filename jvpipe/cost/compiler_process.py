"""`python -m jvpipe.cost.compiler_process`: compiles programs and reports the bytes of each.

This is the child process that `compiling.py` starts, so that compilers of absent devices are never
loaded in the parent. It runs no program. Parent and child exchange lines of JSON, with these keys:

    the child reads     {"platform", "topology", "config"}, which names the target; then, for each
                        program, {"id", "bytes"}, followed by that many bytes of StableHLO
    the child writes    {"kind"} when it is ready, or {"refused"} if the target's compiler does not
                        start; then, as soon as a program is compiled, {"id", "numbers"} with its
                        bytes, as `Sizes.of` reads them, or {"id", "refused"} with the compiler's
                        message
"""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, BinaryIO

from jvpipe._jax import absent_device, compiled_sizes
from jvpipe.cost.tiles import entry_bytes
from jvpipe.util.brief import first_line
from jvpipe.util.devices import Device


def main(incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Compiles programs, several side by side, until the input ends."""
    lock = Lock()

    def say(message: dict[str, Any]) -> None:
        with lock:
            outgoing.write(json.dumps(message).encode() + b"\n")
            outgoing.flush()

    asked = json.loads(incoming.readline())
    try:
        device = absent_device(asked["platform"], asked["topology"], asked["config"])
    except Exception as refusal:  # a compiler's plugin may raise any exception
        say({"refused": first_line(refusal)})
        return
    say({"kind": device.device_kind})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while head := incoming.readline():
            program = json.loads(head)
            text = incoming.read(program["bytes"]).decode()
            pool.submit(_compile, program["id"], text, device, say)


def _compile(
    number: int,
    text: str,
    device: Device,
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Compiles a program and reports its bytes, or the compiler's refusal, under its number."""
    try:
        header, sizes = compiled_sizes(text, device)
        arguments, results = entry_bytes(header)
        say({"id": number, "numbers": (*sizes, len(arguments), *arguments, *results)})
    except Exception as refusal:  # a compiler may raise any exception
        say({"id": number, "refused": first_line(refusal)})


def _own_output() -> BinaryIO:
    """Returns the standard output, and sends what libraries print there to standard error."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return output


if __name__ == "__main__":
    main(sys.stdin.buffer, _own_output())

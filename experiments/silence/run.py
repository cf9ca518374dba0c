"""How long `make bert > log` is silent: seconds to the first line, and the longest between two."""

import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise

FIRST_S, MOST_S = 10.0, 30.0


def said(arguments: list[str], cache: str) -> list[tuple[float, str]]:
    """The lines of the command, each with the seconds since its start; last its end."""
    environment = os.environ | {"NPROC": "1", "XDG_CACHE_HOME": cache}
    command = [sys.executable, "-m", "jvpipe.train", "--model", "bert", *arguments]
    start_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        lines = []
        for line in process.stdout:
            lines.append((time.monotonic() - start_s, line.rstrip("\n")))
            print(f"{lines[-1][0]:8.1f} s  {lines[-1][1]}", flush=True)
    return [*lines, (time.monotonic() - start_s, f"it ends with exit code {process.returncode}")]


def main(arguments: list[str]) -> int:
    with (
        tempfile.TemporaryDirectory() as scratch
    ):  # nothing was trained, compiled or measured before
        lines = said(["--run-dir", f"{scratch}/run", *arguments], scratch)
    gaps = sorted(((b[0] - a[0], a, b) for a, b in pairwise(lines)), reverse=True)
    print(f"\n{len(lines) - 1} lines; the first after {lines[0][0]:.1f} s; the longest silences:")
    for gap_s, (at_s, before), (_, after) in gaps[:3]:
        print(f"{gap_s:6.1f} s  from {at_s:.1f} s: {before!r} to {after!r}")
    return int(lines[0][0] > FIRST_S or gaps[0][0] > MOST_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

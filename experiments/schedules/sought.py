"""How long `auto` is sought for drawn models of many layers: python -m experiments.schedules.sought

Processor seconds of one thread. The exit code is 1 where they are more than the bound.
"""

import sys
import time
from dataclasses import replace

from experiments.schedules.cases import SHARES, bytes_of_1f1b, drawn
from jvpipe.planners.joint.order_search import find_order

BOUNDS_S = {(100, 8): 5.0, (200, 16): 20.0}
"""By layers and devices."""
HALVES, SEND = (1.3, 0.7), 0.1


def main() -> int:
    """Prints the table."""
    late = 0
    print(
        "| layers, devices | limit | sought, s | bound, s | step, s | comes from "
        "|\n|---|---|---|---|---|---|"
    )
    for (layers, devices), bound_s in BOUNDS_S.items():
        free = drawn(devices, 2 * devices, HALVES, SEND, uneven=True, layers=layers)
        full_bytes = bytes_of_1f1b(free)
        for share in SHARES:
            problem = replace(free, memory_limit_bytes=share and int(share * full_bytes))
            start_s = time.process_time()
            found = find_order(problem)
            taken_s = time.process_time() - start_s
            late += taken_s > bound_s
            cells = (
                f"{layers}, {devices}",
                share or "none",
                f"{taken_s:.1f}",
                bound_s,
                f"{found.step_s:.1f}",
                found.family,
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())

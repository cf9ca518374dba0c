"""How many tasks a second the simulator does: `python -m experiments.planners.simulator [TASKS]`.

1F1B on 64 stages that swap, and whose sends share the links to the host: every kind of task, and
every queue.
"""

import sys
import time

from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.simulate.simulator import simulate_lists
from jvpipe.simulate.stages import StageLoad

STAGES = 64
PER_MICRO_BATCH = (
    7 * STAGES - 4
)  # F, R, B, OUT, IN, two sends; the last stage swaps nothing, the ends send once


def main() -> None:
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    lists = one_f_one_b(STAGES, -(-tasks // PER_MICRO_BATCH))
    load = StageLoad(1.0, 2.0, recompute_s=0.3, out_s=0.4, in_s=0.4, send_s=0.1, return_s=0.1)
    for shared in (False, True):
        start = time.perf_counter()
        timeline = simulate_lists(lists, [load] * STAGES, shared_link=shared)
        taken_s = time.perf_counter() - start
        print(
            f"{len(timeline.tasks):,} tasks, {'shared' if shared else 'separate'} links: "
            f"{taken_s:.1f} s"
        )


if __name__ == "__main__":
    main()

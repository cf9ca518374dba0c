"""A process of a run that trains on and on: python tests/hosts/dying.py PROCESS COUNT PORT; one of them is killed."""

import os
import sys

import jvpipe
from tests.bits import batches_of
from tests.hosts.worker import begun, pipeline
from tests.zoo import CASES


def main() -> None:
    process, count, port = map(int, sys.argv[1:])
    begun(process, count, port)
    m = CASES["pre-norm"]()
    pipe = pipeline(m, "1f1b", planner="even")
    batch = batches_of(m)[0]
    state = pipe.init(m.params, batch, m.rng, m.state)
    try:
        for step in range(100_000):
            state, _ = pipe.step(state, batch)
            if step == 3:
                pipe.wait(state)
                print("trains", flush=True)
    except jvpipe.HostLost as lost:
        print(f"lost: {lost}", flush=True)
        os._exit(75)


if __name__ == "__main__":
    main()

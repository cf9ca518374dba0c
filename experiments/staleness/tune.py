"""Learning rates: each of a grid on one device, seed 3. Usage.

python -m experiments.staleness.tune [SUBJECT ...]
"""

import sys

from experiments.staleness.subjects import bert, digits
from experiments.staleness.train import Run, train

SEED = 3  # none of those that are reported


def main() -> None:
    """One update per batch is 1f1b on one stage, one per micro-batch is pipedream on one stage."""
    print("| subject | an update per | rate: held-out loss at the end |\n|---|---|---|")
    for subject in (
        make() for make in (bert, digits) if not sys.argv[1:] or make.__name__ in sys.argv[1:]
    ):
        for schedule, each in (("1f1b", "batch"), ("pipedream", "micro-batch")):
            found = []
            for rate in subject.grids[schedule == "pipedream"]:
                curve = train(subject, Run(subject.name, schedule, 1, SEED, rate))
                found.append(f"{rate:g}: {curve.losses[-1]:.3f}")
            print(f"| {subject.name} | {each} | {', '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()

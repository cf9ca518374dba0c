"""What others measured, beside what the cost model predicts.

python -m experiments.predicts [--json OUT]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from experiments.predicts import dapple, profiles, torchgpipe, vpipe
from experiments.predicts.cases import AMOEBANET, DAPPLE, PROFILES, UNET, VPIPE, Case, halves


class Row(TypedDict):
    """A published number, and what is predicted for it."""

    paper: str
    table: str
    case: str
    published: float
    predicted: float
    half: str


def predictions() -> Iterator[tuple[Case, float]]:
    """Yields each case with its prediction, in the order of the tables."""
    for case in AMOEBANET:
        yield case, torchgpipe.predicted("amoebanet", torchgpipe.AMOEBANET[case.name])
    for case in UNET:
        yield case, torchgpipe.predicted("unet", torchgpipe.UNET[case.name])
    layers = dapple.layers()
    for case in DAPPLE:
        yield case, dapple.predicted(layers, dapple.SETTINGS[case.name])
    for case in PROFILES:
        yield case, profiles.predicted(case.name)
    for case in VPIPE:
        yield case, vpipe.predicted()


def rows() -> Iterator[Row]:
    """Yields the rows of the table."""
    half = halves()
    for case, number in predictions():
        yield Row(
            paper=case.paper,
            table=case.table,
            case=case.name,
            published=round(case.published, 4),
            predicted=round(number, 4),
            half=half[case],
        )


def errors(found: Sequence[Row], half: str) -> list[float]:
    """The share that each prediction of a half is off."""
    return [abs(row["predicted"] / row["published"] - 1) for row in found if row["half"] == half]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.predicts", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the rows are written")
    out = parser.parse_args(words).json
    print("| paper | table | case | published | predicted | off | half |")
    print("|---|---|---|---|---|---|---|", flush=True)
    found = []
    for row in rows():
        found.append(row)
        off = row["predicted"] / row["published"] - 1
        told = f"{row['published']:.4g} | {row['predicted']:.4g} | {off:+.0%} | {row['half']}"
        print(f"| {row['paper']} | {row['table']} | {row['case']} | {told} |", flush=True)
    for half in ("fitted", "judged"):
        off = errors(found, half)
        print(f"\n{half}: {len(off)} rows, mean {statistics.mean(off):.1%}, worst {max(off):.1%}")
    first, last = found[0]["predicted"], found[len(AMOEBANET) - 1]["predicted"]
    print(f"AmoebaNet-D, n=8 and m=32 over n=2 and m=1: {last / first:.2f}; the paper 4.95")
    print(
        f"BERT, vPipe's own plan at 16: {vpipe.predicted(vpipe.VPIPE):.2f} times PipeDream's at 4"
    )
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

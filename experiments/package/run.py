"""What the package weighs: seconds of `import jvpipe` beside the core alone, bytes of the
environment of make bert.
"""

import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 9
MOST_RATIO, MOST_CORE, MOST_BERT = 1.8, 650_000_000, 900_000_000


@contextmanager
def environment(extras: str = "") -> Iterator[tuple[Path, int]]:
    """The folder of a fresh environment with this checkout and its extras, and the bytes that
    installing these adds.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, root = Path(folder) / "source", Path(folder) / "environment"
        kept = ("jvpipe", "models", "releasing", "pyproject.toml", "README.md", "LICENSE")
        shutil.copytree(
            ROOT,
            source,
            ignore=lambda at, names: set(names) - set(kept) if at == str(ROOT) else set(),
        )
        venv.create(root, with_pip=True, symlinks=True)
        before = bytes_under(root)
        subprocess.run(
            [root / "bin/python", "-m", "pip", "install", "--quiet", f"{source}{extras}"],
            check=True,
        )
        yield root, bytes_under(root) - before


def bytes_under(folder: Path) -> int:
    """What files take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def imported_s(root: Path, module: str) -> float:
    """The seconds of a process that imports a module and ends, less those of one that does not."""

    def ends(code: str) -> float:
        start_s = time.perf_counter()
        subprocess.run([root / "bin/python", "-c", code], cwd=root, check=True)
        return time.perf_counter() - start_s

    return ends(f"import {module}") - ends("")


def main() -> int:
    """Prints a table; 1 if a bound does not hold."""
    with environment() as (root, core):
        imported_s(root, "jvpipe")  # what numpy and jax read is in memory
        rounds = [(imported_s(root, "jax"), imported_s(root, "jvpipe")) for _ in range(ROUNDS)]
    with environment("[cli,models]") as (root, bert):
        pass
    jax_s, jvpipe_s = (median(column) for column in zip(*rounds, strict=True))
    ratio = median(b / a for a, b in rounds)
    print("| what | found | bound |\n|---|---|---|")
    print(f"| `import jax` | {jax_s:.2f} s | |\n| `import jvpipe` | {jvpipe_s:.2f} s | |")
    print(f"| ratio, median of {ROUNDS} turns | {ratio:.2f} | {MOST_RATIO} |")
    print(f"| install of the core | {core / 1e9:.3f} GB | {MOST_CORE / 1e9} GB |")
    print(f"| install of `make bert` | {bert / 1e9:.3f} GB | {MOST_BERT / 1e9} GB |")
    return 0 if ratio <= MOST_RATIO and core <= MOST_CORE and bert <= MOST_BERT else 1


if __name__ == "__main__":
    sys.exit(main())

"""The tests compile in a hurry; what they say about bits must hold under the compiler's usual
settings too.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.grid import grid

ROOT = Path(__file__).parents[2]
USUAL = "--xla_backend_optimization_level=3"
if version("jaxlib").startswith("0.10."):
    USUAL += " --xla_cpu_use_fusion_emitters=true --xla_cpu_parallel_codegen_split_count=32"


LAYERS = "tests/programs/test_layer.py::test_same_bits_of_what_is_normalized_whatever_is_kept"
HALVES = "tests/programs/test_split_backward.py::test_halves_have_the_bits_of_the_whole"
SOME = (
    "tests/end_to_end/test_exactness.py::test_bit_identical_with_all_stages_on_one_device[post-norm in bfloat16]",
)
MORE = (
    "tests/end_to_end/test_fates.py::test_a_product_after_a_norm_has_the_same_bits_again",
    "tests/end_to_end/test_fates.py::test_what_is_computed_again_has_the_bits_of_what_was_kept",
    *(
        f"{LAYERS}[{name}]"
        for name in ("contrastive", "mixer", "stacked-decoder", "normalized-products", "noisy")
    ),
    *(f"{HALVES}[{name}]" for name in ("mixer", "normalized-products", "recurrent")),
)


@pytest.mark.parametrize("many", grid(["some", "more"], "some"))
def test_bits_under_the_usual_settings(many: str) -> None:
    tests = SOME if many == "some" else MORE
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--numprocesses=0", "--thorough", *tests],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {USUAL}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert f"{len(tests)} passed" in done.stdout

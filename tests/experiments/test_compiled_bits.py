"""The kernels of scheduled HLO, and layers compiled for hardware that is not here."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from experiments.compiled_bits.kernels import kernels
from experiments.compiled_bits.layers import Asked, layers, traced
from experiments.compiled_bits.whole import most_programs
from jvpipe.cost.targets import find_target

HEAD = "HloModule m, is_scheduled=true"
PRODUCT = """%gemm (a: f32[4,8], b: f32[8,2]) -> f32[4,2] {{
  %a = f32[4,8]{{1,0}} parameter(0)
  %b = f32[8,2]{{1,0}} parameter(1)
  ROOT %{name} = f32[4,2]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""
ENTRY = """ENTRY %main (x: f32[4,8], y: f32[8,2]) -> f32[4,2] {{
  %y = f32[8,2]{{1,0}} parameter(1)
  %x = f32[4,8]{{1,0}} parameter(0)
  ROOT %out = f32[4,2]{{1,0}} fusion(%x, %y), kind=kCustom, calls=%gemm, metadata={{op_name="{name}"}}, \
backend_config={{"operation_queue_id":"{queue}","fusion_backend_config":{{"kind":"__triton","tile":"{tile}"}}}}
}}
"""


def hlo(name: str = "dot", queue: int = 0, tile: int = 16) -> str:
    return "\n".join(
        (HEAD, PRODUCT.format(name=name), ENTRY.format(name=name, queue=queue, tile=tile))
    )


def test_a_kernel_is_what_it_computes_and_how_it_is_configured() -> None:
    (kernel,) = kernels(hlo())
    assert kernel.sums == (True,)
    assert kernel.bytes == 4 * (4 * 8 + 8 * 2 + 4 * 2)
    assert kernels(hlo("other", queue=3)) == [kernel]
    assert kernels(hlo(tile=32))[0].results != kernel.results
    swapped = hlo().replace("dot(%a, %b)", "dot(%b, %a)")
    assert kernels(swapped)[0].results != kernel.results


@pytest.mark.thorough
def test_whole_layers_have_one_pair_of_programs_under_all_fates() -> None:
    inside = traced("bert", "tiny", "float32")
    whole = replace(inside, graph=replace(inside.graph, whole_layers=True))
    assert most_programs(inside, draws=4) > 1
    assert most_programs(whole, draws=4) == 1


@pytest.mark.skipif(find_spec("jax_cuda12_plugin") is None, reason="wants jvpipe[aot-cuda]")
def test_an_attention_layer_has_the_same_sums_on_an_h100_whatever_it_keeps(tmp_path: Path) -> None:
    assert_alike("h100", tmp_path)


@pytest.mark.skipif(find_spec("libtpu") is None, reason="wants jvpipe[aot-tpu]")
def test_an_attention_layer_has_the_same_sums_on_a_tpu_whatever_it_keeps(tmp_path: Path) -> None:
    assert_alike("v5e", tmp_path)


def assert_alike(target: str, folder: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    asked = Asked(find_target(target), folder)
    every = layers(traced("bert", "tiny", "float32"), asked)
    attention = next(layer for layer in every if layer.name == "blocks/000")
    assert not [where for where in attention.unlike if not where.startswith("I and W")]

"""With no limit, what costs nothing to compute again is not kept."""

import jax

from jvpipe._jax import Literal
from jvpipe.models import load
from jvpipe.programs.model_programs import layer_programs
from jvpipe.programs.store import ProgramStore
from jvpipe.trace.model import trace_model


def test_bert_keeps_less_than_a_third_of_what_a_plain_vjp_keeps() -> None:
    work = load("bert", "mini")
    params = jax.eval_shape(work.init, jax.random.key(0))
    batch, key = work.abstract_batch(4), jax.random.key(0, impl="unsafe_rbg")

    def pull(params: object, batch: object) -> list[jax.Array]:
        return jax.tree.leaves(jax.vjp(lambda p: work.loss_fn(p, batch, key)[0], params)[1])

    plain = jax.make_jaxpr(pull)(params, batch).jaxpr
    given = {*plain.invars, *plain.constvars}
    plain_bytes = sum(
        v.aval.size * v.aval.dtype.itemsize
        for v in dict.fromkeys(v for v in plain.outvars if not isinstance(v, Literal))
        if v not in given
    )

    traced = trace_model(work.loss_fn, params, batch, key).traced
    graph, ours_bytes, edges = traced.graph, 0, set()
    for layer, programs in zip(graph.layers, layer_programs(ProgramStore(), traced), strict=True):
        ours_bytes += sum(array.bytes for array in programs.signature.residuals)
        refs = {"input": layer.reads, "output": layer.writes}
        edges |= {refs[kind][i] for kind, i in programs.signature.sources if kind in refs}
    ours_bytes += sum(graph.tensors[ref.index].array.bytes for ref in edges if ref.kind == "tensor")
    share = ours_bytes / plain_bytes
    assert 0.05 < share <= 0.30, f"{ours_bytes:,} of {plain_bytes:,} bytes: {share:.3f}"

"""What PyTorch keeps of a forward for its backward, as candidates of our layers.

Of a matrix product autograd saves the operands, of layer norm and gelu the input, of softmax the
result, of dropout the mask (Korthikanti et al., arXiv:2205.05198, section 4.1). Our layers keep
what products yield and their own input, and compute all elementwise values again. With the operands
of products among the candidates as well they keep as many bytes as PyTorch does: scores stand for
softmax's result, the rest is the same.
"""

from dataclasses import replace

from jvpipe.ir.layers import Layer
from jvpipe.trace import jaxprs
from jvpipe.trace.body import Body
from jvpipe.trace.graph import Traced, array_of
from jvpipe.trace.primitives import flops, is_heavy


def saving_operands(traced: Traced) -> Traced:
    """The model with the operands of products among the candidates of its layers."""
    found = [_with_operands(*both) for both in zip(traced.graph.layers, traced.bodies, strict=True)]
    layers, bodies = zip(*found, strict=True)
    return replace(traced, graph=replace(traced.graph, layers=layers), bodies=bodies)


def _with_operands(layer: Layer, body: Body) -> tuple[Layer, Body]:
    weights = {v for v, ref in zip(body.inputs, body.reads, strict=True) if ref.kind == "parameter"}
    found = dict(body.candidates)
    for eqn in body.eqns:
        read = dict.fromkeys(jaxprs.variables(eqn.invars))
        if read and weights.issuperset(read):
            weights.update(eqn.outvars)  # another form of a parameter, which PyTorch reads in place
        elif is_heavy(eqn) and flops(eqn):
            for v in (v for v in read if v not in body.inputs and v not in weights):
                found.setdefault(v, f"operand_{len(found)}")
    arrays = tuple(array_of(v, name) for v, name in found.items())
    return replace(layer, candidates=arrays), replace(body, candidates=found)

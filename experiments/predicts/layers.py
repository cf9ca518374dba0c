"""The layers of a model on a device as somebody's framework runs them: seconds, and bytes that
leave a layer.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax

from experiments.planners.questions import question_of
from jvpipe.cost import roofline
from jvpipe.cost.frameworks import Framework
from jvpipe.cost.hardware import Accelerator
from jvpipe.ir.values import ValueKind
from jvpipe.models import load
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model_programs import layer_programs
from jvpipe.programs.store import ProgramStore
from jvpipe.trace.flatten import flatten
from jvpipe.trace.inline import merged_equations
from jvpipe.trace.primitives import flops


@dataclass(frozen=True)
class Layer:
    """A layer's seconds, the bytes of what it hands on, and how many parameters it reads."""

    name: str
    forward_s: float
    backward_s: float
    handed_bytes: int
    parameters: int

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def run_by(framework: Framework, device: Accelerator) -> Accelerator:
    """Has a framework run programs on a device."""
    return replace(device, framework=framework)


def layers_of(model: str, size: str, examples: int, device: Accelerator) -> list[Layer]:
    """Estimates the layers of a built-in model at its real size.

    Args:
        model: its name.
        size: of it, with fields that are set: "48 tokens=384".
        examples: of a micro-batch.
        device: that would run them.
    """
    name, *fields = size.split()
    chosen = {key: int(value) for key, _, value in (field.partition("=") for field in fields)}
    workload = load(model, name, **chosen)
    traced = question_of(workload, examples, 1, 1, optax.sgd(0.1), "gpipe").trace().traced
    programs = layer_programs(ProgramStore(), traced)
    seconds = {id(made): _seconds(made, device) for made in programs}
    return [
        Layer(
            layer.name,
            *seconds[id(made)],
            sum(traced.graph.tensors[t].array.bytes for t in layer.writing(ValueKind.TENSOR)),
            sum(traced.graph.parameters[p].array.bytes for p in layer.reading(ValueKind.PARAMETER))
            // 4,
        )
        for layer, made in zip(traced.graph.layers, programs, strict=True)
    ]


def _seconds(programs: LayerPrograms, device: Accelerator) -> tuple[float, float]:
    """Forward and backward; where nothing is fused the elementwise values that our backward makes
    again were kept.
    """
    forward_s, backward_s = (
        roofline.seconds(program, device) for program in (programs.forward, programs.backward)
    )
    if device.framework.fuses:
        return forward_s, backward_s
    forward = merged_equations(programs.forward).jaxpr
    each_s = roofline.equation_seconds(forward.eqns, forward.outvars, device)
    kept_s = sum(s for eqn, s in zip(forward.eqns, each_s, strict=True) if not flops(eqn))
    return forward_s, max(backward_s - kept_s, 0.0)


def update_s(
    optimizer: optax.GradientTransformation, parameters: int, device: Accelerator
) -> float:
    """Estimates the seconds of an optimizer's update, from its equations, as of one array."""
    array = jax.ShapeDtypeStruct((parameters,), jnp.float32)
    state = jax.eval_shape(optimizer.init, array)

    def update(gradient: jax.Array, state: optax.OptState, value: jax.Array) -> object:
        step, state = optimizer.update(gradient, state, value)
        return optax.apply_updates(value, step), state

    return roofline.seconds(flatten(update, array, state, array), device)

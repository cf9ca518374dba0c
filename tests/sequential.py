"""An oracle between a loss and its pipeline: the layers of a graph, run one after another on one
device.
"""

import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe._jax import ClosedJaxpr, exact, jaxpr_as_fun
from jvpipe.ir.layers import Layer, Ref
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.store import ProgramStore
from jvpipe.trace.graph import Traced
from jvpipe.trace.loss import key_words

Tree = Any
Chooser = Callable[[Layer], Collection[str]]
"""Picks the candidates of a layer that its forward keeps."""


@dataclass
class Outcome:
    """What one micro-batch gives; `gradients` and `state` by leaf, `per_layer` by (layer,
    parameter).
    """

    loss: jax.Array
    weight: jax.Array | None
    gradients: list[jax.Array]
    per_layer: dict[tuple[int, int], jax.Array]
    state: list[jax.Array]
    aux: list[jax.Array]


@dataclass
class Sequential:
    """Runs all forwards in layer order, then all backwards in reverse; programs alike are compiled
    once.

    Without `optimize` programs compile three times faster.
    """

    traced: Traced
    kept: Chooser = lambda layer: [c.name for c in layer.candidates]
    store: ProgramStore = field(default_factory=ProgramStore)
    optimize: bool = True

    def programs(self) -> list[LayerPrograms]:
        """Forward and backward of each layer; the cotangents of what later layers read too come in
        as sums.
        """
        tensors = self.traced.graph.tensors
        return [
            self.store.layer(
                body,
                self.kept(layer),
                [
                    r.index
                    for r in layer.reads
                    if r.kind == "tensor" and max(tensors[r.index].readers) > layer.id
                ],
            )
            for layer, body in zip(self.traced.graph.layers, self.traced.bodies, strict=True)
        ]

    def executables(self, programs: list[LayerPrograms]) -> dict[Any, Any]:
        """The compiled programs, by kind and key."""
        wanted = {("F", p.key): p.forward for p in programs} | {
            ("B", p.key): p.backward for p in programs
        }
        options: Any = exact("cpu") if self.optimize else {"xla_backend_optimization_level": 0}

        def compiled(closed: ClosedJaxpr) -> Any:
            jitted = jax.jit(jaxpr_as_fun(closed), keep_unused=True)
            return jitted.lower(*closed.in_avals).compile(compiler_options=options)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return dict(zip(wanted, pool.map(compiled, wanted.values()), strict=True))

    def run(self, params: Tree, batch: Tree, rng: jax.Array | None, state: Tree = None) -> Outcome:
        """Micro-batch 0 of step 0."""
        graph = self.traced.graph
        values: dict[Ref, Any] = {}
        kinds = {ValueKind.PARAMETER: params, ValueKind.BATCH: batch, ValueKind.STATE: state}
        for kind, tree in kinds.items():
            values |= {
                Ref(kind, i): jnp.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))
            }
        values |= {Ref(ValueKind.CONSTANT, i): c for i, c in enumerate(self.traced.loss.constants)}
        if rng is not None:
            values[Ref(ValueKind.SEED, 0)] = np.array([*key_words(rng).ravel(), 0, 0], np.uint32)
        made: dict[Ref, Any] = {}
        inputs, outputs, residuals = [], [], []
        programs = self.programs()
        compiled = self.executables(programs)
        for layer, program in zip(graph.layers, programs, strict=True):
            inputs.append([values[ref] for ref in layer.reads])
            out = compiled["F", program.key](*inputs[-1])
            outputs.append(out[: len(layer.writes)])
            residuals.append(out[len(layer.writes) :])
            made |= zip(layer.writes, outputs[-1], strict=True)
            values |= {ref: x for ref, x in made.items() if ref.kind == "tensor"}
        sums: dict[int, jax.Array] = {}
        per_layer: dict[tuple[int, int], jax.Array] = {}
        for layer, program in list(zip(graph.layers, programs, strict=True))[::-1]:
            signature = program.signature
            sources = {
                "input": inputs[layer.id],
                "output": outputs[layer.id],
                "residual": residuals[layer.id],
            }
            read = [sources[kind][i] for kind, i in signature.sources]
            read += [sums[layer.writes[i].index] for i in signature.cotangents]
            read += [sums[layer.reads[i].index] for i in signature.partial]
            read += [jnp.zeros_like(inputs[layer.id][i]) for i in signature.gradients]
            out = compiled["B", program.key](*read)
            count = len(signature.gradients)
            per_layer |= {
                (layer.id, layer.reads[i].index): x
                for i, x in zip(signature.gradients, out[:count], strict=True)
            }
            sums |= {
                layer.reads[i].index: x
                for i, x in zip(signature.returned, out[count:], strict=True)
            }
        gradients = []
        for p, leaf in enumerate(jax.tree.leaves(params)):
            total = None
            for reader in graph.parameters[p].readers:
                if (found := per_layer.get((reader, p))) is not None:
                    total = found if total is None else total + found
            gradients.append(jnp.zeros_like(leaf) if total is None else total)
        return Outcome(
            made[Ref(ValueKind.LOSS, 0)],
            made.get(Ref(ValueKind.LOSS, 1)),
            gradients,
            per_layer,
            [
                (made | values if Ref(ValueKind.STATE, i) not in made else made)[
                    Ref(ValueKind.STATE, i)
                ]
                for i in range(len(graph.state))
            ],
            [made[Ref(ValueKind.AUX, i)] for i in range(len(graph.aux))],
        )

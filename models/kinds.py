"""Text models as kinds of modules: a kind is built and traced only once, however often it occurs.

Modules of one kind differ only in their parameters. A tree holds the parameters of all modules of a
model. To run a module, the model makes it from its kind and its parameters:

    parameters    embedding    blocks/000, blocks/001, ...    output
    kinds         embedding    blocks                         output
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import jax
from flax import nnx

from jvpipe.models.blocks import Key, TextConfig
from jvpipe.models.lora import with_adapters

Part = Callable[..., nnx.Module]
"""A class of modules, or a function that makes a module: `part(config, rngs=rngs)`."""


class Kind:
    """A kind of module. `build(rngs)` makes a module, whose structure is traced only once."""

    def __init__(self, build: Callable[[nnx.Rngs], nnx.Module]) -> None:
        self._build = build

    def module(self, params: Any) -> Any:
        """Makes a module of this kind with these parameters."""
        graph, _, rest = self._structure
        # Without a copy, modules would share mutable state, such as counters of random streams.
        return nnx.merge(graph, params, rest, copy=True)

    @cached_property
    def init(self) -> Callable[[jax.Array], Any]:
        """Maps a key to fresh parameters, nested dicts of float32 arrays."""

        def module(key: jax.Array) -> nnx.Module:
            return self._build(nnx.Rngs(params=key))

        return jax.jit(lambda key: nnx.to_pure_dict(nnx.state(module(key), nnx.Param)))

    @cached_property
    def _structure(self) -> Any:
        # Only shapes are traced, so even a model of billions of parameters needs no arrays here.
        module = nnx.eval_shape(lambda: self._build(nnx.Rngs(0)))
        return nnx.split(module, nnx.Param, ...)


def adapted_kind(build: Callable[[nnx.Rngs], nnx.Module], config: TextConfig, name: str) -> Kind:
    """Makes a kind of module with the adapters that the configuration asks for.

    Args:
        build: makes the module without adapters.
        config: has the rank of adapters, and the patterns of paths that get an adapter.
        name: the name of the kind, which begins all paths.
    """
    return Kind(with_adapters(build, name, config.lora, config.lora_on, config.dtype))


@dataclass(frozen=True)
class Parts:
    """A model as its kinds of modules, in order.

    Attributes:
        config: the shape of the model.
        kinds: the names of the kinds, each with a class or function that makes its modules.
        stacked: the kinds that occur several times, one module after another.
        count: how often each stacked kind occurs; None means `config.blocks` times.
    """

    config: TextConfig
    kinds: Mapping[str, Part]
    stacked: tuple[str, ...] = ("blocks",)
    count: int | None = None

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Makes fresh parameters: nested dicts of arrays, e.g. `blocks/003/expand/kernel`."""
        layers = {}
        for name, kind in self._kinds.items():
            stack = {}
            for i in range(self._count(name)):
                # The key depends only on the module's position, not on how the model is cut.
                module_key = jax.random.fold_in(key, self._first[name] + i)
                stack[f"{i:03}"] = kind.init(module_key)
            layers[name] = stack if name in self.stacked else stack["000"]
        return layers

    def part(self, name: str, params: Any) -> Any:
        """Makes a module of the named kind with these parameters."""
        return self._kinds[name].module(params)

    def key(self, name: str, key: Key, i: int = 0) -> Key:
        """Returns the key of module `i` of a kind; None without a key.

        The module's position in the model is folded into `key`, so that the keys of blocks differ
        only by a number.
        """
        if key is None:
            return None
        return jax.random.fold_in(key, self._first[name] + i)

    def through(
        self, name: str, blocks: Any, x: jax.Array, key: Key, *others: jax.Array
    ) -> jax.Array:
        """Runs `x` through all blocks of a kind. Each block also reads `others`."""
        # This is a loop, because a scan would need the blocks' parameters in stacked arrays.
        for i in range(self._count(name)):
            block = self.part(name, blocks[f"{i:03}"])
            x = block(x, *others, self.key(name, key, i))
        return x

    def _count(self, name: str) -> int:
        blocks = self.config.blocks if self.count is None else self.count
        return blocks if name in self.stacked else 1

    @cached_property
    def _first(self) -> dict[str, int]:
        """The position of the first module of each kind."""
        starts = accumulate(map(self._count, self.kinds), initial=0)
        return dict(zip(self.kinds, starts, strict=False))

    @cached_property
    def _kinds(self) -> dict[str, Kind]:
        config = self.config

        def built(part: Part, rngs: nnx.Rngs) -> nnx.Module:
            return part(config, rngs=rngs)

        return {
            name: adapted_kind(partial(built, part), config, name)
            for name, part in self.kinds.items()
        }

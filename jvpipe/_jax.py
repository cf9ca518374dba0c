"""The only file that uses `jax.extend`, jaxlib or other parts of JAX that may change.

Other files use only the public modules of JAX, so an upgrade of JAX should change this file alone.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
from jax.core import ShapedArray
from jax.core import Tracer as Tracer
from jax.experimental import multihost_utils, topologies, transfer
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as _core
from jax.interpreters import mlir
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib.mlir.dialects import stablehlo as hlo

from jvpipe.util.devices import Device, DeviceGroup, devices_in, is_plain, sharding_on, spec_of

if TYPE_CHECKING:
    TreeDef = Any
else:
    TreeDef = jax.tree_util.PyTreeDef


ClosedJaxpr = _core.ClosedJaxpr
Jaxpr = _core.Jaxpr
JaxprEqn = _core.JaxprEqn
Literal = _core.Literal
Var = _core.Var
Atom = Var | Literal


def bind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Applies an equation to values (arrays or tracers) and returns its results."""
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def is_dropped(var: Atom) -> bool:
    """Tells whether the result of an equation has no name (`_` in a printed jaxpr)."""
    return isinstance(var, _core.DropVar)


def scope(eqn: JaxprEqn) -> str:
    """Returns the name scope of an equation; in a Linen model, this is the path of the module."""
    return "/".join(filter(None, str(eqn.source_info.name_stack).split("/")))


def joined_source(outer: Any, eqn: JaxprEqn) -> Any:
    """Returns the source of an equation that is taken out of a call, with the call's name scope.

    A source says where in the user's code an equation was traced, and its name scope. `outer` is
    the source of the call; if it is None, the result is the equation's own source.
    """
    source = eqn.source_info
    if outer is None:
        return source
    return outer.replace(name_stack=outer.name_stack + source.name_stack)


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Returns the jaxprs among an equation's parameters, such as the body of a scan."""
    return list(_core.jaxprs_in_params(eqn.params))


def is_ordered(eqn: JaxprEqn) -> bool:
    """Tells whether an equation has an ordered effect, such as an ordered call of host code."""
    return any("Ordered" in type(effect).__name__ for effect in eqn.effects)


def is_of_closed_over(error: Exception) -> bool:
    """Tells whether an error is about a `custom_vjp` that closes over a differentiated value."""
    return type(error).__name__ == "CustomVJPException"


def call_stack(eqn: JaxprEqn) -> list[tuple[str, str]]:
    """Returns the file and the name of each function on the call stack when JAX traced an equation.

    The innermost function comes first.
    """
    frames = getattr(eqn.source_info.traceback, "frames", ())
    return [(frame.file_name, frame.function_name) for frame in frames]


def scan_operands(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits values, one for each operand of a `scan`, into constants, carry and scanned arrays."""
    if "ft_in" in eqn.params:  # JAX 0.11
        consts, carry, xs = eqn.params["ft_in"].update(values).unpack()
        return list(consts), list(carry), list(xs)
    first_carry = eqn.params["num_consts"]
    first_x = first_carry + eqn.params["num_carry"]
    parts = values[:first_carry], values[first_carry:first_x], values[first_x:]
    return list(parts[0]), list(parts[1]), list(parts[2])


def aval(atom: Atom) -> ShapedArray:
    """Returns the shape and type of a variable or literal."""
    return cast(ShapedArray, atom.aval)


def new_variable(aval: Any) -> Var:
    """Returns a new variable for a jaxpr."""
    return Var(aval)


def reshaped_variable(var: Var, shape: Sequence[int]) -> Var:
    """Returns a new variable with another shape, which is dropped if `var` is dropped."""
    return type(var)(aval(var).update(shape=tuple(shape)))


jaxpr_as_fun = _core.jaxpr_as_fun


def outlined(closed: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    """Calls a jaxpr as a function that is compiled in the same way in all programs.

    A value that one program keeps and another recomputes must be bitwise identical in both. So the
    rest of a program must not affect how the function is compiled. On CPUs, the function is marked
    so that the compiler does not inline it. Compilers for other devices inline it. They could then
    choose memory layouts that suit the readers of its results, and kernels that suit these layouts.
    To prevent this, the results get the row-major layout that arrays have between programs, unless
    the program runs on several devices. The function has no derivative.
    """
    return _outlined().bind(*values, jaxpr=closed)


@cache
def _outlined() -> Any:
    """Makes the primitive of `outlined`, with one rule for CPUs and one for other devices."""

    def inside(*values: Any, jaxpr: ClosedJaxpr) -> list[Any]:
        return jaxpr_as_fun(jaxpr)(*values)

    def laid(*values: Any, jaxpr: ClosedJaxpr) -> list[Any]:
        return [_row_major(x) for x in inside(*values, jaxpr=jaxpr)]

    def elsewhere(context: Any, *values: Any, jaxpr: ClosedJaxpr) -> Any:
        rule = inside if _is_spread(context) else laid
        return mlir.lower_fun(rule, multiple_results=True)(context, *values, jaxpr=jaxpr)

    def apart(*values: Any, jaxpr: ClosedJaxpr) -> list[Any]:
        results = jax.jit(jaxpr_as_fun(jaxpr))(*values)
        # Metadata that is set on the results applies to the call that makes them.
        return cast(list[Any], set_xla_metadata(results, inlineable="false"))

    primitive = _core.Primitive("outlined")
    primitive.multiple_results = True
    primitive.def_impl(inside)
    primitive.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)
    on_cpu = mlir.lower_fun(apart, multiple_results=True)
    mlir.register_lowering(primitive, elsewhere)
    mlir.register_lowering(primitive, on_cpu, platform="cpu")
    return primitive


def lowered(jitted: Any, inputs: Sequence[Any], platform: str | None = None) -> Any:
    """Lowers a jitted function for a platform; without one, for that of its inputs.

    To divide an array by a scalar, XLA multiplies by the scalar's reciprocal, but only if nothing
    else reads the scalar. A program that also divides another array by it would round differently.
    So here each division gets its scalar through a barrier of its own, which has no other reader.

    Args:
        jitted: the function.
        inputs: the shapes of its arguments.
        platform: the platform's name.
    """
    parameters = mlir.LoweringParameters(override_lowering_rules=((jax.lax.div_p, _divided),))
    platforms = None if platform is None else (platform,)
    return jitted.trace(*inputs).lower(lowering_platforms=platforms, _private_parameters=parameters)


def _divided(context: Any, x: Any, y: Any) -> Any:
    """Lowers a division; a scalar that divides an array comes through a barrier."""
    array, divisor = context.avals_in
    if array.ndim and not divisor.ndim:
        y = hlo.OptimizationBarrierOp([y]).results[0]
    return mlir._lowerings[jax.lax.div_p].rule(context, x, y)


def laid_out(x: Any) -> Any:
    """Returns a value in the row-major layout that arrays have between programs.

    A recomputed value then has the same layout for its readers as a kept one. On CPUs, and in
    programs that run on several devices, the value stays as it is.
    """
    return _laid_out().bind(x)


@cache
def _laid_out() -> Any:
    """Makes the primitive of `laid_out`, with one rule for CPUs and one for other devices."""

    def elsewhere(context: Any, x: Any) -> Any:
        if _is_spread(context):
            return [x]
        return mlir.lower_fun(_row_major, multiple_results=False)(context, x)

    primitive = _core.Primitive("laid_out")
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda aval: aval)
    mlir.register_lowering(primitive, elsewhere)
    mlir.register_lowering(primitive, lambda _, x: [x], platform="cpu")
    return primitive


def _is_spread(context: Any) -> bool:
    """Tells whether a program runs on several devices, where a fixed layout would gather arrays."""
    return getattr(context.module_context.axis_context, "num_devices", None) not in (None, 1)


def _row_major(x: Any) -> Any:
    """Returns an array in row-major layout, which arrays have between programs."""
    if x.ndim < 2 or not is_plain(x.dtype):
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


# `jax.device_put` adds 17 microseconds of Python to a copy that takes 3 microseconds. A pipeline
# copies twice for each stage and micro-batch, so the copiers below call these functions of jaxlib
# directly, or `device_put` if jaxlib lacks them. Between CPU devices, `_copy_array` also wakes a
# thread for each copy, which takes 36 microseconds. So `prompt_copier` copies small arrays with
# `_put_host`, in the calling thread.
_copy_array = getattr(_jaxlib, "batched_copy_array_to_devices_with_sharding", None)
_put_host = getattr(_jaxlib, "batched_device_put", None)


def is_ready(array: jax.Array) -> bool:
    """Tells whether an array has been computed, without waiting."""
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)  # a key array has no `is_ready`, but its words have
    return cast(Any, array).is_ready()


_EXACT: Mapping[str, dict[str, str | bool]] = {
    # With this option, XLA passes each product to a library alone. Without it, a product may be
    # fused with the operations before it, and another program may lack these.
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"},
    # With this option, XLA does not merge products that read the same array. Another program may
    # have only one of these products.
    "gpu": {"xla_gpu_dot_merger_threshold_mb": "0"},
}


@cache
def exact(platform: str) -> dict[str, str | bool]:
    """Returns compiler options that make a value bitwise identical in all programs that compute it.

    The result is empty if the platform needs no options, or if this version of JAX lacks them.
    """
    options = _EXACT.get("gpu" if platform == "cuda" else platform)
    if not options:
        return {}
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=options)
    except Exception:  # a version without this option
        return {}
    return options


_shaped = cache(ShapedArray)


def copier(device: Device) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that copies an array from another device to `device`."""
    if _copy_array is None:
        return lambda x: jax.device_put(x, sharding_on(device, spec_of(x)))
    copy = _copy_array
    always = [_jaxlib.ArrayCopySemantics.ALWAYS_COPY]
    devices = [_jaxlib.DeviceList(devices_in(device))]
    whole = [sharding_on(device)]
    grouped = isinstance(device, DeviceGroup)

    def run(x: jax.Array) -> jax.Array:
        shardings = [sharding_on(device, spec_of(x))] if grouped else whole
        try:
            return copy([x], devices, shardings, always)[0]
        except TypeError:  # an array of random keys, which this function cannot copy
            return jax.device_put(x, shardings[0])

    return run


def prompt_copier(source: Device, device: Device) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that copies small arrays to a device.

    Between CPUs, an array whose computation has ended is copied by the calling thread itself.

    Args:
        source: the device that has the arrays.
        device: the device that gets the copies.
    """
    copy = copier(device)
    on_cpus = source.platform == device.platform == "cpu"
    if _put_host is None or isinstance(device, DeviceGroup) or not on_cpus:
        return copy
    put = _put_host
    sharding = sharding_on(device)

    def run(x: jax.Array) -> jax.Array:
        if is_plain(x.dtype) and cast(Any, x).is_ready():
            # jaxlib may still read `words` when `x` has been freed, so `words` is a copy.
            words = np.array(x)
            return put(x.aval, sharding, [words], [device], force_copy=True)
        return copy(x)

    return run


def feeder(
    device: Device,
    spec: tuple[Any, ...] = (),
) -> Callable[[np.ndarray | jax.Array], jax.Array]:
    """Returns a function that copies an array, usually from the host, to a device.

    The array on the host may be overwritten as soon as the function returns.

    Args:
        device: a device or a group.
        spec: for each dimension of the array, the axes of the group along which it is cut.
    """
    sharding = sharding_on(device, spec)
    if _put_host is None or isinstance(device, DeviceGroup):
        return lambda x: jax.device_put(x, sharding, may_alias=False)
    put = _put_host
    copy = copier(device)

    def run(x: np.ndarray | jax.Array) -> jax.Array:
        if not isinstance(x, np.ndarray):
            return copy(x)
        return put(_shaped(x.shape, x.dtype), sharding, [x], [device], force_copy=True)

    return run


def transfer_server(address: str) -> Any:
    """Returns a server at this host's `address`, from which other processes pull arrays."""
    any_port = f"{address}:0"
    client = cast(Any, jax.local_devices()[0]).client
    sizes = {"max_num_parallel_copies": 8, "transfer_size": 1 << 20}
    return transfer.start_transfer_server(client, any_port, [any_port], **sizes)


def own_address() -> str:
    """Returns the address of this host on the network that leads to the coordinator."""
    coordinator = cast(Any, multihost_utils).distributed.global_state.coordinator_address
    host, _, port = coordinator.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip("[]"), int(port)))  # nothing is sent
        return probe.getsockname()[0]


def has_devices() -> bool:
    """Tells whether JAX has made its devices, without making any."""
    return cast(Any, multihost_utils).xla_bridge.backends_are_initialized()


def coordination() -> Any:
    """Returns the processes' key-value store and barriers; None if this process is alone."""
    return cast(Any, multihost_utils).distributed.global_state.client


def process_of() -> tuple[int, int]:
    """Returns the number of this process and the count of processes, without making devices."""
    state = cast(Any, multihost_utils).distributed.global_state
    return (0, 1) if state.client is None else (state.process_id, state.num_processes)


def absent_device(platform: str, topology: str, config: str) -> Device:
    """Returns a device of absent hardware, for which programs can be compiled but not run.

    This starts the platform's plugin.

    Args:
        platform: `cuda` or `tpu`; for `cpu`, the result is a CPU device of this machine.
        topology: the devices, in the platform's own notation, such as `v5e:2x2`.
        config: the target description of a GPU; unused for other platforms.
    """
    if platform == "cpu":
        return jax.devices("cpu")[0]
    if platform == "tpu":
        return topologies.get_topology_desc(topology, "tpu").devices[0]
    options = {"target_config": config, "topology": topology}
    return topologies.get_topology_desc("", platform, **options).devices[0]


_NO_TILES = "find output tile sizes"
"""A part of the message with which a GPU's compiler refuses a program with a product.

If the GPU is present, the compiler tries several tilings of the product, and then a library. If the
GPU is absent, it tries one tiling.
"""


def compiled_sizes(text: str, device: Device) -> tuple[str, tuple[int, ...]]:
    """Compiles a program; returns the first line of the compiled HLO, and the bytes that it needs.

    The bytes are those of arguments, results, results that share memory with arguments,
    temporaries and code. If the compiler finds no tiling of a product (`_NO_TILES`), the program is
    compiled again so that a library computes its products.

    Args:
        text: the program in StableHLO.
        device: the device to compile for, which may be absent.
    """
    flags = exact(device.platform)
    try:
        return _compiled_sizes(text, device, flags)
    except jax.errors.JaxRuntimeError as refusal:
        if _NO_TILES not in str(refusal):
            raise
        return _compiled_sizes(text, device, flags | {"xla_gpu_enable_triton_gemm": False})


def _compiled_sizes(
    text: str,
    device: Device,
    flags: dict[str, str | bool],
) -> tuple[str, tuple[int, ...]]:
    """Compiles a program with the given compiler options; the result is as in `compiled_sizes`."""
    options = _jaxlib.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = True
    options.env_option_overrides = list(flags.items())
    client = cast(Any, device).client
    # CPUs are present, so the program can be loaded. The client of an absent device only compiles.
    make = client.compile_and_load if device.platform == "cpu" else client.compile
    devices = _jaxlib.DeviceList((device,))
    with mlir.make_ir_context():
        module = cast(Any, mlir).ir.Module.parse(text)
        executable = make(module, devices, options)
    sizes = executable.get_compiled_memory_stats()
    modules = getattr(executable, "get_hlo_modules", None) or executable.hlo_modules
    header, _, _ = modules()[0].to_string().partition("\n")
    return header, (
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes,
        sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes,
        sizes.generated_code_size_in_bytes,
    )

"""What tests compile is kept in a folder while they run, for every process: to load it takes a sixth of the time.

A program of one device is kept for any, as JAX itself has it on GPUs: on CPUs it would compile it for each of eight,
and for each number of devices that a process may have.
"""

import atexit
import os
import shutil
from tempfile import mkdtemp
from typing import Any


def make_folder() -> None:
    """Names a folder to JAX, here and in the processes that this one starts; a worker has its controller's."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder = mkdtemp(prefix="compiled-")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def open_folder() -> None:
    """Has JAX look there before it compiles; measured seconds, kept beside programs, are not shared among tests.

    JAX promises none of what is touched here. Where it has changed, all is compiled.
    """
    import jax
    from jax._src import cache_key, compilation_cache

    key: Any = cache_key
    touched = "_hash_serialized_compile_options", "_hash_accelerator_config", "_hash_devices"
    if all(hasattr(key, name) for name in touched) and hasattr(compilation_cache, "_initialize_cache"):
        options_of, place_of, kinds_of = (getattr(key, name) for name in touched)
        key._hash_serialized_compile_options = lambda digest, options, **_: options_of(
            digest, options, strip_device_assignment=options.num_replicas * options.num_partitions == 1
        )
        key._hash_accelerator_config = lambda digest, devices: (kinds_of if devices.size == 1 else place_of)(
            digest, devices
        )
        compilation_cache._initialize_cache()
    jax.config.update("jax_compilation_cache_dir", None)

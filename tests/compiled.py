"""What tests compile is kept in a folder while they run, for every process: to load it takes a sixth of the time.

A program of one device is kept for any, as JAX itself has it on GPUs: on CPUs it would compile it for each of eight.
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

    name = "_hash_serialized_compile_options"
    put, start = getattr(cache_key, name, None), getattr(compilation_cache, "_initialize_cache", None)

    def put_without_device(digest: Any, options: Any, **_: Any) -> None:
        assert put
        put(digest, options, strip_device_assignment=options.num_replicas * options.num_partitions == 1)

    if put and start:
        setattr(cache_key, name, put_without_device)
        start()
    jax.config.update("jax_compilation_cache_dir", None)

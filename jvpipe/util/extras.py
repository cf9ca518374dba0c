"""Guards imports of optional packages; the error for a missing package names the extra to install.

An extra is a named set of optional packages, such as `figures` in `pip install 'jvpipe[figures]'`.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtraError(ImportError, ValueError):
    """The error for a missing optional package; its message says how to install the package.

    The error has two base classes. As an ImportError, it is caught by programs that try an import.
    As a ValueError, it counts as a user's mistake, which the command line shows in one line.
    """


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Surrounds imports of packages that an extra of jvpipe installs.

    Args:
        name: the name of the extra, such as `cli`.

    Raises:
        MissingExtraError: a package that the body of the `with` imports is not installed.

    >>> with extra("figures"):
    ...     import no_such_package
    Traceback (most recent call last):
    ...
    jvpipe.util.extras.MissingExtraError: no_such_package is not installed: pip install 'jvpipe[figures]'
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"{missing.name} is not installed: pip install 'jvpipe[{name}]'"
        ) from missing

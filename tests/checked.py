"""An import hook: the functions and classes of a package check their annotations when they are
called.

The first calls of each function are checked, and then the first in each test. While they are, the
function has the code of its checker; in between it has its own, and costs nothing: a wrapper that
counts calls took a tenth of the suite, and checking them all a quarter of the tests of planners.
Functions defined inside a function are not checked, unlike with `beartype.claw`: they would be
compiled anew in each call around them, which took a third of some tests.
"""

import ast
import sys
from collections.abc import Callable, Collection
from functools import update_wrapper
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, FunctionType
from typing import Any, ClassVar

from beartype import beartype

CHECK = "__import__('tests.checked', fromlist=['checking']).checking"
FIRST, IN_EACH_TEST = 200, 1
"""How many calls of a function are checked at first, and how many in each test that follows."""


def _copied(made: FunctionType) -> FunctionType:
    """A function of its own that does the same."""
    copy: Any = FunctionType(
        made.__code__, made.__globals__, made.__name__, made.__defaults__, made.__closure__
    )
    copy.__kwdefaults__ = made.__kwdefaults__
    update_wrapper(copy, made)
    del copy.__wrapped__
    return copy


def _handing_to(called: Callable[..., Any], names: tuple[str, ...]) -> CodeType:
    """The code of a function that hands its arguments to another; names are those its closure
    has.
    """

    def hand(*args: Any, **kwargs: Any) -> Any:
        whom: Any = "called"
        return whom(*args, **kwargs)

    constants = tuple(called if it == "called" else it for it in hand.__code__.co_consts)
    return hand.__code__.replace(co_consts=constants, co_freevars=names)


class Checker:
    """What checks the next calls of a function."""

    resting: ClassVar[list["Checker"]] = []
    """Those whose functions have their own code."""

    def __init__(self, made: FunctionType) -> None:
        self.made: Any = made
        self.own, self.plain = made.__code__, _copied(made)
        self.checks = _handing_to(self, self.own.co_freevars)
        self.checked: Callable[..., Any] | None = None
        self.made.__wrapped__ = self.plain  # whose arguments are those to be shown
        self.check(FIRST)

    def check(self, calls: int) -> None:
        """Checks so many calls."""
        self.left, self.made.__code__ = calls, self.checks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left <= 0:
            self.made.__code__ = self.own
            Checker.resting.append(self)
        self.checked = self.checked or beartype(self.plain)  # the uncalled need not be made ready
        return self.checked(*args, **kwargs)


def check_again() -> None:
    """Checks the next calls of the functions whose first calls were checked."""
    resting, Checker.resting = Checker.resting, []
    for checker in resting:
        checker.check(IN_EACH_TEST)


def checking(made: Any) -> Any:
    """A function whose annotations are checked; or a class whose making is, if a dataclass makes
    it.
    """
    if isinstance(made, type):
        if "__init__" in vars(made):
            checking(made.__init__)
    elif made.__annotations__:
        Checker(made)
    return made


def _check(node: ast.AST) -> ast.expr:
    """The decorator, on the line of what it decorates."""
    decorator = ast.parse(CHECK, mode="eval").body
    return ast.fix_missing_locations(ast.copy_location(decorator, node))


class Decorating(ast.NodeTransformer):
    """Decorates what a module defines, not what is inside it; a class last of all, so that all it
    has is checked.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list.append(_check(node))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        if any(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases):
            self.generic_visit(node)  # its methods alone: they are made by the million
            return node
        self.generic_visit(node)
        if node.decorator_list:  # a dataclass, whose maker has annotations
            node.decorator_list.insert(0, _check(node))
        return node


class CheckedLoader(SourceFileLoader):
    """Compiles a module with its decorators; never from or to a file, where the plain one lies."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = Decorating().visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, "exec", dont_inherit=True)


class CheckedFinder(MetaPathFinder):
    """Finds the modules of `package` as Python does, but for those of `skipped`, and lets them be
    checked.
    """

    def __init__(self, package: str, skipped: Collection[str]) -> None:
        self.package, self.skipped = package, skipped

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self.package or fullname in self.skipped:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = CheckedLoader(spec.loader.name, spec.loader.path)
        return spec


def check(package: str, skipped: Collection[str]) -> None:
    """Checks the modules of a package that are imported from now on, but for those skipped."""
    sys.meta_path.insert(0, CheckedFinder(package, skipped))

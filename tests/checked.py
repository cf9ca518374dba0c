"""An import hook: the functions and classes of a package check their annotations when they are called.

The first calls of each are checked, and then one of many: checking all took a quarter of the tests of planners. Those
defined inside a function are not, unlike with `beartype.claw`: they would be compiled anew in each call around them,
which took a third of some tests.
"""

import ast
import sys
from collections.abc import Collection
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

from beartype import beartype

CHECK = "__import__('tests.checked', fromlist=['sampled']).sampled"
FIRST, ONE_OF = 200, 61
"""How many calls are checked at first, and of how many one later."""


def sampled(made: Any) -> Any:
    """A function some of whose calls are checked; or a class of which all makings are, if a dataclass makes them."""
    if isinstance(made, type):
        if "__init__" in vars(made):
            made.__init__ = sampled(made.__init__)
        return made
    if not getattr(made, "__annotations__", True):
        return made
    checked, seen, passed = None, 0, 0

    @wraps(made)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked, seen, passed
        if passed > 0:
            passed -= 1
            return made(*args, **kwargs)
        seen += 1
        passed = ONE_OF - 1 if seen > FIRST else 0
        checked = checked or beartype(made)  # what is never called need not be made ready
        return checked(*args, **kwargs)

    return call


def _check(node: ast.AST) -> ast.expr:
    """The decorator, on the line of what it decorates."""
    decorator = ast.parse(CHECK, mode="eval").body
    return ast.fix_missing_locations(ast.copy_location(decorator, node))


class Decorating(ast.NodeTransformer):
    """Decorates what a module defines, not what is inside it; a class last of all, so that all it has is checked."""

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
    """Finds the modules of `package` as Python does, but for those of `skipped`, and lets them be checked."""

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

"""Loads chosen modules of an unpacked release as they are, and a recorded stub in the place of every other.

An engine's context-parallel code imports half of its package: configuration, models, compiled kernels.
`Package` serves the files on an allow-list, unchanged; whatever else of the package they import becomes a
`Stub`. Importing and decorating with stubs is harmless. *Using* one while an operation runs is not, since
what comes out is not the engine's: `StubUsed` is raised, and remembered in case the engine catches it, so
that no result of a stub can pass for one of the engine.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardcheck import Unsupported


class StubUsed(RuntimeError):
    """An operation came to a part of the engine that isn't there."""


class Ledger:
    """What became of the parts that aren't there: which were imported, touched, used, and which decided
    something at import."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.decisions: set[str] = set()
        self.touched: set[str] = set()
        self.used: list[str] = []
        self._watching = 0

    def touch(self, name: str) -> None:
        """A stub was looked at."""
        if self._watching:
            self.touched.add(name)

    def use(self, name: str, how: str) -> None:
        """A stub was to act; raises `StubUsed` while an operation runs."""
        if self._watching:
            self.used.append(f"{name} ({how})")
            raise StubUsed(
                f"{name} is {how}, but only a stub stands there: it is not among the files that are served"
            )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within, uses raise; a use that the engine swallowed is raised at the end."""
        self.used.clear()
        self._watching += 1
        try:
            yield
        finally:
            self._watching -= 1
        if self.used:
            raise StubUsed(f"the result hangs on stubs: {', '.join(self.used)}")


class Stub:
    """Stands for a name of a module that isn't served. At import it may be called, subscripted, derived from
    and decorated with."""

    def __init__(self, ledger: Ledger, name: str) -> None:
        self.__dict__.update(_ledger=ledger, _name=name)

    def _act(self, how: str, result: Any = None) -> Any:
        self._ledger.use(self._name, how)
        return self if result is None else result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._ledger.touch(f"{self._name}.{name}")
        return Stub(self._ledger, f"{self._name}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        self._act("changed")

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._act("called")

    def __getitem__(self, _: Any) -> Any:
        return self._act("subscripted")

    def __or__(self, _: Any) -> Any:
        return self._act("combined")

    __ror__ = __and__ = __rand__ = __add__ = __radd__ = __or__

    def __iter__(self) -> Iterator[Any]:
        return self._act("iterated", iter(()))

    def __contains__(self, _: Any) -> bool:
        self._decide()
        return False

    def __bool__(self) -> bool:
        self._decide()
        return False

    def __instancecheck__(self, _: Any) -> bool:
        self._decide()
        return False

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (_base(self._ledger, self._name),)

    def __repr__(self) -> str:
        return f"<stub of {self._name}>"

    def _decide(self) -> None:
        self._ledger.use(self._name, "asked")
        self._ledger.decisions.add(self._name)


def _base(ledger: Ledger, name: str) -> type:
    """A class that a class of the engine derives from in the place of one that isn't there."""

    def initialise(self: Any, *_: Any, **__: Any) -> None:
        ledger.use(name, "initialised")

    body = {
        "__init__": initialise,
        "__init_subclass__": classmethod(lambda cls, **_: None),
        "__class_getitem__": classmethod(lambda cls, _: cls),
    }
    return type(name.rpartition(".")[2], (), body)


class StubModule(types.ModuleType):
    """A module that isn't served: chosen attributes, and stubs for all others. Served modules below it are
    found as usual."""

    def __init__(self, package: Package, name: str, attributes: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(attributes, _package=package, __path__=[], __all__=[])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if self._package.is_real(full) or full in self._package.replaced:
            return importlib.import_module(full)
        self._package.ledger.touch(full)
        return Stub(self._package.ledger, full)


class _StubLoader(importlib.abc.Loader):
    def __init__(self, package: Package) -> None:
        self.package = package

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(self.package, spec.name, self.package.replaced.get(spec.name, {}))

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ not in self.package.replaced:
            self.package.ledger.modules.add(module.__name__)


class _FileLoader(importlib.machinery.SourceFileLoader):
    """Loads a file as it is, notes its hash, and leaves no byte code beside it."""

    package: Package

    def get_data(self, path: str) -> bytes:
        content = super().get_data(path)
        if path == self.path:
            self.package.hashes[Path(path).relative_to(self.package.folder).as_posix()] = hashlib.sha256(
                content
            ).hexdigest()
        return content

    def set_data(self, path: str, data: bytes, *, _mode: int = 0o666) -> None:
        """Nothing: the folder of a release is not written to."""


class Package(importlib.abc.MetaPathFinder):
    """One package of an unpacked release.

    `name` is the package, `folder` the folder that holds it, `served` the modules that are loaded from their
    files, `replaced` what stands in for others: attributes by module name. `foreign` are packages of others
    that stubs stand for where they are not installed, `stood_in` those that stubs and `replaced` stand for whatever is
    installed or lies in the current folder.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        served: Iterable[str],
        replaced: Mapping[str, Mapping[str, Any]],
        foreign: Iterable[str] = (),
        stood_in: Iterable[str] = (),
    ) -> None:
        self.name = name
        self.folder = folder
        self.served = frozenset(served)
        self.replaced = dict(replaced)
        self.foreign = frozenset(foreign)
        self.stood_in = frozenset(stood_in)
        self.ledger = Ledger()
        self.hashes: dict[str, str] = {}

    def install(self) -> None:
        """From now on the package is imported from here alone."""
        loaded = {module.partition(".")[0] for module in sys.modules}
        if self.name in loaded:
            raise RuntimeError(f"{self.name} is imported already: one process serves one release")
        if self.stood_in & loaded:
            name = min(self.stood_in & loaded)
            raise Unsupported(f"this Python imports {name} by itself, where stand-ins belong: use one without it")
        sys.meta_path[:0] = [self, _Foreign(self, self.stood_in)]
        sys.meta_path.append(_Foreign(self, self.foreign))

    def path_of(self, module: str) -> Path | None:
        """File of a module in the release, if it has that module."""
        base = self.folder.joinpath(*module.split("."))
        candidates = (base.with_name(f"{base.name}.py"), base / "__init__.py")
        return next((path for path in candidates if path.is_file()), None)

    def is_real(self, module: str) -> bool:
        """Whether a module is served from its file and the release has it."""
        return module in self.served and self.path_of(module) is not None

    def load(self, module: str) -> types.ModuleType | None:
        """A served module, or `None` where the release has no such file. What its import raises passes
        through."""
        return importlib.import_module(module) if self.is_real(module) else None

    def first(self, modules: Iterable[str], symbol: str) -> Any:
        """The symbol from the first of these modules that defines it, or `None`."""
        for module in modules:
            loaded = self.load(module)
            found = getattr(loaded, symbol, None) if loaded is not None else None
            if found is not None and not isinstance(found, Stub):
                return found
        return None

    def cut(self, module: str, symbol: str, scope: Mapping[str, Any]) -> Callable[..., Any] | None:
        """A function by itself, compiled from the file of a module whose imports need more than is here; it sees
        `scope` alone. `None` where the release has no such function."""
        path = self.path_of(module)
        if path is None:
            return None
        content = path.read_bytes()
        found = [
            node
            for node in ast.parse(content).body
            if isinstance(node, ast.FunctionDef) and node.name == symbol
        ]
        if not found:
            return None
        self.hashes[path.relative_to(self.folder).as_posix()] = hashlib.sha256(content).hexdigest()
        names = dict(scope)
        exec(compile(ast.Module(body=found, type_ignores=[]), str(path), "exec"), names)
        return names[symbol]

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds served files, replacements and stubs; a module that the release doesn't have is not found, as
        it should be."""
        if fullname != self.name and not fullname.startswith(f"{self.name}."):
            return None
        if fullname in self.replaced:
            return importlib.machinery.ModuleSpec(fullname, _StubLoader(self), is_package=True)
        found = self.path_of(fullname)
        if fullname in self.served and found is not None:
            loader = _FileLoader(fullname, str(found))
            loader.package = self
            return importlib.util.spec_from_file_location(fullname, found, loader=loader)
        if found is None and not self.folder.joinpath(*fullname.split(".")).is_dir():
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, _StubLoader(self), is_package=True)

    def loaded(self) -> list[str]:
        """Names of the modules that were loaded from their files."""
        return sorted(name for name in self.served if name in sys.modules and self.is_real(name))

    def described(self) -> list[str]:
        """What was replaced, for a profile."""
        given = [
            f"{module}: {', '.join(sorted(attributes))}"
            for module, attributes in sorted(self.replaced.items())
            if attributes
        ]
        stubs = sorted(module for module in self.ledger.modules if module != self.name)
        named = ", ".join(stubs)
        summary = f"{len(stubs)} modules that are imported but not served are stubs that may not act: {named}"
        decided = [
            f"decided at import by a stub, taken as false: {name}" for name in sorted(self.ledger.decisions)
        ]
        return given + ([summary] if stubs else []) + decided


class _Foreign(importlib.abc.MetaPathFinder):
    """Stubs for packages of others: asked last, only where they are not installed, and asked first, in any case."""

    def __init__(self, package: Package, names: frozenset[str]) -> None:
        self.package = package
        self.names = names

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A stub for a module of a foreign package."""
        if fullname.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, _StubLoader(self.package), is_package=True)


def parameters(function: Callable[..., Any] | None) -> set[str]:
    """Names of the parameters of a function or class; none where there is no such function."""
    return set(inspect.signature(function).parameters) if function is not None else set()

"""From a word on the command line to an engine: import, options, the check of its declaration, hashes of its
files.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from shardcheck.engine import Engine, Session
from shardcheck.profile import OPERATIONS, Operation, Profile


class LoadError(Exception):
    """The engine can't be loaded, or what it declares isn't what it has."""


def load_engine(target: str, options: dict[str, str]) -> Engine:
    """The engine of `MODULE:CLASS` or `PATH.py:CLASS`, made with `options` as keyword arguments.

    `LoadError` says what is missing. Exceptions of the module or of the constructor pass through.
    """
    place, colon, class_name = target.rpartition(":")
    if not colon or not place or not class_name:
        raise LoadError(f"{target!r} is no engine: say MODULE:CLASS, such as my_module:MyEngine")
    module = _import(place)
    kind = getattr(module, class_name, None)
    if kind is None:
        classes = [name for name, found in vars(module).items() if _is_engine_class(found)]
        raise LoadError(f"{place} has no {class_name!r}; engines in it: {', '.join(classes) or 'none'}")
    if not _is_engine_class(kind):
        raise LoadError(f"{target} is no class that derives from shardcheck.Engine")
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise LoadError(f"options of {target}: {error}") from None
    return kind(**options)


def profile_of(engine: Engine) -> Profile:
    """What the engine declares; `LoadError` when a field is missing or no profile can be made of it."""
    for attribute in ("name", "version"):
        if not getattr(engine, attribute):
            raise LoadError(f"{type(engine).__name__} has no `{attribute}`")
    for name, operation in engine.operations.items():
        if not isinstance(operation, Operation):
            raise LoadError(f"operation {name!r} is declared as {operation!r}: give a shardcheck.Operation")
    try:
        return Profile(
            engine=engine.name,
            version=engine.version,
            revision=engine.revision,
            operations=dict(engine.operations),
            files=hash_files([type(engine).__module__, *engine.files]),
            devices=list(engine.devices),
            own_steps=list(engine.own_steps),
            replaced=list(engine.replaced),
            second_group=engine.second_group,
            call_file=str(engine.call_file),
            release_folder=str(engine.release_folder),
        )
    except ValueError as error:
        raise LoadError(f"profile of {type(engine).__name__}: {error}") from None


def session_type_of(engine: Engine) -> type | None:
    """Class of the sessions: `session_type`, else what `open` is annotated to return, else None."""
    if engine.session_type is not None:
        return engine.session_type
    try:
        found = typing.get_type_hints(type(engine).open).get("return")
    except Exception:  # an annotation that can't be resolved tells nothing
        return None
    return found if isinstance(found, type) and found is not Session else None


def check_methods(engine: Engine, session: type) -> list[str]:
    """Names of operations that `session` has methods for but the engine doesn't declare.

    `LoadError` names a declared operation that has no method.
    """
    methods = {name for name in OPERATIONS if callable(getattr(session, name, None))}
    missing = [name for name in engine.operations if name not in methods]
    if missing:
        raise LoadError(
            f"{type(engine).__name__} declares {', '.join(missing)}, "
            f"but {session.__name__} has no such method"
        )
    return [name for name in OPERATIONS if name in methods and name not in engine.operations]


def hash_files(files: Sequence[Any]) -> dict[str, str]:
    """sha256 of each file, by the path it is shown as. A file is a path, a module, or the name of one."""
    hashes = {}
    for entry in files:
        shown, path = _file_of(entry)
        hashes[shown] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def _import(place: str) -> ModuleType:
    # `python -m` puts the working folder in front, other launchers need not
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    if not path.is_file():
        raise LoadError(f"there is no file {place}")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _is_engine_class(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, Engine) and found is not Engine


def _file_of(entry: Any) -> tuple[str, Path]:
    if isinstance(entry, str) and entry in sys.modules:
        entry = sys.modules[entry]
    elif isinstance(entry, str) and not Path(entry).is_file():
        entry = importlib.import_module(entry)
    if isinstance(entry, ModuleType):
        source = getattr(entry, "__file__", None)
        if source is None:
            raise LoadError(f"module {entry.__name__} has no file to hash")
        path = Path(source)
        stem = entry.__name__.replace(".", "/")
        return (f"{stem}/{path.name}" if path.stem == "__init__" else f"{stem}{path.suffix}"), path
    path = Path(entry)
    if not path.is_file():
        raise LoadError(f"there is no file {entry} to hash")
    return (path.name if path.is_absolute() else path.as_posix()), path

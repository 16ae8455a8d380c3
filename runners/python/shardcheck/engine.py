"""What an adapter derives from: `Engine` and `Session`, the reply of a step, and the failures that have a
name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shardcheck.configuration import Configuration
from shardcheck.profile import Operation


class Unsupported(Exception):
    """The engine does not do that, and says why: a verdict of its own, neither pass nor failure."""


class EngineError(Exception):
    """A failure with a class of its own. Any other exception of an engine is a `crash`."""

    kind: ClassVar[str] = "crash"
    rank: int | None = None


class DeviceLost(EngineError):
    """The device went away; the text is what the driver said."""

    kind = "device_lost"


class InputError(EngineError):
    """The inputs do not fit the operation: a fault of the harness or of the case, not of the engine."""

    kind = "input"


class TimedOut(EngineError):
    """The engine gave a rank up itself; `rank` is the one that waits, where known."""

    kind = "timeout"

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


@dataclass
class Reply:
    """Result of a step.

    `outputs` holds numpy arrays, torch tensors or `Tensor`s by name, the first axis being the rank.
    `effective` says what really ran (`comm_backend`, `route`, …). `collectives` counts how many each rank
    entered in this step, in rank order.
    """

    outputs: Mapping[str, Any] = field(default_factory=dict)
    effective: Mapping[str, Any] = field(default_factory=dict)
    collectives: Sequence[int] = ()


class Session:
    """State of an engine between steps, with a method for each operation that the engine declares.

    A method takes the operation's tensors as keyword arguments (`shardcheck explain operations` lists them),
    and its parameters where its signature names them: `mask`, `chunk_budget_tokens`, `tile_tokens`. It
    returns outputs by name, or a `Reply`.
    """

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration

    def close(self) -> None:
        """Called when the harness closes the session."""


class Engine:
    """An engine under test, one object a process. Command-line options reach the constructor as text."""

    name: str = ""
    version: str = ""
    revision: str = ""
    operations: Mapping[str, Operation] = {}
    files: Sequence[Any] = ()
    devices: Sequence[str] = ("cpu",)
    own_steps: Sequence[str] = ()
    replaced: Sequence[str] = ()
    counts_all_ranks: bool = False
    """Of several processes, whether each counts the collectives of all ranks and not only its own."""
    second_group: bool = False
    """Whether a session can hold a second KV group; its methods take `group`, 0 or 1, then."""
    session_type: type | None = None
    call_file: Any = ""
    """File with calls of the engine's own functions, which a script of a case can end in (docs/scripts.md)."""
    release_folder: Any = ""
    """Folder of the engine's own files, which those calls are given."""

    def open(self, configuration: Configuration) -> Session:
        """A session of this configuration; raises `Unsupported` where the engine doesn't run it."""
        if self.session_type is None:
            raise NotImplementedError(f"{type(self).__name__} needs `session_type` or a method `open`")
        return self.session_type(configuration)

    def close(self) -> None:
        """Called once before the process ends."""

"""Adapter SDK of shardcheck: put any attention engine behind the harness's process protocol
(docs/adapters.md).
"""

from shardcheck.asserts import (
    BinaryNotFound,
    CheckError,
    CheckFailed,
    CheckUndecided,
    assert_decode,
    assert_layout,
    assert_merge,
    assert_verify,
    block_table_of,
)
from shardcheck.configuration import Attention, Configuration
from shardcheck.engine import (
    DeviceLost,
    Engine,
    EngineError,
    InputError,
    Reply,
    Session,
    TimedOut,
    Unsupported,
)
from shardcheck.profile import Contract, Conventions, Operation, PerTile, Profile
from shardcheck.tensor import Tensor, unwritten

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "BinaryNotFound",
    "CheckError",
    "CheckFailed",
    "CheckUndecided",
    "Configuration",
    "Contract",
    "Conventions",
    "DeviceLost",
    "Engine",
    "EngineError",
    "InputError",
    "Operation",
    "PerTile",
    "Profile",
    "Reply",
    "Session",
    "Tensor",
    "TimedOut",
    "Unsupported",
    "assert_decode",
    "assert_layout",
    "assert_merge",
    "assert_verify",
    "block_table_of",
    "unwritten",
    "__version__",
]

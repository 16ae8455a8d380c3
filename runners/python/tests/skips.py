"""Tests that need what isn't everywhere: skipped, and visibly so."""

import importlib
import sys
import unittest
from typing import Any


def skip(test: unittest.TestCase, reason: str) -> None:
    """Skips a test, and says so on standard error."""
    print(f"SKIPPED: {test.id()}: {reason}", file=sys.stderr)
    test.skipTest(reason)


def torch_or_skip(test: unittest.TestCase) -> Any:
    """The module torch, where it is installed."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        skip(test, "torch is not installed")

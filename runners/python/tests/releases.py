"""Runs of the scenarios of a published engine's release, and what they need."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

from shardcheck.fetch import engine_folder, read_manifest
from tests.skips import skip

# seconds that a release's scenarios may take under the interpreter
TIMEOUT_S = {"sglang": 1200, "vllm": 600, "vllm-ascend": 1200}


@functools.lru_cache
def outcomes(package: str, release: str, *options: str, together: bool = True) -> dict[str, Any]:
    """What `tests.PACKAGE_scenarios` prints for a release and options of its adapter; `together` says whether programs of a launch may run so."""
    arguments = ("-m", f"tests.{package.replace('-', '_')}_scenarios", release, *options)
    return json.loads(printed(package, *arguments, together=together))


def reproduced(package: str, release: str) -> str:
    """What `reproductions/PACKAGE.py` prints for a release."""
    script = f"reproductions/{package.replace('-', '_')}.py"
    return printed(package, script, str(engine_folder(package, release)))


def printed(package: str, *arguments: str, together: bool = True) -> str:
    """What this Python prints with those arguments, within the time that the package's releases may take."""
    folder = Path(__file__).parent.parent
    command = [sys.executable, "-W", "ignore", *arguments]
    limit_s = TIMEOUT_S[package]
    environment = os.environ | {"SHARDCHECK_LOCKSTEP": "1" if together else "0"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
    )
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def require(test: unittest.TestCase, package: str, release: str) -> None:
    """Skips a test, visibly, where the release or what runs it is not there."""
    for module in ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            skip(test, f"{module} is not installed")
    if read_manifest(engine_folder(package, release)) is None:
        skip(test, f"{package} {release} is not fetched: python3 -m shardcheck.fetch {package}=={release}")

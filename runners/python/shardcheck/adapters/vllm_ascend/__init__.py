"""vLLM-Ascend: the context-parallel code of an unpacked release that needs no NPU, on a CPU.

    python3 -m shardcheck.adapter shardcheck.adapters.vllm_ascend:Engine --release 0.30.0rc2

Options: `--release VERSION` (fetched with `python3 -m shardcheck.fetch vllm-ascend==VERSION`), `--folder DIR` (an unpacked wheel in its place),
`--merge fused|context` (which merge over ranks is asked for: the fused exchange in Triton, where a release has it and by
default then, or that of a cached context of grouped attention, which 0.30.0rc2 no longer has).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from shardcheck import Configuration, Session, Unsupported
from shardcheck import Engine as BaseEngine
from shardcheck.adapters.collectives import VirtualExecutor
from shardcheck.adapters.vllm_ascend.declaration import OWN_STEPS, operations
from shardcheck.fetch import engine_folder, read_manifest

NAME = "vllm-ascend"


def make_release(folder: Path) -> Any:
    """A `Release` in this process; raises `Unsupported` where torch or Triton is missing."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            raise Unsupported(f"the engine's code needs {module}, which {sys.executable} doesn't have: install it")
    import torch

    from shardcheck.adapters.vllm_ascend.release import Release

    torch.set_num_threads(1)
    return Release(folder)


class Engine(BaseEngine):
    """A release of vLLM-Ascend. One process serves one release."""

    name = NAME
    call_file = Path(__file__).with_name("call.py")

    def __init__(self, release: str = "", folder: str = "", merge: str = "") -> None:
        place = Path(folder) if folder else engine_folder(NAME, release)
        if not (place / "vllm_ascend").is_dir():
            hint = f"run `shardcheck engines fetch {NAME}=={release or 'VERSION'}`, or give --folder"
            raise Unsupported(f"no unpacked {NAME} in {place}: {hint} with an unpacked wheel")
        if merge not in ("", "fused", "context"):
            raise ValueError(f"--merge is {merge!r}: use one of fused, context")
        manifest = read_manifest(place) or {}
        self.version = str(manifest.get("version", release or "0"))
        self.revision = f"{manifest['wheel']} sha256:{manifest['wheel_sha256']}" if manifest else ""
        self.release = make_release(place)
        self.release_folder = place.resolve()
        self.merge = merge or ("fused" if self.release.fused is not None else "context")
        if self.merge == "fused" and self.release.fused is None:
            raise Unsupported("this release has no fused exchange")
        if self.merge == "context" and self.release.context is None:
            raise Unsupported("this release has no exchange of a cached context")
        self.executor = VirtualExecutor(self.release)
        self.operations = operations(self.release, self.merge)
        self.files = self.release.files
        self.own_steps = list(OWN_STEPS)
        self.replaced = self.release.replaced()

    def open(self, configuration: Configuration) -> Session:
        """A session."""
        from shardcheck.adapters.vllm_ascend.session import AscendSession

        return AscendSession(self.release, configuration, self.executor, self.merge)

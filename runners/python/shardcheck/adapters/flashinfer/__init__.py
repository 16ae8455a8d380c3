"""FlashInfer: attention over paged latents and merges of states of an installed release, on a GPU.

    python3 -m shardcheck.adapter shardcheck.adapters.flashinfer:Engine --backend fa3

Options: `--backend fa2|fa3` (which kernel attends), `--pages blocks|tokens` (pages of the cache's blocks, or of one token), `--device cuda|cpu` (a CPU is for
stand-ins of the package in tests). FlashInfer has no layout, cache or exchange of its own: it is called as an engine calls it that shares a cache out over ranks.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from shardcheck import Configuration, Session, Unsupported
from shardcheck import Engine as BaseEngine

NAME = "flashinfer"
BACKENDS, PAGES, DEVICES = ("fa2", "fa3"), ("blocks", "tokens"), ("cuda", "cpu")


class Engine(BaseEngine):
    """An installed FlashInfer."""

    name = NAME
    call_file = Path(__file__).with_name("call.py")

    def __init__(self, backend: str = "fa2", pages: str = "blocks", device: str = "cuda") -> None:
        for option, value, known in (("backend", backend, BACKENDS), ("pages", pages, PAGES), ("device", device, DEVICES)):
            if value not in known:
                raise ValueError(f"--{option} is {value!r}: use one of {', '.join(known)}")
        for module in ("torch", NAME):
            if importlib.util.find_spec(module) is None:
                raise Unsupported(f"{sys.executable} has no {module}: install it")
        import flashinfer
        import flashinfer.cascade
        import flashinfer.mla
        import torch

        if device == "cuda" and not torch.cuda.is_available():
            raise Unsupported("there is no GPU")
        from shardcheck.adapters.flashinfer.declaration import OWN_STEPS, operations

        self.version = str(flashinfer.__version__)
        self.release_folder = Path(flashinfer.__file__).resolve().parents[1]
        self.backend, self.pages, self.device = backend, pages, device
        self.devices = [torch.cuda.get_device_name() if device == "cuda" else device]
        self.cascade, self.mla = flashinfer.cascade, flashinfer.mla
        self.files = ["flashinfer.cascade", sys.modules[flashinfer.mla.BatchMLAPagedAttentionWrapper.__module__]]
        self.operations = operations(backend, device)
        self.own_steps = list(OWN_STEPS)
        # as large as the package's documentation asks for; steps come one after the other
        self.workspace = torch.empty(128 << 20, dtype=torch.int8, device=device)

    def open(self, configuration: Configuration) -> Session:
        """A session."""
        from shardcheck.adapters.flashinfer.session import FlashinferSession

        return FlashinferSession(configuration, self)

    def wrapper(self) -> Any:
        """A new wrapper of the paged attention."""
        return self.mla.BatchMLAPagedAttentionWrapper(self.workspace, backend=self.backend)

"""SGLang: the context-parallel code of an unpacked release, on a CPU through Triton's interpreter.

    python3 -m shardcheck.adapter shardcheck.adapters.sglang:Engine --release 0.5.23

Options: `--release VERSION` (fetched with `python3 -m shardcheck.fetch sglang==VERSION`), `--folder DIR` (an unpacked
wheel in its place), `--merge reduced|scattered` (which merge stands behind an all-gather: `cp_lse_ag_out_rs_mha` or
`cp_lse_ag_out_rs_mla`), `--reads backend|planner|pages` (who names the rows of the cache that a decode reads: the
Triton backend, `plan_dcp_decode_metadata`, `create_mla_kv_page_table_for_dcp`), `--slots backend|localize|sparse` (who
names the rows that are written: the Triton backend, `localize_dcp_indices`, `remap_dcp_sparse_indices`), `--splits
N` (splits of a row at most, the server's `--triton-attention-num-kv-splits`: 2, where the server's own default is 8).
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
from shardcheck.adapters.sglang.declaration import OWN_STEPS, operations
from shardcheck.adapters.sglang.options import Options
from shardcheck.fetch import engine_folder, read_manifest

_GROUPS = "torch.distributed and the group coordinator: ranks are threads of one process, in turns"


def make_release(folder: Path) -> Any:
    """A `Release` in this process; raises `Unsupported` where torch or Triton is missing."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            raise Unsupported(
                f"the engine's code needs {module}, which {sys.executable} doesn't have: install it"
            )
    import torch

    from shardcheck.adapters.sglang.release import Release

    torch.set_num_threads(1)
    return Release(folder)


class Engine(BaseEngine):
    """A release of SGLang. One process serves one release."""

    name = "sglang"
    call_file = Path(__file__).with_name("call.py")

    def __init__(self, release: str = "", folder: str = "", **options: str) -> None:
        place = Path(folder) if folder else engine_folder("sglang", release)
        if not (place / "sglang").is_dir():
            hint = f"run `shardcheck engines fetch sglang=={release or 'VERSION'}`, or give --folder"
            raise Unsupported(f"no unpacked sglang in {place}: {hint} with an unpacked wheel")
        self.options = Options.of(options)
        manifest = read_manifest(place) or {}
        self.version = str(manifest.get("version", release or "0"))
        self.revision = f"{manifest['wheel']} sha256:{manifest['wheel_sha256']}" if manifest else ""
        self.release = make_release(place)
        self.release_folder = place.resolve()
        lacking = {"localize": self.release.localize, "sparse": self.release.remap_sparse}
        if lacking.get(self.options.slots, self.release) is None:
            raise Unsupported(f"this release has no function for --slots {self.options.slots}")
        self.executor = VirtualExecutor(self.release)
        self.operations = operations(self.release, self.options.merge)
        self.files = self.release.files
        self.own_steps = list(OWN_STEPS)
        self.replaced = [*self.release.replaced(), _GROUPS]

    def open(self, configuration: Configuration) -> Session:
        """A session; refuses what the release has no code for."""
        from shardcheck.adapters.sglang.session import SglangSession

        if configuration.interleave > 1 and configuration.dcp > 1 and not self.release.has_interleave:
            raise Unsupported("this release interleaves by single tokens, it has no interleave size")
        return SglangSession(self.release, configuration, self.executor, self.options)

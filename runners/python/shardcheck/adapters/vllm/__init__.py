"""vLLM: the context-parallel code of an unpacked release, on a CPU through Triton's interpreter or on a GPU.

    python3 -m shardcheck.adapter shardcheck.adapters.vllm:Engine --release 0.33.0

Options: `--release VERSION` (fetched with `python3 -m shardcheck.fetch vllm==VERSION`), `--folder DIR` (an
unpacked wheel in its place), `--device cpu|cuda`, `--merge triton|torch` (which of the engine's merges of two
states), `--ranks virtual|processes|launched` (threads of one process that take
turns, processes that the adapter starts, or those of a job that torchrun, mpirun or srun started), `--runner
v1|v2` (whose lengths and slots: the older model runner's, or the kernels of the newer one), `--lse
engine|f32` (LSEs of partials as the backend has them, in the query's type, or in f32), `--alias-token POSITION`
(a fault on purpose: that token of each request holds what the token before it holds).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from shardcheck import Configuration, Session, Unsupported
from shardcheck import Engine as BaseEngine
from shardcheck.adapters.collectives import VirtualExecutor
from shardcheck.adapters.launched import LaunchedExecutor
from shardcheck.adapters.processes import ProcessExecutor
from shardcheck.adapters.vllm.declaration import OWN_STEPS, operations
from shardcheck.fetch import engine_folder, read_manifest

_GROUPS = {
    "virtual": "torch.distributed and the group coordinator: ranks are threads of one process, in turns",
    "processes": "the group coordinator: plain calls of torch.distributed, over gloo on a CPU and NCCL on GPUs",
    "launched": "the group coordinator: plain calls of torch.distributed, between the processes of a launcher",
}


_CHOICES = {
    "device": ("cpu", "cuda"),
    "merge": ("triton", "torch"),
    "ranks": tuple(_GROUPS),
    "runner": ("v1", "v2"),
    "lse": ("engine", "f32"),
}


def make_release(
    folder: str, device: str, runner: str, full_lse: bool = False, aliased_token: int | None = None
) -> Any:
    """A `Release` in this process, with everything that changes what its ranks compute; raises `Unsupported` where
    torch, Triton or what `runner` asks for is missing."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            raise Unsupported(
                f"the engine's code needs {module}, which {sys.executable} doesn't have: install it"
            )
    import torch

    from shardcheck.adapters.vllm.release import Release

    torch.set_num_threads(1)
    release = Release(Path(folder), device, runner)
    release.full_lse, release.aliased_token = full_lse, aliased_token
    return release


class Engine(BaseEngine):
    """A release of vLLM. One process serves one release."""

    name = "vllm"
    call_file = Path(__file__).with_name("call.py")

    def __init__(
        self,
        release: str = "",
        folder: str = "",
        device: str = "cpu",
        merge: str = "triton",
        ranks: str = "virtual",
        runner: str = "v1",
        lse: str = "engine",
        alias_token: str = "",
    ) -> None:
        place = Path(folder) if folder else engine_folder("vllm", release)
        if not (place / "vllm").is_dir():
            hint = f"run `shardcheck engines fetch vllm=={release or 'VERSION'}`, or give --folder"
            raise Unsupported(f"no unpacked vllm in {place}: {hint} with an unpacked wheel")
        given = {"device": device, "merge": merge, "ranks": ranks, "runner": runner, "lse": lse}
        for name, value in given.items():
            if value not in _CHOICES[name]:
                raise ValueError(f"--{name} is {value!r}: use one of {', '.join(_CHOICES[name])}")
        manifest = read_manifest(place) or {}
        self.version = str(manifest.get("version", release or _version_of(place)))
        self.revision = f"{manifest['package']} wheel sha256:{manifest['wheel_sha256']}" if manifest else ""
        self.release_folder = place.resolve()
        self.merge_variant = merge
        aliased_token = int(alias_token) if alias_token else None
        make = functools.partial(make_release, str(place), device, runner, lse == "f32", aliased_token)
        self.launched = None
        if ranks == "launched":
            # first of all: what the release loads goes to the GPU that is current
            self.executor = self.launched = LaunchedExecutor(make, "gloo" if device == "cpu" else "nccl")
            self.release = self.launched.engine
            self.counts_all_ranks = True
        else:
            self.release = make()
            virtual = ranks == "virtual"
            self.executor = VirtualExecutor(self.release) if virtual else ProcessExecutor(make, device)
        self.devices = [self.release.device_name]
        self.operations = operations(self.release)
        self.files = self.release.package.loaded()
        self.own_steps = list(OWN_STEPS)
        if self.release.full_lse:
            self.own_steps.append("buffers of the decode kernel, its LSE in f32 where the backend takes the query's type")
        if alias_token:
            self.own_steps.append(f"A FAULT ON PURPOSE: token {alias_token} holds what the token before it holds")
        self.replaced = [*self.release.replaced(), _GROUPS[ranks]]

    def open(self, configuration: Configuration) -> Session:
        """A session; refuses what the release has no code for."""
        from shardcheck.adapters.vllm.session import VllmSession

        if self.launched:
            self.launched.require(configuration.tp)
        if configuration.interleave > 1 and configuration.dcp > 1 and not self.release.has_interleave:
            raise Unsupported("this release interleaves by single tokens, it has no interleave size")
        return VllmSession(self.release, configuration, self.executor, self.merge_variant)

    def close(self) -> None:
        """Ends the ranks."""
        self.executor.close()


def _version_of(folder: Path) -> str:
    """Version in the METADATA of an unpacked wheel, or nothing."""
    for path in folder.glob("vllm*.dist-info/METADATA"):
        for line in path.read_text().splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ")
    return ""

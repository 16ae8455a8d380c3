"""vLLM: the context-parallel code of an unpacked release, on a CPU through Triton's interpreter or on a GPU.

    python3 -m shardcheck.adapter shardcheck.adapters.vllm:Engine --release 0.33.0

Options: `--release VERSION` (fetched with `python3 -m shardcheck.fetch vllm==VERSION`), `--folder DIR` (an
unpacked wheel in its place), `--device cpu|cuda`, `--merge triton|torch` (which of the engine's merges of two
states), `--ranks virtual|processes` (threads of one process that take turns, or gloo processes).
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from shardcheck import Configuration, Session, Unsupported
from shardcheck import Engine as BaseEngine
from shardcheck.adapters import interpreter
from shardcheck.adapters.collectives import VirtualExecutor
from shardcheck.adapters.processes import ProcessExecutor
from shardcheck.adapters.vllm.declaration import OWN_STEPS, operations
from shardcheck.fetch import engine_folder, read_manifest

_GROUPS = {
    "virtual": "torch.distributed and the group coordinator: ranks are threads of one process, in turns",
    "processes": "the group coordinator: plain calls of torch.distributed over gloo",
}


def _release(folder: str):
    """A release in a rank's own process."""
    import torch

    from shardcheck.adapters.vllm.release import Release

    torch.set_num_threads(1)
    return Release(Path(folder), "cpu")


class Engine(BaseEngine):
    """A release of vLLM. One process serves one release."""

    name = "vllm"

    def __init__(
        self,
        release: str = "",
        folder: str = "",
        device: str = "cpu",
        merge: str = "triton",
        ranks: str = "virtual",
    ) -> None:
        place = Path(folder) if folder else engine_folder("vllm", release)
        if not (place / "vllm").is_dir():
            hint = f"python3 -m shardcheck.fetch vllm=={release or 'VERSION'}"
            raise Unsupported(
                f"no unpacked vllm in {place}: run `{hint}`, or give --folder with an unpacked wheel"
            )
        if (
            device not in ("cpu", "cuda")
            or merge not in ("triton", "torch")
            or ranks not in ("virtual", "processes")
        ):
            raise ValueError("--device is cpu or cuda, --merge triton or torch, --ranks virtual or processes")
        if ranks == "processes" and device != "cpu":
            raise Unsupported("ranks are processes on a CPU only")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import torch

        from shardcheck.adapters.vllm.release import Release

        torch.set_num_threads(1)
        manifest = read_manifest(place) or {}
        self.version = str(manifest.get("version", release or _version_of(place)))
        self.revision = f"{manifest['package']} wheel sha256:{manifest['wheel_sha256']}" if manifest else ""
        self.devices = [device if device == "cpu" else torch.cuda.get_device_name()]
        self.merge_variant = merge
        self.release = Release(place, device)
        make = functools.partial(_release, str(place))
        self.executor = VirtualExecutor(self.release) if ranks == "virtual" else ProcessExecutor(make)
        self.operations = operations(self.release)
        package = self.release.package
        self.files = package.loaded()
        self.own_steps = list(OWN_STEPS)
        self.replaced = [
            *package.described(),
            *(interpreter.SHIMS if device == "cpu" else ()),
            _GROUPS[ranks],
            *(
                ["correct_attn_out: wrapped to read off the merged LSE, which cp_lse_ag_out_rs drops"]
                if self.release.observes_lse
                else []
            ),
        ]

    def open(self, configuration: Configuration) -> Session:
        """A session; refuses what the release has no code for."""
        from shardcheck.adapters.vllm.session import VllmSession

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

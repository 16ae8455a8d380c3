"""vLLM: the context-parallel code of an unpacked release, on a CPU through Triton's interpreter or on a GPU.

    python3 -m shardcheck.adapter shardcheck.adapters.vllm:Engine --release 0.33.0

Options: `--release VERSION` (fetched with `python3 -m shardcheck.fetch vllm==VERSION`), `--folder DIR` (an unpacked wheel in its place),
`--device cpu|cuda`, `--merge triton|torch` (which of the engine's merges of two states), `--ranks virtual|processes` (threads of one process
that take turns, or gloo processes).
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from shardcheck import Configuration, Contract, Conventions, Operation, Session, Unsupported
from shardcheck import Engine as BaseEngine
from shardcheck.adapters import interpreter
from shardcheck.adapters.collectives import VirtualExecutor
from shardcheck.adapters.processes import ProcessExecutor
from shardcheck.fetch import engine_folder, read_manifest

_OWN_STEPS = [
    "scatter of keys and values into the paged caches, by the slots that the engine computed, with the cast to a quantised cache",
    "request, block table and length of each query row: the decode kernel sees one row a request",
    "choice of a rank's query heads; their gather over the group is the engine's one line, all_gather along the heads",
    "padding rows: seen by the kernel with no tokens in decode and verify, kept from it in draft and context; zeroed where no merge does it",
    "up-projection of merged outputs, in f32",
    "verify: the row lengths of one backend (ROCm AITER) with the decode of another (Triton MLA), which itself refuses causal rows under DCP",
    "grouped queries: buffers and two splits around the decode kernel, which no backend uses for them under DCP",
    "context: attention of a chunk and of new tokens in f32, copy of cached rows to the workspace, an up-projection that is the identity",
    "copy of given partials, since the engine corrects them in place; LSEs of two states transposed to [heads, rows]",
]


_GROUPS = {
    "virtual": "torch.distributed and the group coordinator: ranks are threads of one process that take turns",
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
        self, release: str = "", folder: str = "", device: str = "cpu", merge: str = "triton", ranks: str = "virtual"
    ) -> None:
        place = Path(folder) if folder else engine_folder("vllm", release)
        if not (place / "vllm").is_dir():
            hint = f"python3 -m shardcheck.fetch vllm=={release or 'VERSION'}"
            raise Unsupported(f"no unpacked vllm in {place}: run `{hint}`, or give --folder with an unpacked wheel")
        if device not in ("cpu", "cuda") or merge not in ("triton", "torch") or ranks not in ("virtual", "processes"):
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
        self.own_steps = list(_OWN_STEPS)
        self.replaced = [
            *package.described(),
            *(interpreter.SHIMS if device == "cpu" else ()),
            _GROUPS[ranks],
            *(["correct_attn_out: wrapped to read off the merged LSE, which cp_lse_ag_out_rs drops"] if self.release.observes_lse else []),
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


def operations(release) -> dict[str, Operation]:
    """Capabilities of a release, from the functions that it has."""
    cpu = release.device == "cpu"
    # Everything is f32 in the interpreter; a 16-bit LSE and output on a GPU, where the backend takes both from the query.
    exact = Contract.f32("f32", merge="ag_rs_f32")
    rounded = Contract.bf16(merge="ag_rs_bf16", lse_rel=2.0**-8, tile_min=1)
    attention = exact if cpu else rounded
    conventions = Conventions(lane_orders=[] if cpu else ["lo_hi"])
    lanes = Conventions(lane_orders=["lo_hi"])
    missing = ["draft_lens", "blocks_needed", "units", "sub_page_table"]
    missing += [] if release.verify_row_lens is not None else ["row_lens"]
    missing += [] if release.has_local_lens else ["local_lens"]
    observables = ["partial_out", "partial_lse", "row_lens"]
    found = {
        "layout": Operation(absent=missing),
        "write_kv": Operation(observables=["slots"]),
        "read_cache": Operation(),
        "load_cache": Operation(),
        "decode": Operation(contract=attention, conventions=conventions, observables=observables),
        "merge_partials": Operation(contract=Contract.f32("f32", merge="ag_rs_bf16", partial="f32"), conventions=lanes),
        # the layer gives an empty state zeros before it merges it
        "merge_states": Operation(contract=Contract.f32("f32"), conventions=Conventions(empty_partial="zero")),
    }
    if release.verify_row_lens is not None:
        found["verify"] = Operation(contract=attention, conventions=conventions, observables=observables)
    if release.drafts:
        found["draft"] = Operation(contract=attention, conventions=conventions, observables=observables)
    if release.merge_segments is not None:
        found["merge_segments"] = Operation(contract=Contract.f32("f32"))
    if release.pack is not None:
        found["pack_lse"] = Operation(conventions=lanes, absent=["unpacked"])
    if release.plans_chunks and cpu:
        seen = ["context_out", "context_lse", "gathered_key", "chunk_lens"]
        found["context"] = Operation(contract=Contract.f32("f32"), observables=seen, absent=["lse"])
    return found


def _version_of(folder: Path) -> str:
    """Version in the METADATA of an unpacked wheel, or nothing."""
    for path in folder.glob("vllm*.dist-info/METADATA"):
        for line in path.read_text().splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ")
    return ""

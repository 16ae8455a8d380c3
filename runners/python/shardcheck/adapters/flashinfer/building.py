"""Builds the modules of FlashInfer that its adapter calls, ahead of a run: `python3 -m shardcheck.adapters.flashinfer.building`.

Needs the package in this Python, nvcc and ninja, and no GPU: `FLASHINFER_CUDA_ARCH_LIST=9.0a` says what for. Built modules lie in the
package, in `data/aot`, where it looks first:
with them a machine needs no compiler.
"""

from __future__ import annotations

import shutil
import sys

import torch
from flashinfer.jit import gen_batch_mla_module
from flashinfer.jit.cascade import gen_cascade_module
from flashinfer.jit.core import build_jit_specs

from shardcheck.adapters.flashinfer import BACKENDS
from shardcheck.adapters.flashinfer.session import LATENT, ROTARY


def main() -> int:
    """Builds what isn't there, all at a time, and prints the modules."""
    specs = [gen_cascade_module()]
    for half in (torch.bfloat16, torch.float16):
        types = [half] * 3 + [torch.int32]
        specs += [gen_batch_mla_module(backend, *types, LATENT, ROTARY, False) for backend in BACKENDS]
    missing = [spec for spec in specs if not spec.aot_path.exists()]
    build_jit_specs(missing)
    for spec in missing:
        spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, spec.aot_path)
    for spec in specs:
        print(spec.aot_path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Example engines as the program judges them, where what they declare is not what most engines do."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from tests.program import program
from tests.skips import skip

EXAMPLE = f"{Path(__file__).resolve().parents[1] / 'examples' / 'numpy_dcp.py'}:NumpyDcp"
CONTEXT = "context/tiny-mla/tp5.dcp5.h2.s2.b8.n4.{cache}.ag_rs.lat/5+11.pad5.shuf.c40/gaussian/1395"


class JudgedTest(unittest.TestCase):
    def test_a_context_in_a_narrow_cache_passes_whatever_type_outputs_have(self) -> None:
        binary = program()
        if binary is None:
            skip(self, "the program is not built: cargo build --release")
        for output in ("bf16", "f32"):
            # scales that no 16-bit value times a code meets, and one that changes nothing
            for cache in ("e4m3fn@0.02", "e4m3fnuz@0.1", "e4m3fn", "bf16"):
                engine = f"exec:{sys.executable} -m shardcheck.adapter {EXAMPLE} --output {output}"
                with self.subTest(output=output, cache=cache), tempfile.TemporaryDirectory() as folder:
                    command = [binary, "replay", CONTEXT.format(cache=cache), "--engine", engine, "--runs", folder]
                    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                    self.assertRegex(done.stdout, r"identity\.rows +holds")


if __name__ == "__main__":
    unittest.main()

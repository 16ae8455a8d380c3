"""Scripts of cases that end in an engine's own call (`shardcheck replay --emit-python`): on a made-up release, and on fetched ones."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from shardcheck.fetch import engine_folder
from tests.program import program
from tests.releases import require
from tests.skips import skip

PACKAGE = Path(__file__).parent.parent
STATES = "merge_states/w2.t1.h2.d8.f32.a2a.hi_lo/some_empty/contiguous/1"
RANKS = "merge_partials/w3.t2.h1.d8.f32.a2a.hi_lo/some_empty/contiguous/1"

# A release whose file imports what isn't there, as those of engines do.
MERGES = """
import an_accelerator_that_is_not_there
import numpy as np


def weigh(out, lse):
    \"\"\"Merge of states on the first axis.\"\"\"
    top = lse.max(0)
    top = np.where(np.isfinite(top), top, 0.0)
    weight = np.exp(lse - top)
    total = weight.sum(0)
    {guard}
    with np.errstate(divide="ignore"):
        return (out * weight[..., None]).sum(0) / np.maximum(total, 1e-300)[..., None], top + np.log(total)
"""
GUARD = "out = np.where(weight[..., None] > 0, out, 0.0)"

CALLS = '''"""Calls of the made-up engine."""

from __future__ import annotations

from cutting import cut, on_ranks


def wide(step, *names):
    """Inputs in float64, on an axis of states."""
    return np.stack([step.inputs[name].astype(np.float64) for name in names])


def merge_states(release, step):
    """Two states."""
    weigh = cut(release / "engine" / "merges.py", "weigh").weigh
    out, lse = weigh(wide(step, "prefix_out", "suffix_out"), wide(step, "prefix_lse", "suffix_lse"))
    return {"out": out[None], "lse": lse[None]}


def merge_partials(release, step):
    """Partials of ranks, exchanged whole."""
    weigh = cut(release / "engine" / "merges.py", "weigh").weigh
    outs, lses = step.inputs["partial_out"].astype(np.float64), step.inputs["partial_lse"].astype(np.float64)
    assert step.dtypes["partial_lse"] == "f32" and step.configuration["dcp"] == len(outs)

    def of_rank(group):
        rank, heads = group.rank_in_group, outs.shape[2] // group.world_size
        own = slice(rank * heads, (rank + 1) * heads)
        out, lse = zip(*group.exchanged((outs[rank], lses[rank])))
        return weigh(np.stack(out)[:, :, own], np.stack(lse)[:, :, own])

    out, lse = zip(*on_ranks(len(outs), of_rank))
    return {"out": np.stack(out), "lse": np.stack(lse)}
'''

# An engine that names its calls, as adapters do.
ENGINE = """
import os
from pathlib import Path
from shardcheck.loading import load_engine

class Named(type(load_engine({example!r}, {{}}))):
    name, version = "made-up", "1.0"
    call_file = Path({folder!r}) / "calls.py"
    release_folder = Path({folder!r})
"""


def run(script: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and what a script prints, run by this Python from another folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", str(script), *arguments]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


class ScriptTest(unittest.TestCase):
    """A folder for scripts, and the program."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.program = program()
        if self.program is None:
            skip(self, "there is no program: build it, or set SHARDCHECK_BIN")

    def emitted(self, case: str, *options: str, expect: int = 0) -> tuple[Path, str]:
        """The script of a case, and what the program said."""
        script = self.folder / "bug.py"
        command = [self.program, "replay", case, "--emit-python", str(script), *options]
        environment = os.environ | {"SHARDCHECK_PYTHON": sys.executable, "PYTHONPATH": str(PACKAGE)}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        self.assertEqual(done.returncode, expect, done.stderr)
        return script, done.stderr


class MadeUpReleaseTest(ScriptTest):
    """Needs numpy alone."""

    def release(self, guard: str) -> str:
        """The made-up release, with or without a guard against the output of an empty state."""
        file = self.folder / "release" / "engine" / "merges.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(MERGES.format(guard=guard))
        return str(self.folder / "release")

    def calls(self, text: str = CALLS) -> str:
        """The file of calls."""
        file = self.folder / "calls.py"
        file.write_text(text)
        return str(file)

    def test_a_finding_shows_in_the_release_that_has_it_and_not_in_the_one_that_mends_it(self) -> None:
        for case in (STATES, RANKS):
            with self.subTest(case):
                script, said = self.emitted(case, "--call", self.calls())
                self.assertIn("folder of the unpacked release", said)
                self.assertNotIn("import shardcheck", script.read_text())
                code, text = run(script, self.release("pass"))
                self.assertEqual(code, 1, text)
                self.assertRegex(
                    text, r"engine: seen nan; out at rank 0, row 0, .*expected .*, allowed .* \.\. "
                )
                code, text = run(script, self.release(GUARD))
                self.assertEqual((code, "0 of " in text), (0, True), text)
                self.assertEqual(run(script, "--self")[0], 0)

    def test_without_a_release_the_script_says_how_it_is_run(self) -> None:
        script, _ = self.emitted(STATES, "--call", self.calls())
        for arguments in ((), ("/nowhere",)):
            code, text = run(script, *arguments)
            self.assertEqual(code, 2, text)
            self.assertIn("FOLDER must be an unpacked release of", text)

    def test_what_the_script_does_not_know_is_refused_and_help_says_what_it_knows(self) -> None:
        script, _ = self.emitted(STATES, "--call", self.calls())
        release = self.release("pass")
        for arguments in (("--slef",), (release, release), ("--self", "--seen")):
            code, text = run(script, *arguments)
            self.assertTrue(code == 2 and "usage: bug.py" in text, text)
        code, text = run(script, "--help")
        self.assertEqual(code, 0, text)
        for part in (STATES, "FOLDER", "--self", "--seen", "Ends with 0"):
            self.assertIn(part, text)

    def test_a_case_that_cannot_be_asked_ends_with_2_and_the_reason(self) -> None:
        for error, said in (
            ('NotImplementedError("no such merge")', "not asked: no such merge"),
            ('ValueError("arange\'s range must be a power of 2")', "powers of two"),
            ("ImportError(\"No module named 'vllm'\")", "No module named 'vllm'"),
            ('NameError("name \'triton\' is not defined")', "has no triton"),
        ):
            with self.subTest(error):
                body = f'    """Two states."""\n    raise {error}\n'
                text = CALLS.replace('    """Two states."""\n', body)
                script, _ = self.emitted(STATES, "--call", self.calls(text))
                code, text = run(script, self.release("pass"))
                self.assertEqual(code, 2, text)
                self.assertIn(said, text)
                self.assertIn("expected", text)
                self.assertNotIn("Traceback", text)

    def test_a_folder_that_holds_no_release_is_not_asked_and_the_file_that_it_lacks_is_named(self) -> None:
        script, _ = self.emitted(STATES, "--call", self.calls())
        other = self.folder / "other"
        other.mkdir()
        code, text = run(script, str(other))
        self.assertEqual(code, 2, text)
        self.assertRegex(text, r"not asked: there is no .*merges\.py: FOLDER must hold a release of .*laid out like it")
        self.assertNotIn("Traceback", text)

    def test_a_package_that_the_calls_import_and_python_lacks_is_named(self) -> None:
        text = CALLS.replace("from cutting", "import a_package_that_is_not_there\nfrom cutting")
        script, _ = self.emitted(STATES, "--call", self.calls(text))
        code, text = run(script, self.release("pass"))
        self.assertEqual(code, 2, text)
        self.assertIn("has no a_package_that_is_not_there", text)
        self.assertNotIn("Traceback", text)

    def test_calls_that_need_a_gpu_say_so_where_there_is_none(self) -> None:
        calls = str(PACKAGE / "shardcheck" / "adapters" / "flashinfer" / "call.py")
        script, _ = self.emitted("merge_states/w2.t1.h2.d64.bf16.a2a.hi_lo/random/contiguous/1", "--call", calls)
        code, text = run(script, self.release("pass"))
        self.assertEqual(code, 2, text)
        self.assertRegex(text, "has no torch, which this script needs|need a GPU|No module named")
        self.assertNotIn("Traceback", text)

    def test_an_engine_that_names_its_calls_and_its_release_needs_no_option(self) -> None:
        self.calls()
        self.release("pass")
        example = str(PACKAGE / "examples" / "numpy_dcp.py") + ":NumpyDcp"
        engine = self.folder / "named.py"
        engine.write_text(ENGINE.format(example=example, folder=str(self.folder)))
        os.symlink(self.folder / "release" / "engine", self.folder / "engine")
        script, said = self.emitted(STATES, "--engine", f"python:{engine}:Named")
        self.assertIn("holds what", said)
        code, text = run(script)
        self.assertEqual(code, 1, text)
        self.assertEqual(run(script, "--seen")[0], 0, "the example itself conforms")
        # a family that the calls know nothing of has the marked place
        script, said = self.emitted(
            "layout/tiny-gqa/tp2.dcp2.h1.s1.b4.n8.bf16.a2a.hi_lo/5+1.seq/gaussian/1",
            "--engine",
            f"python:{engine}:Named",
        )
        self.assertIn("no function layout(release, step)", said)
        self.assertIn("put your call here", script.read_text())

    def test_calls_that_do_not_fit_are_refused_with_what_to_do(self) -> None:
        _, said = self.emitted(STATES, "--call", str(self.folder / "none.py"), expect=2)
        self.assertIn("none.py", said)
        _, said = self.emitted(STATES, "--call", self.calls("def decode(release, step): ..."), expect=2)
        self.assertIn("no function merge_states(release, step)", said)
        _, said = self.emitted(STATES, "--call", self.calls(CALLS + "\n\ndef verdict(): ...\n"), expect=2)
        self.assertIn("defines verdict", said)


# Findings by engine and release: case, what the script must show, and options of the adapter.
FINDINGS = (
    (
        "sglang",
        "0.5.23",
        "merge_states/w2.t1.h2.d8.f32.a2a.hi_lo/some_empty/contiguous/1",
        "seen nan; out",
        "",
    ),
    (
        "sglang",
        "0.5.23",
        "merge_states/w2.t1.h2.d8.f32.a2a.hi_lo/all_empty/contiguous/1",
        "seen nan; lse",
        "",
    ),
    (
        "sglang",
        "0.5.23",
        "merge_partials/w2.t1.h1.d8.bf16.a2a.hi_lo/some_empty/contiguous/1",
        "seen nan; out",
        "",
    ),
    ("sglang", "0.5.23", "merge_partials/w2.t1.h1.d8.f32.ag_rs/broken_lse/contiguous/1", "seen 0.0; out", ""),
    (
        "sglang",
        "0.5.23",
        "merge_partials/w2.t1.h1.d8.f32.ag_rs/some_empty/contiguous/1",
        "seen nan; out",
        "scattered",
    ),
    (
        "sglang",
        "0.5.17",
        "merge_partials/w2.t1.h1.d8.bf16.a2a.hi_lo/all_empty/contiguous/1",
        "seen nan; out",
        "",
    ),
    (
        "vllm-ascend",
        "0.26.0rc1",
        "merge_states/w2.t1.h2.d8.bf16.a2a.hi_lo/some_empty/contiguous/1",
        "seen nan; out",
        "",
    ),
    (
        "vllm-ascend",
        "0.26.0rc1",
        "merge_states/w2.t1.h2.d8.f32.a2a.hi_lo/broken_lse/contiguous/1",
        "seen nan; out",
        "",
    ),
    (
        "vllm-ascend",
        "0.26.0rc1",
        "merge_partials/w2.t1.h1.d8.bf16.a2a.hi_lo/all_empty/contiguous/1",
        "seen nan; out",
        "context",
    ),
    (
        "vllm-ascend",
        "0.23.0",
        "merge_partials/w2.t1.h1.d8.bf16.a2a.hi_lo/some_empty/contiguous/1",
        "seen nan; out",
        "",
    ),
    (
        "vllm-ascend",
        "0.26.0rc1",
        "layout/tiny-gqa16/tp3.dcp3.h1.s1.b4.n4.bf16.a2a.hi_lo/1+2.seq/gaussian/1",
        "seen 1.0; row_mask at rank 2, row 0",
        "",
    ),
    (
        "vllm-ascend",
        "0.23.0",
        "layout/tiny-gqa16/tp2.dcp2.h1.s4.b4.n4.bf16.a2a.hi_lo/8+2.seq/gaussian/1",
        "seen 1.0; row_mask at rank 0, row 0",
        "",
    ),
    (
        "vllm-ascend",
        "0.23.0.post1",
        "layout/tiny-gqa16/tp2.dcp2.h1.s4.b4.n4.bf16.a2a.hi_lo/8+2.seq/gaussian/1",
        "seen 1.0; row_mask at rank 0, row 0",
        "",
    ),
    (
        "vllm",
        "0.24.0",
        "merge_partials/w2.t1.h1.d8.bf16.ag_rs/some_empty/contiguous/1",
        "seen nan; out",
        "",
    ),
    (
        "vllm",
        "0.27.1",
        "merge_partials/w2.t1.h1.d8.bf16.a2a.lo_hi/some_empty/contiguous/1",
        "seen nan; out",
        "",
    ),
    (
        "vllm",
        "0.11.0",
        "merge_partials/w2.t1.h1.d8.f32.ag_rs/all_empty/contiguous/1",
        "seen nan; lse",
        "",
    ),
    (
        "vllm",
        "0.25.1",
        "merge_states/w2.t1.h2.d8.f32.a2a.hi_lo/all_empty/contiguous/1",
        "seen nan; lse",
        "",
    ),
    (
        "vllm",
        "0.33.0",
        "merge_states/w2.t1.h2.d8.f32.a2a.hi_lo/some_empty/contiguous/1",
        "seen nan; out",
        "",
    ),
    (
        "vllm",
        "0.11.0",
        "layout/tiny-mla/tp2.dcp2.h1.s1.b4.n8.bf16.ag_rs/4+1_0+2_5+1.seq/gaussian/1",
        "seen 2.0; local_lens at rank 0, request 1",
        "",
    ),
)
# The same calls on cases that the release gets right.
RIGHT = (
    ("vllm", "0.33.0", "merge_partials/w4.t2.h2.d8.f32.ag_rs/some_empty/contiguous/1", ""),
    ("vllm", "0.33.0", "merge_partials/w4.t2.h2.d8.bf16.a2a.lo_hi/some_empty/contiguous/1", ""),
    ("vllm", "0.25.1", "merge_partials/w4.t2.h2.d8.bf16.ag_rs/some_empty/contiguous/1", ""),
    ("vllm", "0.29.0", "merge_partials/w2.t2.h2.d8.bf16.ag_rs/broken_lse/contiguous/1", ""),
    ("vllm", "0.33.0", "layout/tiny-mla/tp2.dcp2.h1.s2.b4.n8.bf16.ag_rs/4+1_0+2_5+1.seq/gaussian/1", ""),
    ("sglang", "0.5.23", "merge_states/w2.t2.h2.d8.f32.a2a.hi_lo/random/contiguous/1", ""),
    ("sglang", "0.5.23", "merge_partials/w4.t2.h2.d8.bf16.a2a.hi_lo/large_gaps/contiguous/1", ""),
    ("sglang", "0.5.23", "merge_partials/w4.t2.h2.d8.f32.ag_rs/some_empty/contiguous/1", ""),
    ("sglang", "0.5.23", "merge_partials/w4.t2.h2.d8.f32.ag_rs/random/contiguous/1", "scattered"),
    ("sglang", "0.5.23", "layout/tiny-gqa16/tp4.dcp4.h1.s4.b4.n9.bf16.a2a.hi_lo/14+3_0+3.seq/gaussian/1", ""),
    ("vllm-ascend", "0.26.0rc1", "merge_partials/w4.t2.h2.d8.bf16.a2a.hi_lo/some_empty/contiguous/1", ""),
    ("vllm-ascend", "0.30.0rc2", "merge_partials/w4.t2.h2.d8.bf16.a2a.hi_lo/some_empty/contiguous/1", ""),
    ("vllm-ascend", "0.30.0rc2", "merge_partials/w3.t2.h2.d8.f32.a2a.hi_lo/broken_lse/contiguous/1", ""),
    ("vllm-ascend", "0.30.0rc2", "merge_states/w2.t1.h2.d8.bf16.a2a.hi_lo/some_empty/contiguous/1", ""),
    ("vllm-ascend", "0.30.0rc2", "merge_states/w2.t1.h2.d8.f32.a2a.hi_lo/broken_lse/contiguous/1", ""),
    (
        "vllm-ascend",
        "0.26.0rc1",
        "layout/tiny-gqa16/tp2.dcp2.h1.s4.b4.n4.bf16.a2a.hi_lo/8+2.seq/gaussian/1",
        "",
    ),
)

EMPTY_SHARD = "seen nan; out at rank 0, row 1"
OF_16_BITS = "Cannot bitcast data-type of size 16 to data-type of size 32"
# Steps of attention: case, what a release must show, and releases that must pass by the same script, which is made with the first one that
# is named. A case with `lse.unit` is asked with queries of zeros.
STEPS = (
    # an LSE in the query's type: not where that is f32, as bf16 is in the interpreter
    (
        "vllm",
        "decode/tiny-mla/tp2.dcp2.h1.s1.b16.n4.f16.ag_rs/4+1.shuf/gaussian/8684 lse.unit",
        dict.fromkeys(("0.11.0", "0.24.0", "0.33.0"), "lse at rank 0, row 0, head 0: expected 1.609"),
        (),
    ),
    ("vllm", "decode/tiny-mla/tp2.dcp2.h1.s1.b16.n4.bf16.ag_rs/4+1.shuf/gaussian/8684 lse.unit", {}, ("0.33.0",)),
    # f16 behind the all-to-all: no such LSE at first, then the NaN of an empty shard
    (
        "vllm",
        "decode/tiny-mla/tp2.dcp2.h1.s1.b16.n4.f16.a2a.lo_hi/4+1_0+1.seq/gaussian/1",
        {"0.27.1": EMPTY_SHARD, "0.24.0": OF_16_BITS, "0.25.1": OF_16_BITS},
        ("0.29.0", "0.33.0"),
    ),
    ("vllm", "decode/tiny-mla/tp2.dcp2.h1.s1.b16.n4.f16.ag_rs/4+1_0+1.seq/gaussian/1", {}, ("0.27.1",)),
    (
        "vllm",
        "decode/tiny-mla/tp2.dcp2.h1.s1.b16.n4.bf16.ag_rs/4+1_0+1.seq/gaussian/1",
        {"0.11.0": EMPTY_SHARD, "0.24.0": EMPTY_SHARD},
        ("0.25.1", "0.33.0"),
    ),
    # grouped queries on three ranks, of which one is empty
    (
        "vllm",
        "decode/tiny-gqa16/tp3.dcp3.h2.s1.b8.n8.bf16.a2a.lo_hi/12+1_1+1.seq/gaussian/1",
        {"0.24.0": EMPTY_SHARD},
        ("0.33.0",),
    ),
    (
        "vllm",
        "decode/tiny-mla/tp2.dcp2.h1.s1.b16.n4.bf16.ag_rs/3+1.seq/gaussian/1",
        {"0.11.0": "seen nan; lse at rank 0, row 0"},
        ("0.33.0",),
    ),
    (
        "vllm",
        "draft/tiny-mla/tp2.dcp2.h1.s1.b16.n4.bf16.a2a.lo_hi/4+2_1+2.pad1.seq/gaussian/1",
        {"0.27.1": "seen nan; out at rank 0, row 4"},
        ("0.33.0",),
    ),
    ("vllm", "verify/tiny-mla/tp2.dcp2.h1.s4.b16.n4.bf16.ag_rs/3+2_0+3_9+2.pad1.shuf/gaussian/8684", {}, ("0.33.0",)),
    ("vllm", "decode/tiny-mla/tp2.dcp1.h1.s1.b16.n4.bf16.ag_rs/3+1_0+1.pad1.seq/gaussian/1", {}, ("0.33.0", "0.24.0")),
    # sinks: on one rank they are right
    (
        "sglang",
        "attend_sinks/tiny-gqa16/tp2.dcp2.h2.s1.b8.n8.bf16.ag_rs/12+1_3+1.seq/gaussian/1",
        {"0.5.23": "seen 0.0; out at rank 1", "0.5.17": "seen 0.0; out at rank 1"},
        (),
    ),
    (
        "sglang",
        "attend_sinks/tiny-gqa16/tp2.dcp1.h2.s1.b8.n8.bf16.ag_rs/12+1_3+1.pad1.seq/gaussian/1",
        {},
        ("0.5.23", "0.5.17"),
    ),
    (
        "sglang",
        "decode/tiny-mla/tp3.dcp3.h1.s1.b16.n4.bf16.a2a.lo_hi/3+1_0+1.pad2.shuf/gaussian/1",
        {"0.5.17": "seen nan; out at rank 0, row 2"},
        ("0.5.23",),
    ),
    ("sglang", "decode/tiny-mla/tp2.dcp2.h1.s1.b16.n4.f16.ag_rs/3+1_0+1.pad1.shuf/gaussian/1", {}, ("0.5.23",)),
    ("sglang", "verify/tiny-gqa16/tp4.dcp2.h2.s1.b8.n8.bf16.ag_rs/12+3_3+1_0+2.pad1.seq/gaussian/1", {}, ("0.5.23",)),
)

# Cases that the adapter refuses and the calls would answer all the same, by something else than the case asks for.
PROJECTED = "decode/tiny-mla/tp3.dcp3.h1.s1.b8.n6.bf16.a2a.lo_hi.pbm/0+1_4+1_15+1.pad1.shuf/token-code/8182"
REFUSED = (
    ("vllm", "0.24.0", "merge_partials/w2.t5.h1.d31.f32.a2a.hi_lo/nan_halves/contiguous/6268", "Triton takes widths"),
    ("vllm", "0.33.0", PROJECTED, "the calls project what is merged, never partials"),
    ("vllm", "0.33.0", "draft/tiny-gqa/tp2.dcp2.h3.s4.b4.n8.bf16.a2a.lo_hi/8+1_0+0_7+2_1+2.pad1.seq/sink/8038", "only the MLA"),
    ("vllm", "0.33.0", "draft/tiny-mla/tp2.dcp2.h1.s1.b16.n4.bf16.a2a.lo_hi/4+2_1+1.seq/gaussian/1", "the backend takes draft"),
    ("vllm", "0.33.0", "decode/tiny-gqa/tp1.dcp1.h1.s1.b8.n4.f16.ag_rs/3+1.seq/gaussian/1", "with one query head"),
    ("sglang", "0.5.23", PROJECTED, "the calls project what is merged, never partials"),
    ("sglang", "0.5.23", "attend_sinks/tiny-gqa16/tp3.dcp3.h3.s1.b8.n8.bf16.a2a.hi_lo/12+1.seq/gaussian/1", "only MLA layers"),
    ("sglang", "0.5.23", "decode/tiny-mla/tp2.dcp2.h1.s1.b8.n4.bf16.ag_rs.qrep/3+1.seq/gaussian/1", "the engine gathers"),
    ("sglang", "0.5.23", "decode/tiny-mla/tp1.dcp1.h2.s1.b4.n8.bf16.ag_rs/3+1.seq/gaussian/1", "on one rank the kernel"),
    ("sglang", "0.5.23", "decode/tiny-gqa/tp1.dcp1.h1.s1.b8.n4.f16.ag_rs/3+1.seq/gaussian/1", "with one query head"),
)


class FetchedReleasesTest(ScriptTest):
    """Each test names releases and is skipped where one isn't fetched."""

    def script(self, package: str, release: str, case: str, merge: str, *options: str) -> Path:
        """The script that the engine's own profile leads to."""
        require(self, package, release)
        module = package.replace("-", "_")
        option = f" --merge {merge}" if merge else ""
        engine = f"exec:'{sys.executable} -W ignore -m shardcheck.adapter shardcheck.adapters.{module}:Engine --release {release}{option}'"
        return self.emitted(case, "--engine", engine.replace("'", ""), *options)[0]

    def test_each_finding_shows_with_the_release_alone(self) -> None:
        for package, release, case, shows, merge in FINDINGS:
            with self.subTest(f"{package} {release} {case} {merge}"):
                code, text = run(self.script(package, release, case, merge))
                self.assertTrue(code == 1 and shows in text, text)

    def test_what_the_release_gets_right_passes_by_the_same_calls(self) -> None:
        for package, release, case, merge in RIGHT:
            with self.subTest(f"{package} {release} {case} {merge}"):
                code, text = run(self.script(package, release, case, merge))
                self.assertEqual(code, 0, text)

    def test_what_a_release_does_not_have_is_not_asked_and_the_reason_given(self) -> None:
        for package, release, case, reason in REFUSED:
            with self.subTest(f"{package} {release} {case}"):
                code, text = run(self.script(package, release, case, ""))
                self.assertTrue(code == 2 and f"not asked: {reason}" in text and "Traceback" not in text, text)

    def test_steps_of_attention_show_what_is_wrong_in_a_release_and_pass_in_others(self) -> None:
        for package, asked, shown, right in STEPS:
            case, *of = asked.split()
            releases = [*shown, *right]
            with self.subTest(f"{package} {asked}"):
                for release in releases:
                    require(self, package, release)
                script = self.script(package, releases[0], case, "", *(("--property", *of) if of else ()))
                self.assertEqual(run(script, "--self")[0], 0)
                for release in releases:
                    code, text = run(script, str(engine_folder(package, release)))
                    expected = (1, True) if release in shown else (0, True)
                    self.assertEqual((code, shown.get(release, "0 of ") in text), expected, f"{release}\n{text}")


if __name__ == "__main__":
    unittest.main()

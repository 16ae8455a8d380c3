"""Programs of a launch that go through a kernel together do what they do one after the other, to the bit."""

import importlib.util
import unittest

import numpy as np

from shardcheck.adapters import interpreter
from tests.releases import outcomes, require
from tests.skips import skip

PROGRAMS = 6


class LockstepTest(unittest.TestCase):
    """Small kernels, interpreted both ways."""

    def setUp(self) -> None:
        for module in ("torch", "triton"):
            if importlib.util.find_spec(module) is None:
                skip(self, f"{module} is not installed")
        self.triton = interpreter.prepare("cpu")
        import torch

        from shardcheck.adapters import lockstep

        self.torch, self.lockstep = torch, lockstep
        self.x = torch.randn(PROGRAMS, 32, generator=torch.Generator().manual_seed(1))
        self.lens = torch.tensor([5, 0, 32, 5, 17, 1], dtype=torch.int32)

    def both(self, kernel, *given, grid=(PROGRAMS,), **constants):
        """What a kernel makes of its last argument, together and one by one."""
        together, alone = (given[-1].clone() for _ in range(2))
        runs = {"together": [], "alone": []}
        original = {name: getattr(self.lockstep._Grid, f"_{name}") for name in runs}

        def counted(name):
            def run(grid, programs):
                runs[name].append(programs)
                return original[name](grid, programs)

            return run

        for name in runs:
            setattr(self.lockstep._Grid, f"_{name}", counted(name))
        try:
            kernel[grid](*given[:-1], together, **constants)
            self.runs = {name: len(found) for name, found in runs.items()}
            with self.lockstep.one_by_one():
                kernel[grid](*given[:-1], alone, **constants)
        finally:
            for name, method in original.items():
                setattr(self.lockstep._Grid, f"_{name}", method)
        self.assertEqual(len(runs["alone"]) - self.runs["alone"], int(np.prod(grid)))
        bits = [result.view(self.torch.uint8).numpy().tobytes() for result in (together, alone)]
        self.assertEqual(*bits)
        return together

    def test_programs_that_part_at_no_place_run_once(self) -> None:
        triton, tl = self.triton, self.triton.language

        @triton.jit
        def scaled(x, y, N: tl.constexpr):
            at = tl.program_id(0) * N + tl.arange(0, N)
            value = tl.load(x + at)
            scores = value - tl.max(value, axis=0)
            weights = tl.exp(scores)
            tl.store(y + at, weights / tl.sum(weights, axis=0) + tl.cumsum(value, axis=0))

        self.both(scaled, self.x, self.torch.zeros(PROGRAMS, 32), N=32)
        self.assertEqual(self.runs, {"together": 1, "alone": 0})

    def test_two_axes_products_and_transposes_keep_the_axis_of_programs_apart(self) -> None:
        triton, tl = self.triton, self.triton.language

        @triton.jit
        def product(x, y, N: tl.constexpr):
            row, column = tl.arange(0, 4), tl.arange(0, N)
            values = tl.load(x + tl.program_id(0) * 4 * N + row[:, None] * N + column[None, :])
            square = tl.dot(values, tl.trans(values), input_precision="ieee") + tl.program_id(0)
            best = tl.max(square, axis=1, keep_dims=True)
            pairs = tl.join(square, tl.where(square > 0, square, best))
            low, high = tl.split(pairs)
            merged = tl.reshape(low + high, (16,)) + tl.sum(values)
            tl.store(y + tl.program_id(0) * 16 + tl.arange(0, 16), merged)

        self.both(product, self.x.repeat(4, 1), self.torch.zeros(PROGRAMS, 16), N=32)
        self.assertEqual(self.runs["together"], 1)

    def test_programs_part_at_a_branch_and_at_the_bounds_of_a_loop(self) -> None:
        triton, tl = self.triton, self.triton.language

        @triton.jit
        def total(x, lens, y, N: tl.constexpr):
            program = tl.program_id(0)
            length = tl.load(lens + program)
            if length == 0:
                tl.store(y + program, -1.0)
            else:
                found = 0.0
                for at in range(0, length, 4):
                    place = at + tl.arange(0, 4)
                    found += tl.sum(tl.load(x + program * N + place, mask=place < length, other=0.0), axis=0)
                tl.store(y + program, found)

        seen = self.both(total, self.x, self.lens, self.torch.zeros(PROGRAMS), N=32)
        self.assertEqual(seen[1], -1.0)
        # lengths of 5 twice: those two stay together
        self.assertEqual(self.runs["alone"], PROGRAMS - 2)

    def test_what_was_stored_before_programs_part_is_stored_once(self) -> None:
        triton, tl = self.triton, self.triton.language

        @triton.jit
        def bumped(lens, y):
            program = tl.program_id(0)
            tl.store(y + program, tl.load(y + program) + 1.0)
            if tl.load(lens + program) > 4:
                tl.store(y + program, tl.load(y + program) * 2.0)

        seen = self.both(bumped, self.lens, self.torch.ones(PROGRAMS))
        self.assertEqual(seen.tolist(), [4.0, 2.0, 4.0, 4.0, 4.0, 2.0])

    def test_the_last_program_that_stores_at_a_place_is_the_last_of_the_grid(self) -> None:
        triton, tl = self.triton, self.triton.language

        @triton.jit
        def racing(y):
            tl.store(y + tl.program_id(0) % 2, tl.program_id(0))

        seen = self.both(racing, self.torch.zeros(2, dtype=self.torch.int32))
        self.assertEqual(seen.tolist(), [4, 5])

    def test_sums_that_others_add_to_are_left_to_programs_one_by_one(self) -> None:
        triton, tl = self.triton, self.triton.language

        @triton.jit
        def counted(x, y):
            tl.atomic_add(y, tl.load(x + tl.program_id(0)))

        seen = self.both(counted, self.lens, self.torch.zeros(1, dtype=self.torch.int32))
        self.assertEqual(seen.tolist(), [60])
        self.assertEqual(self.runs["alone"], PROGRAMS)

    def test_more_programs_than_go_together_and_three_axes_of_a_grid(self) -> None:
        triton, tl = self.triton, self.triton.language

        @triton.jit
        def named(y):
            x, z = tl.program_id(0), tl.program_id(2)
            at = (x * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + z
            tl.store(y + at, 100 * x + 10 * tl.program_id(1) + z)

        grid = (9, 5, 3)
        seen = self.both(named, self.torch.zeros(grid, dtype=self.torch.int32), grid=grid)
        self.assertEqual(seen[8, 4, 2], 842)
        self.assertEqual(self.runs["together"], -(-9 * 5 * 3 // self.lockstep.PROGRAMS_AT_ONCE))

    def test_bf16_f16_and_eight_bit_floats_are_rounded_and_read_as_ever(self) -> None:
        triton, tl = self.triton, self.triton.language

        @triton.jit
        def cast(x, y, N: tl.constexpr):
            at = tl.program_id(0) * N + tl.arange(0, N)
            tl.store(y + at, tl.load(x + at).to(tl.float32).to(y.dtype.element_ty))

        codes = self.torch.arange(PROGRAMS * 32, dtype=self.torch.int32).to(self.torch.uint8).view(PROGRAMS, 32)
        for source, target in (
            (self.x, "bfloat16"),
            (self.x.bfloat16(), "float16"),
            (codes.view(self.torch.float8_e4m3fn), "float32"),
        ):
            with self.subTest(target):
                self.both(cast, source, self.torch.zeros(PROGRAMS, 32, dtype=getattr(self.torch, target)), N=32)
                self.assertEqual(self.runs["together"], 1)

    def test_an_overflow_of_one_program_is_told_in_the_interpreters_words(self) -> None:
        triton, tl = self.triton, self.triton.language

        @triton.jit
        def far(y):
            tl.store(y + tl.program_id(0), tl.program_id(0) * 1000000000)

        with self.assertRaisesRegex(Exception, "int32 overflow detected for operation mul"):
            far[(PROGRAMS,)](self.torch.zeros(PROGRAMS, dtype=self.torch.int32))

    def test_launches_of_ranks_are_one(self) -> None:
        triton, tl = self.triton, self.triton.language

        @triton.jit
        def doubled(x, y, N: tl.constexpr):
            at = tl.program_id(0) * N + tl.arange(0, N)
            tl.store(y + at, 2.0 * tl.load(x + at))

        given = [self.torch.full((2, 4), float(rank)) for rank in range(3)]
        got = [self.torch.zeros(2, 4) for _ in range(3)]
        doubled[(2,)](self.lockstep.of_ranks(tuple(given)), self.lockstep.of_ranks(tuple(got)), N=4)
        self.assertEqual([seen.unique().tolist() for seen in got], [[0.0], [2.0], [4.0]])


class ReleasesTest(unittest.TestCase):
    """Kernels of published engines; skipped where they aren't fetched."""

    def test_steps_and_merges_of_a_release_have_the_same_errors_together_and_one_by_one(self) -> None:
        for package, release in (("sglang", "0.5.23"), ("vllm", "0.33.0"), ("vllm-ascend", "0.30.0rc2")):
            with self.subTest(package):
                require(self, package, release)
                together, alone = (outcomes(package, release, together=way)["outcomes"] for way in (True, False))
                self.assertGreater(len(together), 10)
                self.assertEqual(together, alone)


if __name__ == "__main__":
    unittest.main()

"""What the adapter mends in Triton's interpreter, and what it takes for a limit rather than for a failure."""

import importlib.util
import unittest

import numpy as np

from shardcheck import Unsupported
from shardcheck.adapters import interpreter
from shardcheck.dtypes import decode
from tests.skips import skip


class InterpreterTest(unittest.TestCase):
    """Small kernels, interpreted."""

    def setUp(self) -> None:
        for module in ("torch", "triton"):
            if importlib.util.find_spec(module) is None:
                skip(self, f"{module} is not installed")
        self.triton = interpreter.prepare("cpu")
        import torch

        self.torch = torch

    def copied(self, source, target):
        """`source` read by a kernel and stored into `target`, cast as the types say."""
        triton, tl = self.triton, self.triton.language

        @triton.jit
        def copy(x, y, N: tl.constexpr):
            at = tl.arange(0, N)
            tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))

        copy[(1,)](source, target, len(source))
        return target

    def test_f32_becomes_the_nearest_bf16_and_ties_go_to_even(self) -> None:
        values = [1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1.0 + 2.0**-8 + 2.0**-20, -1.0 - 3 * 2.0**-9]
        values += [float("inf"), float("-inf"), 0.0, 3.0e38]
        source = self.torch.tensor(values)
        seen = self.copied(source, self.torch.empty(8, dtype=self.torch.bfloat16))
        self.assertEqual(seen.tolist(), source.to(self.torch.bfloat16).tolist())
        nan = self.copied(self.torch.full((8,), float("nan")), self.torch.empty(8, dtype=self.torch.bfloat16))
        self.assertTrue(self.torch.isnan(nan).all())

    def test_every_code_of_an_eight_bit_float_is_read_as_what_it_is(self) -> None:
        codes = self.torch.arange(256, dtype=self.torch.int32).to(self.torch.uint8)
        for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"):
            with self.subTest(name):
                try:
                    seen = self.copied(codes.view(getattr(self.torch, name)), self.torch.empty(256)).numpy()
                except ValueError as error:
                    if "to ir type" not in str(error):
                        raise
                    skip(self, f"this release of Triton interprets no {name}")
                wanted = decode(name.removeprefix("float8_"), codes.numpy())
                self.assertTrue(np.array_equal(seen, wanted, equal_nan=True))

    def test_flags_from_memory_can_be_combined_to_a_mask(self) -> None:
        triton, tl = self.triton, self.triton.language

        @triton.jit
        def masked(flag, x, y, N: tl.constexpr):
            at = tl.arange(0, N)
            wanted = ~tl.load(flag) | (at % 2 == 0)
            tl.store(y + at, tl.load(x + at, mask=wanted, other=-1))

        source = self.torch.arange(4, dtype=self.torch.int32)
        for flag, expected in ((True, [0, -1, 2, -1]), (False, [0, 1, 2, 3])):
            seen = self.torch.empty(4, dtype=self.torch.int32)
            masked[(1,)](self.torch.tensor([flag]), source, seen, 4)
            self.assertEqual(seen.tolist(), expected)

    def test_a_width_that_is_no_power_of_two_is_unsupported_with_the_kernels_own_words(self) -> None:
        source = self.torch.zeros(3)
        with self.assertRaisesRegex(Unsupported, "power of 2"), interpreter.limits():
            self.copied(source, source.clone())

    def test_any_other_error_passes_through(self) -> None:
        with self.assertRaisesRegex(ZeroDivisionError, "division"), interpreter.limits():
            1 / 0  # noqa: B018


if __name__ == "__main__":
    unittest.main()

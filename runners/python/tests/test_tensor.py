"""Tensors: codes, values, and what engines return."""

import sys
import unittest

import numpy as np

from shardcheck import Tensor, unwritten
from shardcheck.dtypes import DTYPES
from tests.skips import torch_or_skip


class Tensors(unittest.TestCase):
    def test_codes_of_another_type_are_refused(self):
        with self.assertRaisesRegex(TypeError, "uint16"):
            Tensor("bf16", np.zeros(2, np.float32))
        with self.assertRaisesRegex(TypeError, "list"):
            Tensor("f32", [1.0])

    def test_numpy_arrays_keep_their_type_and_their_memory(self):
        for name in ("f64", "f32", "i64", "i32", "u16", "u8"):
            array = np.zeros((2, 3), DTYPES[name].storage)
            self.assertEqual(Tensor.of(array).dtype, name)
            self.assertTrue(np.shares_memory(Tensor.of(array).codes, array))
        half = Tensor.of(np.array([1.5, -np.inf], np.float16))
        self.assertEqual(half.dtype, "f16")
        np.testing.assert_array_equal(half.numpy(), np.array([1.5, -np.inf], np.float32))
        np.testing.assert_array_equal(Tensor.of(np.array([1, 2], ">i4")).codes, [1, 2])
        np.testing.assert_array_equal(Tensor.of(np.float32(2)).codes, 2)

    def test_what_is_no_tensor_is_refused_with_what_would_be(self):
        for value in ([1.0], 1.0, np.zeros(2, bool), np.zeros(2, np.int8), np.zeros(2, complex), None):
            with self.subTest(value), self.assertRaisesRegex(TypeError, "float32|torch tensor"):
                Tensor.of(value)

    def test_strides_count_elements_and_a_view_is_no_copy(self):
        memory = np.arange(6, dtype=np.uint16)
        tensor = Tensor("bf16", memory.reshape(2, 3).T)
        self.assertEqual((tensor.shape, tensor.strides), ((3, 2), (1, 3)))
        self.assertTrue(np.shares_memory(tensor.codes, memory))
        self.assertEqual(tensor.to_bytes(), memory.reshape(2, 3).T.tobytes())
        self.assertEqual(repr(tensor), "Tensor(bf16 [3, 2])")

    def test_an_unwritten_buffer_is_full_of_the_pattern_of_the_protocol(self):
        patterns = {
            "f32": (np.uint32, 0x7FA5A5A5),
            "bf16": (np.uint16, 0x7FA5),
            "f16": (np.uint16, 0x7DA5),
            "f64": (np.uint64, 0x7FF5A5A5A5A5A5A5),
            "i32": (np.uint32, 0xA5A5A5A5),
            "i64": (np.uint64, 0xA5A5A5A5A5A5A5A5),
        }
        for name in DTYPES:
            buffer = unwritten(name, (2, 3))
            self.assertEqual((buffer.dtype, buffer.shape, buffer.codes.flags.writeable), (name, (2, 3), True))
            kind, pattern = patterns.get(name, (DTYPES[name].storage, 0))
            self.assertTrue((buffer.codes.view(kind) == pattern).all(), name)
            if DTYPES[name].layout is not None and name in patterns:
                self.assertTrue(np.isnan(buffer.numpy()).all())

    def test_torch_tensors_of_every_type_go_both_ways_bit_for_bit(self):
        torch = torch_or_skip(self)
        generator = np.random.default_rng(3)
        for name, dtype in DTYPES.items():
            codes = generator.integers(0, 256, (4, 6 * dtype.size_bytes), np.uint8).view(dtype.storage)
            theirs = Tensor(name, codes).torch()
            self.assertIsInstance(theirs, torch.Tensor)
            self.assertEqual(tuple(theirs.shape), codes.shape)
            back = Tensor.of(theirs)
            self.assertEqual((back.dtype, back.to_bytes()), (name, codes.tobytes()))

    def test_torch_shares_the_memory_and_keeps_the_strides(self):
        torch = torch_or_skip(self)
        tensor = Tensor("bf16", np.zeros((2, 3), np.uint16).T)
        theirs = tensor.torch()
        self.assertEqual((theirs.dtype, theirs.stride()), (torch.bfloat16, (1, 3)))
        theirs[2, 1] = 1.0
        self.assertEqual(tensor.codes[2, 1], 0x3F80)

    def test_strides_with_gaps_survive_the_way_to_another_device(self):
        torch = torch_or_skip(self)
        gaps = Tensor("f32", np.arange(20, dtype=np.float32).reshape(4, 5)[:, :3])
        theirs = gaps.torch("meta")
        self.assertEqual(
            (tuple(theirs.shape), theirs.stride(), theirs.dtype), ((4, 3), (5, 1), torch.float32)
        )
        if not torch.cuda.is_available():
            print("SKIPPED: no GPU to send a strided view to; its shape alone was checked", file=sys.stderr)
            return
        np.testing.assert_array_equal(gaps.torch("cuda").cpu().numpy(), gaps.codes)
        self.assertEqual(gaps.torch("cuda").stride(), (5, 1))


if __name__ == "__main__":
    sys.exit(unittest.main())

"""Images of safetensors files, byte by byte."""

import json
import sys
import unittest

import numpy as np

from shardcheck import Tensor, safetensors
from shardcheck.dtypes import DTYPES


def image_of(header: object, data: bytes = b"") -> memoryview:
    """An image with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return memoryview(len(text).to_bytes(8, "little") + text + data)


class Reading(unittest.TestCase):
    def test_an_image_written_by_hand_is_read(self):
        header = {"__metadata__": {"a": "b"}, "x": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [0, 4]}}
        found = safetensors.parse(image_of(header, b"\x80\x3f\x00\xc0"))
        self.assertEqual(set(found), {"x"})
        np.testing.assert_array_equal(found["x"].numpy(), [[1.0, -2.0]])

    def test_the_names_of_dtypes_are_those_of_the_format(self):
        names = {dtype.safetensors for dtype in DTYPES.values()}
        expected = "F64 F32 F16 BF16 F8_E4M3 F8_E4M3FNUZ F8_E5M2 I64 I32 U16 U8"
        self.assertEqual(names, set(expected.split()))

    def test_data_that_is_not_aligned_is_read_all_the_same(self):
        header = {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F64", "shape": [], "data_offsets": [1, 9]},
        }
        found = safetensors.parse(image_of(header, b"\x07" + np.float64(2.5).tobytes()))
        self.assertEqual((found["b"].shape, float(found["b"].codes)), ((), 2.5))
        self.assertTrue(found["b"].codes.flags.aligned)

    def test_each_broken_rule_is_refused_and_named(self):
        entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
        late = {**entry, "data_offsets": [1, 3]}
        broken = {
            "no room": memoryview(b"1234567"),
            "does not fit": memoryview((9).to_bytes(8, "little") + b"{}"),
            "no JSON:": image_of(b"{x"),
            "no JSON object": image_of([1]),
            "entry of tensor 'x'": image_of({"x": 1}),
            "dtype 'F4'": image_of({"x": {**entry, "dtype": "F4"}}, b"ab"),
            "no list of counts": image_of({"x": {**entry, "shape": [-2]}}, b"ab"),
            "give start and end": image_of({"x": {**entry, "data_offsets": [2, 0]}}, b"ab"),
            "needs 2 bytes but has 1": image_of({"x": {**entry, "data_offsets": [0, 1]}}, b"a"),
            "starts at byte 1": image_of({"x": late}, b"abc"),
            "starts at byte 0": image_of({"x": entry, "y": entry}, b"ab"),
            "end at byte 2": image_of({"x": entry}, b"abc"),
        }
        for words, image in broken.items():
            with self.subTest(words), self.assertRaisesRegex(safetensors.FormatError, words):
                safetensors.parse(image)

    def test_true_is_no_count(self):
        with self.assertRaisesRegex(safetensors.FormatError, "counts"):
            safetensors.parse(image_of({"x": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"a"))


class Writing(unittest.TestCase):
    def test_every_dtype_and_shape_survives(self):
        tensors = {}
        for name in DTYPES:
            for shape in ((), (0,), (3,), (2, 0, 4), (2, 3)):
                count = int(np.prod(shape))
                tensors[f"{name}{shape}"] = Tensor.from_f32(name, np.arange(count).reshape(shape))
        image = safetensors.image(tensors)
        size, pieces = safetensors.parts(tensors)
        self.assertEqual((len(image), b"".join(pieces)), (size, image))
        found = safetensors.parse(memoryview(image))
        self.assertEqual(set(found), set(tensors))
        for name, tensor in tensors.items():
            self.assertEqual((found[name].dtype, found[name].shape), (tensor.dtype, tensor.shape))
            np.testing.assert_array_equal(found[name].codes, tensor.codes)

    def test_the_data_of_every_tensor_is_aligned_to_its_elements(self):
        tensors = {name: Tensor.from_f32(name, np.zeros(3)) for name in DTYPES}
        image = safetensors.image(tensors)
        length = int.from_bytes(image[:8], "little")
        self.assertEqual(length % 8, 0)
        for name, entry in json.loads(image[8 : 8 + length]).items():
            self.assertEqual(entry["data_offsets"][0] % DTYPES[name].size_bytes, 0, name)

    def test_a_strided_view_is_written_in_the_order_of_its_index(self):
        view = np.arange(6, dtype=np.int32).reshape(2, 3).T
        found = safetensors.parse(memoryview(safetensors.image({"x": Tensor("i32", view)})))
        np.testing.assert_array_equal(found["x"].codes, [[0, 3], [1, 4], [2, 5]])

    def test_no_tensors_are_an_image_too(self):
        self.assertEqual(safetensors.parse(memoryview(safetensors.image({}))), {})


if __name__ == "__main__":
    sys.exit(unittest.main())

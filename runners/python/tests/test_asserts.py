"""Assertions without an adapter, end to end with the program: right calls pass, faulty ones are named."""

import os
import pathlib
import tempfile
import unittest
from unittest import mock

import numpy as np

from shardcheck import Contract, Tensor
from shardcheck.asserts import (
    BinaryNotFound,
    CheckError,
    CheckFailed,
    CheckUndecided,
    assert_decode,
    assert_layout,
    assert_merge,
    assert_verify,
    block_table_of,
)
from tests.program import program
from tests.skips import skip, torch_or_skip


class Call:
    """A batch over a paged cache, and attention in f32 over what each row is said to see."""

    def __init__(self, *, latent: bool, lens=(37, 0, 21), rows=(2, 1, 1), block=8, heads=4, seed=5) -> None:
        random = np.random.default_rng(seed)
        self.latent, self.lens, self.rows, self.block, self.heads = latent, lens, rows, block, heads
        self.kv_heads, self.width, self.v_dim = (1, 32, 24) if latent else (2, 16, 16)
        self.scale = 1 / np.sqrt(self.width)
        width = max(lens) // block + 1
        blocks = width * len(lens) + 2
        used = random.permutation(blocks)[: width * len(lens)]
        self.table = used.reshape(len(lens), width).astype(np.int32)
        shape = (blocks, block, self.kv_heads)
        self.keys = self._numbers(random, (*shape, self.width))
        self.values = self.keys[..., : self.v_dim] if latent else self._numbers(random, (*shape, self.v_dim))
        self.q = self._numbers(random, (sum(rows), heads, self.width)) * np.float32(2)
        self.starts = np.concatenate([[0], np.cumsum(rows)])

    @staticmethod
    def _numbers(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Numbers that bf16 holds."""
        return Tensor.from_f32("bf16", random.standard_normal(shape)).numpy()

    def attend(self, bound=lambda length, rows, row: length - rows + 1 + row):
        """`[T, H, Dv]` and natural `[T, H]`, f32."""
        out = np.zeros((sum(self.rows), self.heads, self.v_dim), np.float32)
        lse = np.full(out.shape[:2], -np.inf, np.float32)
        for request, (length, rows) in enumerate(zip(self.lens, self.rows)):
            for row in range(rows):
                positions = np.arange(max(bound(length, rows, row), 0) if length else 0)
                blocks = self.table[request, positions // self.block]
                token = self.starts[request] + row
                for head in range(self.heads if len(positions) else 0):
                    at = (blocks, positions % self.block, head // (self.heads // self.kv_heads))
                    scores = self.keys[at].astype(np.float64) @ self.q[token, head] * self.scale
                    weights = np.exp(scores - scores.max())
                    lse[token, head] = scores.max() + np.log(weights.sum())
                    out[token, head] = weights / weights.sum() @ self.values[at]
        return out, lse

    def caches(self, encode) -> object:
        if self.latent:
            return encode(self.keys[:, :, 0])
        return encode(self.keys), encode(self.values)

    def arguments(self, encode=lambda values: Tensor.from_f32("bf16", values)) -> dict:
        return {
            "q": encode(self.q),
            "kv_cache": self.caches(encode),
            "block_table": self.table,
            "seq_lens": np.array(self.lens),
            "query_start_loc": self.starts,
            "softmax_scale": self.scale,
            "kv_lora_rank": self.v_dim if self.latent else None,
        }


def bf16(values: np.ndarray) -> np.ndarray:
    return Tensor.from_f32("bf16", values).codes


class Judged(unittest.TestCase):
    """Tests that need the program."""

    def setUp(self) -> None:
        built = program()
        if built is None:
            skip(self, "the program shardcheck isn't built: cargo build --release")
        patch = mock.patch.dict(os.environ, {"SHARDCHECK_BIN": built})
        patch.start()
        self.addCleanup(patch.stop)


class Attention(Judged):
    def test_right_calls_pass_with_a_latent_and_with_heads(self):
        for latent in (True, False):
            call = Call(latent=latent)
            out, lse = call.attend()
            report = assert_verify(out=Tensor("bf16", bf16(out)), lse=lse, **call.arguments())
            self.assertEqual(report["status"], "pass")
            self.assertEqual(report["compared"], out.size + lse.size)

    def test_codes_in_integer_arrays_are_read_as_said(self):
        call = Call(latent=False)
        out, lse = call.attend()
        arguments = call.arguments(bf16)
        assert_verify(out=bf16(out), lse=lse, dtype="bf16", **arguments)
        with self.assertRaisesRegex(CheckError, "u16"):
            assert_verify(out=bf16(out), lse=lse, **arguments)

    def test_a_lost_token_fails_with_place_and_name(self):
        call = Call(latent=True)
        out, lse = call.attend(lambda length, rows, row: length - rows + row)
        with self.assertRaises(CheckFailed) as caught:
            assert_verify(out=Tensor("bf16", bf16(out)), lse=lse, **call.arguments())
        self.assertIsInstance(caught.exception, AssertionError)
        text, finding = str(caught.exception), caught.exception.finding
        self.assertIn("last-token-missing", text)
        self.assertIn("request 0, row", text)
        self.assertIn("assert_close(atol=rtol=2e-2)", text)
        self.assertEqual(finding["diagnosis"]["explanations"][0]["hypothesis"], "last-token-missing")
        self.assertEqual(finding["stage"], "row_bound")

    def test_a_draft_block_sees_all_of_itself(self):
        call = Call(latent=True)
        out, lse = call.attend(lambda length, rows, row: length)
        assert_verify(out=out, lse=lse, causal=False, contract="f32", **call.arguments())
        with self.assertRaisesRegex(CheckFailed, "no-causal-mask"):
            assert_verify(out=out, lse=lse, contract="f32", **call.arguments())

    def test_combined_caches_and_heads_before_tokens_are_read_as_said(self):
        call = Call(latent=False)
        out, _ = call.attend()
        arguments = call.arguments()
        del arguments["kv_cache"]
        both = np.stack([bf16(call.keys), bf16(call.values)], axis=1)
        for cache, layout in ((both, "NHD"), (both.swapaxes(2, 3), "HND"), (both.swapaxes(0, 1), "NHD")):
            cache = np.ascontiguousarray(cache)
            assert_verify(kv_cache=cache, layout=layout, out=out, contract="f32", dtype="bf16", **arguments)

    def test_a_sharded_cache_is_read_by_rank(self):
        call = Call(latent=True, lens=(16, 9), rows=(1, 1), block=16)
        out, lse = call.attend()
        # the one block of each request, dealt to two ranks token by token
        ranks = [np.zeros_like(call.keys[:, :8, 0]) for _ in range(2)]
        for rank in range(2):
            ranks[rank][:] = call.keys[:, rank::2, 0]
        arguments = call.arguments() | {"kv_cache": [Tensor.from_f32("bf16", rank) for rank in ranks]}
        assert_decode(out=Tensor("bf16", bf16(out)), lse=lse, world_size=2, **arguments)
        two = np.stack([bf16(out)[:, :2], bf16(out)[:, 2:]])
        assert_decode(out=Tensor("bf16", two), world_size=2, **arguments)

    def test_a_quantised_cache_needs_its_scales(self):
        call = Call(latent=False)
        keys, values = (Tensor.from_f32("e4m3fn", array / 0.5) for array in (call.keys, call.values))
        call.keys, call.values = keys.numpy() * np.float32(0.5), values.numpy() * np.float32(0.5)
        out, lse = call.attend()
        caches = {"kv_cache": (keys.codes, values.codes), "kv_dtype": "fp8", "k_scale": 0.5}
        arguments = call.arguments() | caches
        assert_verify(out=out, lse=lse, v_scale=0.5, **arguments)
        call.values = values.numpy()
        unscaled, _ = call.attend()
        with self.assertRaisesRegex(CheckFailed, "value-scale-missing"):
            assert_verify(out=unscaled, v_scale=0.5, **arguments)

    def test_what_does_not_fit_is_no_failure_of_the_call(self):
        call = Call(latent=True)
        out, lse = call.attend()
        arguments = call.arguments()
        cases = [
            ({"seq_lens": np.array([370, 0, 21])}, "cover"),
            ({"block_table": call.table - 100}, "names|block_table"),
            ({"softmax_scale": None}, "softmax_scale"),
            ({"contract": "bf8"}, "bf8"),
            ({"lse_base": "10"}, "lse_base"),
            ({"layout": "DHN"}, "layout"),
            ({"lse": lse[:1]}, "lse has shape"),
            ({"kv_dtype": "e5m2"}, "kv_dtype is 'e5m2'"),
            ({"dtype": "bf61"}, "bf61"),
        ]
        for change, words in cases:
            with self.subTest(words), self.assertRaisesRegex(CheckError, words):
                assert_verify(**({"out": out, "lse": lse} | arguments | change))

    def test_nan_that_a_row_sees_leaves_it_undecided(self):
        call = Call(latent=True, lens=(5,), rows=(1,))
        out, _ = call.attend()
        call.keys[call.table[0, 0], 2] = np.nan
        with self.assertRaisesRegex(CheckUndecided, "position 2"):
            assert_decode(out=out, **call.arguments())

    def test_a_contract_may_be_given_in_full(self):
        call = Call(latent=True)
        out, _ = call.attend()
        assert_verify(out=out, contract=Contract.f32(), **call.arguments())

    def test_a_failed_call_is_kept_where_it_is_asked_for(self):
        call = Call(latent=True)
        out, _ = call.attend()
        with tempfile.TemporaryDirectory() as folder:
            with mock.patch.dict(os.environ, {"SHARDCHECK_KEEP": folder}):
                assert_verify(out=out, **call.arguments())
                self.assertEqual(os.listdir(folder), [])
                with self.assertRaisesRegex(CheckFailed, "shardcheck check .*safetensors"):
                    assert_verify(out=out + 1, **call.arguments())
                self.assertEqual(len(os.listdir(folder)), 1)


class Torch(Judged):
    def test_torch_tensors_of_every_type_are_taken(self):
        torch = torch_or_skip(self)
        call = Call(latent=True)
        out, lse = call.attend()

        def encode(values: np.ndarray) -> object:
            return torch.from_numpy(values).to(torch.bfloat16)

        arguments = call.arguments(encode) | {
            "block_table": torch.from_numpy(call.table),
            "seq_lens": torch.tensor(call.lens),
            "query_start_loc": torch.from_numpy(call.starts),
        }
        assert_verify(out=encode(out), lse=torch.from_numpy(lse), **arguments)
        shared = encode(out + 0.25)
        with self.assertRaises(CheckFailed):
            assert_verify(out=shared, **arguments)

    def test_the_attention_of_torch_passes_with_an_fp8_cache_and_without(self):
        torch = torch_or_skip(self)
        torch.manual_seed(3)
        tokens, block = 48, 16
        keys, values = (torch.randn(4, block, 2, 64).to(torch.float8_e4m3fn) for _ in range(2))
        table, query = torch.tensor([[2, 0, 3]]), torch.randn(1, 8, 64).to(torch.bfloat16)

        def flat(cache: object) -> object:
            picked = cache.view(torch.uint8)[table[0]].view(torch.float8_e4m3fn)
            return picked.to(torch.float32).reshape(1, tokens, 2, 64).transpose(1, 2) * 0.5

        out = torch.nn.functional.scaled_dot_product_attention(
            query.float()[None].transpose(1, 2), flat(keys), flat(values), enable_gqa=True
        )
        out = out.transpose(1, 2)[0].to(torch.bfloat16)
        given = {"q": query, "kv_cache": (keys, values), "block_table": table}
        given["seq_lens"] = torch.tensor([tokens])
        report = assert_decode(**given, out=out, k_scale=0.5, v_scale=0.5, contract="f32")
        self.assertEqual(report["status"], "pass")
        with self.assertRaises(CheckFailed):
            assert_decode(**given, out=out, k_scale=0.5, v_scale=1.0, contract="f32")


class Merge(Judged):
    def test_a_merge_passes_and_an_average_is_named(self):
        random = np.random.default_rng(1)
        outs = Tensor.from_f32("bf16", random.standard_normal((3, 4, 2, 8))).numpy()
        lses = random.standard_normal((3, 4, 2)).astype(np.float32)
        weights = np.exp(lses.astype(np.float64))
        right = (outs * weights[..., None]).sum(0) / weights.sum(0)[..., None]
        right, lse = right.astype(np.float32), np.log(weights.sum(0)).astype(np.float32)
        assert_merge(list(outs), list(lses), right, lse)
        base_2 = (lses / np.log(2)).astype(np.float32).swapaxes(1, 2)
        assert_merge(outs, base_2, right, lse_base="2")
        with self.assertRaisesRegex(CheckFailed, "partials-averaged"):
            assert_merge(outs, lses, outs.mean(0).astype(np.float32), contract="f32")


class Layout(Judged):
    def test_integers_pass_and_wrong_ones_are_named(self):
        lens = [37, 8]
        owned = [[sum(p // 2 % 3 == rank for p in range(length)) for length in lens] for rank in range(3)]
        assert_layout(lens, world_size=3, interleave=2, local_lens=owned)
        assert_layout(lens, world_size=3, interleave=2, local_lens=owned[1], rank=1)
        even = [[length // 3 for length in lens]] * 3
        with self.assertRaisesRegex(CheckFailed, "even-lengths") as caught:
            assert_layout(lens, world_size=3, interleave=2, local_lens=even)
        self.assertIn("rank 0, request 0 of 37 tokens: 12 instead of", str(caught.exception))

    def test_slots_go_through_the_block_table(self):
        table = [[5, 2], [7, 0]]
        # the last token of 10 and of 3: positions 9 (rank 1, fifth there) and 2 (rank 0, second)
        slots = [[-1, 7 * 4 + 1], [2 * 4 + 0, -1]]
        given = {"world_size": 2, "block_size": 4, "block_table": table}
        assert_layout([10, 3], slot_mapping=slots, **given)
        with self.assertRaisesRegex(CheckFailed, "marked-by-zero"):
            assert_layout([10, 3], slot_mapping=np.maximum(slots, 0), **given)
        with self.assertRaisesRegex(CheckError, "nothing to judge"):
            assert_layout([10, 3], **given)


class PageLists(unittest.TestCase):
    def test_ragged_page_lists_become_a_table_and_lengths(self):
        table, lens = block_table_of([0, 2, 2, 5], [4, 1, 0, 3, 2], [3, 0, 8], page_size=8)
        np.testing.assert_array_equal(table, [[4, 1, -1], [-1, -1, -1], [0, 3, 2]])
        np.testing.assert_array_equal(lens, [11, 0, 24])
        with self.assertRaisesRegex(CheckError, "ascending"):
            block_table_of([0, 2, 1], [4, 1], [3, 1], page_size=8)


class Program(unittest.TestCase):
    def test_without_the_program_the_error_says_how_to_get_it(self):
        with mock.patch.dict(os.environ, {"PATH": "", "SHARDCHECK_BIN": ""}):
            with self.assertRaisesRegex(BinaryNotFound, "cargo build --release"):
                assert_layout([1], world_size=1, local_lens=[[1]])
        with tempfile.TemporaryDirectory() as folder:
            old = pathlib.Path(folder) / "shardcheck"
            old.write_text("#!/bin/sh\necho \"error: unrecognized subcommand 'check'\" >&2\nexit 2\n")
            old.chmod(0o755)
            with mock.patch.dict(os.environ, {"SHARDCHECK_BIN": str(old)}):
                with self.assertRaisesRegex(BinaryNotFound, "older than"):
                    assert_layout([1], world_size=1, local_lens=[[1]])
        with mock.patch.dict(os.environ, {"SHARDCHECK_BIN": "/nowhere/shardcheck"}):
            with self.assertRaisesRegex(BinaryNotFound, "no file"):
                assert_layout([1], world_size=1, local_lens=[[1]])


class Refusals(Judged):
    """One query head, one KV head, two tokens in one block of four."""

    def decode(self, **changed):
        given = {
            "q": np.ones((1, 1, 4), np.float32),
            "kv_cache": (np.ones((1, 4, 1, 4), np.float32), np.ones((1, 4, 1, 4), np.float32)),
            "block_table": [[0]],
            "seq_lens": [2],
            "out": np.ones((1, 1, 4), np.float32),
            "contract": "f32",
        }
        return assert_decode(**{**given, **changed})

    def test_the_call_passes_as_it_stands_and_with_numbers_of_numpy(self):
        self.decode()
        self.decode(world_size=np.int64(1), interleave=np.int32(1), k_scale=np.float32(1.0))

    def test_arguments_that_contradict_each_other_or_are_no_numbers_are_named(self):
        for changed, word in [
            ({"softmax_scale": 0.5, "sm_scale": 0.25}, "softmax_scale and sm_scale"),
            ({"softmax_scale": float("nan")}, "softmax_scale is nan"),
            ({"k_scale": np.ones(2)}, "k_scale"),
            ({"world_size": 2.5}, "world_size is 2.5"),
            ({"contract": None}, "can't be read"),
            ({"q": [[1.0], [1.0]]}, "can't be read"),
            ({"q": np.ones((3, 1, 4), np.float32), "out": np.ones((3, 1, 4), np.float32)}, "3 rows and 2 tokens"),
        ]:
            with self.subTest(word), self.assertRaisesRegex(CheckError, word):
                self.decode(**changed)
        with self.assertRaises(TypeError):
            self.decode(no_such_argument=1)

    def test_a_program_that_is_another_is_told_from_a_verdict(self):
        with mock.patch.dict(os.environ, {"SHARDCHECK_BIN": "/bin/true"}):
            with self.assertRaisesRegex(BinaryNotFound, "is not shardcheck"):
                self.decode()

    def test_a_folder_for_failed_calls_is_made(self):
        with tempfile.TemporaryDirectory() as folder:
            kept = pathlib.Path(folder) / "not" / "there"
            with mock.patch.dict(os.environ, {"SHARDCHECK_KEEP": str(kept)}):
                self.decode()
                with self.assertRaises(CheckFailed):
                    self.decode(out=np.zeros((1, 1, 4), np.float32))
            self.assertEqual(len(list(kept.iterdir())), 1)


if __name__ == "__main__":
    unittest.main()

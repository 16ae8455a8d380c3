"""The examples, against attention written down once more in f64 over all tokens of a request at once."""

import itertools
import sys
import unittest

import numpy as np

from shardcheck import Configuration, Tensor
from shardcheck.layout import Layout
from tests.peer import CONFIGURATION, ROOT, TORCHRUN, Harness
from tests.skips import torch_or_skip

ATTENTIONS = {
    "mla": {"kind": "mla", "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    "gqa": {"kind": "gqa", "kv_heads": 2, "head_dim": 8, "v_head_dim": 6},
}


class Scene:
    """A batch of requests with shuffled blocks: what the harness would send, and what must come out."""

    def __init__(self, seed: int, lens: list[int], new: list[int], **changes: object):
        self.generator = np.random.default_rng(seed)
        self.json = {
            **CONFIGURATION,
            "attention": ATTENTIONS["mla"],
            "blocks": 16,
            "heads_per_rank": 2,
            **changes,
        }
        self.configuration = Configuration.from_json(self.json)
        self.layout = Layout.of(self.configuration)
        self.lens, self.new = lens, new
        self.starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        needed = [int(self.layout.blocks_needed(n)) for n in lens]
        blocks = list(self.generator.permutation(self.configuration.blocks))
        self.table = np.full((len(lens), max(needed) + 1), 1 << 30, np.int32)
        for request, count in enumerate(needed):
            self.table[request, :count] = [blocks.pop() for _ in range(count)]
        c = self.configuration
        self.keys = [self.drawn(n, c.kv_heads, c.qk_dim) for n in lens]
        self.own_values = (
            None if c.attention.is_mla else [self.drawn(n, c.kv_heads, c.value_dim) for n in lens]
        )
        self.query = self.drawn(int(self.starts[-1]), c.total_heads, c.qk_dim)

    def drawn(self, *shape: int) -> Tensor:
        """Random bf16 values."""
        return Tensor.from_f32("bf16", self.generator.normal(size=shape))

    def write(self, counts: list[int]) -> dict[str, Tensor]:
        """Inputs of a write of the first `counts` tokens of each request, with one row of padding."""
        join = lambda parts: np.concatenate([part.codes[:n] for part, n in zip(parts, counts)])
        pad = lambda codes: Tensor("bf16", np.concatenate([codes, codes[:1]]))
        inputs = {
            "key": pad(join(self.keys)),
            "positions": Tensor("i64", np.concatenate([*map(np.arange, counts), [0]]).astype(np.int64)),
            "requests": Tensor(
                "i32", np.concatenate([np.repeat(np.arange(len(counts)), counts), [-1]]).astype(np.int32)
            ),
            "block_table": Tensor("i32", self.table),
        }
        if self.own_values is not None:
            inputs["value"] = pad(join(self.own_values))
        return inputs

    def attend(self) -> dict[str, Tensor]:
        """Inputs of an attention step, with one row of padding."""
        padded = np.concatenate([self.query.codes, self.query.codes[:1]])
        return {
            "query": Tensor("bf16", padded),
            "seq_lens": Tensor("i32", np.array(self.lens, np.int32)),
            "query_start_loc": Tensor("i32", self.starts),
            "block_table": Tensor("i32", self.table),
        }

    def held(self, tensor: Tensor) -> np.ndarray:
        """f64 values of tokens as the cache holds them."""
        c = self.configuration
        stored = Tensor.from_f32(c.kv_dtype, tensor.numpy() / np.float32(c.kv_scale), "saturate")
        return (stored.numpy() * np.float32(c.kv_scale)).astype(np.float64)

    def expected(self, causal: bool) -> tuple[np.ndarray, np.ndarray]:
        """Output `[T, Hall, Dv]` and LSE `[T, Hall]` in f64."""
        c, query = self.configuration, self.query.numpy().astype(np.float64)
        out, lse = np.zeros((*query.shape[:2], c.value_dim)), np.full(query.shape[:2], -np.inf)
        share = c.gathered_heads // c.kv_heads
        for request, length in enumerate(self.lens):
            keys = self.held(self.keys[request])
            values = (
                keys[..., : c.value_dim] if self.own_values is None else self.held(self.own_values[request])
            )
            for row, head in itertools.product(
                range(self.starts[request], self.starts[request + 1]), range(c.total_heads)
            ):
                seen = length - (self.starts[request + 1] - row) + 1 if causal else length
                kv_head = head % c.gathered_heads // share
                scores = keys[:seen, kv_head] @ query[row, head] * c.softmax_scale
                if seen > 0:
                    weights = np.exp(scores - scores.max())
                    out[row, head] = weights @ values[:seen, kv_head] / weights.sum()
                    lse[row, head] = scores.max() + np.log(weights.sum())
        return out, lse

    def of_all_heads(self, tensor: Tensor) -> np.ndarray:
        """`[ranks, T, H, …]` as `[T, Hall, …]`, padding dropped."""
        values = np.moveaxis(tensor.numpy(), 0, 1)[: self.starts[-1]]
        return values.reshape(values.shape[0], -1, *values.shape[3:]).astype(np.float64)


def scenes() -> list[Scene]:
    """Worlds, layouts, formats and exchanges that differ in every way."""
    lens, new = [37, 1, 0, 12], [3, 1, 0, 2]
    return [
        Scene(1, lens, new, tp=1, dcp=1),
        Scene(2, lens, new, tp=4, dcp=2, comm_backend="ag_rs"),
        Scene(3, lens, new, tp=3, dcp=3, interleave=2, attention=ATTENTIONS["gqa"]),
        Scene(
            4,
            lens,
            new,
            tp=4,
            dcp=4,
            interleave=4,
            kv_dtype="e4m3fn",
            kv_scale=0.0625,
            query_replication=True,
        ),
        Scene(5, lens, new, tp=6, dcp=3, kv_dtype="e5m2", attention=ATTENTIONS["gqa"], comm_backend="ag_rs"),
    ]


class PlainTorch(unittest.TestCase):
    def test_attention_is_that_of_all_tokens_at_once(self):
        torch_or_skip(self)
        with Harness(["examples/plain_torch.py:Plain"]) as harness:
            harness.start()
            for session, scene in enumerate(scenes()):
                self.assertEqual(harness.open(session, **scene.json)["status"], "ok")
                self.assertEqual(
                    harness.step("write_kv", scene.write(scene.lens), session)[0]["status"], "ok"
                )
                for kind in ("verify", "draft"):
                    reply, outputs = harness.step(kind, scene.attend(), session)
                    self.assertEqual(reply["status"], "ok", reply)
                    out, lse = scene.expected(causal=kind == "verify")
                    np.testing.assert_allclose(scene.of_all_heads(outputs["out"]), out, rtol=2**-8, atol=3e-6)
                    np.testing.assert_allclose(scene.of_all_heads(outputs["lse"]), lse, atol=3e-6)

    def test_it_is_as_short_as_its_page_says_and_the_page_shows_it_as_it_is(self):
        source = (ROOT / "examples" / "plain_torch.py").read_text()
        self.assertLessEqual(len(source.splitlines()), 60)
        page = (ROOT.parent.parent / "docs" / "adapters.md").read_text()
        self.assertIn(f"```python\n{source}```\n", page)


class TorchRanks(unittest.TestCase):
    def test_two_processes_attend_as_one(self):
        torch_or_skip(self)
        lens, new = [37, 1, 0, 12], [3, 1, 0, 2]
        with Harness(["examples/torch_ranks.py:TorchRanks"], TORCHRUN) as harness:
            harness.start()
            self.assertEqual(harness.open(99, tp=4, dcp=2)["status"], "unsupported")
            for session, backend in enumerate(("a2a", "ag_rs")):
                for attention in ATTENTIONS.values():
                    scene = Scene(12, lens, new, interleave=2, comm_backend=backend, attention=attention)
                    self.assertEqual(harness.open(session, **scene.json)["status"], "ok")
                    harness.step("write_kv", scene.write(scene.lens), session)
                    reply, outputs = harness.step("verify", scene.attend(), session)
                    self.assertEqual(reply["status"], "ok", reply)
                    out, lse = scene.expected(causal=True)
                    np.testing.assert_allclose(scene.of_all_heads(outputs["out"]), out, rtol=2**-8, atol=3e-6)
                    np.testing.assert_allclose(scene.of_all_heads(outputs["lse"]), lse, atol=3e-6)
                    self.assertEqual(reply["collectives"][0], reply["collectives"][1])
                    self.assertEqual(reply["effective"]["comm_backend"], backend)


class NumpyDcp(unittest.TestCase):
    def test_attention_is_that_of_all_tokens_at_once(self):
        for scene in scenes():
            with (
                self.subTest(scene.json),
                Harness(["examples/numpy_dcp.py:NumpyDcp", "--output", "f32", "--partial", "f32"]) as harness,
            ):
                harness.start()
                self.assertEqual(harness.open(**scene.json)["status"], "ok")
                self.assertEqual(harness.step("write_kv", scene.write(scene.lens))[0]["status"], "ok")
                for kind in ("verify", "draft"):
                    reply, outputs = harness.step(kind, scene.attend())
                    self.assertEqual(reply["status"], "ok", reply)
                    out, lse = scene.expected(causal=kind == "verify")
                    np.testing.assert_allclose(scene.of_all_heads(outputs["out"]), out, atol=3e-6)
                    np.testing.assert_allclose(scene.of_all_heads(outputs["lse"]), lse, atol=3e-6)
                    self.assertEqual(len(set(reply["collectives"])), 1)
                    self.assertEqual(reply["effective"]["route"], kind)

    def test_a_context_in_chunks_and_new_tokens_are_one_attention(self):
        for scene in scenes():
            # what an 8-bit cache rounds comes unrounded as a new token: only 16-bit caches compare
            if scene.configuration.kv_dtype != "bf16":
                continue
            with (
                self.subTest(scene.json),
                Harness(["examples/numpy_dcp.py:NumpyDcp", "--output", "f32", "--partial", "f32"]) as harness,
            ):
                harness.start()
                harness.open(**scene.json)
                cached = [length - count for length, count in zip(scene.lens, scene.new)]
                harness.step("write_kv", scene.write(cached))
                tails = lambda parts: Tensor(
                    "bf16", np.concatenate([p.codes[n:] for p, n in zip(parts, cached)])
                )
                inputs = {
                    "query": scene.query,
                    "key": tails(scene.keys),
                    "context_lens": Tensor("i32", np.array(cached, np.int32)),
                    "query_start_loc": Tensor("i32", scene.starts),
                    "block_table": Tensor("i32", scene.table),
                }
                if scene.own_values is not None:
                    inputs["value"] = tails(scene.own_values)
                reply, outputs = harness.step("context", inputs, chunk_budget_tokens=24)
                self.assertEqual(reply["status"], "ok", reply)
                self.assertGreater(int(reply["effective"]["chunks"]), 1)
                out, lse = scene.expected(causal=True)
                np.testing.assert_allclose(scene.of_all_heads(outputs["out"]), out, atol=3e-6)
                np.testing.assert_allclose(scene.of_all_heads(outputs["lse"]), lse, atol=3e-6)
                sums = outputs["chunk_lens"].codes.sum(axis=1)
                np.testing.assert_array_equal(sums, np.tile(cached, (scene.configuration.tp, 1)))

    def test_partials_are_exchanged_in_bf16_with_their_lses_in_lanes_unless_told_otherwise(self):
        for order in ("hi_lo", "lo_hi"):
            scene = Scene(10, [9, 4], [1, 1], tp=2, dcp=2, lane_order=order)
            with Harness(["examples/numpy_dcp.py:NumpyDcp"]) as harness:
                harness.start()
                harness.open(**scene.json)
                harness.step("write_kv", scene.write(scene.lens))
                reply, outputs = harness.step("decode", scene.attend())
            self.assertEqual(reply["effective"]["lane_order"], order)
            partials = outputs["partial_out"].codes
            np.testing.assert_array_equal(Tensor.from_f32("bf16", partials).numpy(), partials)
            out, lse = scene.expected(True)
            np.testing.assert_allclose(scene.of_all_heads(outputs["out"]), out, atol=0.02)
            np.testing.assert_allclose(scene.of_all_heads(outputs["lse"]), lse, atol=3e-6)

    def test_a_kernel_with_fixed_widths_computes_the_same_heads(self):
        scene = Scene(11, [9, 4], [1, 1], tp=2, dcp=2, kernel_head_widths=[3, 7, 16])
        with Harness(["examples/numpy_dcp.py:NumpyDcp", "--output", "f32", "--partial", "f32"]) as harness:
            harness.start()
            harness.open(**scene.json)
            harness.step("write_kv", scene.write(scene.lens))
            reply, outputs = harness.step("decode", scene.attend())
        self.assertEqual(reply["effective"]["kernel_heads"], "7")
        np.testing.assert_allclose(scene.of_all_heads(outputs["out"]), scene.expected(True)[0], atol=3e-6)

    def test_the_projection_is_the_same_before_and_after_the_merge(self):
        for before in (False, True):
            scene = Scene(6, [9, 4], [1, 1], tp=2, dcp=2, project_before_merge=before)
            weights = scene.drawn(scene.configuration.total_heads, 8, 6)
            with Harness(
                ["examples/numpy_dcp.py:NumpyDcp", "--output", "f32", "--partial", "f32"]
            ) as harness:
                harness.start()
                harness.open(**scene.json)
                harness.step("write_kv", scene.write(scene.lens))
                reply, outputs = harness.step("decode", {**scene.attend(), "w_uv": weights})
            self.assertEqual(reply["effective"]["project_before_merge"], str(before).lower())
            self.assertEqual(outputs["partial_out"].shape[-1], 6 if before else 8)
            expected = np.einsum("thd,hdv->thv", scene.expected(True)[0], weights.numpy().astype(np.float64))
            np.testing.assert_allclose(scene.of_all_heads(outputs["out"]), expected, atol=2e-5)

    def test_layout_and_slots_agree_with_the_caches(self):
        scene = Scene(7, [13, 5], [1, 2], tp=2, dcp=2, interleave=2)
        with Harness(["examples/numpy_dcp.py:NumpyDcp"]) as harness:
            harness.start()
            harness.open(**scene.json)
            _, written = harness.step("write_kv", scene.write(scene.lens))
            batch = {name: tensor for name, tensor in scene.attend().items() if name != "query"}
            _, layout = harness.step("layout", batch)
            _, caches = harness.step("read_cache")
            # the caches of another session come in by load_cache
            harness.open(session=2, **scene.json)
            harness.step("load_cache", {"key_cache": caches["key_cache"]}, session=2)
            _, again = harness.step("read_cache", session=2)
        np.testing.assert_array_equal(written["slots"].codes[:, :-1], layout["slots"].codes)
        np.testing.assert_array_equal(written["slots"].codes[:, -1], -1)
        np.testing.assert_array_equal(again["key_cache"].codes, caches["key_cache"].codes)
        tokens = np.concatenate([keys.codes for keys in scene.keys])
        flat = caches["key_cache"].codes.reshape(2, 64, 1, 12)
        for rank, slots in enumerate(layout["slots"].codes):
            np.testing.assert_array_equal(flat[rank, slots[slots >= 0]], tokens[slots >= 0])
            self.assertEqual((slots >= 0).sum(), layout["local_lens"].codes[rank].sum())
        np.testing.assert_array_equal(layout["local_lens"].codes, [[7, 3], [6, 2]])
        np.testing.assert_array_equal(layout["row_lens"].codes, [[7, 2, 3], [6, 2, 2]])
        np.testing.assert_array_equal(layout["units"].codes, [[8, 8, 4]] * 2)

    def test_a_cache_of_another_layout_comes_in_as_if_it_had_been_written_here(self):
        there = Scene(7, [13, 5], [1, 2], tp=3, dcp=3, interleave=1)
        here = Scene(7, [13, 5], [1, 2], tp=2, dcp=2, interleave=2)
        with Harness(["examples/numpy_dcp.py:NumpyDcp"]) as harness:
            harness.start()
            for session, scene in ((1, there), (2, here), (3, here)):
                self.assertEqual(harness.open(session=session, **scene.json)["status"], "ok")
            harness.step("write_kv", there.write(there.lens))
            harness.step("write_kv", here.write(here.lens), session=2)
            given = {"source_key_cache": harness.step("read_cache")[1]["key_cache"]}
            given["source_block_table"] = there.attend()["block_table"]
            given |= {name: here.attend()[name] for name in ("seq_lens", "block_table")}
            source = {"dcp": 3, "interleave": 1, "block_size": there.json["block_size"]}
            operation = {"operation": "import_cache", "source": source}
            question = {"type": "step", "session": 3, "operation": operation, "kind": "import_cache"}
            self.assertEqual(harness.ask(question, given)[0]["status"], "ok")
            written, imported = (harness.step("read_cache", session=n)[1]["key_cache"] for n in (2, 3))
        np.testing.assert_array_equal(imported.codes, written.codes)

    def test_empty_states_do_not_count_in_a_merge(self):
        nan, inf = np.nan, np.inf
        with Harness(["examples/numpy_dcp.py:NumpyDcp"]) as harness:
            harness.start()
            for backend in ("a2a", "ag_rs"):
                harness.open(comm_backend=backend)
                out = np.array([[[[1.0], [nan]]], [[[nan], [nan]]]], np.float32)
                lse = np.array([[[0.5, -inf]], [[-inf, -inf]]], np.float32)
                _, merged = harness.step(
                    "merge_partials", {"partial_out": Tensor("f32", out), "partial_lse": Tensor("f32", lse)}
                )
                np.testing.assert_array_equal(merged["out"].codes.ravel(), [1.0, 0.0])
                np.testing.assert_array_equal(merged["lse"].codes.ravel(), np.array([0.5, -inf], np.float32))

    def test_a_batch_is_shared_out_over_ranks_of_prefill_context_parallelism_and_comes_back(self):
        wanted = {
            ("head_tail", "replicated"): [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8, 11]],
            ("head_tail", "owned"): [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]],
            ("contiguous", "replicated"): [[0, 1, 2, 3, 4, 5, 11], [6, 7, 8, 9, 10, 11]],
            ("round_robin", "split"): [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]],
        }
        batch = {
            "query_start_loc": Tensor("i32", np.array([0, 11, 12], np.int32)),
            "context_lens": Tensor("i32", np.array([5, 20], np.int32)),
            "is_prefilling": Tensor("u8", np.array([1, 0], np.uint8)),
        }
        with Harness(["examples/numpy_dcp.py:NumpyDcp"]) as harness:
            harness.start()
            harness.open()
            for (strategy, decodes), ranks in wanted.items():
                split = {"world": 2, "strategy": strategy, "decodes": decodes}
                _, seen = harness.step("pcp_layout", batch, **split)
                rows, restore = seen["rows"].codes, seen["restore"].codes
                padded = [own + [-1] * (rows.shape[1] - len(own)) for own in ranks]
                np.testing.assert_array_equal(rows, padded, f"{strategy} {decodes}")
                np.testing.assert_array_equal(rows.reshape(-1)[restore], [np.arange(12)] * 2)
                written = [rows.reshape(-1)[writer == 1] for writer in seen["kv_writer"].codes]
                np.testing.assert_array_equal(np.sort(written), [np.arange(12)] * 2)
                # five tokens and twenty were there before
                bounds = np.where(rows < 0, 0, np.where(rows == 11, 21, rows + 6))
                np.testing.assert_array_equal(seen["row_lens"].codes, bounds)
            padded = {"world": 2, "strategy": "head_tail", "decodes": "owned", "padded_rows": 9}
            self.assertEqual(harness.step("pcp_layout", batch, **padded)[1]["rows"].codes.shape, (2, 9))

    def test_experts_are_chosen_by_the_bias_and_weigh_without_it(self):
        logits = np.array([[0, 0, -1, -1], [3, 2, 1, 0]], np.float32)
        given = {"logits": Tensor("f32", logits), "bias": Tensor("f32", np.array([0, -9, 9, 0], np.float32))}
        router = {
            "scoring": "sigmoid",
            "choice": "biased",
            "top_k": 2,
            "groups": 1,
            "top_groups": 1,
            "fill": "zero",
            "renormalise": "sum",
            "scale": 2.0,
        }
        scores = 1 / (1 + np.exp(-logits.astype(np.float64)))[:, [0, 2]]
        with Harness(["examples/numpy_dcp.py:NumpyDcp"]) as harness:
            harness.start()
            harness.open()
            _, seen = harness.step("route", given, router=router)
        order = np.argsort(seen["topk_ids"].codes[0], axis=1)
        np.testing.assert_array_equal(np.sort(seen["topk_ids"].codes[0], axis=1), [[0, 2], [0, 2]])
        weights = np.take_along_axis(seen["topk_weights"].codes[0], order, axis=1)
        np.testing.assert_allclose(weights, 2 * scores / scores.sum(axis=1, keepdims=True), rtol=1e-6)

    def test_drafts_are_accepted_by_given_numbers_and_every_rank_emits_the_same(self):
        target = np.log(np.array([[6, 4], [5, 5], [2, 8]], np.float32) / 10)
        law = np.log(np.array([[[8, 2], [3, 7]]], np.float32) / 10)
        base = {
            "query_start_loc": Tensor("i32", np.array([0, 3], np.int32)),
            "draft_tokens": Tensor("i32", np.array([[0, 1]], np.int32)),
            "target_logits": Tensor("f32", target),
        }
        drawn = {
            "draft_logits": Tensor("f32", law),
            "temperature": Tensor("f32", np.ones(1, np.float32)),
            "noise": Tensor("f32", np.zeros((3, 2), np.float32)),
        }
        # a block passes up to 3/13 behind its first draft and up to 15/28 behind both
        wanted = [
            ("greedy", None, [0, 0, -1]),
            ("standard", [0.74, 0.71, 0], [0, 1, 1]),
            ("standard", [0.76, 0.0, 0], [1, -1, -1]),
            ("block", [0.9, 0.53, 0], [0, 1, 1]),
            ("block", [0.23, 0.54, 0], [0, 0, -1]),
            ("block", [0.24, 0.54, 0], [1, -1, -1]),
        ]
        with Harness(["examples/numpy_dcp.py:NumpyDcp"]) as harness:
            harness.start()
            harness.open()
            for method, numbers, tokens in wanted:
                given = (
                    base
                    if numbers is None
                    else {**base, **drawn, "uniform": Tensor("f32", np.array(numbers, np.float32))}
                )
                _, seen = harness.step("accept_drafts", given, method=method, ranks=2)
                np.testing.assert_array_equal(seen["tokens"].codes, [[tokens]] * 2, f"{method} {numbers}")
                accepted = sum(token >= 0 for token in tokens) - 1
                np.testing.assert_array_equal(seen["accepted"].codes, [[accepted]] * 2)
                np.testing.assert_array_equal(seen["statistics"].codes, [[1 + accepted, accepted / 2]] * 2)

    def test_tokens_are_selected_over_ranks_and_each_lists_the_slots_of_its_own(self):
        # eleven tokens on two ranks, one by one, in blocks of four; a token's score is the first element of its key
        scores = [3, 1, 8, 2, 7, 2, 6, 0, 5, 4, 9]
        cache = np.full((2, 8, 4, 2), np.nan, np.float32)
        for position, score in enumerate(scores):
            local = position // 2
            cache[position % 2, [5, 3][local // 4], local % 4] = [score, 0]
        query = np.array([[[1, 0]]] * 2, np.float32)
        given = {
            "seq_lens": Tensor("i32", np.array([11], np.int32)),
            "query_start_loc": Tensor("i32", np.array([0, 1], np.int32)),
            "block_table": Tensor("i32", np.array([[5, 3, 99]], np.int32)),
            "index_query": Tensor.from_f32("bf16", query),
            "index_weights": Tensor("f32", np.ones((2, 1), np.float32)),
            "index_cache": Tensor.from_f32("bf16", cache),
        }
        wanted = {
            ("exact", "padded"): (
                [10, 2],
                [10, 2],
                [2, 0],
                [[0, 2, 4], [0, 2, 4]],
                [[13, 21, -1, -1], [-1] * 4],
            ),
            ("exact", "packed"): (
                [10, 2],
                [10, 2],
                [2, 0],
                [[0, 2, 2], [0, 0, 0]],
                [[13, 21, -1, -1], [-1] * 4],
            ),
            ("exact", "packed_dummy"): (
                [10, 2],
                [10, 2],
                [2, 0],
                [[0, 2, 3], [0, 1, 2]],
                [[13, 21, 0, -1], [0, 0, -1, -1]],
            ),
            ("union", "packed"): (
                [10, 2],
                [9, 3],
                [2, 2],
                [[0, 2, 2], [0, 2, 2]],
                [[13, 21, -1, -1], [12, 21, -1, -1]],
            ),
        }
        with Harness(["examples/numpy_dcp.py:NumpyDcp"]) as harness:
            harness.start()
            harness.open(tp=2, dcp=2, interleave=1, block_size=4, blocks=8)
            for (mode, form), (first, second, counts, indptr, slots) in wanted.items():
                selector = {"top_k": 2, "mode": mode, "list": form}
                _, seen = harness.step("select_sparse", given, selector=selector)
                np.testing.assert_array_equal(seen["topk"].codes, [[first, [-1, -1]], [second, [-1, -1]]])
                np.testing.assert_array_equal(
                    seen["counts"].codes, [[counts[0], 0], [counts[1], 0]], f"{mode} {form}"
                )
                np.testing.assert_array_equal(seen["indptr"].codes, indptr, f"{mode} {form}")
                np.testing.assert_array_equal(seen["slots"].codes, slots, f"{mode} {form}")

    def test_an_lse_comes_back_from_its_lanes_bit_for_bit(self):
        bits = np.array([0, 0x80000000, 0x7FC00001, 0xFF800000, 0x3F812345], np.uint32)
        with Harness(["examples/numpy_dcp.py:NumpyDcp"]) as harness:
            harness.start()
            for order, high in (("hi_lo", 0), ("lo_hi", 1)):
                harness.open(lane_order=order)
                _, packed = harness.step("pack_lse", {"lse": Tensor("f32", bits.view(np.float32))})
                np.testing.assert_array_equal(packed["unpacked"].codes.view(np.uint32), bits[None])
                np.testing.assert_array_equal(packed["lanes"].codes[0, :, high], bits >> 16)


if __name__ == "__main__":
    sys.exit(unittest.main())

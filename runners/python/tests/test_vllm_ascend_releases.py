"""Releases of vLLM-Ascend through their adapter: right to rounding where they claim to be, and with the faults that they are known for."""

import unittest
from typing import Any

from tests.releases import outcomes, reproduced, require

NEWEST, MASKED, OLDEST = "0.30.0rc2", "0.26.0rc1", "0.23.0"
# f32 over a few dozen tokens of unit normal data, and a rounding to 16 bits; the harness derives its bounds itself, this only tells right from
# wrong
CLOSE, CLOSE_16_BIT = 3e-6, 2e-2
# a request of three tokens or fewer behind, three ranks: a row that must not see any token of a rank
KNOWN = "verify, a row without tokens of a rank"


class ReleasesTest(unittest.TestCase):
    """Each test names a release and is skipped where it isn't fetched."""

    def of(self, release: str, *options: str) -> dict[str, Any]:
        """Outcomes of a release by scenario."""
        require(self, "vllm-ascend", release)
        found = outcomes("vllm-ascend", release, *options)
        self.assertEqual(found["used stubs"], [])
        return found["outcomes"]

    def wrong_steps(self, found: dict[str, Any]) -> set[str]:
        """Steps whose output, LSE, slots or lengths are not right; none is refused."""
        wrong = set()
        for name, outcome in found.items():
            if "out" in outcome:
                close = all(outcome[key] is not None and outcome[key] < CLOSE for key in ("out", "lse"))
                if not close or outcome["slots"] or outcome.get("local_lens", 0):
                    wrong.add(name)
        return wrong

    def wrong_merges(self, found: dict[str, Any]) -> set[str]:
        """Merges that are not right."""
        limit = lambda name: CLOSE_16_BIT if name.endswith("bf16") else CLOSE  # noqa: E731
        return {name for name, error in found["merges"].items() if error is None or error > limit(name)}

    def test_steps_are_right_but_for_the_masks_that_are_known_to_be_wrong(self) -> None:
        for release, known in ((NEWEST, set()), (MASKED, {KNOWN}), (OLDEST, {KNOWN, "verify, interleave"})):
            with self.subTest(release):
                found = self.of(release)
                self.assertNotIn("unsupported", str({name: found[name] for name in found if "share" not in name}))
                self.assertEqual(self.wrong_steps(found), known)

    def test_merges_fail_on_just_the_inputs_that_they_are_known_to_fail_on(self) -> None:
        broken = ("one empty, NaN", "one LSE infinite", "one LSE NaN", "all empty, zeros", "all empty, NaN")
        states = {f"{case}, states" for case in broken}
        ranks = {f"{case}, {dtype}" for case in (*broken, "first empty, NaN") for dtype in ("f32", "bf16")}
        self.assertEqual(self.wrong_merges(self.of(NEWEST)), set())
        self.assertEqual(self.wrong_merges(self.of(MASKED)), states)
        self.assertEqual(self.wrong_merges(self.of(OLDEST)), states | ranks)
        self.assertEqual(self.wrong_merges(self.of(MASKED, "merge=context")), states | ranks)

    def test_the_releases_own_functions_show_each_finding_without_the_adapter(self) -> None:
        sparse = "rank 0: seen [8388608]"
        lost = "LSE 2.46519e-32: seen [0.0, 0.0]"
        mask, interleaved = "must see [], sees [2]   <-- wrong", "sees [0, 1, 2, 3, 8, 9]   <-- wrong"
        for release, shown, absent in (
            (OLDEST, (mask, interleaved, sparse, "no fused exchange"), (lost,)),
            (MASKED, (mask, lost, sparse), (interleaved,)),
            (NEWEST, ("no mask of a verification", lost, sparse), (mask, interleaved)),
        ):
            with self.subTest(release):
                require(self, "vllm-ascend", release)
                text = reproduced("vllm-ascend", release)
                for part in (*shown, "empty, output NaN: expected 1.0, 0.0; seen nan, 0.0"):
                    self.assertIn(part, text)
                for part in absent:
                    self.assertNotIn(part, text)

    def test_integers_are_right_for_all_group_and_interleave_sizes_but_far_sparse_indices(self) -> None:
        for release in (OLDEST, MASKED):
            with self.subTest(release):
                found = self.of(release)["sweep"]
                self.assertGreater(sum(asked for asked, _ in found.values()), 900_000)
                wrong = {name for name, (_, count) in found.items() if count}
                # its arithmetic is in f32 where there is no Triton
                self.assertEqual(wrong, {"sparse indices beyond"})

    def test_masks_are_wrong_for_just_the_rows_that_must_see_nothing_and_once_for_interleaved_tokens(self) -> None:
        for release, more in ((OLDEST, {"rows that see tokens, interleaved"}), (MASKED, set())):
            with self.subTest(release):
                found = self.of(release)["masks"]
                self.assertGreater(sum(asked for asked, _ in found.values()), 800_000)
                nothing = {name for name in found if name.startswith("rows that see none")}
                self.assertEqual(len(nothing), 4)
                self.assertEqual({name for name, (_, count) in found.items() if count}, nothing | more)
                self.assertEqual({name for name in nothing if found[name][0] == found[name][1]}, nothing)

    def test_the_fused_exchange_loses_a_rank_only_by_an_lse_that_is_next_to_zero_and_in_16_bits(self) -> None:
        for release in (MASKED, NEWEST):
            with self.subTest(release):
                found = self.of(release)["exponents"]
                self.assertEqual({name for name, (_, count) in found.items() if count}, {"LSEs below 2^-104, bfloat16"})

    def test_rows_and_ranks_of_a_launch_at_once_give_the_bits_of_one_after_the_other(self) -> None:
        for release in (MASKED, NEWEST):
            with self.subTest(release):
                found = self.of(release)["together"]
                self.assertEqual(
                    {name: wrong for name, (_, wrong) in found.items()}, dict.fromkeys(("bfloat16", "float16", "float32"), 0)
                )
                self.assertGreater(min(asked for asked, _ in found.values()), 2000)

    def test_prompts_are_shared_out_rightly_where_a_release_has_a_manager_of_its_own(self) -> None:
        found = self.of(OLDEST)
        for name in ("prompts", "decodes", "verification", "decodes alone", "short prompts"):
            with self.subTest(name):
                self.assertEqual(found[f"share, {name}"], {"wrong": []})
        self.assertIn("unsupported", found["share, zigzag"])
        self.assertIn("unsupported", self.of(NEWEST)["share, prompts"])


if __name__ == "__main__":
    unittest.main()

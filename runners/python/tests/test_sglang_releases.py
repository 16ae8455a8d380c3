"""Releases of SGLang through their adapter: right to rounding where they claim to be, and with the faults that they are
known for."""

import unittest
from typing import Any

from tests.releases import outcomes, reproduced, require

NEWEST, OLDEST = "0.5.23", "0.5.17"
# f32 over a few dozen tokens of unit normal data, latents of 576 elements included; the harness derives its bounds
# itself, this one only tells right from wrong
CLOSE = 1e-5


class ReleasesTest(unittest.TestCase):
    """Each test names a release and is skipped where it isn't fetched."""

    def of(self, release: str, *options: str) -> dict[str, Any]:
        """Outcomes of a release by scenario."""
        require(self, "sglang", release)
        found = outcomes("sglang", release, *options)
        self.assertEqual(found["used stubs"], [])
        return found["outcomes"]

    def assert_right(self, outcome: dict[str, Any]) -> None:
        """Output and LSE within rounding, rows of the cache and lengths exact."""
        self.assertNotIn("unsupported", outcome)
        for name in ("out", "lse"):
            self.assertIsNotNone(outcome[name], f"NaN in {name}")
            self.assertLess(outcome[name], CLOSE, name)
        self.assertEqual(outcome.get("slots", 0), 0)
        self.assertEqual(outcome.get("local_lens", 0), 0)

    def assert_decodes(self, found: dict[str, Any], refused: set[str]) -> None:
        """Those steps are refused with a reason, all others right."""
        for name, outcome in found.items():
            if name not in ("merges", "sweep") and not name.startswith("share, "):
                with self.subTest(name):
                    if name in refused:
                        self.assertIn("unsupported", outcome)
                    else:
                        self.assert_right(outcome)

    def assert_shares(self, found: dict[str, Any]) -> None:
        """Batches are shared out rightly where a strategy of the engine is asked for and applies."""
        applies = {"share, zigzag", "share, zigzag, aligned", "share, round robin"}
        for name, outcome in found.items():
            if name.startswith("share, "):
                with self.subTest(name):
                    if name in applies:
                        self.assertEqual(outcome, {"wrong": []})
                    else:
                        self.assertIn("unsupported", outcome)

    def wrong(self, found: dict[str, Any]) -> set[str]:
        """Merges whose output or LSE is not right."""
        close = lambda error: error is not None and error < CLOSE  # noqa: E731
        return {name for name, e in found["merges"].items() if not (close(e["out"]) and close(e["lse"]))}

    def test_the_newest_release_is_right_in_every_step_that_it_has(self) -> None:
        found = self.of(NEWEST)
        self.assert_decodes(found, {"interleave"})
        self.assert_shares(found)

    def test_the_oldest_release_is_right_in_every_step_that_it_has(self) -> None:
        found = self.of(OLDEST)
        self.assert_decodes(found, {"interleave", "verify", *(name for name in found if "context" in name)})
        self.assert_shares(found)

    def test_merges_fail_on_just_the_inputs_that_they_are_known_to_fail_on(self) -> None:
        known = {f"one empty, NaN, {route}" for route in ("ag_rs, two", "a2a, e", "a2a, two")}
        known |= {f"one LSE {what}, ag_rs, e" for what in ("infinite", "NaN")}
        for release in (OLDEST, NEWEST):
            with self.subTest(release):
                self.assertEqual(self.wrong(self.of(release)), known)

    def test_integers_are_right_for_all_group_and_interleave_sizes(self) -> None:
        for release, least in ((OLDEST, 10_000), (NEWEST, 1_000_000)):
            with self.subTest(release):
                found = self.of(release)["sweep"]
                self.assertGreater(sum(asked for asked, _ in found.values()), least)
                wrong = {name for name, (_, count) in found.items() if count}
                # its arithmetic is in f32
                self.assertLessEqual(wrong, {"rows of the cache, sparse, beyond"})

    def test_the_releases_own_functions_show_each_finding_without_the_adapter(self) -> None:
        divided, sparse = "all empty, output 0: expected 0.0; seen nan", "rank 0: seen [8388608]"
        for release, shown, absent in ((OLDEST, divided, sparse), (NEWEST, sparse, divided)):
            with self.subTest(release):
                require(self, "sglang", release)
                text = reproduced("sglang", release)
                for part in (
                    shown,
                    "one empty, output NaN: expected 1.0, 0.0; seen nan, 0.0",
                    "one empty, output NaN: expected 1.0; seen nan",
                    "LSE inf on rank 1: expected 1.0, 0.0; seen 0.0, inf",
                    "head 0: expected 0.6667; seen 0.5000",
                ):
                    self.assertIn(part, text)
                self.assertNotIn(absent, text)

    def test_sparse_indices_are_known_to_lose_their_owner_beyond_2_to_the_24(self) -> None:
        asked, wrong = self.of(NEWEST)["sweep"]["rows of the cache, sparse, beyond"]
        self.assertGreater(wrong, asked // 10)

    def test_other_functions_for_the_same_rows_and_the_same_merge_are_right_too(self) -> None:
        for options, refused in (
            (("reads=planner", "slots=localize", "merge=scattered"), {"interleave", "verify"}),
            (("reads=pages", "slots=sparse"), {"interleave"}),
        ):
            with self.subTest(options):
                found = self.of(NEWEST, *options)
                if "merge=scattered" in options:  # a merge of MLA layers, for powers of two of ranks
                    refused = refused | {
                        name for name in found if "grouped" in name and "one rank" not in name
                    }
                    refused |= {"three ranks", "one query head a KV head"}
                self.assert_decodes(found, refused)


if __name__ == "__main__":
    unittest.main()

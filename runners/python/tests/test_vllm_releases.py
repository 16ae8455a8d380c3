"""Releases of vLLM through their adapter: a healthy one is right to rounding, old ones show the faults that
they are known for."""

import unittest
from typing import Any

from tests.releases import outcomes, require

HEALTHY = "0.33.0"
# f32 over a few dozen tokens of unit normal data; the harness derives its bounds itself, this one only tells
# right from wrong
CLOSE = 3e-6


class ReleasesTest(unittest.TestCase):
    """Each test names a release and is skipped where it isn't fetched."""

    def of(self, release: str) -> dict[str, Any]:
        """Outcomes of a release by scenario."""
        require(self, "vllm", release)
        return outcomes("vllm", release)["outcomes"]

    def assert_right(self, outcome: dict[str, Any]) -> None:
        """Output and LSE within rounding, slots and lengths exact."""
        self.assertNotIn("unsupported", outcome)
        for name in ("out", "lse"):
            if name in outcome:
                self.assertIsNotNone(outcome[name], f"NaN in {name}")
                self.assertLess(outcome[name], CLOSE, name)
        self.assertEqual(outcome["slots"], 0)
        self.assertEqual(outcome.get("local_lens", 0), 0)

    def test_a_healthy_release_is_right_in_every_step_that_it_has(self) -> None:
        found = self.of(HEALTHY)
        for name in (
            *(
                "one rank, projected",
                "no rank empty",
                "no rank empty, a2a",
                "one rank empty",
                "one rank empty, a2a",
            ),
            *("two groups, padding, projected", "interleave", "grouped", "verify", "draft", "context"),
        ):
            with self.subTest(name):
                self.assert_right(found[name])
        self.assertEqual(
            (found["both states empty"], found["all partials empty"]), ({"nan": False}, {"nan": False})
        )

    def test_a_healthy_release_declares_what_it_runs_and_uses_no_stub(self) -> None:
        self.of(HEALTHY)
        self.assertEqual(outcomes("vllm", HEALTHY)["used stubs"], [])
        self.assertLessEqual(
            {"decode", "verify", "draft", "context", "merge_segments", "pack_lse"},
            set(outcomes("vllm", HEALTHY)["operations"]),
        )

    def assert_shares(self, found: dict[str, Any], names: set[str]) -> None:
        """Those batches are shared out rightly, all others refused with a reason."""
        for name, outcome in found.items():
            if name.startswith("share, "):
                with self.subTest(name):
                    if name.removeprefix("share, ") in names:
                        self.assertEqual(outcome, {"wrong": []})
                    else:
                        self.assertIn("unsupported", outcome)

    def test_managers_of_prefill_context_parallelism_share_out_what_their_release_knows(self) -> None:
        oldest = {"prompts", "decodes on every rank", "decodes alone"}
        graphs = {*oldest, "rows of a graph"}
        newest = {*graphs, "verification", "decodes with an owner", "short prompts whole"}
        for release, names in (("0.27.1", oldest), ("0.29.0", graphs), (HEALTHY, newest)):
            with self.subTest(release):
                found = self.of(release)
                self.assertIn("share, prompts", found)
                self.assert_shares(found, names)
        self.assertNotIn("share, prompts", self.of("0.25.1"))

    def test_every_rank_enters_as_many_collectives_as_the_exchange_has(self) -> None:
        found = self.of(HEALTHY)
        self.assertEqual(found["one rank empty"]["collectives"], [3] * 4)
        self.assertEqual(found["one rank empty, a2a"]["collectives"], [2] * 4)
        self.assertEqual(found["one rank, projected"]["collectives"], [0])

    def test_ranks_that_are_gloo_processes_give_what_threads_of_one_process_give(self) -> None:
        threads = self.of(HEALTHY)
        processes = outcomes("vllm", HEALTHY, "ranks=processes")["outcomes"]
        self.assertEqual(set(threads), set(processes))
        for name, outcome in threads.items():
            with self.subTest(name):
                for key, value in outcome.items():
                    if key == "out" and value is not None:
                        # a real reduction adds in an order of its own
                        self.assertAlmostEqual(value, processes[name][key], delta=CLOSE)
                    else:
                        self.assertEqual(value, processes[name][key], key)

    def test_the_kernels_of_the_newer_runner_and_the_other_merge_are_right_as_well(self) -> None:
        self.of(HEALTHY)
        found = outcomes("vllm", HEALTHY, "runner=v2", "merge=torch")["outcomes"]
        for name in ("one rank empty", "two groups, padding, projected", "interleave", "verify"):
            with self.subTest(name):
                self.assert_right(found[name])
        self.assertEqual(found["both states empty"], {"nan": False})

    def test_sizes_that_the_kernels_refuse_are_unsupported_and_no_failure(self) -> None:
        found = self.of(HEALTHY)
        for name in ("three ranks", "grouped, width no power of two"):
            self.assertIn("power of 2", found[name].get("unsupported", ""), name)

    def test_0_24_0_lets_an_empty_shard_into_both_exchanges_as_nan(self) -> None:
        found = self.of("0.24.0")
        self.assertIsNone(found["one rank empty"]["out"])
        self.assertIsNone(found["one rank empty, a2a"]["out"])
        self.assert_right(found["no rank empty"])
        self.assert_right(found["no rank empty, a2a"])

    def test_0_25_1_and_0_27_1_mended_the_reduce_scatter_but_not_the_all_to_all(self) -> None:
        for release in ("0.25.1", "0.27.1"):
            with self.subTest(release):
                found = self.of(release)
                self.assert_right(found["one rank empty"])
                self.assertIsNone(found["one rank empty, a2a"]["out"])
                self.assert_right(found["no rank empty, a2a"])

    def test_0_29_0_has_both_exchanges_right(self) -> None:
        found = self.of("0.29.0")
        for name in ("one rank empty", "one rank empty, a2a", "verify", "draft", "context"):
            with self.subTest(name):
                self.assert_right(found[name])

    def test_0_11_0_gives_nan_for_an_empty_shard_for_two_empty_states_and_for_empty_partials(self) -> None:
        found = self.of("0.11.0")
        self.assertIsNone(found["one rank empty"]["out"])
        self.assert_right(found["no rank empty"])
        self.assertEqual(
            (found["both states empty"], found["all partials empty"]), ({"nan": True}, {"nan": True})
        )

    def test_what_a_release_does_not_have_yet_is_unsupported(self) -> None:
        found = self.of("0.11.0")
        self.assertIn("no exchange a2a", found["no rank empty, a2a"]["unsupported"])
        self.assertIn("no interleave size", found["interleave"]["unsupported"])
        for name in ("verify", "draft", "context"):
            self.assertIn("unsupported", found[name])

    def test_two_empty_states_merge_to_nan_until_0_25_1_and_to_nothing_from_0_27_1_on(self) -> None:
        for release, nan in (("0.24.0", True), ("0.25.1", True), ("0.27.1", False), ("0.29.0", False)):
            with self.subTest(release):
                self.assertEqual(self.of(release)["both states empty"], {"nan": nan})
                self.assertEqual(self.of(release)["one head of any stride"], {"alike": True})


if __name__ == "__main__":
    unittest.main()

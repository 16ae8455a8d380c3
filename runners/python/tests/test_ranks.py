"""Several processes behind one adapter: one answer of all, and collectives over torch.distributed."""

import sys
import time
import unittest

import numpy as np

from shardcheck import Tensor
from tests.peer import ROOT, TORCHRUN, Ended, Harness, i32
from tests.skips import torch_or_skip

PLAIN = [sys.executable, str(ROOT / "tests" / "launch.py"), "2"]


def layout(what: int) -> dict[str, Tensor]:
    """Inputs whose first length says what happens."""
    return {
        "seq_lens": i32(what, 7),
        "query_start_loc": i32(0, 1, 2),
        "block_table": Tensor("i32", np.ones((2, 2), np.int32)),
    }


class TwoProcesses(unittest.TestCase):
    def start(self) -> Harness:
        """Two processes with a session."""
        harness = Harness(["ranked_engines:Several"], PLAIN)
        self.addCleanup(harness.__exit__)
        harness.start()
        self.assertEqual(harness.open()["status"], "ok")
        return harness

    def test_every_rank_sees_every_question_and_counts_for_itself(self):
        harness = self.start()
        for via_file in (False, True):
            reply, outputs = harness.step("layout", layout(0), via_file=via_file)
            self.assertEqual(reply["status"], "ok")
            self.assertEqual(reply["collectives"], [1, 2])
            self.assertIn("local_lens", outputs)
        for rank in (0, 1):
            self.assertEqual((harness.folder / f"seen-{rank}").read_text(), "[0, 7] 4\n" * 2)
            self.assertEqual(harness.record(rank)[0], 2 * (rank + 1))
        harness.send({"type": "bye"})
        self.assertEqual(harness.exit_code(), 0)

    def test_large_questions_reach_every_rank_and_leave_no_file(self):
        harness = self.start()
        inputs = {**layout(0), "block_table": Tensor("i32", np.ones((2, 1 << 19), np.int32))}
        self.assertEqual(harness.step("layout", inputs, via_file=True)[0]["status"], "ok")
        self.assertEqual((harness.folder / "seen-1").read_text(), f"[0, 7] {1 << 20}\n")
        self.assertEqual(sorted(path.name for path in harness.folder.iterdir()), ["seen-0", "seen-1"])

    def test_the_failure_of_another_rank_is_the_answer_and_ends_the_session_everywhere(self):
        harness = self.start()
        reply, _ = harness.step("layout", layout(1))
        self.assertEqual((reply["status"], reply["class"]), ("error", "crash"))
        self.assertTrue(reply["text"].startswith("rank 1: RuntimeError: rank one is ill"), reply["text"])
        again, _ = harness.step("layout", layout(0))
        self.assertEqual((again["class"], "ended with an earlier failure" in again["text"]), ("input", True))
        self.assertEqual(harness.ask({"type": "close", "session": 1})[0]["status"], "ok")
        self.assertEqual(harness.open(session=2)["status"], "ok")
        self.assertEqual(harness.step("layout", layout(0), session=2)[0]["status"], "ok")

    def test_the_refusal_of_another_rank_is_the_answer(self):
        harness = self.start()
        reply, _ = harness.step("layout", layout(2))
        self.assertEqual((reply["status"], reply["reason"]), ("unsupported", "rank 1: not on an odd rank"))

    def test_a_refusal_of_all_ranks_leaves_the_session_as_it_was(self):
        harness = self.start()
        reply, _ = harness.step("merge_states")
        self.assertEqual((reply["status"], reply["reason"]), ("unsupported", "several has no merge_states"))
        self.assertEqual(harness.step("layout", layout(0))[0]["status"], "ok")

    def test_ranks_that_wait_for_a_failed_one_are_given_up(self):
        failures = {
            3: "RuntimeError: rank zero is ill",
            4: "rank 1: RuntimeError: rank one is ill for good",
            5: "rank 1: the process ended",
        }
        for what, words in failures.items():
            with self.subTest(words):
                harness = self.start()
                asked = time.monotonic()
                reply, _ = harness.step("layout", layout(what))
                self.assertTrue(reply["text"].startswith(words), reply)
                self.assertLess(time.monotonic() - asked, 60)
                with self.assertRaises(Ended):
                    harness.receive()
                self.assertEqual(harness.exit_code(), 1)


class TorchRanks(unittest.TestCase):
    def test_collectives_over_gloo_give_every_rank_its_part(self):
        torch_or_skip(self)
        with Harness(["ranked_engines:Together"], TORCHRUN) as harness:
            harness.start()
            refused = harness.open(session=9, tp=4)
            self.assertEqual(refused["status"], "unsupported")
            self.assertIn("4 ranks, but 2 processes", refused["reason"])
            self.assertEqual(harness.open()["status"], "ok")
            reply, outputs = harness.step("pack_lse", {"lse": Tensor("f32", np.array([1, 2, 3], np.float32))})
            self.assertEqual(reply["status"], "ok", reply)
            empty, nothing = harness.step("pack_lse", {"lse": Tensor("f32", np.zeros(0, np.float32))})
            self.assertEqual((empty["status"], empty["collectives"]), ("ok", reply["collectives"]), empty)
            harness.send({"type": "bye"})
            self.assertEqual(harness.exit_code(), 0)
            records = [harness.record(rank) for rank in (0, 1)]
        one, two = np.array([1, 2, 3]), np.array([2, 3, 4])
        self.assertEqual(outputs["gathered"].dtype, "bf16")
        np.testing.assert_array_equal(outputs["gathered"].numpy(), [[one, two]] * 2)
        grids = [np.stack([10 * mine, 10 * mine + 100]) for mine in (one, two)]
        for rank in (0, 1):
            np.testing.assert_array_equal(outputs["exchanged"].numpy()[rank], [grid[rank] for grid in grids])
            np.testing.assert_array_equal(outputs["reduced"].numpy()[rank], sum(grid[rank] for grid in grids))
        self.assertEqual(outputs["codes"].dtype, "e4m3fn")
        np.testing.assert_array_equal(outputs["codes"].numpy(), [one, two])
        self.assertEqual(outputs["nothing"].shape, (2, 0, 3))
        self.assertEqual(len(set(reply["collectives"])), 1)
        self.assertGreaterEqual(reply["collectives"][0], 4)
        self.assertEqual(records[0], records[1])
        self.assertEqual(records[0][0], 2 * reply["collectives"][0])
        self.assertEqual(
            {name: nothing[name].shape for name in ("gathered", "exchanged", "reduced")},
            {"gathered": (2, 2, 0), "exchanged": (2, 2, 0), "reduced": (2, 0)},
        )

    def test_jobs_of_launched_ranks_end_as_those_of_virtual_ranks_and_their_collectives_are_on_record(self):
        torch_or_skip(self)
        given = {"lse": Tensor("f32", np.array([1, 2, 3, 4], np.float32))}
        seen = []
        for launcher, options in ((None, ["--ranks", "virtual"]), (TORCHRUN, [])):
            with Harness(["ranked_engines:Launched", *options], launcher) as harness:
                harness.start()
                self.assertEqual(harness.open()["status"], "ok")
                reply, outputs = harness.step("pack_lse", given)
                self.assertEqual((reply["status"], reply["collectives"]), ("ok", [4, 4]), reply)
                seen.append({name: outputs[name].numpy().tolist() for name in ("hi", "lo")})
                records = [harness.record(rank)[0] for rank in (0, 1)] if launcher else None
                harness.send({"type": "bye"})
                self.assertEqual(harness.exit_code(), 0)
        self.assertEqual(seen[0], seen[1])
        self.assertNotEqual(seen[0]["hi"], seen[0]["lo"])
        self.assertEqual(records, [5, 5])

    def test_without_a_launcher_a_process_is_a_job_of_one(self):
        torch_or_skip(self)
        with Harness(["ranked_engines:Together"]) as harness:
            harness.start()
            self.assertEqual(harness.open(tp=1, dcp=1)["status"], "ok")
            reply, outputs = harness.step("pack_lse", {"lse": Tensor("f32", np.ones(2, np.float32))})
            self.assertEqual(reply["status"], "ok", reply)
            np.testing.assert_array_equal(outputs["reduced"].numpy(), [[10, 10]])

    def test_a_backend_that_torch_has_not_got_means_that_it_cannot_run_here(self):
        torch = torch_or_skip(self)
        if torch.distributed.is_backend_available("mpi"):
            self.skipTest("this torch has MPI")
        with Harness(["ranked_engines:Together", "--backend", "mpi"]) as harness:
            self.assertEqual(harness.exit_code(), 89)
            self.assertIn("no backend 'mpi'", harness.log())


if __name__ == "__main__":
    sys.exit(unittest.main())

"""Ranks that are threads of one process: collectives between them, and ranks that disagree."""

import unittest

from shardcheck.adapters.collectives import CollectiveMismatch, VirtualDistributed, VirtualGroup, VirtualRanks
from tests.skips import torch_or_skip


class VirtualRanksTest(unittest.TestCase):
    """Exchanges of plain values."""

    def test_everyone_gets_what_everyone_gave_in_rank_order(self) -> None:
        ranks = VirtualRanks(3)
        seen = ranks.run(lambda rank: ranks.exchange("first", rank) + ranks.exchange("second", 10 * rank))
        self.assertEqual(seen, [[0, 1, 2, 0, 10, 20]] * 3)
        self.assertEqual(ranks.entered, [2, 2, 2])

    def test_one_rank_runs_at_a_time_and_always_in_the_same_order(self) -> None:
        for _ in range(20):
            ranks, events = VirtualRanks(3), []

            def step(rank: int, ranks: VirtualRanks = ranks, events: list = events) -> None:
                events.append(("before", rank))
                ranks.exchange("turn", None)
                events.append(("after", rank))

            ranks.run(step)
            self.assertEqual(events[:3], [("before", 0), ("before", 1), ("before", 2)])
            self.assertEqual(sorted(events[3:]), [("after", 0), ("after", 1), ("after", 2)])

    def test_a_rank_that_ends_while_others_wait_is_named(self) -> None:
        ranks = VirtualRanks(3)
        with self.assertRaisesRegex(
            CollectiveMismatch, "rank 0 waits in gather, rank 1 has ended, rank 2 waits in gather"
        ):
            ranks.run(lambda rank: None if rank == 1 else ranks.exchange("gather", rank))

    def test_ranks_in_different_collectives_are_named(self) -> None:
        ranks = VirtualRanks(2)
        with self.assertRaisesRegex(CollectiveMismatch, "rank 0 waits in gather, rank 1 waits in reduce"):
            ranks.run(lambda rank: ranks.exchange("reduce" if rank else "gather", rank))

    def test_ranks_that_meet_count_no_collective_and_have_what_all_brought(self) -> None:
        ranks = VirtualRanks(3)
        seen = ranks.run(lambda rank: ranks.meet("launch", rank) + ranks.exchange("gather", 10 * rank))
        self.assertEqual(seen, [[0, 1, 2, 0, 10, 20]] * 3)
        self.assertEqual(ranks.entered, [1, 1, 1])

    def test_a_rank_that_meets_nobody_goes_on_by_itself(self) -> None:
        for others in ("gather", "end"):
            with self.subTest(others):
                ranks = VirtualRanks(3)

                def step(rank: int, ranks: VirtualRanks = ranks, others: str = others) -> list:
                    met = ranks.meet("launch", rank) if rank != 1 else []
                    return met + (ranks.exchange("gather", rank) if others == "gather" else [])

                gathered = [0, 1, 2] if others == "gather" else []
                self.assertEqual(ranks.run(step), [[0, *gathered], gathered, [2, *gathered]])

    def test_ranks_that_disagree_behind_a_meeting_are_still_named(self) -> None:
        ranks = VirtualRanks(2)

        def step(rank: int) -> None:
            ranks.meet("launch", rank)
            ranks.exchange("reduce" if rank else "gather", rank)

        with self.assertRaisesRegex(CollectiveMismatch, "rank 0 waits in gather, rank 1 waits in reduce"):
            ranks.run(step)

    def test_the_failure_of_one_rank_ends_all_and_is_the_one_that_is_raised(self) -> None:
        ranks = VirtualRanks(4)

        def step(rank: int) -> None:
            ranks.exchange("gather", rank)
            if rank == 2:
                raise ZeroDivisionError("rank 2")
            ranks.exchange("gather", rank)

        with self.assertRaisesRegex(ZeroDivisionError, "rank 2"):
            ranks.run(step)


class VirtualGroupTest(unittest.TestCase):
    """Collectives of tensors."""

    def setUp(self) -> None:
        self.torch = torch_or_skip(self)

    def run_group(self, world: int, function) -> list:
        """`function(group, tensor)` on each rank, whose tensor is `[4, 2]` and counts up over ranks."""
        ranks = VirtualRanks(world)
        start = lambda rank: 8.0 * rank + self.torch.arange(8.0).view(4, 2)  # noqa: E731
        return ranks.run(lambda rank: function(VirtualGroup(ranks, rank), start(rank)))

    def test_gather_reduce_and_scatter_are_those_of_a_real_group(self) -> None:
        whole = [8.0 * rank + self.torch.arange(8.0).view(4, 2) for rank in range(2)]
        gathered = self.run_group(2, lambda group, tensor: group.all_gather(tensor, dim=1))
        self.assertTrue(self.torch.equal(gathered[1], self.torch.cat(whole, dim=1)))
        scattered = self.run_group(2, lambda group, tensor: group.reduce_scatter(tensor, dim=0))
        self.assertTrue(self.torch.equal(self.torch.cat(scattered), whole[0] + whole[1]))
        reduced = self.run_group(2, lambda group, tensor: group.all_reduce(tensor))
        self.assertTrue(self.torch.equal(reduced[0], whole[0] + whole[1]))

    def test_what_an_engine_starts_through_torch_distributed_goes_to_the_group(self) -> None:
        distributed = VirtualDistributed(self.torch.distributed)

        def exchange(group: VirtualGroup, tensor):
            output = self.torch.empty_like(tensor)
            distributed.all_to_all_single(output, tensor, group=group.device_group, async_op=True).wait()
            return output

        first, second = self.run_group(2, exchange)
        self.assertEqual(first.flatten().tolist(), [0, 1, 2, 3, 8, 9, 10, 11])
        self.assertEqual(second.flatten().tolist(), [4, 5, 6, 7, 12, 13, 14, 15])
        self.assertIs(distributed.ReduceOp, self.torch.distributed.ReduceOp)

    def test_a_tensor_that_is_changed_after_it_was_sent_arrives_as_it_was(self) -> None:
        def step(group: VirtualGroup, tensor):
            gathered = group.all_gather(tensor, dim=0)
            tensor.zero_()
            group.all_gather(tensor, dim=0)
            return gathered

        self.assertEqual(self.run_group(2, step)[1][:4].flatten().tolist(), list(range(8)))


if __name__ == "__main__":
    unittest.main()

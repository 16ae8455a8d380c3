"""Integers of the interleaved layout, against published examples and against counting."""

import sys
import unittest

import numpy as np

from shardcheck.layout import Layout


class Layouts(unittest.TestCase):
    def slots(self, interleave: int, member: int) -> list[int]:
        """Slots of twelve positions in the blocks 7 and 3."""
        layout, table, positions = Layout(2, interleave, 4), np.array([7, 3]), np.arange(12)
        slots = layout.slot(positions, table[layout.table_entry(positions)])
        return np.where(layout.owner(positions) == member, slots, -1).tolist()

    def test_slots_follow_the_published_worked_example(self):
        self.assertEqual(self.slots(2, 0), [28, 29, -1, -1, 30, 31, -1, -1, 12, 13, -1, -1])
        self.assertEqual(self.slots(2, 1), [-1, -1, 28, 29, -1, -1, 30, 31, -1, -1, 12, 13])
        self.assertEqual(self.slots(1, 0), [28, -1, 29, -1, 30, -1, 31, -1, 12, -1, 13, -1])

    def test_local_lengths_follow_the_published_worked_examples(self):
        for length, layout, expected in (
            (37, Layout(4, 1, 4), [10, 9, 9, 9]),
            (37, Layout(4, 4, 4), [12, 9, 8, 8]),
            (3, Layout(4, 1, 4), [1, 1, 1, 0]),
        ):
            self.assertEqual([layout.local_length(length, rank) for rank in range(4)], expected)

    def test_a_local_length_counts_the_positions_that_a_rank_owns_and_they_lie_densely(self):
        for world in (1, 2, 3, 8):
            for interleave in (1, 2, 16):
                layout = Layout(world, interleave, 16)
                for length in range(0, 150, 7):
                    for member in range(world):
                        owned = layout.positions(length, member)
                        self.assertEqual(layout.local_length(length, member), len(owned))
                        np.testing.assert_array_equal(layout.local_index(owned), np.arange(len(owned)))

    def test_the_blocks_of_a_request_are_those_that_its_positions_touch(self):
        layout = Layout(3, 2, 4)
        for length in range(1, 60):
            entries = {int(entry) for entry in layout.table_entry(np.arange(length))}
            self.assertEqual(layout.blocks_needed(length), len(entries))
        np.testing.assert_array_equal(layout.blocks_needed(np.array([0, 12, 13])), [0, 1, 2])

    def test_numbers_and_arrays_give_the_same(self):
        layout = Layout(3, 2, 4)
        lengths = np.arange(50)
        for member in range(3):
            each = [layout.local_length(int(length), member) for length in lengths]
            np.testing.assert_array_equal(layout.local_length(lengths, member), each)


if __name__ == "__main__":
    sys.exit(unittest.main())

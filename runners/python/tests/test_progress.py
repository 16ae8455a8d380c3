"""The progress record, byte by byte."""

import os
import struct
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from shardcheck.progress import Progress, process_count, process_rank


class ProgressRecords(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "progress"
        self.path.write_bytes(struct.pack("<4sII", b"SCKP", 1, 4).ljust(64, b"\0") + bytes(4 * 64))

    def record(self, rank: int) -> tuple[int, bytes]:
        """Count and name in the file."""
        content = self.path.read_bytes()[64 + 64 * rank : 128 + 64 * rank]
        return struct.unpack_from("<Q", content)[0], content[8:]

    def test_a_rank_counts_in_its_own_record_and_says_what_it_enters(self):
        progress = Progress(str(self.path))
        progress.enter("all_gather query", 2)
        progress.enter("all_to_all", 2)
        self.assertEqual(self.record(2), (2, b"all_to_all".ljust(56, b"\0")))
        self.assertEqual([self.record(rank) for rank in (0, 1, 3)], [(0, bytes(56))] * 3)
        self.assertEqual((progress.count(2), progress.count(1)), (2, 0))

    def test_a_long_name_is_cut_between_characters(self):
        progress = Progress(str(self.path))
        progress.enter("é" * 40, 0)
        self.assertEqual(self.record(0)[1], ("é" * 28).encode())
        progress.enter("x" + "é" * 40, 0)
        self.assertEqual(self.record(0)[1], ("x" + "é" * 27).encode() + b"\0")

    def test_two_processes_go_on_where_the_file_is(self):
        Progress(str(self.path)).enter("first", 0)
        Progress(str(self.path)).enter("second", 0)
        self.assertEqual(self.record(0)[0], 2)

    def test_a_rank_beyond_the_records_counts_without_one(self):
        progress = Progress(str(self.path))
        progress.enter("somewhere", 4)
        self.assertEqual(progress.count(4), 1)
        self.assertEqual(len(self.path.read_bytes()), 64 * 5)

    def test_another_file_is_refused(self):
        self.path.write_bytes(bytes(1000))
        with self.assertRaisesRegex(ValueError, "no progress file"):
            Progress(str(self.path))

    def test_without_a_file_counts_stay_in_the_process(self):
        progress = Progress(None)
        progress.enter("somewhere", 1)
        self.assertEqual(progress.count(1), 1)

    def test_the_rank_is_what_the_launcher_says(self):
        for variables, expected in (
            ({}, (0, 1)),
            ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
            ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
            ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6"}, (5, 6)),
        ):
            with mock.patch.dict(os.environ, variables, clear=True):
                self.assertEqual((process_rank(), process_count()), expected)


if __name__ == "__main__":
    sys.exit(unittest.main())

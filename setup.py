"""Builds the compiled parts with CMake where that is possible, and installs without them where it is not.

What was left out, and why, goes into mtp_kernels/lib/build.json, which `mtp_kernels.report()` reads. Environment:

- MTP_REQUIRE_NATIVE=1: a part that should build here and does not fails the build instead of being left out.
- MTP_TORCH_DIR: the `torch` folder whose headers to use, where the one found is not the one meant.
- CMAKE_ARGS, CXX: as CMake projects understand them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FOLDERS = {"mtp_kernels.triton_ops": "triton_ops", "mtp_kernels.bench": "bench", "mtp_kernels.pair": "examples/pair"}
PARTS = {"cpu": "mtp_cpu", "host": "_host", "cuda": "mtp_cuda"}  # name in build.json -> CMake target
OLDEST_TORCH = (2, 11)
LAST_LINES = 30


class NotHere(Exception):
    """Why the compiled parts cannot be built on this machine."""


class BuildExt(build_ext):
    """Runs CMake and puts what it built beside the Python files."""

    def run(self) -> None:
        package = ROOT / "mtp_kernels" if self.inplace else Path(self.build_lib) / "mtp_kernels"
        for old in built_files(package):
            old.unlink()
        info = build_native(Path(self.build_temp).resolve(), package)
        (package / "lib").mkdir(parents=True, exist_ok=True)
        (package / "lib" / "build.json").write_text(json.dumps(info, indent=1) + "\n")
        for part in PARTS:
            print(f"mtp_kernels: {part}: {info[part] or 'built'}")

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in lists csrc

    def get_outputs(self) -> list[str]:
        return [str(p) for p in built_files(Path(self.build_lib) / "mtp_kernels")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildPy(build_py):
    """Starts from an empty folder, so that a file removed from the tree is not installed from an earlier build."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "mtp_kernels", ignore_errors=True)
        super().run()


def built_files(package: Path) -> list[Path]:
    return [*package.glob("lib/*"), *package.glob("_host*.so")]


def build_native(build: Path, package: Path) -> dict[str, str]:
    """Build what can be built into `package`: part -> "" when it is there, else the reason why it is not."""
    required = os.environ.get("MTP_REQUIRE_NATIVE", "") not in ("", "0")
    info = {"torch": "", **dict.fromkeys(PARTS, "")}
    try:
        torch, version = find_torch()
        info["torch"] = version
    except NotHere as why:
        if required:
            raise SystemExit(f"mtp_kernels: {why}") from None
        torch, info["cpu"] = None, str(why)
    try:
        configure(build, torch)
    except NotHere as why:
        if required:
            raise SystemExit(f"mtp_kernels: {why}") from None
        return {**info, **{part: info[part] or str(why) for part in PARTS}}
    # All at once, so that no processor waits for the last file of a part; what fails here fails again below, alone.
    there = [target for part, target in PARTS.items() if not (build / "skipped" / f"{part}.txt").exists()]
    if len(there) > 1:
        with suppress(NotHere):
            call([tool("cmake"), "--build", str(build), "--target", *there, "--", "-k", "0"], "the build", quiet=True)
    for part, target in PARTS.items():
        skipped = build / "skipped" / f"{part}.txt"
        if skipped.exists():
            info[part] = info[part] or skipped.read_text()
            continue
        try:
            call([tool("cmake"), "--build", str(build), "--target", target], f"{target} did not compile")
        except NotHere as why:
            if required:
                raise SystemExit(f"mtp_kernels: {why}") from None
            info[part] = str(why)
            continue
        place(build, package, target)
    return info


def place(build: Path, package: Path, target: str) -> None:
    if target == "_host":
        folder, pattern = package, "_host*.so"
    else:
        folder, pattern = package / "lib", f"lib{target}.so"
    folder.mkdir(parents=True, exist_ok=True)
    for built in build.glob(pattern):
        shutil.copy2(built, folder / built.name)


def configure(build: Path, torch: Path | None) -> None:
    """Run CMake's configure step afresh: pip's build environment has another path every time."""
    build.mkdir(parents=True, exist_ok=True)
    command = [tool("cmake"), "--fresh", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
    command += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DMTP_TORCH_DIR={torch or ''}"]
    command += [f"-DPython_EXECUTABLE={sys.executable}"]
    pybind11 = importlib.util.find_spec("pybind11")
    if pybind11 is not None and pybind11.origin is not None:
        command += [f"-Dpybind11_DIR={Path(pybind11.origin).parent / 'share' / 'cmake' / 'pybind11'}"]
    call(command + shlex.split(os.environ.get("CMAKE_ARGS", "")), "CMake")


def tool(name: str) -> str:
    """The path of cmake or ninja: the pip package's, wherever the build environment put it, else the one on PATH."""
    module = importlib.util.find_spec(name)
    if module is not None and module.origin is not None:
        for folder in (Path(module.origin).parent / "data" / "bin", Path(sys.executable).parent):
            if (folder / name).exists():
                return str(folder / name)
    found = shutil.which(name)
    if found is None:
        raise NotHere(f"{name} was not found")
    return found


def call(command: list[str], what: str, quiet: bool = False) -> None:
    """Run a build step; NotHere with the first line of its error where it fails. `quiet` keeps its last lines back."""
    print("mtp_kernels:", shlex.join(command), flush=True)
    english = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=english)
    if done.returncode:
        if not quiet:
            print("\n".join(done.stdout.splitlines()[-LAST_LINES:]), flush=True)
        raise NotHere(f"{what}: {first_error(done.stdout)}")


def first_error(output: str) -> str:
    """One line that says what went wrong, out of what CMake or a compiler printed."""
    end = r"\n\s*(?:It fails with|Tell CMake|Call Stack)|\n\n\n|\Z"
    cmake = re.search(rf"CMake Error[^\n]*\n(.+?)(?={end})", output, re.DOTALL)
    compiler = re.search(r"^[^\n]*\berror:[^\n]*", output, re.MULTILINE)
    match = cmake.group(1) if cmake else compiler.group(0) if compiler else output.strip()[-200:]
    return " ".join(match.split())[:300] or "it failed without a word"


def find_torch() -> tuple[Path, str]:
    """The folder and version of the torch to build against.

    pip builds in an environment of its own without torch, and must not download one, so the environment around it is
    asked too: the same interpreter without the variables that pip set, then the active virtual environment's.
    """
    folder = os.environ.get("MTP_TORCH_DIR") or _torch_here() or _torch_of(sys.executable)
    if not folder and os.environ.get("VIRTUAL_ENV"):
        folder = _torch_of(str(Path(os.environ["VIRTUAL_ENV"]) / "bin" / "python"))
    if not folder:
        raise NotHere("torch was not installed when this was built; install torch, then mtp-kernels again")
    header = Path(folder) / "include" / "torch" / "headeronly" / "version.h"
    if not header.exists():
        raise NotHere(f"{folder} has no torch headers")
    major, minor = (int(n) for n in re.findall(r"define TORCH_VERSION_(?:MAJOR|MINOR) (\d+)", header.read_text()))
    if (major, minor) < OLDEST_TORCH:
        raise NotHere(f"torch {major}.{minor} is older than {'.'.join(map(str, OLDEST_TORCH))}")
    return Path(folder), f"{major}.{minor}"


def _torch_here() -> str:
    spec = importlib.util.find_spec("torch")
    return next(iter(spec.submodule_search_locations or ()), "") if spec else ""


def _torch_of(python: str) -> str:
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    try:
        done = subprocess.run([python, "-E", "-c", code], capture_output=True, text=True, timeout=60, cwd=os.sep)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def packages() -> dict[str, str]:
    """mtp_kernels and the folders beside it that install under its name, with their subpackages; and where each is."""
    found = subpackages("mtp_kernels", "mtp_kernels")
    for name, folder in FOLDERS.items():
        if (ROOT / folder).is_dir():
            found |= {name: folder} | subpackages(name, folder)  # the pair is data alone
    return found


def subpackages(name: str, folder: str) -> dict[str, str]:
    """Every package in `folder`, itself included: its installed name and where it is."""
    inside = [p.parent.relative_to(ROOT / folder) for p in sorted((ROOT / folder).rglob("__init__.py"))]
    return {".".join((name, *path.parts)): (Path(folder) / path).as_posix() for path in inside}


setup(
    packages=list(packages()),
    package_dir=packages(),
    package_data={
        "mtp_kernels": ["py.typed", "*.pyi"],
        "mtp_kernels.pair": ["*.json", "*.md", "*/*.json", "*/*.safetensors", "*/*.md"],
    },
    include_package_data=False,
    ext_modules=[Extension("mtp_kernels._host", [])],
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    zip_safe=False,
)

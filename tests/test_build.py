"""The package builds with and without a compiler or torch, holds what it should, and says what it lacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mtp_kernels

ROOT = Path(__file__).resolve().parents[1]
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".data", "build", "dist", "lib", "*.egg-info", "*.so", "__pycache__", ".*_cache", ".hypothesis"
)
NEEDED = [name for name in ("pip", "setuptools", "pybind11") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(NEEDED), reason=f"building needs {', '.join(NEEDED)}")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository as a clone would have it: nothing built."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("clone") / "repository", ignore=NOT_SOURCE))


def run(*command: str, cwd: Path, **changed: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MTP_", "PYTHON", "CMAKE", "CXX", "CC"))}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**environment, **changed})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wheel(source: Path, to: Path, **changed: str) -> Path:
    """Build a wheel of `source` with this environment's tools, and nothing from a network."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(to), "."]
    run(*pip, cwd=source, **changed)
    return next(to.glob("*.whl"))


def unpacked(built: Path, to: Path) -> Path:
    with zipfile.ZipFile(built) as archive:
        archive.extractall(to)
    return to


def python(code: str, cwd: Path) -> str:
    """What `code` prints, run where `import mtp_kernels` finds the one in `cwd`."""
    return run(sys.executable, "-c", code, cwd=cwd).strip()


def wheel_and_its_files(tree: Path, tmp_path: Path) -> tuple[Path, set[str]]:
    """Where a wheel of the repository was unpacked: by pip, whose package is under test, or here."""
    site = Path(mtp_kernels.__file__).resolve().parents[1]
    if site != ROOT:
        files = importlib.metadata.distribution("mtp_kernels").files or []
        return site, {f.as_posix() for f in files if not {"..", "__pycache__"} & {*f.parts}}
    site = unpacked(wheel(tree, tmp_path, CMAKE_ARGS="-DMTP_WERROR=ON", MTP_REQUIRE_NATIVE="1"), tmp_path / "site")
    return site, {p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file()}


def test_wheel_holds_the_package_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    site, names = wheel_and_its_files(tree, tmp_path)
    tops = sorted({name.split("/")[0] for name in names})
    assert [t.split("-")[0] for t in tops] == ["mtp_kernels", "mtp_kernels"] and tops[1].endswith(".dist-info")
    for name in ("triton_ops/__init__.py", "bench/__init__.py", "ops/norm_linear.py", "reference/norm_linear.py",
                 "py.typed", "_host.pyi", "lib/libmtp_cpu.so", "lib/build.json"):
        assert f"mtp_kernels/{name}" in names
    assert any(n.startswith("mtp_kernels/_host.") and n.endswith(".so") for n in names)
    pair = {p.relative_to(tree / "examples").as_posix() for p in (tree / "examples" / "pair").rglob("*") if p.is_file()}
    assert {f"mtp_kernels/{name}" for name in pair} <= names
    sources = {p.relative_to(tree).as_posix() for p in (tree / "mtp_kernels").rglob("*.py")}
    assert sources <= names
    where = python("import mtp_kernels._native as n, mtp_kernels._host as h; print(n.cpu_library(), h.__file__)", site)
    assert where.startswith(str(site))  # the library gives no reason why it does not load


def test_sdist_without_a_compiler(tree: Path, tmp_path: Path) -> None:
    """The sdist holds the sources; built where no compiler works, it installs the references and says why."""
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    archive = tmp_path / run(sys.executable, "-c", code, cwd=tree).splitlines()[-1]
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    names = {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()}
    for name in ("csrc/cpu/tree_expand.cpp", "csrc/include/mtp/views.h", "CMakeLists.txt", "triton_ops/__init__.py",
                 "bench/__init__.py", "tests/harness.py", "Makefile", "LICENSE"):
        assert name in names
    assert not any(n.endswith(".so") or n.startswith(("build/", "mtp_kernels/lib/")) for n in names)

    site = unpacked(wheel(source, tmp_path, CXX="/bin/false"), tmp_path / "site")
    reason = 'The C++ compiler "/bin/false" is not able to compile a simple test program.'
    assert reason in python("import mtp_kernels; print(mtp_kernels.report())", site)
    code = "import torch, mtp_kernels as m; x = torch.ones(2, 2); print(m.ops.norm_linear(x, x[0], 0.0, x).tolist())"
    assert python(code, site) == "[[2.0, 2.0], [2.0, 2.0]]"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"PATH": "/nonexistent"}, "No CMAKE_CXX_COMPILER could be found"),
        ({"MTP_TORCH_DIR": "/nonexistent", "CXX": "/bin/false"}, "/nonexistent has no torch headers"),
    ],
)
def test_what_is_missing_is_named(tree: Path, tmp_path: Path, changed: dict[str, str], reason: str) -> None:
    if "PATH" in changed and importlib.util.find_spec("cmake") is None:
        reason = "cmake was not found"
    site = unpacked(wheel(tree, tmp_path, **changed), tmp_path / "site")
    assert reason in json.loads((site / "mtp_kernels" / "lib" / "build.json").read_text())["cpu"]


def test_required_parts_fail_the_build(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="is not able to compile a simple test program"):
        wheel(tree, tmp_path, CXX="/bin/false", MTP_REQUIRE_NATIVE="1")


def test_running_from_the_repository(tree: Path) -> None:
    """From a clone, the sibling folders import under their installed names, and report() says that nothing is built."""
    code = "import mtp_kernels as m, mtp_kernels.triton_ops as t, mtp_kernels.bench as b; print(t.__file__, b.__file__)"
    assert python(code, tree) == f"{tree / 'triton_ops' / '__init__.py'} {tree / 'bench' / '__init__.py'}"
    assert "`make build`" in python("import mtp_kernels; print(mtp_kernels.report())", tree)

"""Wheels of engines, whole or slim, as files: an engine that cannot be imported whole lends single modules.

Nothing of an engine is kept in this package. Its own files are run from the wheel that the user names.
"""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from types import ModuleType
from typing import Any

OPTION = "--peer-wheel"


@dataclass(frozen=True)
class Wheel:
    """A .whl file, or a folder with one unpacked."""

    path: Path
    name: str  # of the project, in lower case
    version: str

    @classmethod
    def open(cls, path: Path, projects: Sequence[str]) -> Wheel:
        """Read its METADATA; ValueError names the option, the path and what is wanted."""
        wanted = f"expected a .whl file (whole or slim) or the folder of an unpacked wheel of {' or '.join(projects)}"

        def refuse(got: str) -> ValueError:
            return ValueError(f"{OPTION}: {path}: {wanted}, got {got}")

        if not path.exists():
            raise refuse("no such file or folder")
        if path.is_file() and not zipfile.is_zipfile(path):
            raise refuse("a file that is no zip archive")
        if not (found := _metadata(path)):
            raise refuse("no *.dist-info/METADATA in it")
        fields = []
        for name in found:  # a folder may hold several projects
            head = Parser().parsestr(_read(path, name).decode("utf-8", "replace"), headersonly=True)
            fields.append(((head["Name"] or "").lower(), head["Version"] or ""))
        known = [(name, version) for name, version in fields if name in projects]
        if len(known) != 1:
            raise refuse("a wheel of " + ", ".join(f"{name} {version}" for name, version in (known or fields)[:3]))
        return cls(path, *known[0])

    def missing(self, files: Iterable[str]) -> list[str]:
        """Those of `files` that the wheel does not hold."""
        if self.path.is_dir():
            return sorted(name for name in files if not (self.path / name).is_file())
        with zipfile.ZipFile(self.path) as archive:
            return sorted(set(files) - set(archive.namelist()))

    def unpacked(self, files: Iterable[str]) -> Path:
        """A folder that has `files`: Triton and nvcc read sources from disk."""
        if self.path.is_dir():
            return self.path
        folder = Path(tempfile.mkdtemp(prefix=f"mtp-peer-{self.name}-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name in files:
            to = folder / name
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(_read(self.path, name))
        return folder

    def slim(self, out: Path, files: Iterable[str]) -> None:
        """Write a wheel with only `files` and the METADATA."""
        kept = sorted(set(files) - set(self.missing(files)))
        out.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in [*kept, *_metadata(self.path)]:
                archive.writestr(zipfile.ZipInfo(name), _read(self.path, name), zipfile.ZIP_DEFLATED)


def _metadata(path: Path) -> list[str]:
    """The METADATA files, one a project."""
    if path.is_dir():
        return [file.relative_to(path).as_posix() for file in path.glob("*.dist-info/METADATA")]
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    return [name for name in names if name.count("/") == 1 and name.endswith(".dist-info/METADATA")]


def _read(path: Path, name: str) -> bytes:
    if path.is_dir():
        return (path / name).read_bytes()
    with zipfile.ZipFile(path) as archive:
        return archive.read(name)


def load_modules(root: Path, files: Sequence[str], stubs: Mapping[str, Mapping[str, Any]]) -> list[ModuleType]:
    """Run the modules at `root`/`files` in this order, beside `stubs` for what they import of the rest of their engine.

    sys.modules is as before afterwards: whoever imports the engine itself gets the engine.
    """
    top = files[0].split("/")[0]
    with _aside(top):
        for name, attributes in stubs.items():
            _add(name).__dict__.update(attributes)
        return [_load(root / file, file.removesuffix(".py").replace("/", ".")) for file in files]


@contextmanager
def _aside(top: str) -> Iterator[None]:
    """Without the modules of package `top` for the time of the block, and with them as they were behind it."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == top}
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == top]:
            del sys.modules[name]
        sys.modules.update(before)


def _add(name: str) -> ModuleType:
    """An empty package of this name in sys.modules, and its parents."""
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_add(parent), last, module)
    return sys.modules[name]


def _load(file: Path, name: str) -> ModuleType:
    _add(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

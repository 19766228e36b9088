"""A folder as transformers' save_pretrained writes it: config.json, and model.safetensors whole or in shards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._errors import refuse
from ._layout import TensorInfo

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
NO_PICKLES = (
    "pickles are refused, since loading one can run any code; load it where you trust it with transformers, and save "
    "it with model.save_pretrained(), which writes safetensors"
)
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Checkpoint:
    """The headers of a checkpoint's files; tensors are read when asked for.

    `where` names what holds the tensors: the one file, or the index of several.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder = Path(path)
        if folder.is_file():
            kind = "" if folder.suffix == ".safetensors" else _pickle_kind(folder)
            refuse(folder, f"is {kind}: {NO_PICKLES}" if kind else "expected the checkpoint's folder, got a file")
        if not folder.is_dir():
            refuse(folder, "no such folder (checkpoints are read from disk, never downloaded)")
        if not (folder / CONFIG).is_file():
            refuse(folder, f"{CONFIG} is missing")
        self.config_file = folder / CONFIG
        self.config = read_json(self.config_file)
        self.where, files, weight_map = _find_files(folder)
        self.infos: dict[str, TensorInfo] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            self._read_header(file)
        for name, file_name in weight_map.items():
            if self._file_of.get(name) != folder / file_name:
                refuse(folder / file_name, f"{name} is missing, which {INDEX} places there")

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named tensors, on the CPU; each file is opened once.

        Cloned, because safetensors gives views of the mapped file: aligned to 8 bytes only, and changed or gone (which
        ends the process) when somebody writes the file anew in place.
        """
        of_file: dict[Path, list[str]] = {}
        for name in names:
            of_file.setdefault(self._file_of[name], []).append(name)
        tensors = {}
        for file, wanted in of_file.items():
            with opened(file) as reader:
                tensors.update({name: reader.get_tensor(name).clone() for name in wanted})
        return tensors

    def _read_header(self, file: Path) -> None:
        with opened(file) as reader:
            for name in reader.keys():  # noqa: SIM118, a safetensors reader is no dict
                if name in self.infos:
                    refuse(file, f"{name} is in {self._file_of[name].name} too")
                view = reader.get_slice(name)
                dtype = view.get_dtype()
                self.infos[name] = TensorInfo(tuple(view.get_shape()), DTYPES.get(dtype, dtype))
                self._file_of[name] = file


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        refuse(file, f"not readable as JSON ({error})")


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors reader of `file`."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(f"reading a checkpoint needs safetensors: pip install safetensors ({error})") from error
    if not file.is_file():
        refuse(file, "no such file")
    try:
        reader = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        # Only now: a safetensors file may begin with the bytes of a pickle, but then it opens.
        if kind := _pickle_kind(file):
            refuse(file, f"is {kind}: {NO_PICKLES}")
        refuse(file, f"not a whole safetensors file, perhaps a download that was cut off ({error})")
    with reader as entered:
        yield entered


def _find_files(folder: Path) -> tuple[Path, list[Path], dict[str, str]]:
    """(what to call it in errors, the files with tensors, name -> file as the index says it)."""
    if (folder / WHOLE).exists():
        return folder / WHOLE, [folder / WHOLE], {}
    index = folder / INDEX
    if not index.exists():
        pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
        if pickles:
            refuse(folder, f"has {pickles[0]} but no {WHOLE}: {NO_PICKLES}")
        refuse(folder, f"{WHOLE} is missing, and so is {INDEX}")
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        refuse(index, "weight_map is missing")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            refuse(index, f"weight_map: {name}: expected the name of a file in the same folder, got {file_name!r}")
    return index, [folder / name for name in sorted(set(weight_map.values()))], weight_map


def _pickle_kind(file: Path) -> str:
    """What kind of pickle a file's first bytes look like; "" for none."""
    with file.open("rb") as stream:
        head = stream.read(4)
    if head == b"PK\x03\x04":
        return "a zip archive, as torch.save writes it"
    return "a pickle" if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5 else ""

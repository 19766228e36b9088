"""The text: the standard library's sources, without the held-out modules, as one array of token ids."""

from __future__ import annotations

import json
import platform
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
PAD, EOS, BOS = 0, 1, 2
HELD_OUT = (
    "argparse", "calendar", "configparser", "difflib", "fractions", "heapq", "sched", "shlex", "statistics", "textwrap",
)
# Tables and texts that are no Python to learn from, and files that hold the paths of the machine they were built on.
SKIPPED = re.compile(r"^(site-packages|encodings|config-[^/]*|__pycache__)/|^_sysconfigdata|(^|/)lib2to3/tests/data/")
MAX_SHARED_LINES = 0.1  # a file with more of its longer lines in a held-out module is a near copy of it


@dataclass(frozen=True)
class Data:
    """What training and evaluation read."""

    tokens: np.ndarray  # [n] uint16, every file as bos + ids, one eos behind it
    held_out: dict[str, np.ndarray]  # module -> its ids, no specials
    held_out_bytes: dict[str, int]
    about: dict[str, str | int]
    tokenizer_file: Path


def prepare(out: Path, stdlib: Path | None = None, max_files: int | None = None) -> Data:
    """Train the tokenizer, encode everything, write it to `out` (never to the repository: it is the library's text)."""
    root = stdlib or Path(sysconfig.get_paths()["stdlib"])
    held_out = {name: _read(root / f"{name}.py") or "" for name in HELD_OUT}
    files = _training_files(root, held_out)[:max_files]
    tokenizer = _train_tokenizer([text for _, text in files])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)

    pieces = []
    for encoding in tokenizer.encode_batch([text for _, text in files]):
        pieces += [np.array([BOS], np.uint16), np.array(encoding.ids, np.uint16), np.array([EOS], np.uint16)]
    np.save(out / "tokens.npy", np.concatenate(pieces))
    np.savez(out / "held_out.npz", **{m: np.array(tokenizer.encode(t).ids, np.uint16) for m, t in held_out.items()})
    about = {
        "python": platform.python_version() if stdlib is None else f"--stdlib ({_version_of(root)})",
        "files": len(files),
        "bytes": sum(len(text.encode()) for _, text in files),
        "tokens": sum(p.size for p in pieces),
        "held_out_bytes": {m: len(t.encode()) for m, t in held_out.items()},
    }
    (out / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return load(out)


def load(folder: Path) -> Data:
    """What `prepare` wrote."""
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    with np.load(folder / "held_out.npz") as archive:
        held_out = {name: archive[name] for name in HELD_OUT}
    sizes = about.pop("held_out_bytes")
    return Data(np.load(folder / "tokens.npy"), held_out, sizes, about, folder / "tokenizer.json")


def held_out_only(tokenizer_file: Path, stdlib: Path | None = None) -> Data:
    """The held-out modules alone, in a trained pair's own tokens: all that its evaluation needs."""
    root = stdlib or Path(sysconfig.get_paths()["stdlib"])
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    texts = {name: _read(root / f"{name}.py") or "" for name in HELD_OUT}
    held_out = {name: np.array(tokenizer.encode(text).ids, np.uint16) for name, text in texts.items()}
    sizes = {name: len(text.encode()) for name, text in texts.items()}
    return Data(np.empty(0, np.uint16), held_out, sizes, {}, tokenizer_file)


def _training_files(root: Path, held_out: dict[str, str]) -> list[tuple[str, str]]:
    """(name, text) of every source that may be trained on, in a fixed order."""
    held_lines = set().union(*(_long_lines(text) for text in held_out.values()))
    related = re.compile(rf"(^|_)({'|'.join(HELD_OUT)})(_|$)")
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED.search(name) or any(related.search(part) for part in name.removesuffix(".py").split("/")):
            continue
        text = _read(path)
        lines = _long_lines(text or "")
        if not lines or len(lines & held_lines) > MAX_SHARED_LINES * len(lines):
            continue
        files.append((name, text or ""))
    return files


def _long_lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) > 24}


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None


def _train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "too little text for the vocabulary"
    return tokenizer


def _version_of(root: Path) -> str:
    return root.name if root.name.startswith("python") else f"read by {sys.version.split()[0]}"

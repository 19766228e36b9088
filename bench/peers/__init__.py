"""What others run for the same work, found at run time: FlashInfer, vLLM, SGLang and transformers.

    peers = find_peers([Path("vllm-0.33.0.whl")])
    peers.status                              # every known peer with its version, or why it is absent
    peers.attention_variants("sglang")        # {"sglang": make, "sglang-32": make}
    peers.op("sglang", "tree_expand")         # (bind, results) of a Candidate
    peers.transformers_step(weights)

Nothing of a peer is imported before it is used. Engines that cannot be imported whole are loaded from their wheel's
files, and none of those files belongs to this package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from ..case import Unsupported
from ..record import PeerStatus
from . import _sglang_tree, flashinfer, sglang, transformers, vllm
from ._attention import Attend, MakeAttention
from ._sglang_tree import Bind, Results
from ._wheel import OPTION, Wheel

if TYPE_CHECKING:
    from mtp_kernels.weights import AssistantWeights

__all__ = ["Attend", "MakeAttention", "Peers", "find_peers", "slim"]

# The files that the loaders read, and those without which the peer is absent.
FILES: Mapping[str, tuple[str, ...]] = {
    "vllm": vllm.MODULES,
    "sglang": tuple(dict.fromkeys([*sglang.MODULES, *(f for files in _sglang_tree.FILES.values() for f in files)])),
}
ENGINES = {"vllm": vllm, "sglang": sglang}
DISTRIBUTIONS = {"flashinfer": "flashinfer-python"}
SPLITS = {"sglang": 8, "sglang-32": 32}


@dataclass(frozen=True)
class Peers:
    """The peers of this machine."""

    status: tuple[PeerStatus, ...]
    wheels: Mapping[str, Wheel] = field(default_factory=dict)

    def present(self, name: str) -> bool:
        return any(s.name == name and not s.why_absent for s in self.status)

    def attention(self, name: str) -> MakeAttention:
        """The first of attention_variants; Unsupported where the peer is absent or has none."""
        variants = self.attention_variants(name)
        if not variants:
            raise Unsupported(f"{name}: {self._why_absent(name)}")
        return next(iter(variants.values()))

    def attention_variants(self, name: str) -> dict[str, MakeAttention]:
        """Label -> MakeAttention, several where the peer has a setting that its user would choose; {} if absent."""
        if not self.present(name):
            return {}
        if name == "flashinfer":
            return {name: flashinfer.attention}
        if name == "vllm":
            return {name: self._loaded(name, vllm.attention)}
        if name == "sglang":
            return {label: self._loaded(name, sglang.attention, splits) for label, splits in SPLITS.items()}
        return {}

    def op(self, name: str, op: str) -> tuple[Bind, Results] | None:
        """`bind` and `results` of a Candidate for this op; None where the peer is absent or has no such function.

        Where its files do not load, `bind` raises Unsupported with the reason.
        """
        if name != "sglang" or op not in _sglang_tree.FILES or not self.present(name):
            return None
        try:
            root = _root(name, self.wheels.get(name), _sglang_tree.FILES[op])
            return {"tree_expand": _sglang_tree.tree_expand, "tree_build": _sglang_tree.tree_build}[op](root)
        except Unsupported as error:
            return _refusing(str(error)), tuple

    def transformers_step(self, weights: AssistantWeights) -> transformers.Step:
        """See transformers.step; Unsupported where it is absent."""
        if not self.present("transformers"):
            raise Unsupported(f"transformers: {self._why_absent('transformers')}")
        return transformers.step(weights)

    def _loaded(self, name: str, attention: Callable[..., Attend], *settings: Any) -> MakeAttention:
        """MakeAttention that loads the engine's module when it is called."""
        wheel = self.wheels.get(name)

        def make(*args: Any, **kwargs: Any) -> Attend:
            return attention(_module(name, wheel), *settings, *args, **kwargs)

        return cast(MakeAttention, make)

    def _why_absent(self, name: str) -> str:
        return next((s.why_absent or "has none" for s in self.status if s.name == name), "not a known peer")


def find_peers(wheels: Sequence[Path] = ()) -> Peers:
    """Look for every known peer; none that is absent or broken raises.

    Args:
        wheels: of --peer-wheel: .whl files, whole or slim, or folders with one unpacked.

    Raises:
        ValueError: one of `wheels` is not that, or the second of a project.
    """
    opened: dict[str, Wheel] = {}
    for path in wheels:
        wheel = Wheel.open(Path(path), tuple(FILES))
        if wheel.name in opened:
            raise ValueError(f"{OPTION}: {path}: expected one wheel of {wheel.name}, got {opened[wheel.name].path} too")
        opened[wheel.name] = wheel
    engines = [_engine_status(name, opened.get(name)) for name in FILES]
    return Peers((_installed("flashinfer"), *engines, _transformers_status()), opened)


def slim(out: Path, wheel: Path) -> None:
    """Write a wheel with only the files that the loaders read, to carry to another machine."""
    whole = Wheel.open(wheel, tuple(FILES))
    whole.slim(out, FILES[whole.name])


def _installed(name: str, hint: str = "") -> PeerStatus:
    """Whether a package of this name can be found, without importing it."""
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return PeerStatus(name, why_absent="not installed" + hint)
    try:
        version = importlib.metadata.version(DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return PeerStatus(name, version)


def _engine_status(name: str, wheel: Wheel | None) -> PeerStatus:
    status = PeerStatus(name, wheel.version) if wheel else _installed(name, f"; {OPTION} can load it from its wheel")
    if status.why_absent:
        return status
    if importlib.util.find_spec("triton") is None:
        return PeerStatus(name, status.version, "needs triton, which is not installed")
    if wheel and (missing := wheel.missing(ENGINES[name].MODULES)):
        return PeerStatus(name, status.version, f"its wheel lacks {', '.join(missing)}")
    return status


def _transformers_status() -> PeerStatus:
    status = _installed("transformers")
    spec = None if status.why_absent else importlib.util.find_spec("transformers")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if folders and not any((Path(f) / "models" / "gemma4_assistant").is_dir() for f in folders):
        return PeerStatus(status.name, status.version, "this version has no Gemma 4 assistant; 5.17 has")
    return status


@cache
def _root(name: str, wheel: Wheel | None, files: tuple[str, ...]) -> Path:
    """A folder with `files` of the engine."""
    if wheel is not None:
        if missing := wheel.missing(files):
            raise Unsupported(f"its wheel lacks {', '.join(missing)}")
        return wheel.unpacked(files)
    spec = importlib.util.find_spec(name)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    root = Path(folders[0]).parent if folders else Path()
    if missing := [file for file in files if not (root / file).is_file()]:
        raise Unsupported(f"this version lacks {', '.join(missing)}")
    return root


@cache
def _module(name: str, wheel: Wheel | None) -> ModuleType:
    """The engine's attention module: from its wheel, else from the installed package."""
    engine = ENGINES[name]
    try:
        if wheel is not None:
            return engine.load(_root(name, wheel, engine.MODULES))
        return importlib.import_module(engine.MODULES[-1].removesuffix(".py").replace("/", "."))
    except Unsupported:
        raise
    except Exception as error:  # an engine's import runs much code of theirs
        raise Unsupported(f"{name}: import failed: {type(error).__name__}: {error}") from error


def _refusing(why: str) -> Bind:
    def bind(call: Any) -> Callable[[], Any]:
        raise Unsupported(why)

    return bind

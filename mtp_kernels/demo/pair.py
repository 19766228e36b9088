"""Finds and loads the example pair: a small Gemma 4 target, its two assistants, its tokenizer, its held-out prompts."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..weights import AssistantWeights

HEADS = ("centroid", "dense")


class DemoError(RuntimeError):
    """Something that the demo needs is not here; the message says what to do."""


@dataclass(frozen=True)
class Pair:
    """The loaded pair, on one device and in one dtype."""

    model: Any  # Gemma4ForCausalLM
    weights: AssistantWeights
    tokenizer: Any  # tokenizers.Tokenizer
    held_out: tuple[str, ...]  # module names never seen in training
    eos_id: int

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def greedy(self, prompt: Tensor, max_new_tokens: int, stop_ids: list[int] | None = None) -> list[int]:
        """The target's greedy continuation of prompt [length] by transformers alone: what drafting must not change."""
        out = self.model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=stop_ids or None,
            pad_token_id=0,
        )
        return out[0, prompt.numel() :].tolist()

    def held_out_prompt(self, module: str, length: int, start: int = 0) -> Tensor:
        """`length` tokens of a held-out module's source in the running interpreter, from token `start` on."""
        path = Path(sysconfig.get_paths()["stdlib"]) / (module.replace(".", "/") + ".py")
        if not path.is_file():
            raise DemoError(f"no source of module {module} at {path.name}; pass --prompt-file")
        ids = self.encode(path.read_text(encoding="utf-8"))
        return torch.tensor(ids[start : start + length], device=self.model.device)


def pair_directory() -> Path:
    """The pair that ships with the package, or the one of the source tree this runs from."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "pair", package.parent / "examples" / "pair"):
        if (candidate / "pair.json").is_file():
            return candidate
    raise DemoError("the example pair is not installed; pass --pair with the path of examples/pair")


def load_pair(directory: Path, head: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Pair:
    """Load target, assistant and tokenizer; everything comes from `directory`, nothing from a network."""
    try:
        from tokenizers import Tokenizer
        from transformers import Gemma4ForCausalLM
    except ImportError as error:
        raise DemoError(f"the demo runs on transformers: pip install transformers safetensors ({error})") from error
    for part in ("target", f"assistant-{head}", "tokenizer.json", "pair.json"):
        if not (directory / part).exists():
            raise DemoError(f"{directory} is not a pair: {part} is missing")
    with _quiet_transformers():
        model = Gemma4ForCausalLM.from_pretrained(directory / "target", dtype=dtype, local_files_only=True)
    model = model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
    embed = model.model.embed_tokens.weight.detach()
    weights = AssistantWeights.from_pretrained(directory / f"assistant-{head}", embed, dtype=dtype, device=device)
    about = json.loads((directory / "pair.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return Pair(model, weights, tokenizer, tuple(about["held_out"]), int(model.config.eos_token_id))


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar and no advice while a model loads: they would land in the middle of the demo's output."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()

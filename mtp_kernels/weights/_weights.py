"""AssistantWeights: everything that a draft step multiplies with, laid out as the ops want it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..heads import reorder_lm_head
from ..ops._checks import (
    FLOATS,
    check_device,
    check_dtype,
    fail,
    require,
    show_dtypes,
)
from ._checkpoint import Checkpoint
from ._config import AssistantConfig, HasConfig
from ._embedding import check_embedding, rounded_scale
from ._layers import LayerWeights, make_layers
from ._layout import (
    CENTROIDS,
    EMBEDDING,
    HEAD,
    ORDERING,
    TensorInfo,
    check_layout,
    check_ordering,
    check_tied,
    stored_names,
)
from ._parse import parse_config
from ._presets import PRESETS, random_tensors


@dataclass(frozen=True, eq=False)
class AssistantWeights(HasConfig):
    """The weights of an assistant, and the target's embedding that it reads.

    Make one with `from_pretrained`, `from_module` or `synthetic`, which check every size. Memory is shared with what
    they are given, but for gate and up, which are merged.

    >>> weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    >>> weights.head, weights.hidden, weights.backbone, weights.vocab, weights.num_layers
    ('centroid', 32, 40, 64, 2)
    >>> weights.layers[0].gate_up.shape, weights.layers[1].rope_inv_freq.shape
    (torch.Size([96, 32]), torch.Size([16]))
    """

    config: AssistantConfig
    embed_weight: Tensor  # [vocab, backbone], the target's, unscaled
    embed_scale: float  # sqrt(backbone), rounded to the embedding's dtype as transformers rounds it
    pre_projection: Tensor  # [hidden, 2 * backbone]
    post_projection: Tensor  # [backbone, hidden]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]; rows by token, or in the order of token_ordering where centroid_ordered
    centroids: Tensor | None  # [num_centroids, hidden]; None for a dense head
    token_ordering: Tensor | None  # [vocab] int64, token ids sorted by centroid; None for a dense head
    layers: tuple[LayerWeights, ...]
    centroid_ordered: bool = False

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        embed_weight: Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> AssistantWeights:
        """Read a folder that transformers' save_pretrained wrote.

        Args:
            path: a folder with config.json of a Gemma4AssistantForCausalLM or Gemma4UnifiedAssistantForCausalLM, and
                model.safetensors, whole or in shards. Pickles are refused.
            embed_weight: [vocab, backbone], the *target's* input embedding, unscaled.
            dtype: bf16, fp16 or fp32, to convert everything to, the embedding too; None for the checkpoint's, which
                the embedding's must then equal.
            device: None for the embedding's.

        Raises:
            CheckpointError: something is wrong with the files; the message names the file and the key or tensor.
            ArgumentError: something is wrong with `embed_weight` or `dtype`.
            ImportError: safetensors is not installed.
        """
        where = "AssistantWeights.from_pretrained"
        _check_dtype(where, dtype)
        checkpoint = Checkpoint(path)
        config = parse_config(checkpoint.config_file, checkpoint.config)
        stored = check_layout(checkpoint.where, config, checkpoint.infos, converts=dtype is not None)
        check_embedding(where, config, embed_weight)
        if dtype is None:
            why = f"the checkpoint is {show_dtypes([stored])}; dtype= converts"
            check_dtype(where, "embed_weight", embed_weight, (stored,), why)
        tensors = checkpoint.read(stored_names(config, checkpoint.infos))
        weights = cls._assemble(checkpoint.where, config, tensors, embed_weight)
        return weights.to(embed_weight.device if device is None else device, dtype)

    @classmethod
    def from_module(cls, hf_assistant: Any, embed_weight: Tensor) -> AssistantWeights:
        """Take the weights of a transformers assistant in memory.

        Args:
            hf_assistant: a Gemma4AssistantForCausalLM or Gemma4UnifiedAssistantForCausalLM. Its tensors are shared:
                what is later written into them in place is seen here, but for gate and up.
            embed_weight: [vocab, backbone], the *target's* input embedding, unscaled; dtype and device of the module.

        Raises:
            CheckpointError: a config, tensor or size that is not supported.
            ArgumentError: something is wrong with `embed_weight`.
        """
        where = "AssistantWeights.from_module"
        name = type(hf_assistant).__name__
        if not hasattr(getattr(hf_assistant, "config", None), "to_dict") or not hasattr(hf_assistant, "state_dict"):
            fail(where, "hf_assistant", "a transformers assistant", name)
        config = parse_config(f"{name}.config", hf_assistant.config.to_dict())
        tensors = hf_assistant.state_dict()
        infos = {key: TensorInfo(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
        dtype = check_layout(name, config, infos)
        check_embedding(where, config, embed_weight)
        check_dtype(where, "embed_weight", embed_weight, (dtype,), f"the assistant is {show_dtypes([dtype])}")
        weights = cls._assemble(name, config, tensors, embed_weight)
        check_device(where, weights.device, "hf_assistant", embed_weight=embed_weight)
        return weights

    @classmethod
    def synthetic(
        cls,
        name: str | AssistantConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        seed: int = 0,
        embed_weight: Tensor | None = None,
        vocab: int | None = None,
    ) -> AssistantWeights:
        """Random weights of a preset's sizes: matrices scaled by fan-in, norms near 1, a random token_ordering.

        Args:
            name: a key of `mtp_kernels.weights.PRESETS` ("E2B", "E4B", "12B", "26B-A4B", "31B", "tiny",
                "tiny-dense"), or a config.
            dtype: bf16, fp16 or fp32.
            device: where they are made; one seed gives different values on different kinds of device.
            seed: of the values.
            embed_weight: [vocab, backbone] of that dtype and device; None makes a random one.
            vocab: another size of the vocabulary, a multiple of the number of centroids.

        Raises:
            ArgumentError: an unknown name, or a wrong size or dtype.
        """
        where, device = "AssistantWeights.synthetic", torch.empty(0, device=device).device
        _check_dtype(where, dtype)
        if isinstance(name, str) and name not in PRESETS:
            fail(where, "name", "one of " + ", ".join(PRESETS), repr(name))
        config = PRESETS[name] if isinstance(name, str) else name
        if vocab is not None:
            multiple = max(1, config.num_centroids)
            ok = vocab > 0 and vocab % multiple == 0
            require(ok, where, "vocab", f"a positive multiple of {multiple}", vocab, "the number of centroids")
            config = replace(config, vocab=vocab)
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        tensors = random_tensors(config, dtype, device, generator)
        if embed_weight is None:
            shape, std = (config.vocab, config.backbone), config.backbone**-0.5
            embed_weight = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std, generator=generator)
        check_embedding(where, config, embed_weight)
        check_dtype(where, "embed_weight", embed_weight, (dtype,), f"dtype is {show_dtypes([dtype])}")
        check_device(where, device, "the device asked for", embed_weight=embed_weight)
        return cls._assemble(where, config, tensors, embed_weight)

    @classmethod
    def _assemble(
        cls, where: object, config: AssistantConfig, tensors: Mapping[str, Tensor], embed_weight: Tensor
    ) -> AssistantWeights:
        """From tensors with transformers' names, whose sizes and dtypes are right."""
        check_tied(where, config, tensors)
        ordering = tensors.get(ORDERING) if config.num_centroids else None
        if ordering is not None:
            check_ordering(where, ordering)
            ordering = ordering.long()
        first = tensors["pre_projection.weight"]
        return cls(
            config=config,
            embed_weight=embed_weight.detach(),
            embed_scale=rounded_scale(config.backbone, embed_weight.dtype),
            pre_projection=first,
            post_projection=tensors["post_projection.weight"],
            norm=tensors["model.norm.weight"],
            lm_head=tensors[HEAD if HEAD in tensors else EMBEDDING],
            centroids=tensors[CENTROIDS] if config.num_centroids else None,
            token_ordering=ordering,
            layers=make_layers(config, tensors, first.device),
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> AssistantWeights:
        """The same weights elsewhere or in another dtype; RoPE frequencies stay fp32, token ids int64.

        `embed_scale` becomes that of the new dtype. What need not change is shared.
        """
        _check_dtype("AssistantWeights.to", dtype)

        def moved(value: Any, name: str) -> Any:
            if not isinstance(value, Tensor):
                return value
            keeps = name == "rope_inv_freq" or not value.is_floating_point()
            return value.to(device=device, dtype=None if keeps else dtype)

        layers = tuple(
            replace(layer, **{f.name: moved(getattr(layer, f.name), f.name) for f in fields(layer)})
            for layer in self.layers
        )
        own = {f.name: moved(getattr(self, f.name), f.name) for f in fields(self)}
        if own["embed_weight"].dtype != self.embed_weight.dtype:
            own["embed_scale"] = rounded_scale(self.backbone, own["embed_weight"].dtype)
        return replace(self, **{**own, "layers": layers})

    def reordered(self) -> AssistantWeights:
        """With the head's rows in centroid order, so that a centroid's rows lie in one block; the same drafts.

        A new copy of the head. A dense head has no such order and is left as it is.
        """
        if self.token_ordering is None or self.centroid_ordered:
            return self
        return replace(self, lm_head=reorder_lm_head(self.lm_head, self.token_ordering), centroid_ordered=True)

    def num_bytes(self) -> int:
        """Bytes of the assistant's own tensors. The embedding is the target's and does not count."""
        return sum(t.numel() * t.element_size() for name, t in self.tensors() if name != "embed_weight")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every tensor; a layer's are named layers.0.q_proj and so on."""
        named: list[tuple[str, Any]] = [(f.name, getattr(self, f.name)) for f in fields(self)]
        for i, layer in enumerate(self.layers):
            named += ((f"layers.{i}.{f.name}", getattr(layer, f.name)) for f in fields(layer))
        return ((name, value) for name, value in named if isinstance(value, Tensor))

    @property
    def dtype(self) -> torch.dtype:
        return self.pre_projection.dtype

    @property
    def device(self) -> torch.device:
        return self.pre_projection.device


def _check_dtype(where: str, dtype: torch.dtype | None) -> None:
    require(dtype is None or dtype in FLOATS, where, "dtype", show_dtypes(FLOATS), dtype)

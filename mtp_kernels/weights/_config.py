"""The sizes of an assistant, whoever wrote them down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class AttentionConfig:
    """What all layers of one type have in common."""

    layer_type: str  # "sliding_attention" or "full_attention"
    num_kv_heads: int  # of the target's cache
    head_dim: int
    rope_theta: float
    num_pairs: int  # that turn, of head_dim / 2
    rope_factor: float = 1.0

    def inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        """[num_pairs] fp32: theta^(-2i / head_dim) / factor, in the order of operations in which the target has it.

        Frequencies of a "proportional" RoPE are spaced as if all pairs turned, and only the first few do.
        """
        exponent = torch.arange(0, 2 * self.num_pairs, 2, dtype=torch.float32, device="cpu") / self.head_dim
        return ((1.0 / self.rope_theta**exponent) / self.rope_factor).to(device)


@dataclass(frozen=True)
class AssistantConfig:
    """Sizes and constants of an assistant.

    >>> from mtp_kernels.weights import PRESETS
    >>> config = PRESETS["E2B"]
    >>> config.hidden, config.backbone, config.head, config.kv_shape("full_attention")
    (256, 1536, 'centroid', (1, 512))
    """

    architecture: str  # transformers' class
    vocab: int
    hidden: int
    intermediate: int
    backbone: int  # the target's hidden size
    num_qo_heads: int
    layer_types: tuple[str, ...]
    attention: tuple[AttentionConfig, ...]  # one a layer type
    sliding_window: int  # W as the model's config has it; engines read W or W - 1 keys before the last one
    num_centroids: int = 0  # 0 for a dense head
    num_active: int = 0  # centroids whose tokens are candidates
    norm_eps: float = 1e-6
    logits_soft_cap: float = 0.0  # of the config; transformers' assistant does not apply it
    tied: bool = True  # the head's weight is the assistant's own embedding

    @property
    def head(self) -> str:
        return "centroid" if self.num_centroids else "dense"

    @property
    def num_candidates(self) -> int:
        """Tokens that the head gives logits for."""
        return self.num_active * (self.vocab // self.num_centroids) if self.num_centroids else self.vocab

    def attention_of(self, layer_type: str) -> AttentionConfig:
        return {a.layer_type: a for a in self.attention}[layer_type]

    def kv_shape(self, layer_type: str) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of the target's cache that layers of this type read."""
        attention = self.attention_of(layer_type)
        return attention.num_kv_heads, attention.head_dim


class HasConfig:
    """Short names for what the config of a class with a `config` says."""

    config: AssistantConfig

    @property
    def hidden(self) -> int:
        return self.config.hidden

    @property
    def backbone(self) -> int:
        """The target's hidden size: the width of embedding and state."""
        return self.config.backbone

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def head(self) -> str:
        """"centroid" or "dense"."""
        return self.config.head

    @property
    def num_active(self) -> int:
        """Centroids whose tokens are candidates; 0 for a dense head."""
        return self.config.num_active

    @property
    def num_candidates(self) -> int:
        """Tokens that the head gives logits for."""
        return self.config.num_candidates

    @property
    def num_layers(self) -> int:
        return len(self.config.layer_types)

    @property
    def norm_eps(self) -> float:
        return self.config.norm_eps

    @property
    def sliding_window(self) -> int:
        """W of the model's config. The caller's window_left is W or W - 1, as its engine has it."""
        return self.config.sliding_window

    @property
    def logits_soft_cap(self) -> float:
        """final_logit_softcapping of the config, 0.0 for none. transformers' assistant carries it and applies none."""
        return self.config.logits_soft_cap

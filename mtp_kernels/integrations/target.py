"""One request on a transformers Gemma 4 target: prefill, verify a draft tree in one forward, keep the accepted rows.

The cache holds committed rows only, in position order, full length for sliding layers too (their window is in the
mask), so that rejected rows can be dropped from every layer and the drafter sees exactly the committed KV.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..draft import DraftTree
from ..kv_view import KVView

LAYER_TYPES = ("sliding_attention", "full_attention")


class TargetSession:
    """The target's side of speculative decoding for one request (batch 1).

    Args:
        model: a `Gemma4ForCausalLM` in eval mode.

    `committed` is the number of rows in the cache; the token that follows them (the bonus) is not among them.
    """

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        self.model = model
        self.device = model.device
        self.config = model.config.get_text_config()
        self.window = self.config.sliding_window
        self._cache: Any = DynamicCache()
        parameters = inspect.signature(model.model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5.2x
        self._stores = _last_storing_layers(self.config)
        self.committed = 0

    @torch.no_grad()
    def prefill(self, prompt_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Commit the prompt [length]; returns (bonus id [1], hidden [1, backbone] of the row that predicted it)."""
        length = prompt_ids.numel()
        ones = torch.ones(length, length, dtype=torch.bool, device=self.device)
        logits, hidden = self._forward(prompt_ids, torch.arange(length, device=self.device), ones.tril())
        self.committed = length
        return logits[-1:].argmax(-1), hidden[-1:]

    @torch.no_grad()
    def verify(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """Run all N nodes of the draft behind the committed rows.

        Returns:
            target_ids [N], the target's greedy choice behind each node, and hidden [N, backbone] after the final norm.
        """
        assert tree.draft_positions is not None
        logits, hidden = self._forward(tree.draft_ids[0], tree.draft_positions[0], tree.tree_mask[0])
        return logits.argmax(-1), hidden

    def keep(self, nodes: Tensor) -> None:
        """Commit the rows of `nodes` [n] (root first) and drop the other rows of the last verify."""
        rows = torch.cat([torch.arange(self.committed, device=self.device), self.committed + nodes])
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]
        self.committed += nodes.numel()

    def kv(self) -> dict[str, KVView]:
        """The committed KV that the drafter reads: the last layer of each type that has a cache of its own."""
        return {
            layer_type: KVView.dense(
                self._cache.layers[i].keys,
                self._cache.layers[i].values,
                # transformers' sliding mask of one query reaches back W + 1 keys
                window_left=self.window if layer_type == "sliding_attention" else -1,
            )
            for layer_type, i in self._stores.items()
        }

    def _forward(self, ids: Tensor, positions: Tensor, tree_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Run new rows: each sees all committed rows and its ancestors. Returns (logits [n, vocab], hidden [n, .])."""
        new = ids.numel()
        past = torch.ones(new, self.committed, dtype=torch.bool, device=self.device)
        visible = torch.cat([past, tree_mask], dim=1)  # [new, committed + new]
        keys = torch.cat([torch.arange(self.committed, device=self.device), positions])
        near = positions.unsqueeze(1) - keys < self.window
        masks = {"full_attention": visible, "sliding_attention": visible & near}
        dtype = self.model.dtype
        additive = {
            name: torch.zeros(mask.shape, dtype=dtype, device=self.device)
            .masked_fill(~mask, torch.finfo(dtype).min)[None, None]
            for name, mask in masks.items()
        }
        hidden = self.model.model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=additive,
            use_cache=True,
            **{self._cache_name: self._cache},
        ).last_hidden_state
        return self._logits(hidden)[0], hidden[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.lm_head(hidden)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _last_storing_layers(config: Any) -> dict[str, int]:
    """For each layer type, the last layer that writes a cache of its own (the later ones share it)."""
    own = config.num_hidden_layers - config.num_kv_shared_layers
    return {t: max(i for i in range(own) if config.layer_types[i] == t) for t in LAYER_TYPES}

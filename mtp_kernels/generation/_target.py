"""The target's side: transformers' Gemma 4 runs prompts and draft trees of a batch, its KV in the paged store."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..draft import DraftTree
from ..kv_view import KVView
from ..ops._checks import fail, require
from .paged_cache import AppendedRows, PagedCache

WHERE = "generate"
SLIDING = "sliding_attention"
CLASSES = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedForConditionalGeneration",
)


class Target:
    """A transformers target and the cache of the requests that it serves.

    The sliding layers keep all rows; their window is in the mask. So rejected rows can be dropped everywhere, and the
    drafter sees exactly the committed ones.
    """

    def __init__(self, model: Any) -> None:
        names = [c.__name__ for c in type(model).__mro__]
        require(bool(set(names) & set(CLASSES)), WHERE, "target", " or ".join(CLASSES), names[0])
        require(not model.training, WHERE, "target", "a model in eval mode", "one in training mode")
        self.config = model.config.get_text_config()
        attention = self.config._attn_implementation
        ok = attention in ("eager", "sdpa")
        require(ok, WHERE, "target", "attention that takes 4-D masks (eager or sdpa)", attention)
        require(self.config.use_bidirectional_attention != "all", WHERE, "target", "causal attention", "bidirectional")
        self.device, self.dtype, self.vocab = model.device, model.dtype, self.config.vocab_size
        self.embed_weight: Tensor = model.get_input_embeddings().weight
        self._decoder = model.get_decoder()
        self._lm_head = model.lm_head
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5.2x
        own = self.config.num_hidden_layers - self.config.num_kv_shared_layers  # the later ones share their KV
        self.layer_types: tuple[str, ...] = tuple(self.config.layer_types[:own])
        self.cache: PagedCache

    def open_cache(self, longest: Sequence[int], page_size: int) -> None:
        """Room for requests that reach these lengths."""
        pages = sum(-(-n // page_size) for n in longest)
        self.cache = PagedCache(self.layer_types, max(1, pages), page_size, self.device)

    @torch.no_grad()
    def prefill(self, requests: Sequence[int], prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Commit the prompts; (logits [batch, vocab], hidden [batch, backbone]) of each one's last row."""
        counts = [p.numel() for p in prompts]
        ids = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)  # [batch, longest]
        positions = torch.arange(ids.size(1), device=self.device).expand_as(ids)
        causal = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool, device=self.device).tril()
        hidden = self._forward(requests, counts, ids, positions, causal.expand(len(counts), -1, -1))
        self.cache.keep(requests, [range(n) for n in counts])
        last = hidden[torch.arange(len(counts)), torch.tensor(counts) - 1]
        return self._logits(last), last

    @torch.no_grad()
    def verify(self, requests: Sequence[int], tree: DraftTree) -> tuple[Tensor, Tensor]:
        """Run all nodes behind the committed rows: (logits [batch * N, vocab], hidden [batch * N, backbone])."""
        assert tree.draft_positions is not None
        counts = [tree.draft_ids.size(1)] * len(requests)
        hidden = self._forward(requests, counts, tree.draft_ids, tree.draft_positions, tree.tree_mask).flatten(0, 1)
        return self._logits(hidden), hidden

    def kv(self, requests: Sequence[int], layer_types: Sequence[str]) -> dict[str, KVView]:
        """The committed KV that a drafter reads: of each layer type the last layer that stores any."""
        views = {}
        for layer_type in dict.fromkeys(layer_types):
            stores = [i for i, t in enumerate(self.layer_types) if t == layer_type]
            if not stores:
                fail(WHERE, "target", f"a layer of {layer_type}, which the assistant reads", list(self.layer_types))
            # transformers' sliding mask of one query reaches back W + 1 keys
            window = self.config.sliding_window if layer_type == SLIDING else -1
            views[layer_type] = self.cache.view(stores[-1], requests, window_left=window)
        return views

    def _forward(
        self, requests: Sequence[int], counts: Sequence[int], ids: Tensor, positions: Tensor, visible: Tensor
    ) -> Tensor:
        """Hidden [batch, n, backbone] of new rows ids [batch, n], of which counts[b] count.

        Each sees all committed rows of its request, and those new ones that visible [batch, n, n] shows it.
        """
        committed = torch.tensor([self.cache.lengths.get(r, 0) for r in requests], device=self.device)
        rows = self.cache.append(requests, counts)
        mask = self._masks(rows, committed, torch.tensor(counts, device=self.device), positions, visible)
        return self._decoder(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **{self._cache_name: rows}
        ).last_hidden_state

    def _masks(
        self, rows: AppendedRows, committed: Tensor, counts: Tensor, positions: Tensor, visible: Tensor
    ) -> dict[str, Tensor]:
        """Additive masks [batch, 1, n, total]. Columns are a request's rows in order, committed ones first."""
        column = torch.arange(rows.total, device=self.device).expand(len(committed), -1)  # [batch, total]
        new = column - committed.unsqueeze(1)
        is_new = (new >= 0) & (new < counts.unsqueeze(1))
        new = new.clamp(0, positions.size(1) - 1)
        shown = visible.gather(2, new.unsqueeze(1).expand(-1, visible.size(1), -1))  # [batch, n, total]
        seen = (column < committed.unsqueeze(1)).unsqueeze(1) | (shown & is_new.unsqueeze(1))
        places = torch.where(is_new, positions.gather(1, new), column)  # position of each key
        near = positions.unsqueeze(2) - places.unsqueeze(1) < self.config.sliding_window
        return {name: self._additive(mask) for name, mask in (("full_attention", seen), (SLIDING, seen & near))}

    def _additive(self, mask: Tensor) -> Tensor:
        zeros = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill(~mask, torch.finfo(self.dtype).min).unsqueeze(1)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._lm_head(hidden)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

"""transformers' assistant step on the ops: from the arguments of its forward to logits and state."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..draft import layers_step
from ..kv_view import KVView
from ..weights import AssistantWeights

ops = torch.ops.mtp
FULL, SLIDING = "full_attention", "sliding_attention"
SharedKV = Mapping[str, tuple[Tensor, Tensor]]  # layer type -> K, V [batch, num_kv_heads, length, head_dim]


class Fallback(Exception):
    """The ops do not serve this call; the message says why."""


class Round(NamedTuple):
    """What was found out at the first draft step of a round. It holds no tensor, so nobody's KV outlives its use."""

    key: weakref.ref[Tensor]
    attention_mask: weakref.ref[Tensor] | None
    padding: int  # hidden keys in front

    def goes_on(self, key: Tensor, attention_mask: Tensor | None) -> bool:
        if self.attention_mask is None or attention_mask is None:
            return self.key() is key and self.attention_mask is attention_mask
        return self.key() is key and self.attention_mask() is attention_mask


class AssistantStep:
    """step(inputs_embeds=, position_ids=, attention_mask=, shared_kv_states=) -> logits, state; or raises Fallback.

    Weights and mask are looked at once a round, known by its KV tensors, which transformers cuts anew for each.
    """

    def __init__(self, assistant: Any) -> None:
        self._assistant = assistant
        self._modules = list(assistant.modules())
        self._round: Round | None = None
        self._load()

    def __call__(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        shared_kv_states: SharedKV | None = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        if inputs_embeds is None or shared_kv_states is None or position_ids is None:
            raise Fallback("inputs_embeds, position_ids or shared_kv_states is missing")
        self._check_call(inputs_embeds, others)
        padding = self._begin(shared_kv_states, attention_mask)
        weights, batch = self._weights, inputs_embeds.size(0)
        self._check_inputs(inputs_embeds, position_ids)
        x = F.linear(inputs_embeds, weights.pre_projection)  # [batch, 1, hidden]
        normed, state = layers_step(
            weights, self._views(shared_kv_states, padding), x, position_ids[:, 0].expand(batch)
        )
        return self._logits(normed), state

    def _check_call(self, inputs_embeds: Tensor, others: Mapping[str, Any]) -> None:
        assistant = self._assistant
        if asked := sorted(name for name, value in others.items() if value is not None and value is not False):
            raise Fallback(f"the argument {asked[0]}")
        config = assistant.config
        for name in ("output_hidden_states", "output_attentions"):
            if getattr(config, name, False) or getattr(config.get_text_config(), name, False):
                raise Fallback(f"config.{name}")
        if getattr(config, "return_dict", True) is False or others.get("return_dict") is False:
            raise Fallback("return_dict=False")
        if torch.compiler.is_compiling():
            raise Fallback("torch.compile")
        if assistant.training:
            raise Fallback("training mode")
        if torch.is_grad_enabled() and (inputs_embeds.requires_grad or any(p.requires_grad for p in self._parameters)):
            raise Fallback("gradients (call it under torch.no_grad())")
        if torch.is_autocast_enabled(inputs_embeds.device.type):
            raise Fallback("autocast")

    def _check_inputs(self, inputs_embeds: Tensor, position_ids: Tensor) -> None:
        weights = self._weights
        if inputs_embeds.dim() != 3 or inputs_embeds.size(1) != 1:
            raise Fallback("inputs_embeds is not [batch, 1, 2 * backbone]")
        if inputs_embeds.dtype != weights.dtype or inputs_embeds.device != weights.device:
            raise Fallback(f"inputs_embeds is {inputs_embeds.dtype} on {inputs_embeds.device}, the assistant is not")
        allowed = (1, 1), (inputs_embeds.size(0), 1)
        if position_ids.device != weights.device or tuple(position_ids.shape) not in allowed:
            raise Fallback("position_ids is not [batch, 1] beside the assistant")

    def _logits(self, normed: Tensor) -> Tensor:
        """[batch, 1, vocab]; what a centroid head leaves out is the lowest candidate of the whole batch - 1."""
        weights = self._weights
        if weights.centroids is None:
            return F.linear(normed, weights.lm_head)
        logits, ids = ops.centroid_logits(
            normed, weights.centroids, weights.token_ordering, weights.lm_head, weights.num_active
        )
        logits = logits.to(normed.dtype)
        outside = logits.amin() - 1.0
        return outside.expand(*normed.shape[:2], weights.vocab).scatter(-1, ids, logits)

    def _begin(self, shared: SharedKV, attention_mask: Tensor | None) -> int:
        """The padding of the round that this call belongs to; looks at weights and mask if it is a new one."""
        for layer_type in (FULL, SLIDING):
            if layer_type not in shared:
                raise Fallback(f"shared_kv_states has no {layer_type}")
        key = shared[FULL][0]
        if self._round is None or not self._round.goes_on(key, attention_mask):
            self._refresh()
            padding = _left_padding(attention_mask, key.size(2))
            mask = None if attention_mask is None else weakref.ref(attention_mask)
            self._round = Round(weakref.ref(key), mask, padding)
        return self._round.padding

    def _views(self, shared: SharedKV, padding: int) -> dict[str, KVView]:
        """One view a layer type, without the keys of the left padding.

        transformers shows the last W + 1 rows of the sliding KV that it hands over, wherever they come from.
        """
        length = shared[FULL][0].size(2)
        views = {}
        for layer_type, (k, v) in ((t, shared[t]) for t in (FULL, SLIDING)):
            first = max(0, padding - (length - k.size(2)))
            if first >= k.size(2):
                raise Fallback("no visible key")
            for tensor in (k, v):
                if tensor.device != self._weights.device or tensor.dtype != self._weights.dtype:
                    raise Fallback(f"shared_kv_states is {tensor.dtype} on {tensor.device}, the assistant is not")
            window = self._weights.config.sliding_window if layer_type == SLIDING else -1
            views[layer_type] = KVView.dense(k[:, :, first:], v[:, :, first:], window_left=window)
        return views

    def _refresh(self) -> None:
        """Load the weights again if a tensor, a module or a hook is not what it was."""
        if self._stamp() != self._loaded:
            self._modules = list(self._assistant.modules())
            self._load()

    def _load(self) -> None:
        hooked = [m for m in self._modules[1:] if m._forward_hooks or m._forward_pre_hooks]
        if hooked:
            raise Fallback(f"hooks on a {type(hooked[0]).__name__} of the assistant")
        config = self._assistant.config
        first = self._assistant.pre_projection.weight
        # The step starts from embedded tokens, so no embedding is ever read: one row stands for all.
        embedding = first.new_zeros(1, config.backbone_hidden_size).expand(config.get_text_config().vocab_size, -1)
        self._weights = AssistantWeights.from_module(self._assistant, embedding)
        self._parameters = list(self._assistant.parameters())
        self._loaded = self._stamp()

    def _stamp(self) -> list[object]:
        """What changes when a module, a tensor, its memory or its values do."""
        seen: list[object] = []
        for module in self._modules:
            seen += map(id, module._modules.values())
            seen.append(len(module._forward_hooks) + len(module._forward_pre_hooks))
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    seen += (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        return seen


def _left_padding(attention_mask: Tensor | None, length: int) -> int:
    """How many keys in front are hidden from every request; any other mask is not served. Reads the mask's values."""
    if attention_mask is None:
        return 0
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        raise Fallback("an attention mask that is not [batch, length]")
    mask = attention_mask[:, :length].bool()
    if mask.size(1) != length:
        raise Fallback("an attention mask shorter than the keys")
    shown = mask.sum(1)
    first = length - int(shown[0])
    columns = torch.arange(length, device=mask.device)
    if not bool((mask == (columns >= first)).all()):
        raise Fallback("an attention mask that is more than the same left padding for all requests")
    return first

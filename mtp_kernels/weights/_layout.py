"""Which tensors an assistant has, by transformers' names, and the checks of those that a checkpoint or a module has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops._checks import FLOATS, INDICES, show_dtypes, show_shape
from ._config import AssistantConfig
from ._errors import refuse

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
FIRST = "pre_projection.weight"  # its dtype is the checkpoint's
# Layers read the target's KV and tokens the target's embedding. transformers too skips the former where they are
# stored; an embedding of the assistant's own matters only as the head that is tied to it.
UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight|model\.embed_tokens\.weight")
MAY_BE_FP32 = re.compile(r".*norm\.weight|.*\.layer_scalar")
SHOWN = 3


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype | str  # a string where torch has no such dtype


def layout(config: AssistantConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, the head's as lm_head.weight."""
    hidden, inner = config.hidden, config.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        FIRST: (hidden, 2 * config.backbone),
        "post_projection.weight": (config.backbone, hidden),
        "model.norm.weight": (hidden,),
        HEAD: (config.vocab, hidden),
    }
    if config.num_centroids:
        shapes[CENTROIDS] = (config.num_centroids, hidden)
        shapes[ORDERING] = (config.vocab,)
    for i, layer_type in enumerate(config.layer_types):
        head_dim = config.attention_of(layer_type).head_dim
        width = config.num_qo_heads * head_dim
        of_layer = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (width, hidden),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.o_proj.weight": (hidden, width),
            "post_attention_layernorm.weight": (hidden,),
            "pre_feedforward_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "post_feedforward_layernorm.weight": (hidden,),
            "layer_scalar": (1,),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def stored_names(config: AssistantConfig, names: Iterable[str]) -> list[str]:
    """The names of `layout` as a checkpoint stores them: a tied head as itself, as the embedding, or as both."""
    heads = [name for name in ((HEAD, EMBEDDING) if config.tied else (HEAD,)) if name in names]
    return [*(name for name in layout(config) if name != HEAD), *(heads or [HEAD])]


def check_layout(
    where: object, config: AssistantConfig, infos: Mapping[str, TensorInfo], converts: bool = False
) -> torch.dtype:
    """Every tensor is there with its shape, and nothing else is; the dtype of the first matrix is returned.

    All matrices have that dtype, unless the caller converts them; norms and layer scalars may be fp32 beside it.
    """
    shapes = layout(config)
    wanted = {name: shapes[HEAD if name == EMBEDDING else name] for name in stored_names(config, infos)}
    if missing := [name for name in wanted if name not in infos]:
        refuse(where, f"{_count(missing, 'missing')}: {_some(missing)}")
    if extra := sorted(name for name in infos if name not in wanted and not UNUSED.fullmatch(name)):
        refuse(where, f"{_count(extra, 'unexpected')}: {_some(extra)}")
    for name, shape in wanted.items():
        if infos[name].shape != shape:
            refuse(where, f"{name}: expected {show_shape(shape)}, got {show_shape(infos[name].shape)}")
    for name in wanted:
        _check_dtype(where, name, infos[name].dtype, infos[FIRST].dtype, converts)
    dtype = infos[FIRST].dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def _check_dtype(where: object, name: str, got: torch.dtype | str, first: torch.dtype | str, converts: bool) -> None:
    allowed: tuple[torch.dtype, ...] = FLOATS
    why = "other dtypes, quantised ones too, are not supported"
    if name == ORDERING:
        allowed, why = INDICES, "token ids"
    elif got in FLOATS and isinstance(first, torch.dtype) and not converts:
        allowed = (first, torch.float32) if MAY_BE_FP32.fullmatch(name) else (first,)
        why = f"{FIRST} is {show_dtypes([first])}"
    if got not in allowed:
        shown = got if isinstance(got, str) else show_dtypes([got])
        refuse(where, f"{name}: expected {show_dtypes(allowed)}, got {shown} ({why})")


def check_tied(where: object, config: AssistantConfig, tensors: Mapping[str, Tensor]) -> None:
    """A tied head that is stored twice is stored equal."""
    if config.tied and HEAD in tensors and EMBEDDING in tensors:
        head, embedding = tensors[HEAD], tensors[EMBEDDING]
        if head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
            refuse(where, f"{HEAD} and {EMBEDDING} differ, but tie_word_embeddings is true")


def check_ordering(where: object, ordering: Tensor) -> None:
    """token_ordering lists every token once. Read on the host: done once, at load."""
    if ordering.is_meta:
        return
    ids = ordering.cpu().long()
    vocab = ids.numel()
    outside = (ids < 0) | (ids >= vocab)
    if outside.any():
        got = f"token {int(ids[outside][0])}"
    else:
        counts = torch.bincount(ids, minlength=vocab)
        if bool((counts == 1).all()):
            return
        token = int(counts.argmax())
        got = f"token {token} {int(counts[token])} times"
    refuse(where, f"{ORDERING}: expected every token of 0 to {vocab - 1} once, got {got}")


def _count(names: list[str], what: str) -> str:
    return f"{len(names)} {what} tensor" + ("s" if len(names) > 1 else "")


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")

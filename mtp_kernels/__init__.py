"""Fused kernels for frozen-KV MTP drafting: `torch.ops.mtp.*` and a thin draft loop.

Importing this registers the ops. It touches no GPU and imports no Triton.
"""

from __future__ import annotations

from . import _source_tree, ops
from ._report import report, supports
from .captured import CapturedDraft, DraftBuffers
from .draft import DraftTree, draft, draft_step
from .generation import GenerationOutput, PagedCache, generate
from .heads import merge_topk, quantize_lm_head, reorder_lm_head
from .kv_view import KVView
from .metrics import AcceptanceStats
from .ops import ArgumentError, ImplementationError
from .policy import CostModel, DraftPolicy
from .weights import AssistantWeights, CheckpointError

__all__ = [
    "AcceptanceStats",
    "ArgumentError",
    "AssistantWeights",
    "CapturedDraft",
    "CheckpointError",
    "CostModel",
    "DraftBuffers",
    "DraftPolicy",
    "DraftTree",
    "GenerationOutput",
    "ImplementationError",
    "KVView",
    "PagedCache",
    "draft",
    "draft_step",
    "generate",
    "merge_topk",
    "ops",
    "quantize_lm_head",
    "reorder_lm_head",
    "report",
    "supports",
]
__version__ = "0.1.0"

_source_tree.install(__file__)

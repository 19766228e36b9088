"""Every op of `torch.ops.mtp`: importing this package registers them all; each name is also a documented function."""

from __future__ import annotations

from ._checks import ArgumentError, ImplementationError
from ._registry import OPS
from .centroid_logits import centroid_logits
from .centroid_topk import centroid_topk
from .commit import commit
from .draft_attention import draft_attention
from .linear_norm_add import linear_norm_add
from .lm_head_topk import lm_head_topk
from .norm_geglu import norm_geglu
from .norm_linear import norm_linear
from .post_project import post_project
from .pre_project import pre_project
from .sample_logits import sample_logits
from .tree_build import tree_build
from .tree_expand import tree_expand
from .verify_greedy import verify_greedy
from .verify_sample import verify_sample

__all__ = [
    "OPS",
    "ArgumentError",
    "ImplementationError",
    "centroid_logits",
    "centroid_topk",
    "commit",
    "draft_attention",
    "linear_norm_add",
    "lm_head_topk",
    "norm_geglu",
    "norm_linear",
    "post_project",
    "pre_project",
    "sample_logits",
    "tree_build",
    "tree_expand",
    "verify_greedy",
    "verify_sample",
]

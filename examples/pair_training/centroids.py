"""Stage 4: the centroid drafter, made from the dense one: balanced clusters of tokens, then a fine-tune."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from torch import Tensor
from transformers import Gemma4AssistantForCausalLM

from .assistant import HeadLoss, distill
from .compiled import Compiled
from .models import NUM_ACTIVE, NUM_CENTROIDS, new_assistant

ABSENT = -1e4  # a logit of a token that is no candidate; finite, so that 0 * log 0 stays 0


def centroid_from_dense(dense: Gemma4AssistantForCausalLM, seed: int) -> Gemma4AssistantForCausalLM:
    """The same weights with a centroid head: clusters of equal size, each centroid the mean of its tokens' rows."""
    model = new_assistant(dense.config.backbone_hidden_size, centroid=True).to(dense.lm_head.weight.device)
    model.load_state_dict(dense.state_dict(), strict=False)
    rows = dense.lm_head.weight.detach().float().cpu()
    cluster = torch.from_numpy(balanced_clusters(F.normalize(rows, dim=-1).numpy(), NUM_CENTROIDS, seed))
    head = model.masked_embedding
    head.token_ordering.copy_(torch.argsort(cluster, stable=True))
    head.centroids.weight.data.copy_(torch.stack([rows[cluster == c].mean(0) for c in range(NUM_CENTROIDS)]))
    return model


def balanced_clusters(rows: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """KMeans, then the cheapest assignment with exactly len(rows) / num_clusters rows in each: [n] int64."""
    size = len(rows) // num_clusters
    centers = KMeans(num_clusters, n_init=4, random_state=seed).fit(rows).cluster_centers_
    cost = (centers**2).sum(1) - 2 * rows @ centers.T  # [n, num_clusters], up to a constant in each row
    _, slot = linear_sum_assignment(np.repeat(cost, size, axis=1))
    return slot // size


def cluster_of(assistant: Gemma4AssistantForCausalLM) -> Tensor:
    """[vocab]: each token's cluster."""
    ordering = assistant.masked_embedding.token_ordering
    rank = torch.arange(ordering.numel(), device=ordering.device)
    return torch.empty_like(ordering).scatter_(0, ordering, rank // (ordering.numel() // NUM_CENTROIDS))


def centroid_head_loss(assistant: Gemma4AssistantForCausalLM, compile_: bool) -> HeadLoss:
    loss = Compiled(_centroid_loss, compile_)
    cluster = cluster_of(assistant)
    member = F.one_hot(cluster, NUM_CENTROIDS).float()  # [vocab, centroids]

    def head_loss(normed: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
        centroids = assistant.masked_embedding.centroids.weight
        return loss(normed, assistant.lm_head.weight, centroids, cluster, member, target_logits)

    return head_loss


def candidate_logits(normed: Tensor, assistant: Gemma4AssistantForCausalLM) -> Tensor:
    """[.., vocab], -inf outside the active centroids: the head as it is used."""
    scores = assistant.masked_embedding.centroids(normed)
    active = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(NUM_ACTIVE, dim=-1).indices, True)
    logits = F.linear(normed, assistant.lm_head.weight)
    return logits.masked_fill(~active[..., cluster_of(assistant)], -torch.inf)


def _centroid_loss(
    normed: Tensor, head: Tensor, centroids: Tensor, cluster: Tensor, member: Tensor, target_logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Two parts: the candidates (the label's cluster always among them), and which clusters should be active."""
    label = target_logits.argmax(-1)
    probs = target_logits.float().softmax(-1)
    scores = F.linear(normed, centroids).float()  # [.., centroids]
    cluster_loss = distill(scores, (probs @ member).float(), cluster[label])

    chosen = torch.zeros_like(scores).scatter(-1, scores.topk(NUM_ACTIVE, dim=-1).indices, 1.0)
    found = chosen.gather(-1, cluster[label][..., None]).squeeze(-1)
    active = chosen.scatter(-1, cluster[label][..., None], 1.0)
    visible = active[..., cluster] > 0  # [.., vocab]
    logits = F.linear(normed, head).float().masked_fill(~visible, ABSENT)
    probs = probs.masked_fill(~visible, 0.0)
    loss = distill(logits, probs / probs.sum(-1, keepdim=True), label)
    return loss + 0.5 * cluster_loss, (logits.argmax(-1) == label).float() * found

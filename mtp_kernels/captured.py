"""CapturedDraft: draft() in CUDA graphs, one a bucket of batch size and depth, over buffers that stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import _triton
from ._cpu_step import cpu_chain, cpu_step, why_no_step
from .draft import DraftTree, StepOutput, chain_links, chain_tree, check_draft, draft, draft_with
from .kv_view import KVView
from .ops._checks import check_device, check_dtype, check_index, check_range, check_shape, fail, require
from .weights import AssistantWeights

WHERE = "CapturedDraft"
SEGMENTS, FUSED, STEP, OPS = "segments", "fused", "step", "ops"  # kernels of a captured round
WARM_UPS = 2  # runs before a capture: kernels compile in the first


@dataclass(frozen=True)
class DraftBuffers:
    """What a replay reads, of max_batch requests; row b belongs to request b. The caller writes here before it.

    Of each layer type: its page table, with -1 where nothing was written, and the committed length.
    """

    seed_ids: Tensor  # [max_batch] int64
    seed_state: Tensor  # [max_batch, backbone]
    positions: Tensor  # [max_batch] int64, of the draft queries
    root_positions: Tensor  # [max_batch] int64, of the target
    block_tables: dict[str, Tensor]  # [max_batch, max_pages] int32
    seq_lens: dict[str, Tensor]  # [max_batch] int32


class CapturedDraft:
    """A whole round, from seeds to draft tree, as one CUDA graph launch.

    A graph is captured for each bucket of batch size (1, 2, 4, ... and max_batch) and each number of steps. A batch
    runs in the smallest bucket that holds it; the rows behind it have length 0, read no page, and change nothing.
    Nothing is copied to the host and nothing synchronises. Results equal those of draft() on the same buffers.
    Replays of one runner must not overlap in time: they share its buffers and its workspace.

    On a CPU, which has no graphs, a step of a tree is one call of the CPU library, and so are all steps of a chain,
    with the bits of draft().

    Args:
        weights: the assistant.
        kv: one view of the target's cache a layer type. Its caches, window, scales and the width of its table are
            captured (so the caches must stay where they are), and its max_seq_len, which every replay must keep; its
            table and lengths are not read.
        max_batch: requests at most.
        num_steps: depth of the draft, or several to choose from at each replay.
        topk, num_draft_tokens: as for draft().
        root_positions: False for a chain that needs no draft_positions.
        private: kernels that cross the borders of ops and start before the one in front has ended, where they serve:
            on a GPU, of small assistants with a centroid head (E2B, E4B), all that lies between two attentions in one
            CUDA launch ("segments": bf16, max_batch * topk up to 64), else Triton kernels ("fused"); of assistants with
            a dense head (12B, 26B-A4B, 31B) Triton kernels that keep the memory busy ("fused" too), where
            max_batch * topk is at most 8, so not by default; on a CPU whole steps in one call ("step"). False for the
            ops as draft() calls them ("ops"). `kernels` says what runs, and `reason` why nothing faster does. Those of
            a GPU round sums in another order than the ops; a CPU's steps have their bits.
        suppress_ids: as for draft(); the tensor is captured: what is written into it holds from the next replay on.

    Raises:
        ArgumentError: as draft() does, and for a view with kv_indptr, whose capacity a graph cannot know.

    >>> from mtp_kernels import AssistantWeights, KVView
    >>> weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    >>> def view(layer_type, window_left):
    ...     heads, dim = weights.config.kv_shape(layer_type)
    ...     k, v = torch.randn(2, 12, 4, heads, dim).unbind()  # [num_pages, page_size, num_kv_heads, head_dim]
    ...     return KVView.paged(k, v, torch.zeros(1, 6, dtype=torch.int32), torch.tensor([0]), window_left)
    >>> kv = {"sliding_attention": view("sliding_attention", 7), "full_attention": view("full_attention", -1)}
    >>> runner = CapturedDraft(weights, kv, max_batch=4, num_steps=3)
    >>> for layer_type in kv:
    ...     runner.buffers.block_tables[layer_type][:2] = torch.arange(12).view(2, 6)
    ...     runner.buffers.seq_lens[layer_type][:2] = torch.tensor([21, 9])
    >>> runner.buffers.seed_ids[:2] = torch.tensor([5, 9])
    >>> runner.replay(2).draft_ids.shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        weights: AssistantWeights,
        kv: Mapping[str, KVView],
        max_batch: int = 64,
        num_steps: int | Sequence[int] = 4,
        topk: int = 1,
        num_draft_tokens: int | None = None,
        root_positions: bool = True,
        private: bool = True,
        suppress_ids: Tensor | None = None,
    ) -> None:
        check_range(WHERE, "max_batch", max_batch, 1)
        depths = (num_steps,) if isinstance(num_steps, int) else tuple(num_steps)
        require(len(depths) > 0, WHERE, "num_steps", "at least one number", "none")
        self.weights, self.max_batch, self.num_steps = weights, max_batch, depths
        self.topk, self.num_draft_tokens, self.suppress_ids = topk, num_draft_tokens, suppress_ids
        self._with_roots = root_positions or topk > 1
        self._views = {name: _checked(name, view) for name, view in kv.items()}
        self.kernels, self.reason = (OPS, "private=False")
        if private:
            self.kernels, self.reason = choose_kernels(weights, self._views, topk, suppress_ids, max_batch)
        self._workspace = new_workspace(self.kernels, weights, max_batch * topk)
        self.buffers = _make_buffers(weights, self._views, max_batch)
        self.batch_sizes = _buckets(max_batch)
        self._graphs: dict[tuple[int, int], Callable[[], DraftTree]] = {}
        pool = torch.cuda.graph_pool_handle() if weights.device.type == "cuda" else None
        for depth in depths:
            for size in reversed(self.batch_sizes):  # the largest first: the others fit into its memory
                self._graphs[size, depth] = self._capture(size, depth, pool)

    def replay(self, batch: int, num_steps: int | None = None) -> DraftTree:
        """Draft for the first `batch` requests of the buffers; the results are views that the next replay overwrites.

        Args:
            batch: requests, 0 to max_batch.
            num_steps: one of the captured depths; None for the first.
        """
        depth = self.num_steps[0] if num_steps is None else num_steps
        require(depth in self.num_steps, WHERE, "num_steps", f"one of {list(self.num_steps)}", depth)
        check_range(WHERE, "batch", batch, 0, self.max_batch, "max_batch")
        size = next(size for size in self.batch_sizes if size >= batch)
        for lengths in self.buffers.seq_lens.values():
            lengths[batch:size] = 0
        tree = self._graphs[size, depth]()
        return DraftTree._make(None if t is None else t[:batch] for t in tree)

    def draft(
        self,
        kv: Mapping[str, KVView],
        seed_ids: Tensor,
        seed_state: Tensor,
        positions: Tensor,
        root_positions: Tensor | None = None,
        num_steps: int | None = None,
    ) -> DraftTree:
        """draft() with this runner: copies tables, lengths and seeds into the buffers, then replays.

        Only the tables and lengths of `kv` are read: its caches must be the captured ones.
        """
        check_shape(WHERE, "seed_ids", seed_ids, (None,))
        batch, buffers = seed_ids.size(0), self.buffers
        check_range(WHERE, "seed_ids", batch, 0, self.max_batch, "max_batch")
        check_index(WHERE, "seed_ids", seed_ids)
        check_shape(WHERE, "seed_state", seed_state, (batch, self.weights.backbone), "the batch of seed_ids")
        check_dtype(WHERE, "seed_state", seed_state, (self.weights.dtype,), "that of the weights")
        check_device(
            WHERE, self.weights.device, "weights", seed_ids=seed_ids, seed_state=seed_state, positions=positions,
            root_positions=root_positions,
        )
        roots = root_positions
        if self._with_roots and roots is None:
            fail(WHERE, "root_positions", "a tensor", None, "the runner was made with root_positions")
        for name, value in (("positions", positions), ("root_positions", roots)):
            if value is not None:
                check_shape(WHERE, name, value, (batch,), "the batch of seed_ids")
                check_index(WHERE, name, value)
                getattr(buffers, name)[:batch].copy_(value)
        buffers.seed_ids[:batch].copy_(seed_ids)
        buffers.seed_state[:batch].copy_(seed_state)
        for name, captured in self._views.items():
            self._copy_table(name, captured, kv, batch)
        return self.replay(batch, num_steps)

    def _copy_table(self, name: str, captured: KVView, kv: Mapping[str, KVView], batch: int) -> None:
        label = f"kv[{name!r}]"
        if name not in kv:
            fail(WHERE, label, "a KVView for each layer type of the assistant", f"views for {sorted(kv)}")
        view = kv[name]
        same = view.k_cache.data_ptr() == captured.k_cache.data_ptr()
        same = same and view.v_cache.data_ptr() == captured.v_cache.data_ptr()
        require(same and view.kv_indptr is None, WHERE, label, "a page table over the captured caches", "another cache")
        width = captured.block_table.size(1)
        check_shape(WHERE, f"{label}.block_table", view.block_table, (batch, None), "the batch of seed_ids")
        check_range(WHERE, f"{label}.block_table", view.block_table.size(1), 0, width, "its captured width")
        table = self.buffers.block_tables[name][:batch]
        table[:, : view.block_table.size(1)].copy_(view.block_table)
        # Pages behind a narrower table are not the request's: its length must not reach them.
        capacity = view.block_table.size(1) * view.page_size
        self.buffers.seq_lens[name][:batch].copy_(view.seq_lens.clamp(max=capacity))

    def _capture(self, size: int, depth: int, pool: Any) -> Callable[[], DraftTree]:
        """What drafts for the first `size` requests of the buffers."""
        b = self.buffers
        kv = {
            name: replace(view, block_table=b.block_tables[name][:size], seq_lens=b.seq_lens[name][:size])
            for name, view in self._views.items()
        }

        def run() -> Callable[[], DraftTree]:
            roots = b.root_positions[:size] if self._with_roots else None
            seeds = (b.seed_ids[:size], b.seed_state[:size], b.positions[:size])
            kernels = OPS if self.kernels == STEP else self.kernels  # a whole step is prepared once: _on_cpu
            return launch_round(
                kernels, self.weights, kv, *seeds, depth, self.topk, self.num_draft_tokens, roots, self.suppress_ids,
                self._workspace,
            )

        check_draft(
            self.weights, kv, b.seed_ids[:size], b.seed_state[:size], b.positions[:size], depth, self.topk,
            self.num_draft_tokens, b.root_positions[:size] if self._with_roots else None, self.suppress_ids,
        )
        if self.weights.device.type != "cuda":
            return self._on_cpu(run, kv, size, depth)
        stream = torch.cuda.Stream(self.weights.device)
        stream.wait_stream(torch.cuda.current_stream(self.weights.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(self.weights.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            made = run()
        tree = made()

        def replay() -> DraftTree:
            graph.replay()
            return tree

        return replay

    def _on_cpu(
        self, run: Callable[[], Callable[[], DraftTree]], kv: Mapping[str, KVView], size: int, depth: int
    ) -> Callable[[], DraftTree]:
        """The CPU library's whole step, where nothing asks for the ops when it is replayed."""
        if self.kernels != STEP:
            return lambda: run()()
        b = self.buffers
        whole = _whole_round(self.weights, kv, b.positions[:size], self.topk)

        def replay() -> DraftTree:
            if why_no_step(self.weights):
                return run()()
            roots = b.root_positions[:size] if self._with_roots else None
            seeds = (b.seed_ids[:size], b.seed_state[:size])
            return whole(*seeds, depth, self.num_draft_tokens, roots)

        return replay


def launch_round(
    kernels: str,
    weights: AssistantWeights,
    kv: Mapping[str, KVView],
    seed_ids: Tensor,
    seed_state: Tensor,
    positions: Tensor,
    num_steps: int,
    topk: int,
    num_draft_tokens: int | None,
    root_positions: Tensor | None,
    suppress_ids: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Callable[[], DraftTree]:
    """What a graph captures of a round, on what choose_kernels named, with the workspace of new_workspace.

    What this returns gives the draft afterwards, with what is the same for every chain, which no replay makes again.
    """
    if kernels == STEP:
        whole = _whole_round(weights, kv, positions, topk)
        tree = whole(seed_ids, seed_state, num_steps, num_draft_tokens, root_positions)
        return lambda: tree
    if kernels == OPS or seed_ids.size(0) == 0:
        tree = draft(
            weights, kv, seed_ids, seed_state, positions, num_steps, topk, num_draft_tokens, root_positions,
            suppress_ids,
        )
        return lambda: tree
    from . import fused

    assert (kernels == SEGMENTS) == (workspace is not None), "segments have a workspace, other kernels none"
    drafter = fused.Drafter(weights, kv, positions, fused.overlaps(seed_ids.device), workspace=workspace)
    if topk > 1:
        assert root_positions is not None
        tree = fused.draft_tree(drafter, seed_ids, seed_state, num_steps, topk, num_draft_tokens, root_positions)
        return lambda: tree
    chain = fused.draft_chain(drafter, seed_ids, seed_state, num_steps, num_draft_tokens, root_positions)
    return lambda: chain_links(*chain[:4])


# seed_ids, seed_state, num_steps, num_draft_tokens, root_positions
Round = Callable[[Tensor, Tensor, int, "int | None", "Tensor | None"], DraftTree]


def _whole_round(weights: AssistantWeights, kv: Mapping[str, KVView], positions: Tensor, topk: int) -> Round:
    """draft() by the CPU library's whole steps, its arguments unchecked."""
    if topk == 1:
        steps = cpu_chain(weights, kv)

        def chain(
            seed_ids: Tensor, seed_state: Tensor, num_steps: int, size: int | None, roots: Tensor | None
        ) -> DraftTree:
            logprobs, ids, _ = steps(seed_ids, seed_state, positions, num_steps)
            return chain_tree(seed_ids, ids.t(), logprobs.t(), size, roots)

        return chain
    whole = cpu_step(weights, kv)

    def step(ids: Tensor, state: Tensor, row_index: Tensor | None) -> StepOutput:
        return StepOutput(*whole(ids, state, positions, row_index, topk))

    def tree(
        seed_ids: Tensor, seed_state: Tensor, num_steps: int, size: int | None, roots: Tensor | None
    ) -> DraftTree:
        return draft_with(step, seed_ids, seed_state, num_steps, topk, size, roots)

    return tree


def choose_kernels(
    weights: AssistantWeights, kv: Mapping[str, KVView], topk: int, suppress_ids: Tensor | None = None,
    max_batch: int = 1
) -> tuple[str, str]:
    """What runs captured rounds of up to max_batch requests, and why nothing faster does.

    All of a runner's rounds run on the same kernels, so that a request's bits do not depend on how many there are.
    """
    if suppress_ids is not None:
        return OPS, "suppress_ids"
    if weights.device.type == "cpu" and not _triton.interpreting():
        why = why_no_step(weights)
        return (OPS, why) if why else (STEP, "")
    try:
        from . import _segment, fused
    except ImportError as error:
        return OPS, str(error)
    if why := fused.refuses(weights, kv, topk, max_batch):
        return OPS, why
    why = "the head is dense" if weights.centroids is None else _segment.refuses(weights, kv, max_batch * topk)
    return (FUSED, why) if why else (SEGMENTS, "")


def new_workspace(kernels: str, weights: AssistantWeights, rows: int) -> Tensor | None:
    """What segments of rounds of up to `rows` rows need beside their results; None for other kernels.

    It is allocated outside a capture: a graph's memory may be another graph's too.
    """
    if kernels != SEGMENTS:
        return None
    from . import _segment

    return _segment.new_workspace(weights, rows)


def _buckets(max_batch: int) -> tuple[int, ...]:
    """Powers of two below max_batch, and max_batch."""
    sizes = []
    size = 1
    while size < max_batch:
        sizes.append(size)
        size *= 2
    return (*sizes, max_batch)


def _checked(name: str, view: KVView) -> KVView:
    flat = view.kv_indptr is not None
    require(not flat, WHERE, f"kv[{name!r}]", "a view with a block_table [batch, max_pages]", "one with kv_indptr")
    return view


def _make_buffers(weights: AssistantWeights, kv: Mapping[str, KVView], max_batch: int) -> DraftBuffers:
    """Zeros, so that what was never written is harmless: a length of 0 reads no page."""
    device = weights.device

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return DraftBuffers(
        seed_ids=zeros(max_batch),
        seed_state=zeros(max_batch, weights.backbone, dtype=weights.dtype),
        positions=zeros(max_batch),
        root_positions=zeros(max_batch),
        block_tables={
            name: torch.full((max_batch, view.block_table.size(1)), -1, dtype=torch.int32, device=device)
            for name, view in kv.items()
        },
        seq_lens={name: zeros(max_batch, dtype=torch.int32) for name in kv},
    )

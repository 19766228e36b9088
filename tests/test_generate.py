"""generate(), greedily: the target's own tokens, whatever is drafted, batched, paged or switched off."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from generation_cases import VOCAB, pad, plain_greedy, tiny_greedy, tiny_pair, trained_pair, unequal_prompts
from torch import Tensor

from mtp_kernels import AcceptanceStats, ArgumentError, DraftPolicy, generate
from mtp_kernels.demo.pair import HEADS, load_pair, pair_directory
from mtp_kernels.generation import GenerationChunk, GenerationStatistics, _loop
from mtp_kernels.generation._target import Target

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_steps": 4},
    "chain cut": {"num_steps": 4, "num_draft_tokens": 3},
    "tree": {"num_steps": 4, "topk": 4, "num_draft_tokens": 16, "page_size": 61},
    "whole tree": {"num_steps": 2, "topk": 2, "page_size": 1},
}
NEW = 16


pytestmark = pytest.mark.usefixtures("one_thread")


# examples/check_generation.py does this for all shapes, sizes, batches and pages.
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", HEADS)
def test_equals_greedy_on_every_held_out_module(head: str, shape: str) -> None:
    """Prompts of ten unequal lengths in one batch, against transformers' greedy decoding of each alone."""
    pair = trained_pair(head)
    ids, mask = pad(unequal_prompts(pair), left=shape != "tree")
    out = generate(pair.model, pair.weights, ids, mask, max_new_tokens=NEW, stop_ids=[pair.eos_id], **SHAPES[shape])
    assert [tuple(ids) for ids in out.token_ids] == list(plain_greedy(head, NEW))
    # The trained drafter agrees often: the KV, seeds and positions that it is given are right.
    assert out.statistics.tokens_per_round > 1.5


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_request_does_not_depend_on_its_neighbours(shape: str) -> None:
    """Alone, in threes and in any order: the same tokens, and the same drafts accepted."""
    pair = trained_pair("centroid")
    prompts = unequal_prompts(pair)[:5]

    def run(rows: list[int]) -> dict[int, list[tuple[list[int], int]]]:
        seen: dict[int, list[tuple[list[int], int]]] = {row: [] for row in rows}

        def keep(chunk: GenerationChunk) -> None:
            seen[rows[chunk.request]].append((chunk.token_ids, chunk.num_accepted))

        generate(
            pair.model, pair.weights, *pad([prompts[r] for r in rows]), max_new_tokens=NEW, callback=keep,
            **SHAPES[shape],
        )
        return seen

    together = run([0, 1, 2, 3, 4])
    for rows in ([3], [4, 0], [2, 1, 3]):
        for row, chunks in run(rows).items():
            assert chunks == together[row]


def test_padding_is_never_read() -> None:
    """Left, right, on both sides, or none; and what the padding holds does not matter."""
    pair = tiny_pair()
    prompts = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (1, 9, 5)]
    wanted = [tiny_greedy(pair.target, p, 12) for p in prompts]
    left, right = pad(prompts), pad(prompts, left=False)
    both = tuple(torch.cat([torch.full((3, 2), fill), x], dim=1) for x, fill in zip(right, (7, 0)))
    for ids, mask in (left, right, both):
        assert generate(pair.target, pair.weights, ids, mask, max_new_tokens=12).token_ids == wanted
        other = torch.where(mask == 0, 11, ids)
        assert generate(pair.target, pair.weights, other, mask.bool(), max_new_tokens=12).token_ids == wanted
    alone = generate(pair.target, pair.weights, prompts[1][None].int(), max_new_tokens=12)
    assert alone.token_ids == wanted[1:2]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 20])
def test_lengths_around_the_window(length: int) -> None:
    """The tiny pair's window is 8; 12 tokens more pass it from every length."""
    pair = tiny_pair()
    prompt = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length))
    wanted = tiny_greedy(pair.target, prompt, 12)
    for shape in SHAPES.values():
        assert generate(pair.target, pair.weights, prompt[None], max_new_tokens=12, **shape).token_ids == [wanted]


@pytest.mark.parametrize("length", [0, 3, 20])
def test_masks_of_a_tree_deeper_than_the_window(length: int) -> None:
    """Each node sees the committed rows and its ancestors, in sliding layers those less than 8 positions away."""
    generator = torch.Generator().manual_seed(length)
    size, committed = 24, torch.tensor([length, 5])
    parents = [-1, *(max(0, i - 1 - int(torch.randint(2, (1,), generator=generator))) for i in range(1, size))]
    lines = [[0]]
    for node in range(1, size):
        lines.append([*lines[parents[node]], node])
    depth = torch.tensor([len(line) - 1 for line in lines])
    assert depth.max() > 8
    visible = torch.zeros(2, size, size, dtype=torch.bool)
    for node, line in enumerate(lines):
        visible[:, node, line] = True
    target = Target(tiny_pair().target)
    target.open_cache([64, 64], page_size=4)
    if length:
        target.cache.append([0], [length])
        target.cache.keep([0], [range(length)])
    target.cache.append([1], [5])
    target.cache.keep([1], [range(5)])
    rows = target.cache.append([0, 1], [size, size])
    positions = committed.unsqueeze(1) + depth
    masks = target._masks(rows, committed, torch.tensor([size, size]), positions, visible)
    for b, past in enumerate(committed.tolist()):
        for node, line in enumerate(lines):
            places = {**{i: i for i in range(past)}, **{past + n: past + int(depth[n]) for n in line}}
            near = {column for column, place in places.items() if past + int(depth[node]) - place < 8}
            for name, wanted in (("full_attention", set(places)), ("sliding_attention", near)):
                assert set((masks[name][b, 0, node] == 0).nonzero()[:, 0].tolist()) == wanted


def test_the_assistant_may_be_transformers_own_module() -> None:
    pair = tiny_pair()
    prompts = torch.randint(VOCAB, (3, 6), generator=torch.Generator().manual_seed(1))
    runs = [generate(pair.target, one, prompts, max_new_tokens=9) for one in (pair.weights, pair.assistant)]
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].statistics.reached == runs[1].statistics.reached


@pytest.mark.parametrize(
    "name", ["Gemma4ForConditionalGeneration", "Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"]
)
def test_the_other_classes_of_targets(name: str) -> None:
    """The same weights in the other classes that a Gemma 4 target may have."""
    pair, prompts = tiny_pair(), torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(2))
    target = as_class(pair.target, name)
    for shape in ({}, {"topk": 2}):
        wanted = generate(pair.target, pair.weights, prompts, max_new_tokens=9, **shape)
        out = generate(target, pair.weights, prompts, max_new_tokens=9, **shape)
        assert (out.token_ids, out.statistics.reached) == (wanted.token_ids, wanted.statistics.reached)


def as_class(target: Any, name: str) -> Any:
    import transformers

    config = target.config
    if "Unified" in name:
        values = {k: v for k, v in config.to_dict().items() if "per_layer" not in k and k != "kv_sharing_modes"}
        values |= {"model_type": "gemma4_unified_text", "global_head_dim": 128, "num_global_key_value_heads": 1}
        config = transformers.Gemma4UnifiedTextConfig(**values)
    if "Conditional" in name:
        whole = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))
        config = whole(text_config=config, vision_config=None, audio_config=None, tie_word_embeddings=False)
    other = getattr(transformers, name)(config).eval().requires_grad_(False)
    other.get_decoder().load_state_dict(target.model.state_dict())
    other.lm_head.load_state_dict(target.lm_head.state_dict())
    return other


def test_requests_that_do_not_draft() -> None:
    """Opted out one by one, or all: the same tokens, and rounds of one token each."""
    pair = trained_pair("dense")
    ids, mask = pad(unequal_prompts(pair)[:4])
    options: dict[str, Any] = {"max_new_tokens": NEW, "topk": 2, "num_steps": 3}
    everybody = generate(pair.model, pair.weights, ids, mask, **options)
    chunks: list[GenerationChunk] = []
    some = generate(
        pair.model, pair.weights, ids, mask, draft_enabled=[True, False, True, False], callback=chunks.append, **options
    )
    nobody = generate(pair.model, pair.weights, ids, mask, draft_enabled=False, **options)
    target_alone = generate(pair.model, pair.weights, ids, mask, max_new_tokens=NEW, num_steps=0)
    assert everybody.token_ids == some.token_ids == nobody.token_ids == target_alone.token_ids
    assert all(len(c.token_ids) == 1 and c.num_drafted == 0 for c in chunks if c.request in (1, 3))
    assert {c.num_drafted for c in chunks if c.request == 0} == {0, 3}  # the prefill drafts nothing
    assert nobody.statistics.rounds == 0 and nobody.statistics.plain_rounds == 4 * (NEW - 1)


@dataclass
class Recorder:
    """A policy that drafts as deep as it is told, in turn, and notes what it hears."""

    depths: list[int]
    asked: list[tuple[int, list[int]]] = field(default_factory=list)
    heard: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)

    def choose(self, batch: int, request_ids: Any = None) -> int:
        self.asked.append((batch, list(request_ids)))
        return self.depths[(len(self.asked) - 1) % len(self.depths)]

    def update(self, ids: Any, drafted: Any, accepted: Any, draft_seconds: float, verify_seconds: float) -> None:
        assert draft_seconds >= 0 and verify_seconds > 0
        self.heard.append((list(ids), list(drafted), list(accepted)))

    def forget(self, request_id: int) -> None:
        self.gone.append(request_id)


@pytest.mark.parametrize("shape", [{}, {"topk": 4, "num_draft_tokens": 16}])
def test_a_policy_chooses_each_round(shape: dict[str, Any]) -> None:
    pair = trained_pair("centroid")
    ids, mask = pad(unequal_prompts(pair)[:3])
    policy = Recorder([3, 0, 1, 9])
    chunks: list[GenerationChunk] = []
    out = generate(
        pair.model, pair.weights, ids, mask, max_new_tokens=[NEW, 3, NEW], draft_enabled=[True, True, False],
        policy=policy, callback=chunks.append, **shape,
    )
    assert [tuple(ids) for ids in out.token_ids] == [
        one[:n] for one, n in zip(plain_greedy("centroid", NEW), (NEW, 3, NEW))
    ]
    assert policy.asked[0] == (3, [0, 1]) and all(asked == [0] for _, asked in policy.asked[3:])
    assert sorted(policy.gone) == [0, 1, 2]
    assert policy.heard[0][0] == [0, 1, 2] and policy.heard[0][1] == [3, 3, 0]
    depths = [drafted[0] for ids, drafted, _ in policy.heard if ids[0] == 0]
    wanted = [(3, 0, 1, 4)[i % 4] for i in range(len(policy.asked))]  # 9 is more than num_steps
    assert depths[: len(wanted)] == wanted
    for ids, drafted, accepted in policy.heard:
        assert len(ids) == len(drafted) == len(accepted) and all(a <= d for a, d in zip(accepted, drafted))
    with pytest.raises(ArgumentError, match=r"generate: policy: expected at least 0, got -1 \(what choose\(\) gave\)"):
        generate(pair.model, pair.weights, ids_of(pair), max_new_tokens=4, policy=Recorder([-1]))


@pytest.mark.parametrize("head", ["centroid", "dense"])
def test_draft_policy_and_acceptance(head: str) -> None:
    """The library's own policy changes how deep is drafted and nothing that is said; its counts are generate()'s."""
    pair = trained_pair(head)
    ids, mask = pad(unequal_prompts(pair)[:3])
    policy, stats, chunks = DraftPolicy(max_steps=6), AcceptanceStats(), []
    out = generate(
        pair.model, pair.weights, ids, mask, max_new_tokens=NEW, num_steps=6, policy=policy, callback=chunks.append
    )
    assert [tuple(ids) for ids in out.token_ids] == list(plain_greedy(head, NEW))[:3]
    rounds = [c for c in chunks if c.num_drafted]
    stats.update([c.num_accepted for c in rounds], [c.num_drafted for c in rounds])
    assert stats.drafting_rounds == out.statistics.rounds
    assert stats.accepted == out.statistics.reached  # of rounds whose depths differ


@pytest.mark.parametrize("shape", [{}, {"topk": 4, "num_draft_tokens": 16}])
def test_suppressed_ids_are_never_drafted(shape: dict[str, Any]) -> None:
    """Without the tokens that the target says, no draft is right, and the text is the same."""
    pair = trained_pair("centroid")
    ids, mask = pad(unequal_prompts(pair)[:2])
    said = [token for one in plain_greedy("centroid", NEW)[:2] for token in one]
    chunks: list[GenerationChunk] = []
    out = generate(
        pair.model, pair.weights, ids, mask, max_new_tokens=NEW, suppress_ids=said, callback=chunks.append, **shape
    )
    assert [tuple(ids) for ids in out.token_ids] == list(plain_greedy("centroid", NEW))[:2]
    assert all(c.num_accepted == 0 for c in chunks) and any(c.num_drafted for c in chunks)
    with pytest.raises(ArgumentError, match="generate: suppress_ids: expected int32 or int64, got float32"):
        generate(pair.model, pair.weights, ids, mask, max_new_tokens=4, suppress_ids=[0.5])


def ids_of(pair: Any) -> Tensor:
    return pair.held_out_prompt(pair.held_out[0], 10)[None]


def test_statistics_add_up() -> None:
    pair = trained_pair("centroid")
    ids, mask = pad(unequal_prompts(pair)[:3])
    chunks: list[GenerationChunk] = []
    out = generate(pair.model, pair.weights, ids, mask, max_new_tokens=NEW, callback=chunks.append)
    found, drafting = out.statistics, [c for c in chunks if c.num_drafted]
    assert found.rounds == len(drafting) and found.tokens == sum(len(c.token_ids) for c in drafting)
    assert found.reached == [sum(c.num_accepted > depth for c in drafting) for depth in range(4)]
    assert found.tokens + found.plain_rounds + 3 == 3 * NEW  # the prefill gave each request one
    assert found.accepted_per_position == [n / found.rounds for n in found.reached]
    times = found.as_dict()["times"]
    assert set(times) == {"prefill_seconds", "draft_seconds", "verify_seconds", "commit_seconds"}
    assert all(t > 0 for t in times.values()) and found.seconds == pytest.approx(sum(times.values()))
    for c in chunks:
        assert 0 <= c.num_accepted <= min(c.num_drafted, len(c.token_ids))
    twice = sum([found, found], GenerationStatistics())
    assert (twice.rounds, twice.reached[0]) == (2 * found.rounds, 2 * found.reached[0])
    assert twice.seconds == pytest.approx(2 * found.seconds)
    nothing = GenerationStatistics()
    assert nothing.tokens_per_round == 0.0 and nothing.accepted_per_position == []


def test_every_round_starts_from_the_right_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed token, seed state, positions and committed KV of every round, against one forward over the final text."""
    pair = tiny_pair()
    prompts = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (3, 11, 7)]
    seen: list[tuple[Any, ...]] = []

    def spy(weights: Any, kv: Any, seed_ids: Tensor, seed_state: Tensor, positions: Tensor, *rest: Any, **more: Any
            ) -> Any:
        tree = real(weights, kv, seed_ids, seed_state, positions, *rest, **more)
        full = kv["full_attention"]
        keys = [full.k_cache[full.block_table[b]].flatten(0, 1)[:n] for b, n in enumerate(full.seq_lens.tolist())]
        seen.extend(zip(seed_ids.tolist(), seed_state, positions.tolist(), more["root_positions"].tolist(), keys))
        return tree

    real = _loop.draft
    monkeypatch.setattr(_loop, "draft", spy)
    lengths = [p.numel() for p in prompts]
    out = generate(
        pair.target, pair.weights, *pad(prompts), max_new_tokens=[9, 14, 11], topk=2, num_steps=3, page_size=2
    )
    texts = [p.tolist() + ids for p, ids in zip(prompts, out.token_ids)]
    whole = [forward(pair.target, torch.tensor(text)) for text in texts]
    counted = 0
    for seed_id, state, position, root, keys in seen:
        matching = [
            b for b, (text, (hidden, all_keys)) in enumerate(zip(texts, whole))
            if lengths[b] <= position < len(text) and text[position] == seed_id
            and torch.allclose(state, hidden[position - 1], atol=1e-4)
            and torch.allclose(keys, all_keys[:position], atol=1e-4)
        ]
        assert matching and root == position == len(keys)
        counted += 1
    assert counted >= 3 * 3


def forward(target: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden [length, backbone] after the final norm, and keys [length, heads, dim] of the last full layer."""
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    cache_name = "cache" if "cache" in inspect.signature(target.model.forward).parameters else "past_key_values"
    out = target.model(input_ids=ids[None], use_cache=True, **{cache_name: cache})
    return out.last_hidden_state[0], cache.layers[1].keys[0].transpose(0, 1)


def test_bf16_runs_end_to_end() -> None:
    pair = load_pair(pair_directory(), "centroid", dtype=torch.bfloat16)
    ids, mask = pad(unequal_prompts(pair)[:3])
    out = generate(pair.model, pair.weights, ids, mask, max_new_tokens=NEW, topk=2, num_draft_tokens=8)
    alike = [tuple(ids[:4]) == wanted[:4] for ids, wanted in zip(out.token_ids, plain_greedy("centroid", NEW))]
    assert all(len(ids) == NEW for ids in out.token_ids) and any(alike)
    assert out.statistics.tokens_per_round > 1.5


def test_no_requests() -> None:
    pair = tiny_pair()
    out = generate(pair.target, pair.weights, torch.zeros(0, 4, dtype=torch.int64), max_new_tokens=3)
    assert out.token_ids == [] and out.finish_reasons == [] and out.padded(0).shape == (0, 0)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": torch.zeros(3, dtype=torch.int64)}, "input_ids: expected [*, *], got [3]"),
    ({"input_ids": torch.zeros(1, 3)}, "input_ids: expected int32 or int64, got float32"),
    ({"input_ids": torch.tensor([[1, 16]])}, "input_ids: expected token ids of 0 to 15, got 16 (row 0)"),
    ({"input_ids": torch.tensor([[1], [-1]])}, "input_ids: expected token ids of 0 to 15, got -1 (row 1)"),
    ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, "input_ids: expected at least 1 token a request, got 0"),
    ({"attention_mask": torch.ones(1, 3)}, "attention_mask: expected [1, 2], got [1, 3] (the shape of input_ids)"),
    ({"attention_mask": torch.zeros(1, 2)}, "attention_mask: expected at least 1 token a request, got 0 (row 0)"),
    ({"input_ids": torch.ones(1, 3, dtype=torch.int64), "attention_mask": torch.tensor([[1, 0, 1]])},
     "attention_mask: expected padding on the left and the right only, got a gap (row 0)"),
    ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
    ({"max_new_tokens": [1, 2]}, "max_new_tokens: expected one for all or 1 of them, got 2 (the batch of input_ids)"),
    ({"draft_enabled": []}, "draft_enabled: expected one for all or 1 of them, got 0 (the batch of input_ids)"),
    ({"num_steps": -1}, "num_steps: expected at least 0, got -1"),
    ({"topk": 0}, "topk: expected at least 1, got 0"),
    ({"topk": 9}, "topk: expected 1 to 8, got 9 (the head's candidates)"),
    ({"num_draft_tokens": 6}, "num_draft_tokens: expected 2 to 5, got 6 (root and candidates)"),
    ({"temperature": -1.0}, "temperature: expected a number of at least 0, got -1.0"),
    ({"temperature": float("nan")}, "temperature: expected a number of at least 0, got nan"),
    ({"top_k": -1}, "top_k: expected at least 0, got -1"),
    ({"top_p": 0.0}, "top_p: expected a number above 0, at most 1, got 0.0"),
    ({"page_size": 0}, "page_size: expected at least 1, got 0"),
    ({"stop_ids": [0.5]}, "stop_ids: expected int32 or int64, got float32"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_errors_name_the_argument(arguments: dict[str, Any], message: str) -> None:
    pair = tiny_pair()
    with pytest.raises(ArgumentError) as error:
        generate(pair.target, pair.weights, **{"input_ids": torch.tensor([[1, 2]]), "max_new_tokens": 4, **arguments})
    assert str(error.value) == f"generate: {message}"


def test_a_pair_that_does_not_fit_is_refused() -> None:
    pair, ids = tiny_pair(), torch.tensor([[1, 2]])
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: generate(torch.nn.Linear(2, 2), pair.weights, ids, max_new_tokens=1),
         "generate: target: expected Gemma4ForCausalLM or "),
        (lambda: generate(pair.target, trained_pair("dense").weights, ids, max_new_tokens=1),
         "generate: assistant: expected backbone 48, got 256 (the target's)"),
        (lambda: generate(pair.target, pair.weights.to(dtype=torch.bfloat16), ids, max_new_tokens=1),
         "generate: assistant: expected float32, got bfloat16 (the target is float32)"),
    ]
    for call, message in cases:
        with pytest.raises(ArgumentError) as error:
            call()
        assert str(error.value).startswith(message)
    pair.target.train()
    try:
        with pytest.raises(ArgumentError, match="generate: target: expected a model in eval mode"):
            generate(pair.target, pair.weights, ids, max_new_tokens=1)
    finally:
        pair.target.eval()

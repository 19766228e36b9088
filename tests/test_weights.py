"""AssistantWeights: transformers' checkpoints and modules tensor by tensor, dtypes, presets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import DEVICES, assert_same_bits
from torch import Tensor

pytest.importorskip("safetensors")

from checkpoint_cases import (
    CONFIG,
    EMBEDDING,
    HEAD,
    ORDERING,
    PARSED,
    Q_PROJ,
    Config,
    Tensors,
    changed,
    check_equal,
    check_refused,
    checkpoint_tensors,
    edited,
    embedding,
    flat,
    load,
    write,
)

from mtp_kernels import ArgumentError, AssistantWeights
from mtp_kernels.weights import PRESETS, AssistantConfig


def check_holds(weights: AssistantWeights, tensors: Tensors) -> None:
    """Every tensor of a checkpoint is where it belongs, bit for bit, and there is no other."""
    own: dict[str, Tensor | None] = {
        "pre_projection.weight": weights.pre_projection,
        "post_projection.weight": weights.post_projection,
        "model.norm.weight": weights.norm,
        HEAD if HEAD in tensors else EMBEDDING: weights.lm_head,
    }
    if weights.head == "centroid":
        own |= {"masked_embedding.centroids.weight": weights.centroids, ORDERING: weights.token_ordering}
    for i, layer in enumerate(weights.layers):
        gate, up = layer.gate_up.chunk(2)
        of_layer = {
            "input_layernorm.weight": layer.input_norm,
            "self_attn.q_proj.weight": layer.q_proj,
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.o_proj.weight": layer.o_proj,
            "post_attention_layernorm.weight": layer.post_attention_norm,
            "pre_feedforward_layernorm.weight": layer.pre_feedforward_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.down,
            "post_feedforward_layernorm.weight": layer.post_feedforward_norm,
            "layer_scalar": layer.layer_scalar,
        }
        own |= {f"model.layers.{i}.{name}": tensor for name, tensor in of_layer.items()}
    assert own.keys() == tensors.keys() - ({EMBEDDING} if HEAD in tensors else set())
    for name, tensor in own.items():
        assert tensor is not None
        assert_same_bits(tensor, tensors[name])
        assert not tensor.requires_grad


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("head", ["centroid", "dense"])
def test_transformers_checkpoint_and_module(tmp_path: Path, head: str, unified: bool) -> None:
    pytest.importorskip("transformers")
    from parity_helpers import make_pair, small_config

    pair = make_pair(head, unified=unified, seed=2)
    pair.assistant.save_pretrained(tmp_path)
    weights = load(tmp_path, embed_weight=pair.embed.weight)
    check_holds(weights, pair.assistant.state_dict())
    check_equal(weights, pair.weights)
    assert weights.config == small_config(head, unified=unified)
    assert (weights.head, weights.num_layers, weights.sliding_window, weights.norm_eps) == (head, 4, 8, 1e-6)
    assert weights.embed_weight.data_ptr() == pair.embed.weight.data_ptr()
    for layer in weights.layers:
        frequencies = getattr(pair.assistant.model.rotary_emb, f"{layer.layer_type}_inv_freq")
        assert_same_bits(layer.rope_inv_freq, frequencies[frequencies != 0])


def test_transformers_shards(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from parity_helpers import make_pair

    pair = make_pair()
    pair.assistant.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_equal(load(tmp_path, embed_weight=pair.embed.weight), pair.weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embed_scale_is_rounded_as_transformers_rounds_it(dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    from parity_helpers import make_embedding

    for backbone in (48, 1536, 2560, 2816, 3072, 3840, 5376):
        config = replace(PRESETS["tiny"], backbone=backbone, vocab=8, num_centroids=0, num_active=0)
        embed = make_embedding(config, seed=0).to(dtype)
        weights = AssistantWeights.synthetic(config, dtype=dtype, embed_weight=embed.weight)
        got = (embed.weight.float() * weights.embed_scale).to(dtype)  # as pre_project does it
        assert_same_bits(got, embed(torch.arange(8)))


@pytest.mark.parametrize("name", [n for n in PRESETS if not n.startswith("tiny")])
def test_presets_have_the_tensors_of_transformers(name: str) -> None:
    """Names, shapes and the number of parameters, at a vocabulary of one token a centroid."""
    pytest.importorskip("transformers")
    from parity_helpers import hf_class, hf_config

    weights = AssistantWeights.synthetic(name, device="meta", vocab=2048)
    with torch.device("meta"):
        assistant = hf_class(weights.config)(hf_config(weights.config))
    module = AssistantWeights.from_module(assistant.to(torch.bfloat16), weights.embed_weight)
    shapes = {n: (t.shape, t.dtype) for n, t in module.tensors()}
    assert shapes == {n: (t.shape, t.dtype) for n, t in weights.tensors()}
    # Tied weights are one parameter; the layers' scalars and token_ordering are buffers.
    extra = weights.num_layers + (2048 if weights.head == "centroid" else 0)
    extra += sum(layer.rope_inv_freq.numel() for layer in weights.layers)
    numbers = sum(t.numel() for n, t in weights.tensors() if n != "embed_weight")
    assert numbers - extra == sum(p.numel() for p in assistant.parameters())


def test_weights_of_parameters_need_no_gradients(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from parity_helpers import make_pair

    pair = make_pair()
    parameter = torch.nn.Parameter(embedding())
    assert not load(write(tmp_path), embed_weight=parameter).embed_weight.requires_grad
    weights = AssistantWeights.from_module(pair.assistant.requires_grad_(), pair.embed.weight)
    assert not any(t.requires_grad for _, t in weights.tensors())


def test_module_shares_memory_but_for_gate_and_up() -> None:
    pytest.importorskip("transformers")
    from parity_helpers import make_pair

    pair = make_pair()
    owners = {t.untyped_storage().data_ptr() for t in pair.assistant.state_dict().values()}
    owners.add(pair.embed.weight.untyped_storage().data_ptr())
    copied = [n for n, t in pair.weights.tensors() if t.untyped_storage().data_ptr() not in owners]
    assert all(n.endswith((".gate_up", ".rope_inv_freq")) for n in copied)


def parsed(folder: Path, edit: Callable[[Config, Config], Any], base: Config = CONFIG) -> AssistantConfig:
    """What becomes of an edited config, on a checkpoint whose tensors need not change."""
    return load(write(folder, edited(edit, base))).config


def test_both_forms_of_the_config(tmp_path: Path) -> None:
    assert load(write(tmp_path)).config == PARSED
    assert load(write(tmp_path, flat())).config == PARSED


def test_full_layers_have_kv_heads_of_their_own_only_with_k_eq_v(tmp_path: Path) -> None:
    config = parsed(tmp_path, lambda c, t: t.update(attention_k_eq_v=False), flat())
    assert config.kv_shape("full_attention") == (2, 8)
    config = parsed(tmp_path, lambda c, t: t.update(num_global_key_value_heads=None), flat())
    assert config.kv_shape("full_attention") == (2, 8)


def test_what_else_a_config_may_say(tmp_path: Path) -> None:
    def unify(config: Config, text: Config) -> None:
        config["model_type"], text["model_type"] = "gemma4_unified_assistant", "gemma4_unified_text"
        text["use_bidirectional_attention"] = "vision"
        del config["architectures"], config["tie_word_embeddings"]
        del text["hidden_size_per_layer_input"], text["enable_moe_block"]

    unified = edited(unify)
    assert load(write(tmp_path, unified)).config.architecture == "Gemma4UnifiedAssistantForCausalLM"
    capped = load(write(tmp_path, edited(lambda c, t: t.update(final_logit_softcapping=30.0))))
    assert capped.logits_soft_cap == 30.0 and load(write(tmp_path)).logits_soft_cap == 0.0
    padded = {"01": {"head_dim": 8, "num_key_value_heads": 1, "skip": []}, "00": {"head_dim": 4}}
    assert parsed(tmp_path, lambda c, t: t.update(per_layer_config=padded)) == PARSED
    full = {"rope_theta": 1e6, "rope_type": "proportional", "factor": 8.0}
    weights = load(write(tmp_path, edited(lambda c, t: t["rope_parameters"].update(full_attention=full))))
    expected = 1e6 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8) / 8
    torch.testing.assert_close(weights.layers[1].rope_inv_freq, expected.float(), rtol=1e-6, atol=0)


def test_tied_head_under_either_name_or_both(tmp_path: Path) -> None:
    tensors = checkpoint_tensors()
    by_embedding = load(write(tmp_path, tensors=tensors))
    check_holds(by_embedding, tensors)
    head = tensors[EMBEDDING].clone()
    renamed = {n: t for n, t in tensors.items() if n != EMBEDDING} | {HEAD: head}
    check_equal(load(write(tmp_path, tensors=renamed)), by_embedding)
    both = {**tensors, HEAD: head}
    check_equal(load(write(tmp_path, tensors=both)), by_embedding)
    head[3, 4] += 1
    file = tmp_path / "model.safetensors"
    check_refused(write(tmp_path, tensors=both),
                  f"{file}: lm_head.weight and model.embed_tokens.weight differ, but tie_word_embeddings is true")
    untied = edited(lambda c, t: c.update(tie_word_embeddings=False))
    assert_same_bits(load(write(tmp_path, untied, both)).lm_head, head)
    check_refused(write(tmp_path, untied), f"{file}: 1 missing tensor: lm_head.weight")


def test_loaded_weights_do_not_follow_the_file(tmp_path: Path) -> None:
    file = write(tmp_path) / "model.safetensors"
    weights = load(tmp_path)
    with file.open("r+b") as stream:
        stream.seek(-2000, 2)
        stream.write(b"\xff" * 2000)
    check_holds(weights, checkpoint_tensors())
    assert all(t.data_ptr() % 64 == 0 for name, t in weights.tensors() if name != "embed_weight")


def test_tensors_that_transformers_ignores(tmp_path: Path) -> None:
    tensors = checkpoint_tensors()
    weights = load(write(tmp_path, tensors=tensors))
    more = {f"model.layers.1.self_attn.{n}.weight": torch.ones(3) for n in ("k_proj", "v_proj", "k_norm", "v_norm")}
    check_equal(load(write(tmp_path, tensors={**tensors, **more})), weights)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loading_in_another_dtype(tmp_path: Path, dtype: torch.dtype, device: str) -> None:
    write(tmp_path)
    weights = load(tmp_path, dtype=dtype, device=device)
    assert (weights.dtype, weights.device.type) == (dtype, device)
    check_equal(weights, load(tmp_path).to(device, dtype))
    check_equal(weights, load(tmp_path, embed_weight=embedding().to(device), dtype=dtype))
    converted = {n: t.to(dtype) if t.is_floating_point() else t for n, t in checkpoint_tensors().items()}
    check_holds(weights.to("cpu"), converted)


def test_an_embedding_in_another_dtype_than_the_checkpoint(tmp_path: Path) -> None:
    """Asked for the checkpoint's own dtype, only the embedding changes, and its scale with it."""
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in checkpoint_tensors().items()}
    write(tmp_path, tensors=half)
    weights = load(tmp_path, dtype=torch.bfloat16)
    check_equal(weights, load(tmp_path, embed_weight=embedding(torch.bfloat16)))
    assert weights.embed_scale == 2.453125  # sqrt(6) is 2.4495


def test_dtypes_may_be_mixed_where_they_are_converted_and_norms_may_be_fp32(tmp_path: Path) -> None:
    kept = ("norm.weight", "layer_scalar")
    half = {n: t if n == ORDERING or n.endswith(kept) else t.bfloat16() for n, t in checkpoint_tensors().items()}
    weights = load(write(tmp_path, tensors=half), embed_weight=embedding(torch.bfloat16))
    assert (weights.dtype, weights.norm.dtype, weights.layers[0].q_norm.dtype) == (
        torch.bfloat16, torch.float32, torch.float32,
    )  # fmt: skip
    mixed = {**checkpoint_tensors(), Q_PROJ: checkpoint_tensors()[Q_PROJ].bfloat16()}
    weights = load(write(tmp_path, tensors=mixed), dtype=torch.bfloat16)
    assert {t.dtype for n, t in weights.tensors() if "rope" not in n} == {torch.bfloat16, torch.int64}


def test_int32_ordering_becomes_int64(tmp_path: Path) -> None:
    weights = load(write(tmp_path, tensors=changed(ORDERING, lambda t: t.int())))
    check_equal(weights, load(write(tmp_path)))


def test_to() -> None:
    weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    half = weights.to(dtype=torch.bfloat16)
    for (name, one), (_, two) in zip(weights.tensors(), half.tensors()):
        keeps = name.endswith(("rope_inv_freq", "token_ordering"))
        assert_same_bits(two, one if keeps else one.bfloat16())
        assert (one.data_ptr() == two.data_ptr()) == keeps
    assert (weights.embed_scale, half.embed_scale) == (pytest.approx(40**0.5), 6.3125)
    assert half.to(dtype=torch.float32).embed_scale == weights.embed_scale
    assert all(t.is_meta for _, t in weights.to("meta").tensors())
    for (_, one), (_, two) in zip(weights.tensors(), weights.to("cpu", torch.float32).tensors()):
        assert one.data_ptr() == two.data_ptr()
    with pytest.raises(ArgumentError) as error:
        weights.to(dtype=torch.float64)
    assert str(error.value) == (
        "AssistantWeights.to: dtype: expected bfloat16 or float16 or float32, got torch.float64"
    )


def test_reordered() -> None:
    weights = AssistantWeights.synthetic("tiny")
    ordered = weights.reordered()
    assert not weights.centroid_ordered and ordered.centroid_ordered
    assert weights.token_ordering is not None
    for i, token in enumerate(weights.token_ordering.tolist()):
        assert_same_bits(ordered.lm_head[i], weights.lm_head[token])
    check_equal(replace(ordered, lm_head=weights.lm_head, centroid_ordered=False), weights)
    assert ordered.reordered() is ordered and ordered.to(dtype=torch.float32).centroid_ordered
    dense = AssistantWeights.synthetic("tiny-dense")
    assert dense.reordered() is dense


def test_presets_have_the_sizes_of_the_real_ones() -> None:
    """Against the table of the real checkpoints, written out once more."""
    table = {  # hidden, intermediate, query heads, KV heads sliding and full, window, backbone, centroids
        "E2B": (256, 2048, 4, 1, 1, 512, 1536, 2048),
        "E4B": (256, 2048, 4, 2, 2, 512, 2560, 2048),
        "12B": (1024, 8192, 16, 8, 1, 1024, 3840, 0),
        "26B-A4B": (1024, 8192, 16, 8, 2, 1024, 2816, 0),
        "31B": (1024, 8192, 32, 16, 4, 1024, 5376, 0),
    }
    assert table.keys() == {n for n in PRESETS if not n.startswith("tiny")}
    for name, row in table.items():
        config = PRESETS[name]
        (sliding_heads, sliding_dim), (full_heads, full_dim) = map(config.kv_shape, config.layer_types[2:])
        assert row == (
            config.hidden, config.intermediate, config.num_qo_heads, sliding_heads, full_heads, config.sliding_window,
            config.backbone, config.num_centroids,
        )  # fmt: skip
        assert (sliding_dim, full_dim, config.vocab, config.norm_eps) == (256, 512, 262144, 1e-6)
        assert config.layer_types == ("sliding_attention",) * 3 + ("full_attention",)
        assert [(a.rope_theta, a.num_pairs) for a in config.attention] == [(1e4, 128), (1e6, 64)]
        assert config.num_active == (32 if row[-1] else 0)
        assert ("Unified" in config.architecture) == (name == "12B")
    assert PRESETS["E2B"].num_candidates == 32 * 128 and PRESETS["12B"].num_candidates == 262144


def test_synthetic_values() -> None:
    weights = AssistantWeights.synthetic("E2B", vocab=4096, dtype=torch.float32)
    check_equal(weights, AssistantWeights.synthetic("E2B", vocab=4096, dtype=torch.float32))
    other = AssistantWeights.synthetic("E2B", vocab=4096, dtype=torch.float32, seed=1)
    for (name, one), (_, two) in zip(weights.tensors(), other.tensors()):
        assert name.endswith("rope_inv_freq") or not torch.equal(one, two)
        if name.endswith(("norm", "layer_scalar")):
            assert (one - 1).abs().max() < 0.6
        elif one.dim() == 2:
            assert one.std() * one.size(1) ** 0.5 == pytest.approx(1, rel=0.05)
    assert weights.token_ordering is not None
    assert_same_bits(weights.token_ordering.sort().values, torch.arange(4096))


def test_num_bytes() -> None:
    hidden, inner, backbone, vocab = 32, 48, 40, 64
    layers = sum(2 * 4 * dim * hidden + 3 * hidden * inner + 4 * hidden + dim + 1 for dim in (64, 128))
    numbers = 3 * backbone * hidden + hidden + vocab * hidden + 8 * hidden + layers
    fixed = 8 * vocab + 4 * (32 + 16)  # token_ordering, frequencies
    weights = AssistantWeights.synthetic("tiny")
    assert weights.num_bytes() == 2 * numbers + fixed
    assert weights.to(dtype=torch.float32).num_bytes() == 4 * numbers + fixed

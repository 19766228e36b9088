"""What AssistantWeights refuses, each with its message: configs, tensors, files, embeddings, arguments."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")

from checkpoint_cases import (
    EMBEDDING,
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
    without,
    write,
)
from safetensors.torch import load_file, save_file

from mtp_kernels import ArgumentError, AssistantWeights, CheckpointError

CONFIG_ERRORS: list[tuple[str, Callable[[Config, Config], Any]]] = [
    ("model_type is missing", lambda c, t: c.pop("model_type")),
    ("model_type: expected 'gemma4_assistant' or 'gemma4_unified_assistant', got 'gemma4' (is this the assistant's "
     "config?)", lambda c, t: c.update(model_type="gemma4")),
    ("architectures: expected ['Gemma4AssistantForCausalLM'], got ['Gemma4ForCausalLM'] (model_type is "
     "'gemma4_assistant')", lambda c, t: c.update(architectures=["Gemma4ForCausalLM"])),
    ("text_config is missing", lambda c, t: c.pop("text_config")),
    ("text_config: expected an object, got None", lambda c, t: c.update(text_config=None)),
    ("text_config.model_type: expected 'gemma4_text', got 'gemma3_text'",
     lambda c, t: t.update(model_type="gemma3_text")),
    ("backbone_hidden_size is missing", lambda c, t: c.pop("backbone_hidden_size")),
    ("use_ordered_embeddings is missing", lambda c, t: c.pop("use_ordered_embeddings")),
    ("use_ordered_embeddings: expected true or false, got 1", lambda c, t: c.update(use_ordered_embeddings=1)),
    ("tie_word_embeddings: expected true or false, got None", lambda c, t: c.update(tie_word_embeddings=None)),
    ("num_centroids: expected a divisor of the vocabulary's 12, got 5", lambda c, t: c.update(num_centroids=5)),
    ("centroid_intermediate_top_k: expected at most 4, got 6 (num_centroids)",
     lambda c, t: c.update(centroid_intermediate_top_k=6)),
    ("quantization_config: quantised checkpoints are not supported",
     lambda c, t: c.update(quantization_config={"quant_method": "fp8"})),
    ("text_config.hidden_size is missing", lambda c, t: t.pop("hidden_size")),
    ("text_config.hidden_size: expected a positive integer, got 0", lambda c, t: t.update(hidden_size=0)),
    ("text_config.vocab_size: expected a positive integer, got True", lambda c, t: t.update(vocab_size=True)),
    ("text_config.sliding_window: expected a positive integer, got None", lambda c, t: t.update(sliding_window=None)),
    ("text_config.rms_norm_eps: expected a positive number, got nan", lambda c, t: t.update(rms_norm_eps=float("nan"))),
    ("text_config.hidden_activation: expected 'gelu_pytorch_tanh', got 'silu' (not supported)",
     lambda c, t: t.update(hidden_activation="silu")),
    ("text_config.attention_bias: expected False, got True (not supported)",
     lambda c, t: t.update(attention_bias=True)),
    ("text_config.enable_moe_block: expected False, got True (not supported)",
     lambda c, t: t.update(enable_moe_block=True)),
    ("text_config.use_double_wide_mlp: expected False, got True (not supported)",
     lambda c, t: t.update(use_double_wide_mlp=True)),
    ("text_config.hidden_size_per_layer_input: expected 0, got 256 (not supported)",
     lambda c, t: t.update(hidden_size_per_layer_input=256)),
    ("text_config.use_bidirectional_attention: expected None, got 'all' (not supported)",
     lambda c, t: t.update(use_bidirectional_attention="all")),
    ("text_config.num_kv_shared_layers: expected 2, got 1 (an assistant has no KV of its own)",
     lambda c, t: t.update(num_kv_shared_layers=1)),
    ("text_config.layer_types: expected 2 of 'sliding_attention' and 'full_attention', got ['full_attention']",
     lambda c, t: t.update(layer_types=["full_attention"])),
    ("text_config.layer_types: expected 'full_attention' at the end, got ['full_attention', 'sliding_attention'] "
     "(transformers forces it)", lambda c, t: t["layer_types"].reverse()),
    ("text_config.rope_parameters is missing", lambda c, t: t.pop("rope_parameters")),
    ("text_config.rope_parameters.full_attention is missing", lambda c, t: t["rope_parameters"].pop("full_attention")),
    ("text_config.rope_parameters.sliding_attention.rope_type: expected 'default' or 'proportional', got 'yarn'",
     lambda c, t: t["rope_parameters"]["sliding_attention"].update(rope_type="yarn")),
    ("text_config.rope_parameters.full_attention.rope_theta is missing",
     lambda c, t: t["rope_parameters"]["full_attention"].pop("rope_theta")),
    ("text_config.rope_parameters.full_attention.partial_rotary_factor: expected 1 to 4 pairs of head_dim 8, got 0.1",
     lambda c, t: t["rope_parameters"]["full_attention"].update(partial_rotary_factor=0.1)),
    ("text_config.per_layer_config.7: expected a layer's number below 2 as the key, got {}",
     lambda c, t: t["per_layer_config"].update({"7": {}})),
    ("text_config.per_layer_config.1.intermediate_size: expected no such override, got 9 (not supported)",
     lambda c, t: t["per_layer_config"]["1"].update(intermediate_size=9)),
    ("text_config.num_attention_heads: expected a multiple of the 3 KV heads of sliding_attention, got 4",
     lambda c, t: t.update(num_key_value_heads=3)),
    ("text_config.head_dim: expected an even number for full_attention, got 7",
     lambda c, t: t["per_layer_config"]["1"].update(head_dim=7)),
    ("text_config.per_layer_config: expected one (num_key_value_heads, head_dim) for all of full_attention, got "
     "(1, 8) and (2, 4)", lambda c, t: t.update(layer_types=["full_attention", "full_attention"])),
]  # fmt: skip


@pytest.mark.parametrize(("message", "edit"), CONFIG_ERRORS, ids=[m[:60] for m, _ in CONFIG_ERRORS])
def test_config_errors(tmp_path: Path, message: str, edit: Callable[[Config, Config], Any]) -> None:
    check_refused(write(tmp_path, edited(edit)), f"{tmp_path / 'config.json'}: {message}")


def test_flat_config_without_the_full_layers_size(tmp_path: Path) -> None:
    folder = write(tmp_path, edited(lambda c, t: t.pop("global_head_dim"), flat()))
    check_refused(folder, f"{tmp_path / 'config.json'}: text_config.global_head_dim is missing")


TENSOR_ERRORS: list[tuple[str, Tensors]] = [
    ("1 missing tensor: model.layers.0.self_attn.q_proj.weight", without(Q_PROJ)),
    ("1 missing tensor: lm_head.weight", without(EMBEDDING)),
    ("4 missing tensors: pre_projection.weight, post_projection.weight, model.norm.weight and 1 more",
     without("pre_projection.weight", "post_projection.weight", "model.norm.weight", "model.layers.1.layer_scalar")),
    ("1 unexpected tensor: model.layers.2.layer_scalar",
     {**checkpoint_tensors(), "model.layers.2.layer_scalar": torch.ones(1)}),
    ("2 unexpected tensors: a.bias, b.bias",
     {**checkpoint_tensors(), "b.bias": torch.ones(1), "a.bias": torch.ones(1)}),
    ("model.layers.0.self_attn.q_proj.weight: expected [16, 10], got [10, 16]", changed(Q_PROJ, lambda t: t.T)),
    ("model.embed_tokens.weight: expected [12, 10], got [11, 10]", changed(EMBEDDING, lambda t: t[1:])),
    ("model.layers.0.layer_scalar: expected [1], got []",
     changed("model.layers.0.layer_scalar", lambda t: torch.tensor(1.0))),
    ("model.layers.0.self_attn.q_proj.weight: expected bfloat16 or float16 or float32, got float8_e4m3fn (other "
     "dtypes, quantised ones too, are not supported)", changed(Q_PROJ, lambda t: t.to(torch.float8_e4m3fn))),
    ("pre_projection.weight: expected bfloat16 or float16 or float32, got int8 (other dtypes, quantised ones "
     "too, are not supported)", changed("pre_projection.weight", lambda t: t.to(torch.int8))),
    ("model.norm.weight: expected bfloat16 or float16 or float32, got float64 (other dtypes, quantised ones "
     "too, are not supported)", changed("model.norm.weight", lambda t: t.double())),
    ("model.layers.0.self_attn.q_proj.weight: expected float32, got bfloat16 (pre_projection.weight is float32)",
     changed(Q_PROJ, lambda t: t.bfloat16())),
    ("masked_embedding.token_ordering: expected int32 or int64, got float32 (token ids)",
     changed(ORDERING, lambda t: t.float())),
    ("masked_embedding.token_ordering: expected every token of 0 to 11 once, got token 0 12 times",
     changed(ORDERING, torch.zeros_like)),
    ("masked_embedding.token_ordering: expected every token of 0 to 11 once, got token 12",
     changed(ORDERING, lambda t: t + 1)),
    ("masked_embedding.token_ordering: expected every token of 0 to 11 once, got token -1",
     changed(ORDERING, lambda t: t - 1)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "tensors"), TENSOR_ERRORS, ids=[m[:60] for m, _ in TENSOR_ERRORS])
def test_tensor_errors(tmp_path: Path, message: str, tensors: Tensors) -> None:
    check_refused(write(tmp_path, tensors=tensors), f"{tmp_path / 'model.safetensors'}: {message}")


def test_module_errors() -> None:
    pytest.importorskip("transformers")
    from parity_helpers import make_pair

    pair = make_pair()
    with pytest.raises(ArgumentError) as error:
        AssistantWeights.from_module(torch.nn.Linear(2, 2), pair.embed.weight)
    assert str(error.value) == (
        "AssistantWeights.from_module: hf_assistant: expected a transformers assistant, got Linear"
    )
    with pytest.raises(ArgumentError) as error:
        AssistantWeights.from_module(pair.assistant, pair.embed.weight.bfloat16())
    assert str(error.value) == (
        "AssistantWeights.from_module: embed_weight: expected float32, got bfloat16 (the assistant is float32)"
    )
    pair.assistant.masked_embedding.token_ordering.zero_()
    with pytest.raises(CheckpointError) as refused:
        AssistantWeights.from_module(pair.assistant, pair.embed.weight)
    assert str(refused.value).startswith("Gemma4AssistantForCausalLM: masked_embedding.token_ordering: expected every")
    pair.assistant.config.text_config.hidden_activation = "silu"
    with pytest.raises(CheckpointError) as refused:
        AssistantWeights.from_module(pair.assistant, pair.embed.weight)
    assert str(refused.value).startswith("Gemma4AssistantForCausalLM.config: text_config.hidden_activation: expected")


NO_PICKLES = (
    "pickles are refused, since loading one can run any code; load it where you trust it with transformers, and save "
    "it with model.save_pretrained(), which writes safetensors"
)


def test_missing_files(tmp_path: Path) -> None:
    check_refused(tmp_path / "nowhere",
                  f"{tmp_path / 'nowhere'}: no such folder (checkpoints are read from disk, never downloaded)")
    check_refused(tmp_path, f"{tmp_path}: config.json is missing")
    write(tmp_path)
    check_refused(tmp_path / "model.safetensors",
                  f"{tmp_path / 'model.safetensors'}: expected the checkpoint's folder, got a file")
    (tmp_path / "model.safetensors").unlink()
    check_refused(tmp_path, f"{tmp_path}: model.safetensors is missing, and so is model.safetensors.index.json")
    (tmp_path / "config.json").write_text('{"model_type": ', encoding="utf-8")
    check_refused(tmp_path, f"{tmp_path / 'config.json'}: not readable as JSON (...")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    check_refused(tmp_path, f"{tmp_path / 'config.json'}: not readable as JSON (...")
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    check_refused(tmp_path, f"{tmp_path / 'model.safetensors'}: not a whole safetensors file...")


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_are_refused(tmp_path: Path, zipped: bool) -> None:
    """Beside config.json, given by its path, and under the name of a safetensors file. None is ever loaded."""
    write(tmp_path)
    pickle = tmp_path / "pytorch_model.bin"
    torch.save(checkpoint_tensors(), pickle, _use_new_zipfile_serialization=zipped)
    assert zipfile.is_zipfile(pickle) == zipped
    assert load(tmp_path).config == PARSED  # beside safetensors it does no harm
    kind = "a zip archive, as torch.save writes it" if zipped else "a pickle"
    check_refused(pickle, f"{pickle}: is {kind}: {NO_PICKLES}")
    file = tmp_path / "model.safetensors"
    file.unlink()
    check_refused(tmp_path, f"{tmp_path}: has pytorch_model.bin but no model.safetensors: {NO_PICKLES}")
    pickle.rename(file)
    check_refused(tmp_path, f"{file}: is {kind}: {NO_PICKLES}")


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_files(tmp_path: Path, size: int) -> None:
    """Cut inside the length, the header and the last tensor."""
    file = write(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    check_refused(tmp_path, f"{file}: not a whole safetensors file, perhaps a download that was cut off (...")


def test_a_header_that_begins_like_a_pickle(tmp_path: Path) -> None:
    """A header of 0x0280 bytes starts with the first two bytes of a pickle of protocol 2."""
    write(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    wanted = (size // 65536 + 1) * 65536 + 0x0280
    padded = wanted.to_bytes(8, "little") + data[8 : 8 + size].ljust(wanted) + data[8 + size :]
    (tmp_path / "model.safetensors").write_bytes(padded)
    assert padded[:2] == b"\x80\x02" and load(tmp_path).config == PARSED


def shard(folder: Path) -> dict[str, str]:
    """Turn the folder's model.safetensors into two shards and an index; name -> file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {name: files[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return weight_map


def test_shards(tmp_path: Path) -> None:
    whole = load(write(tmp_path))
    weight_map = shard(tmp_path)
    check_equal(load(tmp_path), whole)
    index = tmp_path / "model.safetensors.index.json"
    one, two = (tmp_path / name for name in sorted(set(weight_map.values())))

    def check(message: str, content: Any = None) -> None:
        before = index.read_text()
        if content is not None:
            index.write_text(content if isinstance(content, str) else json.dumps(content))
        check_refused(tmp_path, message)
        index.write_text(before)

    name = next(n for n, f in weight_map.items() if f == two.name)
    check(f"{one}: {name} is missing, which {index.name} places there", {"weight_map": {**weight_map, name: one.name}})
    check(f"{index}: not readable as JSON (...", "{")
    check(f"{index}: weight_map is missing", {"metadata": {}})
    check(f"{index}: weight_map is missing", [1])
    check(f"{index}: weight_map: {name}: expected the name of a file in the same folder, got '../{two.name}'",
          {"weight_map": {**weight_map, name: f"../{two.name}"}})
    fewer = load_file(two)
    fewer.pop(name)
    save_file(fewer, two)
    check(f"{index}: 1 missing tensor: {name}", {"weight_map": {n: f for n, f in weight_map.items() if n != name}})
    save_file({**fewer, **load_file(one)}, two)
    check(f"{two}: {min(load_file(one))} is in {one.name} too")
    two.write_bytes(two.read_bytes()[:-3])
    check(f"{two}: not a whole safetensors file...")
    two.unlink()
    check(f"{two}: no such file")


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"^reading a checkpoint needs safetensors: pip install safetensors "):
        load(tmp_path)


@pytest.mark.parametrize(
    ("embed", "options", "message"),
    [
        (embedding(width=10), {}, "embed_weight: expected [12, 6], got [12, 10] (the target's: backbone_hidden_size is "
         "6, the assistant's own width 10)"),
        (embedding(vocab=13), {}, "embed_weight: expected [12, 6], got [13, 6] (the target's: backbone_hidden_size is "
         "6, the assistant's own width 10)"),
        (embedding()[0], {}, "embed_weight: expected [12, 6], got [6] (the target's: backbone_hidden_size is 6, the "
         "assistant's own width 10)"),
        (torch.nn.Embedding(12, 6), {}, "embed_weight: expected a tensor, the target's embedding, got Embedding"),
        (embedding(torch.bfloat16), {}, "embed_weight: expected float32, got bfloat16 (the checkpoint is float32; "
         "dtype= converts)"),
        (embedding(torch.float64), {"dtype": torch.float32}, "embed_weight: expected bfloat16 or float16 or float32, "
         "got float64"),
        (embedding(width=12)[:, ::2], {}, "embed_weight: expected a contiguous last dimension, got strides [12, 2]"),
        (embedding(), {"dtype": torch.float64}, "dtype: expected bfloat16 or float16 or float32, got torch.float64"),
    ],
)  # fmt: skip
def test_embedding_errors(tmp_path: Path, embed: Any, options: dict[str, Any], message: str) -> None:
    write(tmp_path)
    with pytest.raises(ArgumentError) as error:
        load(tmp_path, embed_weight=embed, **options)
    assert str(error.value) == f"AssistantWeights.from_pretrained: {message}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "E3B"}, "name: expected one of E2B, E4B, 12B, 26B-A4B, 31B, tiny, tiny-dense, got 'E3B'"),
        ({"vocab": 63}, "vocab: expected a positive multiple of 8, got 63 (the number of centroids)"),
        ({"vocab": 0}, "vocab: expected a positive multiple of 8, got 0 (the number of centroids)"),
        ({"dtype": torch.int8}, "dtype: expected bfloat16 or float16 or float32, got torch.int8"),
        ({"embed_weight": torch.zeros(64, 32)}, "embed_weight: expected [64, 40], got [64, 32] (the target's: "
         "backbone_hidden_size is 40, the assistant's own width 32)"),
        ({"embed_weight": torch.zeros(64, 40)}, "embed_weight: expected bfloat16, got float32 (dtype is bfloat16)"),
        ({"embed_weight": torch.zeros(64, 40, dtype=torch.bfloat16, device="meta")},
         "embed_weight: expected cpu, got meta (the device asked for is on cpu)"),
    ],
)  # fmt: skip
def test_synthetic_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        AssistantWeights.synthetic(**{"name": "tiny", **options})
    assert str(error.value) == f"AssistantWeights.synthetic: {message}"

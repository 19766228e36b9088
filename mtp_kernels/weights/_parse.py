"""From the config of a transformers assistant, as plain JSON, to an AssistantConfig.

Two forms are in use: up to transformers 5.12 at least the full layers' sizes are `global_head_dim` and
`num_global_key_value_heads` of text_config; from 5.17 at the latest they are overrides in its `per_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ._config import FULL, SLIDING, AssistantConfig, AttentionConfig
from ._errors import refuse

ARCHITECTURES = {
    "gemma4_assistant": ("Gemma4AssistantForCausalLM", "gemma4_text"),
    "gemma4_unified_assistant": ("Gemma4UnifiedAssistantForCausalLM", "gemma4_unified_text"),
}
# What a key of text_config may say; a missing key is transformers' default, which is the first of these (but for
# hidden_size_per_layer_input: there an assistant without the key has no such tensors either).
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False, None),
    "enable_moe_block": (False, None),
    "use_double_wide_mlp": (False, None),
    "hidden_size_per_layer_input": (0, None),
    # "vision" is about image tokens, which an assistant never sees; "all" would change the window.
    "use_bidirectional_attention": (None, "vision"),
}
OVERRIDES = ("num_key_value_heads", "head_dim")  # that per_layer_config may have


class Section:
    """A JSON object of a config whose values are checked as they are read."""

    def __init__(self, where: object, values: object, prefix: str = "") -> None:
        if not isinstance(values, Mapping):
            refuse(where, f"{prefix.removesuffix('.') or 'the config'}: expected an object, got {values!r}")
        self.where, self.values, self.prefix = where, values, prefix

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def required(self, key: str) -> Any:
        if key not in self.values:
            refuse(self.where, f"{self.prefix}{key} is missing")
        return self.values[key]

    def section(self, key: str) -> Section:
        return Section(self.where, self.required(key), f"{self.prefix}{key}.")

    def integer(self, key: str) -> int:
        value = self.required(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.wrong(key, "a positive integer")
        return value

    def number(self, key: str) -> float:
        value = self.required(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            self.wrong(key, "a positive number")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.required(key)
        if not isinstance(value, bool):
            self.wrong(key, "true or false")
        return value

    def wrong(self, key: str, expected: str, why: str = "") -> NoReturn:
        self.wrong_value(key, expected, repr(self.get(key)), why)

    def wrong_value(self, key: str, expected: str, got: object, why: str = "") -> NoReturn:
        refuse(self.where, f"{self.prefix}{key}: expected {expected}, got {got}" + (f" ({why})" if why else ""))


def parse_config(where: object, values: object) -> AssistantConfig:
    """Check and read a config; `where` (a file, a module) begins every message."""
    top = Section(where, values)
    architecture, text_type = _architecture(top)
    text = top.section("text_config")
    if text.get("model_type", text_type) != text_type:
        text.wrong("model_type", repr(text_type))
    for key, allowed in SUPPORTED.items():
        if text.get(key, allowed[0]) not in allowed:
            text.wrong(key, repr(allowed[0]), "not supported")
    if top.get("quantization_config") is not None:
        refuse(where, "quantization_config: quantised checkpoints are not supported")
    layer_types = _layer_types(text)
    if text.get("num_kv_shared_layers", 0) not in (0, len(layer_types)):
        text.wrong("num_kv_shared_layers", str(len(layer_types)), "an assistant has no KV of its own")
    vocab, num_qo_heads = text.integer("vocab_size"), text.integer("num_attention_heads")
    num_centroids, num_active = _centroids(top, vocab)
    cap = text.get("final_logit_softcapping")
    return AssistantConfig(
        architecture=architecture,
        vocab=vocab,
        hidden=text.integer("hidden_size"),
        intermediate=text.integer("intermediate_size"),
        backbone=top.integer("backbone_hidden_size"),
        num_qo_heads=num_qo_heads,
        layer_types=layer_types,
        attention=_attention(text, layer_types, num_qo_heads),
        sliding_window=text.integer("sliding_window"),
        num_centroids=num_centroids,
        num_active=num_active,
        norm_eps=text.number("rms_norm_eps"),
        logits_soft_cap=0.0 if cap is None else text.number("final_logit_softcapping"),
        tied=top.boolean("tie_word_embeddings") if "tie_word_embeddings" in top.values else True,
    )


def _architecture(top: Section) -> tuple[str, str]:
    """The class and its text_config's model_type."""
    model_type = top.required("model_type")
    if model_type not in ARCHITECTURES:
        top.wrong("model_type", " or ".join(map(repr, ARCHITECTURES)), "is this the assistant's config?")
    architecture, text_type = ARCHITECTURES[model_type]
    if (top.get("architectures") or [architecture]) != [architecture]:
        top.wrong("architectures", repr([architecture]), f"model_type is {model_type!r}")
    return architecture, text_type


def _layer_types(text: Section) -> tuple[str, ...]:
    count = text.integer("num_hidden_layers")
    types = text.required("layer_types")
    if not isinstance(types, (list, tuple)) or len(types) != count or any(t not in (SLIDING, FULL) for t in types):
        text.wrong("layer_types", f"{count} of {SLIDING!r} and {FULL!r}")
    if types[-1] != FULL:
        text.wrong("layer_types", f"{FULL!r} at the end", "transformers forces it")
    return tuple(types)


def _centroids(top: Section, vocab: int) -> tuple[int, int]:
    """(num_centroids, num_active), zeros for a dense head."""
    if not top.boolean("use_ordered_embeddings"):
        return 0, 0
    num_centroids, num_active = top.integer("num_centroids"), top.integer("centroid_intermediate_top_k")
    if vocab % num_centroids:
        top.wrong("num_centroids", f"a divisor of the vocabulary's {vocab}")
    if num_active > num_centroids:
        top.wrong("centroid_intermediate_top_k", f"at most {num_centroids}", "num_centroids")
    return num_centroids, num_active


def _attention(text: Section, layer_types: tuple[str, ...], num_qo_heads: int) -> tuple[AttentionConfig, ...]:
    shapes = _kv_shapes(text, layer_types)
    rope = text.section("rope_parameters")
    made = []
    for layer_type in dict.fromkeys(layer_types):
        of_type = {s for s, t in zip(shapes, layer_types) if t == layer_type}
        if len(of_type) > 1:
            got = " and ".join(map(str, sorted(of_type)))
            text.wrong_value("per_layer_config", f"one (num_key_value_heads, head_dim) for all of {layer_type}", got)
        num_kv_heads, head_dim = of_type.pop()
        if num_qo_heads % num_kv_heads:
            text.wrong("num_attention_heads", f"a multiple of the {num_kv_heads} KV heads of {layer_type}")
        if head_dim % 2:
            text.wrong_value("head_dim", f"an even number for {layer_type}", head_dim)
        made.append(AttentionConfig(layer_type, num_kv_heads, head_dim, *_rope(rope.section(layer_type), head_dim)))
    return tuple(made)


def _kv_shapes(text: Section, layer_types: tuple[str, ...]) -> list[tuple[int, int]]:
    """(num_kv_heads, head_dim) of every layer, from either form."""
    if "per_layer_config" in text.values:
        overrides = _overrides(text.section("per_layer_config"), len(layer_types))
        return [
            tuple((over if key in over.values else text).integer(key) for key in OVERRIDES)  # type: ignore[misc]
            for over in overrides
        ]
    shapes = {SLIDING: (text.integer("num_key_value_heads"), text.integer("head_dim"))}
    own_heads = text.get("attention_k_eq_v") and text.get("num_global_key_value_heads") is not None
    heads = text.integer("num_global_key_value_heads" if own_heads else "num_key_value_heads")
    shapes[FULL] = (heads, text.integer("global_head_dim"))
    return [shapes[t] for t in layer_types]


def _overrides(per_layer: Section, num_layers: int) -> list[Section]:
    """What per_layer_config says of each layer. Its keys are the layers' numbers, perhaps padded with zeros."""
    found = [Section(per_layer.where, {}, per_layer.prefix) for _ in range(num_layers)]
    for key in per_layer.values:
        if not str(key).isdecimal() or int(key) >= num_layers:
            per_layer.wrong(key, f"a layer's number below {num_layers} as the key")
        over = found[int(key)] = per_layer.section(key)
        for name, value in over.values.items():
            if name not in OVERRIDES and not (name == "skip" and not value):
                over.wrong(name, "no such override", "not supported")
    return found


def _rope(rope: Section, head_dim: int) -> tuple[float, int, float]:
    """(theta, pairs that turn, factor)."""
    kind = rope.required("rope_type")
    if kind == "default":
        return rope.number("rope_theta"), head_dim // 2, 1.0
    if kind != "proportional":
        rope.wrong("rope_type", "'default' or 'proportional'")
    part = rope.number("partial_rotary_factor") if "partial_rotary_factor" in rope.values else 1.0
    pairs = int(part * head_dim // 2)
    if not 0 < pairs <= head_dim // 2:
        rope.wrong("partial_rotary_factor", f"1 to {head_dim // 2} pairs of head_dim {head_dim}")
    return rope.number("rope_theta"), pairs, rope.number("factor") if "factor" in rope.values else 1.0

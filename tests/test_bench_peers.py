"""The bench's peers: found or absent with a reason, engines loaded from (fake) wheels, transformers' step."""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_kernels.bench.case import Call, Unsupported
from mtp_kernels.bench.peers import __main__ as command
from mtp_kernels.bench.peers import find_peers, flashinfer, sglang, slim
from mtp_kernels.bench.peers._attention import scratch
from mtp_kernels.bench.peers._wheel import load_modules

from mtp_kernels import AssistantWeights, KVView
from mtp_kernels.draft import draft_step
from mtp_kernels.weights import PRESETS, AssistantConfig

ops = torch.ops.mtp
UNIFIED = replace(PRESETS["tiny-dense"], architecture="Gemma4UnifiedAssistantForCausalLM")  # the 12B's class

# Modules with the names of the engines', which import what the real ones import, and compute something simple.
VLLM = {
    "vllm/v1/attention/ops/triton_attention_helpers.py": """
from vllm.triton_utils import tl, triton
HELP = 2
""",
    "vllm/v1/attention/ops/triton_unified_attention.py": """
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.triton_attention_helpers import HELP
from vllm.v1.kv_cache_interface import KVQuantMode
logger = init_logger(__name__)
fp8 = current_platform.fp8_dtype()
CALLS = []
def unified_attention(q, k, v, out, starts, longest_q, lengths, longest, scale, causal, window, tables, softcap,
                      *scales, **options):
    CALLS.append((starts.tolist(), lengths.tolist(), tables.tolist(), window, options["seq_threshold_3D"]))
    out.copy_(q * HELP)
""",
}
SGLANG = {
    "sglang/kernels/ops/attention/score_mod.py": "import triton\ndef unpack_aux_tensors(a, b): return 1\n",
    "sglang/kernels/ops/attention/decode_attention.py": """
import triton
from sglang.kernels.ops.attention.score_mod import unpack_aux_tensors
from sglang.srt.environ import envs
from sglang.srt.utils import get_device_core_count, is_gfx95_supported, is_gfx1250_supported, is_hip
assert not is_hip() and not envs.SOMETHING.get()
CALLS = []
def decode_attention_fwd(q, k, v, out, indptr, indices, partial, lse, num_splits, splits, *scales):
    CALLS.append((k.shape, indptr.tolist(), indices.tolist(), num_splits.tolist(), splits, scales))
    out.copy_(q * 3)
""",
}
SGLANG_TREE = {
    "sglang/srt/utils/common.py": """
import a_package_that_nobody_has
def fast_topk(values, topk, dim):
    return torch.topk(values, topk, dim=dim)
""",
    "sglang/srt/speculative/spec_utils.py": """
import a_package_that_nobody_has
def _select_top_k_tokens_first(p: Nobody, ids, state, k):
    return ids.flatten(), state.repeat_interleave(k, 0), p, (p[:, None], ids, torch.arange(-1, k).expand(len(p), -1))
@torch.no_grad()
def _select_top_k_tokens_later(i, p, ids, state, scores, k):
    sums = scores[:, :, None] * p.view(-1, k, k)
    best, where = fast_topk(sums.flatten(1), k, dim=-1)
    ids = ids.view(-1, k * k)
    rows = where // k + torch.arange(len(where))[:, None] * k
    tree = sums, ids, where + k * k * (i - 1) + k
    return ids.gather(1, where).flatten(), state[rows.flatten()], best, tree
def select_top_k_tokens(i, p, ids, state, scores, k):
    if i == 0:
        return _select_top_k_tokens_first(p, ids, state, k)
    return _select_top_k_tokens_later(i, p, ids, state, scores, k)
""",
}


def metadata(name: str, version: str) -> dict[str, str]:
    text = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nName: of nothing\n"
    return {f"{name}-{version}.dist-info/METADATA": text}


def write_wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def write_folder(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package of that name, where there is none: the fakes only import it. Kernels may run on the CPU."""
    if importlib.util.find_spec("triton") is None:
        write_folder(tmp_path / "stand-in", {"triton/__init__.py": "", "triton/language.py": ""})
        monkeypatch.syspath_prepend(str(tmp_path / "stand-in"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")


Write = Callable[[Path, dict[str, str]], Path]
each_form = pytest.mark.parametrize("write", [write_wheel, write_folder], ids=["whl", "folder"])


def status(name: str, *wheels: Path) -> tuple[str, str]:
    found = {s.name: s for s in find_peers(wheels).status}[name]
    return found.version, found.why_absent


def problem(batch: int = 2, pages: int = 4, page_size: int = 2) -> dict[str, Any]:
    k, v = torch.randn(2, batch * pages, page_size, 2, 64).unbind()
    table = torch.arange(batch * pages, dtype=torch.int32).flip(0).view(batch, pages)
    return {"k_cache": k, "v_cache": v, "block_table": table, "seq_lens": torch.tensor([3, 8], dtype=torch.int32)}


OPTIONS = {"num_qo_heads": 4, "rows": 1, "window_left": -1, "sm_scale": 1.0, "max_seq_len": 8}


def calls(attend: Any) -> list[Any]:
    """What the fake module that `attend` calls has recorded."""
    return next(cell.cell_contents.CALLS for cell in attend.__closure__ if hasattr(cell.cell_contents, "CALLS"))


def test_every_known_peer_is_listed() -> None:
    peers = find_peers()
    assert [s.name for s in peers.status] == ["flashinfer", "vllm", "sglang", "transformers"]
    for found in peers.status:
        assert found.version or found.why_absent


def test_an_absent_peer_says_why_and_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    peers = find_peers()
    reasons = {s.name: s.why_absent for s in peers.status}
    hint = "not installed; --peer-wheel can load it from its wheel"
    nothing = "not installed"
    assert reasons == {"flashinfer": nothing, "vllm": hint, "sglang": hint, "transformers": nothing}
    assert peers.attention_variants("vllm") == {}
    assert peers.op("sglang", "tree_expand") is None
    with pytest.raises(Unsupported, match=r"^vllm: not installed; --peer-wheel"):
        peers.attention("vllm")
    with pytest.raises(Unsupported, match=r"^transformers: not installed"):
        peers.transformers_step(AssistantWeights.synthetic("tiny"))


def test_a_broken_package_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """find_spec raises ValueError for a name that sys.modules holds without a spec."""
    broken = type(sys)("flashinfer")
    broken.__spec__ = None
    monkeypatch.setitem(sys.modules, "flashinfer", broken)
    assert status("flashinfer") == ("", "not installed")


def test_engines_need_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "v.whl", {**VLLM, **metadata("vllm", "0.33.0")})
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "triton" else real(name, *a))
    assert status("vllm", wheel) == ("0.33.0", "needs triton, which is not installed")


@pytest.mark.parametrize(
    ("files", "got"),
    [
        (None, "no such file or folder"),
        ("no zip", "a file that is no zip archive"),
        ({"vllm/a.py": ""}, r"no \*.dist-info/METADATA in it"),
        (metadata("numpy", "2.0"), "a wheel of numpy 2.0"),
    ],
)
def test_a_bad_wheel_is_refused(tmp_path: Path, files: Any, got: str) -> None:
    path = tmp_path / "x.whl"
    if isinstance(files, str):
        path.write_text(files)
    elif files:
        write_wheel(path, files)
    wanted = r"expected a .whl file \(whole or slim\) or the folder of an unpacked wheel of vllm or sglang"
    with pytest.raises(ValueError, match=f"^--peer-wheel: {path}: {wanted}, got {got}$"):
        find_peers([path])


def test_an_empty_folder_and_one_of_two_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--peer-wheel: .*, got no \*.dist-info/METADATA in it$"):
        find_peers([tmp_path])
    write_folder(tmp_path, {**metadata("vllm", "1"), **metadata("sglang", "2")})
    with pytest.raises(ValueError, match=r"--peer-wheel: .*, got a wheel of (vllm 1, sglang 2|sglang 2, vllm 1)$"):
        find_peers([tmp_path])


def test_two_wheels_of_one_engine_are_refused(tmp_path: Path) -> None:
    one, two = (write_wheel(tmp_path / n, {**VLLM, **metadata("vllm", "1")}) for n in ("a.whl", "b.whl"))
    with pytest.raises(ValueError, match=f"^--peer-wheel: {two}: expected one wheel of vllm, got {one} too$"):
        find_peers([one, two])


@each_form
def test_a_wheel_of_another_layout_is_absent(tmp_path: Path, write: Write) -> None:
    first = next(iter(VLLM))
    wheel = write(tmp_path / "w", {first: "", **metadata("vllm", "0.1")})
    assert status("vllm", wheel) == ("0.1", "its wheel lacks vllm/v1/attention/ops/triton_unified_attention.py")


@each_form
def test_vllm_from_its_wheel(tmp_path: Path, write: Write) -> None:
    wheel = write(tmp_path / "w", {**VLLM, **metadata("vllm", "0.33.0")})
    assert status("vllm", wheel) == ("0.33.0", "")
    variants = find_peers([wheel]).attention_variants("vllm")
    assert list(variants) == ["vllm"]
    one = problem()
    attend = variants["vllm"](**one, **{**OPTIONS, "rows": 2, "window_left": 4})
    q = torch.randn(2, 2, 4, 64)
    assert torch.equal(attend(q), q * 2)
    table = one["block_table"].tolist()
    # each request twice, with one query each; two KV heads
    expected = ([0, 1, 2, 3, 4], [3, 3, 8, 8], [table[0], table[0], table[1], table[1]], (4, 0), 64)
    assert calls(attend) == [expected]


@each_form
def test_sglang_from_its_wheel(tmp_path: Path, write: Write) -> None:
    wheel = write(tmp_path / "w", {**SGLANG, **metadata("sglang", "0.5.23")})
    variants = find_peers([wheel]).attention_variants("sglang")
    assert list(variants) == ["sglang", "sglang-32"]
    for splits, make in zip((8, 32), variants.values()):
        attend = make(**problem(), **{**OPTIONS, "window_left": 3, "sm_scale": 0.5})
        q = torch.randn(2, 1, 4, 64)
        assert torch.equal(attend(q), q * 3)
        # The table holds pages 7, 6, 5, 4 and 3, 2, 1, 0 of two slots; the window keeps the last four keys.
        expected = ((16, 2, 64), [0, 3, 7], [14, 15, 12, 2, 3, 0, 1], [splits] * 2, splits, (0.5, 1.0, 1.0))
        assert calls(attend)[-1] == expected


def test_loading_leaves_no_modules_behind(tmp_path: Path) -> None:
    """Neither the stubs nor the engine's modules; and a real one that was imported before is still there."""
    first = "from engine.other import x\nimport engine.sub.b as b\ny = x + b.z"
    root = write_folder(tmp_path, {"engine/sub/a.py": first, "engine/sub/b.py": "z = 2"})
    real = sys.modules["engine"] = type(sys)("engine")
    try:
        b, a = load_modules(root, ["engine/sub/b.py", "engine/sub/a.py"], {"engine.other": {"x": 1}})
        assert (a.y, b.z) == (3, 2)
        assert {n: m for n, m in sys.modules.items() if n.startswith("engine")} == {"engine": real}
        with pytest.raises(ImportError):
            load_modules(root, ["engine/sub/a.py"], {})
        assert sys.modules["engine"] is real
    finally:
        del sys.modules["engine"]


def test_an_engine_that_does_not_import_is_unsupported(tmp_path: Path) -> None:
    broken = {**VLLM, next(iter(VLLM)): "import a_package_that_nobody_has"}
    wheel = write_wheel(tmp_path / "w.whl", {**broken, **metadata("vllm", "0.33.0")})
    make = find_peers([wheel]).attention("vllm")
    with pytest.raises(Unsupported, match=r"vllm: import failed: ModuleNotFoundError: .*a_package_that_nobody_has"):
        make(**problem(), **OPTIONS)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_triton_attention_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    files = {"vllm": VLLM, "sglang": SGLANG}[name]
    wheel = write_wheel(tmp_path / "w.whl", {**files, **metadata(name, "1")})
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(Unsupported, match="need a GPU"):
        find_peers([wheel]).attention(name)(**problem(), **OPTIONS)


def test_flashinfer_needs_a_gpu() -> None:
    with pytest.raises(Unsupported, match="FlashInfer needs a GPU"):
        flashinfer.attention(**problem(), **{**OPTIONS, "q_dtype": torch.bfloat16})


def test_flashinfers_page_lists() -> None:
    tables = torch.tensor([[5, -1, 7], [9, 3, 10**6]], dtype=torch.int32)
    indptr, indices, last = flashinfer.page_lists(tables, torch.tensor([1, 12]), 4, 10)
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 1, 4], [5, 9, 3, 9], [1, 4])
    assert {t.dtype for t in (indptr, indices, last)} == {torch.int32}
    with pytest.raises(Unsupported, match="a request without keys"):
        flashinfer.page_lists(tables, torch.tensor([0, 12]), 4, 10)


def test_libcuda_is_linked_unless_library_path_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "libcuda.so.1"
    driver.touch()
    monkeypatch.setattr(flashinfer, "find_libcuda", lambda: driver)
    monkeypatch.setenv("LIBRARY_PATH", "/nowhere")
    flashinfer.link_libcuda()
    first, second = os.environ["LIBRARY_PATH"].split(os.pathsep)
    assert second == "/nowhere" and (Path(first) / "libcuda.so").resolve() == driver
    flashinfer.link_libcuda()
    assert os.environ["LIBRARY_PATH"].split(os.pathsep) == [first, second]


def test_libcuda_is_found_in_the_loaders_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcuda.so.1").touch()
    monkeypatch.setenv("PATH", "")  # no ldconfig
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere{os.pathsep}{tmp_path}")
    assert flashinfer.find_libcuda() == tmp_path / "libcuda.so.1"


def test_sglang_wants_slots_at_one_stride() -> None:
    cache = torch.randn(4, 3, 2, 8)
    assert sglang.slots(cache).shape == (12, 2, 8)
    for other in (torch.randn(4, 2, 3, 8).transpose(1, 2), torch.randn(4, 2, 3, 2, 8)[:, 0]):
        with pytest.raises(Unsupported, match="one stride from slot to slot"):
            sglang.slots(other)


def test_scratch_is_shared_and_grows() -> None:
    small = scratch("a test", 2, 3, device=torch.device("cpu"))
    assert scratch("a test", 3, 2, device=torch.device("cpu")).data_ptr() == small.data_ptr()
    assert scratch("a test", 100, device=torch.device("cpu")).shape == (100,)
    assert small.shape == (2, 3)


@pytest.mark.parametrize("topk", [2, 3])
def test_sglangs_tree_expand_gives_the_ops_results(tmp_path: Path, topk: int) -> None:
    wheel = write_wheel(tmp_path / "w.whl", {**SGLANG, **SGLANG_TREE, **metadata("sglang", "0.5.23")})
    peer = find_peers([wheel]).op("sglang", "tree_expand")
    assert peer is not None
    bind, results = peer
    offset, kwargs = 0, {}
    for step in range(3):
        rows = topk if step else 1
        logprobs = torch.randn(2, rows, 20).log_softmax(-1).topk(topk).values
        call = Call((logprobs, torch.randint(99, (2, rows, topk)), offset), dict(kwargs))
        expected = ops.tree_expand(*call.args, **call.kwargs)
        got = results(bind(call)())
        assert got[5] is None  # SGLang has no parents of candidates
        for one, other in zip(got[:5], expected):
            torch.testing.assert_close(one, other)
        kwargs, offset = {"scores": expected[2], "frontier": expected[3]}, offset + rows * topk
    with pytest.raises(Unsupported, match="cand_offset 1 is not that of a step"):
        bind(Call((logprobs, call.args[1], 1), dict(kwargs)))


def test_tree_functions_that_a_wheel_lacks(tmp_path: Path) -> None:
    """A wheel without the file, with a file without the function, and ops that SGLang has nothing for."""
    wheel = write_wheel(tmp_path / "w.whl", {**SGLANG, **metadata("sglang", "0.5.23")})
    peers = find_peers([wheel])
    call = Call((torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), 0))
    peer = peers.op("sglang", "tree_expand")
    assert peer is not None
    with pytest.raises(Unsupported, match=r"its wheel lacks sglang/srt/speculative/spec_utils.py"):
        peer[0](call)
    assert peers.op("sglang", "commit") is None and peers.op("vllm", "tree_expand") is None
    emptied = {**SGLANG_TREE, list(SGLANG_TREE)[1]: "x = 1\n"}
    peer = find_peers([write_wheel(tmp_path / "e.whl", {**SGLANG, **emptied, **metadata("sglang", "2")})]).op(
        "sglang", "tree_expand"
    )
    assert peer is not None
    with pytest.raises(Unsupported, match=r"of this version has no .*select_top_k_tokens"):
        peer[0](call)


def test_slim_keeps_what_the_loaders_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"vllm/big.so": "x" * 9999, "vllm/__init__.py": "raise ImportError"}
    whole = write_wheel(tmp_path / "w.whl", {**VLLM, **more, **metadata("vllm", "0.33.0")})
    out = tmp_path / "new" / "slim.whl"
    assert command.main(["slim", str(out), str(whole)]) == 0
    assert capsys.readouterr().out == f"{out}: {out.stat().st_size} bytes\n"
    with zipfile.ZipFile(out) as archive:
        assert sorted(archive.namelist()) == sorted([*VLLM, *metadata("vllm", "0.33.0")])
    assert status("vllm", out) == ("0.33.0", "")
    again = tmp_path / "again.whl"
    slim(again, out)
    assert again.read_bytes() == out.read_bytes()


def test_slim_of_no_wheel_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["slim", str(tmp_path / "out.whl"), str(tmp_path / "none.whl")])
    assert f"--peer-wheel: {tmp_path / 'none.whl'}: expected a .whl file" in capsys.readouterr().err


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("config", [PRESETS["tiny"], PRESETS["tiny-dense"], UNIFIED], ids=["tiny", "dense", "unified"])
def test_transformers_step_is_ours(config: AssistantConfig, ordered: bool) -> None:
    """A batch in one forward(), over all keys, more than the window."""
    pytest.importorskip("transformers")
    weights = AssistantWeights.synthetic(config, dtype=torch.float32)
    weights = weights.reordered() if ordered else weights
    batch, length = 3, 21
    dense, views = {}, {}
    for layer_type, window in (("sliding_attention", config.sliding_window), ("full_attention", -1)):
        heads, dim = config.kv_shape(layer_type)
        k, v = torch.randn(2, batch, heads, length, dim).unbind()
        dense[layer_type] = (k * dim**-0.5, v)
        lengths = torch.full((batch,), length, dtype=torch.int32)
        views[layer_type] = KVView.dense(*dense[layer_type], lengths, window_left=window)
    ids, state = torch.randint(config.vocab, (batch,)), torch.randn(batch, config.backbone)
    positions = torch.full((batch,), length)
    next_ids, next_state = find_peers().transformers_step(weights)(ids, state, positions, dense)
    ours = draft_step(weights, views, ids[:, None], state[:, None], positions)
    assert next_ids.tolist() == ours.token_ids[:, 0, 0].tolist()
    torch.testing.assert_close(next_state, ours.state[:, 0], rtol=1e-4, atol=1e-4)
    assert torch.get_default_dtype() == torch.float32

"""The core under every op: the chooser, report() and supports(), schemas, names and files, overlap, shared maths."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_bits, call, debug, environment, forced, served_by
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mtp_kernels
from mtp_kernels import _native
from mtp_kernels.ops import OPS, ArgumentError
from mtp_kernels.ops._contents import debug_enabled
from mtp_kernels.ops._overlap import overlaps
from mtp_kernels.ops._registry import IMPLEMENTATIONS, Kernel, Op, _out_names, _out_schema, cpp_kernel
from mtp_kernels.reference import _math

ALL_OPS = [
    "draft_attention", "pre_project", "norm_linear", "norm_geglu", "linear_norm_add", "post_project", "centroid_topk",
    "centroid_logits", "lm_head_topk", "sample_logits", "tree_expand", "tree_build", "verify_greedy", "verify_sample",
    "commit",
]
PACKAGES = ("ops", "reference", "triton_ops", "bench.ops")  # with a file an op
NAME = "norm_linear"  # the op whose table the tests below fill
ARGS = (torch.ones(2, 3), torch.ones(3), 1e-6, torch.ones(4, 3))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Op]:
    """Gives norm_linear another table of kernels for the time of a test."""
    monkeypatch.delenv("MTP_FORCE_IMPL", raising=False)

    def fill(*kernels: Kernel) -> Op:
        monkeypatch.setattr(OPS[NAME], "kernels", kernels)
        monkeypatch.setattr(OPS[NAME], "loaded", {})
        return OPS[NAME]

    return fill


def kernel(implementation: str, value: float = 5.0, devices: tuple[str, ...] = ("cpu",), absent: str = "",
           refuses: str = "", loads: list[str] | None = None) -> Kernel:
    """A kernel of norm_linear that fills the result with `value`; or says why it is absent or refuses to serve."""

    def load() -> Callable[..., Tensor]:
        if loads is not None:
            loads.append(implementation)
        if absent:
            raise ImportError(absent)
        return lambda x, norm_weight, eps, weight: x.new_full((*x.shape[:-1], weight.size(0)), value)

    def serves(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> str:
        return refuses

    return Kernel(implementation, devices, load, serves)


def first_value() -> float:
    return float(call(NAME, *ARGS)[0, 0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_forced_implementation_serves(table: Callable[..., Op], implementation: str) -> None:
    others = [kernel(i, value=7.0) for i in IMPLEMENTATIONS[1:] if i != implementation]
    table(*others, *([] if implementation == "reference" else [kernel(implementation)]))
    with forced(implementation):
        assert served_by(NAME, *ARGS) == implementation
        value = first_value()
        out = torch.empty(2, 4)
        torch.ops.mtp.norm_linear.out(*ARGS, output=out)
    assert value == float(out[0, 0]) == pytest.approx(3.0 if implementation == "reference" else 5.0, abs=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_a_forced_implementation_raises_where_it_cannot_serve(table: Callable[..., Op], implementation: str) -> None:
    start = f"norm_linear: MTP_FORCE_IMPL={implementation}: "
    other = kernel("cpu" if implementation != "cpu" else "triton")
    for kernels, why in (
        ((other,), f"this op has no {implementation} kernel"),
        ((other, kernel(implementation, devices=("cuda",))), f"the {implementation} kernel does not run on cpu"),
        ((kernel(implementation, absent="nothing was built"), other), "nothing was built"),
        ((other, kernel(implementation, refuses="4 rows are too many")), "4 rows are too many"),
    ):
        table(*kernels)
        with forced(implementation), pytest.raises(RuntimeError) as error:
            call(NAME, *ARGS)
        assert str(error.value) == start + why
        assert first_value() == 5.0  # not forced, the other one serves


@pytest.mark.parametrize("name", ["cpp", "CPU", "reference,cpu"])
def test_an_unknown_forced_name_raises(table: Callable[..., Op], name: str) -> None:
    table(kernel("cpu"))
    with forced(name), pytest.raises(RuntimeError) as error:
        call(NAME, *ARGS)
    assert str(error.value) == f"norm_linear: MTP_FORCE_IMPL={name}: expected one of reference, cpu, triton, cuda"
    with forced(""):  # set to nothing is not set
        assert first_value() == 5.0


def test_the_first_kernel_that_serves_is_chosen(table: Callable[..., Op]) -> None:
    table(kernel("cuda", devices=("cuda",)), kernel("triton", absent="no triton"), kernel("cpu", refuses="no"))
    assert served_by(NAME, *ARGS) == "reference"
    table(kernel("triton", value=1.0), kernel("cpu", value=2.0))
    assert first_value() == 1.0
    table(kernel("triton", value=1.0, refuses="not this"), kernel("cpu", value=2.0))
    assert first_value() == 2.0
    table(kernel("cpu", value=1.0, refuses="not this"), kernel("cpu", value=2.0))
    assert first_value() == 2.0


def test_a_kernel_is_loaded_once_and_only_when_asked(table: Callable[..., Op]) -> None:
    loads: list[str] = []
    table(kernel("triton", absent="no triton", loads=loads), kernel("cpu", loads=loads),
          kernel("cuda", devices=("cuda",), loads=loads))
    assert loads == []
    for _ in range(3):
        first_value()
    assert loads == ["triton", "cpu"]


def test_an_argument_error_comes_before_any_kernel(table: Callable[..., Op]) -> None:
    loads: list[str] = []
    table(kernel("cpu", loads=loads))
    with pytest.raises(ArgumentError):
        call(NAME, ARGS[0], ARGS[1][:2], *ARGS[2:])
    assert loads == []


def test_results_have_the_strides_of_the_fake(table: Callable[..., Op]) -> None:
    table(Kernel("cpu", ("cpu",), lambda: lambda x, norm_weight, eps, weight: torch.ones(4, 2).t()))
    assert call(NAME, *ARGS).stride() == (4, 1)


def test_a_cpp_kernel_without_its_library(table: Callable[..., Op], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cpu_library", lambda: "the library was not built")
    table(cpp_kernel(NAME))
    assert served_by(NAME, *ARGS) == "reference"
    with forced("cpu"), pytest.raises(RuntimeError) as error:
        call(NAME, *ARGS)
    assert str(error.value) == "norm_linear: MTP_FORCE_IMPL=cpu: the library was not built"


@pytest.mark.parametrize("value, on", [("1", True), ("true", True), ("on", True), ("0", False), ("", False),
                                       (None, False)])
def test_contents_are_checked_only_on_request(value: str | None, on: bool) -> None:
    args = (torch.full((2, 3), torch.nan), *ARGS[1:])
    with environment("MTP_DEBUG", value):
        assert debug_enabled(args[0]) == on
        if on:
            with pytest.raises(ArgumentError, match=r"^norm_linear: x\[0, 0\]: expected a finite value, got nan$"):
                call(NAME, *args)
        else:
            assert torch.isnan(call(NAME, *args)).all()


def row(op: str = NAME) -> Any:
    return next(r for r in mtp_kernels.report().rows if r.op == op and r.device == "cpu")


def test_report_says_what_serves_and_why_the_others_do_not(table: Callable[..., Op]) -> None:
    table()
    none = "no kernel for this op"
    assert row().serves == "reference"
    assert row().why_not == {"cpu": none, "triton": none, "cuda": none}
    table(kernel("cuda", devices=("cuda",)), kernel("triton"), kernel("cpu"))
    assert row().serves == served_by(NAME, *ARGS) == "triton"
    assert row().why_not == {"reference": "triton comes first", "cpu": "triton comes first",
                             "cuda": "does not run on cpu"}
    table(kernel("triton", absent="triton is not installed"), kernel("cpu"))
    assert row().serves == "cpu"
    assert row().why_not == {"reference": "cpu comes first", "triton": "triton is not installed", "cuda": none}


def test_report_lists_every_op_on_every_device(table: Callable[..., Op]) -> None:
    table(kernel("cpu"))
    report = mtp_kernels.report()
    assert report.torch_version == torch.__version__
    assert report.devices == (("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))
    assert [(r.op, r.device) for r in report.rows] == list(itertools.product(OPS, report.devices))
    lines = str(report).splitlines()
    assert lines[0] == f"torch {torch.__version__}; devices: {', '.join(report.devices)}"
    assert len(lines) == 2 + len(report.rows)
    line = next(text for text in lines if text.split()[:2] == [NAME, "cpu"])
    assert line.split(maxsplit=3)[2:] == ["cpu", "reference: cpu comes first; triton: no kernel for this op; "
                                          "cuda: no kernel for this op"]


def test_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mtp_kernels.supports(NAME) == (True, "")
    assert mtp_kernels.supports(NAME, dtype=torch.float16, device="cuda") == (True, "")
    assert mtp_kernels.supports(NAME, dtype=torch.float64) == (
        False, "dtype float64 is not bfloat16 or float16 or float32")
    monkeypatch.setattr(OPS[NAME], "supports", lambda *, head_dim: "" if head_dim % 2 == 0 else "head_dim is odd")
    assert mtp_kernels.supports(NAME, head_dim=64, dtype=torch.float16) == (True, "")
    assert mtp_kernels.supports(NAME, head_dim=63) == (False, "head_dim is odd")


def test_supports_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError) as error:
        mtp_kernels.supports("norm_liner")
    assert str(error.value) == f"supports: op: expected one of {', '.join(sorted(OPS))}, got 'norm_liner'"
    monkeypatch.setattr(OPS[NAME], "supports", None)
    with pytest.raises(ArgumentError) as error:
        mtp_kernels.supports(NAME, dtype=torch.float16, head_dim=64)
    assert str(error.value) == "supports: norm_linear: head_dim: expected dtype or device, got an unknown name"
    monkeypatch.setattr(OPS[NAME], "supports", lambda *, head_dim: "")
    with pytest.raises(ArgumentError, match=r"^supports: norm_linear: .* unexpected keyword argument 'head_dimm'$"):
        mtp_kernels.supports(NAME, head_dimm=64)


IMPORT = """
import sys, torch
asked = set()

class Watch:
    def find_spec(self, name, path=None, target=None):
        asked.add(name.partition(".")[0])

def refuse(*args, **kwargs):
    raise AssertionError("the import asked for CUDA")

sys.meta_path.insert(0, Watch())
kept = {name: getattr(torch.cuda, name) for name in ("init", "_lazy_init", "is_available", "device_count")}
for name in kept:
    setattr(torch.cuda, name, refuse)
import mtp_kernels
assert "mtp_kernels" in asked
optional = {"triton", "transformers", "tokenizers", "safetensors", "rich", "matplotlib", "pytest"}
assert not asked & optional, asked & optional
for name, function in kept.items():
    setattr(torch.cuda, name, function)
mtp_kernels.report()
assert not torch.cuda.is_initialized()
"""


def test_the_import_takes_no_cuda_and_nothing_optional(tmp_path: Path) -> None:
    root = Path(mtp_kernels.__file__).parents[1]
    path = os.pathsep.join([str(root), *(p for p in sys.path if p)])
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_all_ops_are_registered() -> None:
    assert sorted(OPS) == sorted(ALL_OPS)
    assert sorted(set(mtp_kernels.ops.__all__) - {"OPS", "ArgumentError", "ImplementationError"}) == sorted(ALL_OPS)


def test_out_schemas_from_text() -> None:
    plain = "f(Tensor x, float eps) -> Tensor"
    assert _out_names(plain) == ("output",)
    assert _out_schema(plain, ("output",)) == "f.out(Tensor x, float eps, *, Tensor(a!) output) -> ()"
    keyword = "g(Tensor x, Tensor? y, *, SymInt n=-1) -> (Tensor logits, Tensor token_ids)"
    names = _out_names(keyword)
    assert names == ("out_logits", "out_token_ids")
    outs = "Tensor(a!) out_logits, Tensor(b!) out_token_ids"
    assert _out_schema(keyword, names) == f"g.out(Tensor x, Tensor? y, *, SymInt n=-1, {outs}) -> ()"
    broken = keyword.replace(" *,", "\n    *,\n").replace(" (", "\n    (")
    assert _out_names(broken) == names
    assert _out_schema(broken, names).count("*") == 1


@pytest.mark.parametrize("name", OPS)
def test_overloads(name: str) -> None:
    overloads = getattr(torch.ops.mtp, name)
    assert sorted(overloads.overloads()) == ["default", "out"]
    default, out = overloads.default._schema, overloads.out._schema
    assert str(default) == str(torch._C.parse_schema(f"mtp::{OPS[name].schema}"))
    assert not default.is_mutable and len(default.returns) == len(OPS[name].out_names)
    inputs = len(default.arguments)
    assert described_all(out.arguments[:inputs]) == described_all(default.arguments)
    assert [str(a.type) for a in out.arguments[:inputs]] == [str(a.type) for a in default.arguments]
    assert [a.name for a in out.arguments[inputs:]] == list(OPS[name].out_names)
    assert all(a.kwarg_only and a.alias_info.is_write and str(a.type) == "Tensor" for a in out.arguments[inputs:])
    assert out.returns == []
    for key in ("CompositeExplicitAutograd", "Meta"):
        for overload in (f"mtp::{name}", f"mtp::{name}.out"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(overload, key)
    for overload in (overloads.default, overloads.out):
        assert torch.Tag.pt2_compliant_tag in overload.tags


@pytest.mark.parametrize("name", OPS)
def test_every_function_of_an_op_has_its_schemas_parameters(name: str) -> None:
    op = OPS[name]
    wanted = described_all(getattr(torch.ops.mtp, name).default._schema.arguments)
    functions = {"check": op.check, "outputs": op.outputs, "reference": op.reference, "contents": op.contents,
                 "public": getattr(mtp_kernels.ops, name)}
    for what, function in functions.items():
        if function is None:
            continue
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        got = [described(p.name, p.kind is p.KEYWORD_ONLY, p.default) for p in named]
        if len(parameters) > len(named) and what != "public":  # with *args or **kwargs it names only what it looks at
            positional = [p for p in got if not p.startswith("* ")]
            assert positional == wanted[: len(positional)] and set(got) <= set(wanted), what
        else:
            assert got == wanted, what


def described_all(arguments: Any) -> list[str]:
    """The arguments of a torch schema."""
    nothing = inspect.Parameter.empty
    return [described(a.name, a.kwarg_only, a.default_value if a.has_default_value() else nothing) for a in arguments]


def described(name: str, keyword_only: bool, default: Any) -> str:
    """Text, since it tells 0 from 0.0 and False."""
    required = default is inspect.Parameter.empty
    return f"{'* ' if keyword_only else ''}{name}{'' if required else f'={default!r}'}"


@pytest.mark.parametrize("name", OPS)
def test_every_op_is_documented(name: str) -> None:
    doc = inspect.getdoc(getattr(mtp_kernels.ops, name)) or ""
    for part in ("Args:", "Returns:", "Raises:", ">>> "):
        assert part in doc, part
    for argument in getattr(torch.ops.mtp, name).default._schema.arguments:
        assert argument.name in doc, argument.name
    for result in OPS[name].out_names if len(OPS[name].out_names) > 1 else ():
        assert result.removeprefix("out_") in doc, result


def folder_of(package: str) -> Path:
    return Path(importlib.import_module(f"mtp_kernels.{package}").__file__ or "").parent


@pytest.mark.parametrize("name", ALL_OPS)
def test_every_op_has_its_files(name: str) -> None:
    for file in (*(folder_of(package) / f"{name}.py" for package in PACKAGES),
                 Path(__file__).with_name(f"test_{name}.py")):
        assert file.is_file(), f"{name} lacks {file.parent.name}/{file.name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_has_its_op(package: str) -> None:
    files = folder_of(package).glob("*.py")
    assert {f.stem for f in files if not f.stem.startswith("_")} <= set(OPS)


def test_overlap_of_column_slices() -> None:
    buffer = torch.zeros(4, 8)
    assert not overlaps(buffer[:, :4], buffer[:, 4:])
    assert overlaps(buffer[:, :5], buffer[:, 4:])
    assert not overlaps(buffer[:, 0::2], buffer[:, 1::2])
    assert overlaps(buffer[:, 0::2], buffer[:, 1::3])
    assert not overlaps(buffer[:2], buffer[2:])
    assert overlaps(buffer, buffer.t())
    assert overlaps(buffer[1, 2].expand(3, 3), buffer[:, 2])
    assert not overlaps(buffer[1:1], buffer)
    assert not overlaps(buffer, torch.zeros(4, 8))
    assert not overlaps(buffer, torch.zeros(4, 8, device="meta"))
    halves = buffer.view(torch.bfloat16)  # [4, 16]
    assert overlaps(halves[:, 3:4], buffer[:, 1:2])
    assert not overlaps(halves[:, 4:5], buffer[:, 1:2])


views = st.tuples(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=3), st.integers(0, 12))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(views, views, st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]))
def test_overlap_is_exact(one: Any, two: Any, dtype: torch.dtype) -> None:
    buffer = torch.zeros(512, dtype=torch.uint8)

    def make(view: Any, dtype: torch.dtype) -> tuple[Tensor, set[int]]:
        dims, offset = view
        sizes, strides = [d[0] for d in dims], [d[1] for d in dims]
        tensor = buffer.view(dtype).as_strided(sizes, strides, offset)
        places = itertools.product(*(range(n) for n in sizes))
        starts = [(offset + sum(i * s for i, s in zip(place, strides))) * dtype.itemsize for place in places]
        return tensor, {start + byte for start in starts for byte in range(dtype.itemsize)}

    (a, a_bytes), (b, b_bytes) = make(one, torch.int16), make(two, dtype)
    assert overlaps(a, b) == overlaps(b, a) == bool(a_bytes & b_bytes)


BACKENDS: Any = torch.backends  # the stubs lack what the tests below set
MATMULS: Any = (BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul)


@pytest.fixture
def precision() -> Iterator[None]:
    before = [m.fp32_precision for m in MATMULS]
    yield
    BACKENDS.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for backend, value in zip(MATMULS, before):
        backend.fp32_precision = value


def lower(how: str) -> None:
    """One of the ways in which a process can allow less than fp32."""
    if how in ("high", "medium"):
        torch.set_float32_matmul_precision(how)
    elif how == "allow_tf32":
        BACKENDS.cuda.matmul.allow_tf32 = True
    elif how == "cuda":
        MATMULS[0].fp32_precision = "tf32"
    elif how == "mkldnn":
        MATMULS[1].fp32_precision = "bf16"
    else:
        BACKENDS.fp32_precision = "tf32"


@pytest.mark.parametrize("how", ["high", "medium", "allow_tf32", "cuda", "mkldnn", "everything"])
def test_full_precision(precision: None, how: str) -> None:
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    expected = _math.matmul(x, y)
    lower(how)
    before = [m.fp32_precision for m in MATMULS]
    assert "tf32" in before or "bf16" in before
    with _math.full_precision(), _math.full_precision():
        assert {m.fp32_precision for m in MATMULS} <= {"ieee", "none"}
    assert [m.fp32_precision for m in MATMULS] == before
    with pytest.raises(KeyError), _math.full_precision():
        raise KeyError
    assert [m.fp32_precision for m in MATMULS] == before
    assert_same_bits(_math.matmul(x, y), expected)


def test_full_precision_leaves_a_full_setting_alone(precision: None) -> None:
    before = [m.fp32_precision for m in MATMULS]
    with _math.full_precision():
        assert [m.fp32_precision for m in MATMULS] == before
    assert [m.fp32_precision for m in MATMULS] == before


def test_accumulate_widens_all_but_fp64() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert _math.accumulate(torch.ones(1, dtype=dtype)).dtype == torch.float32
    assert _math.accumulate(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


def test_rank_descending() -> None:
    nan, inf = torch.nan, torch.inf
    values, order = _math.rank_descending(torch.tensor([[nan, 1.0, -inf, 3.0, 3.0, nan, inf], [nan] * 7]), 6)
    assert order.tolist() == [[6, 3, 4, 1, 0, 2], [0, 1, 2, 3, 4, 5]]
    assert values.tolist() == [[inf, 3.0, 3.0, 1.0, -inf, -inf], [-inf] * 6]
    assert _math.rank_descending(torch.tensor([-0.0, 0.0]), 2)[1].tolist() == [0, 1]


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from([torch.nan, -torch.inf, torch.inf, -1.0, 0.0, 2.0]) | st.floats(width=32), min_size=1,
                max_size=40), st.sampled_from([torch.float32, torch.float64]))
def test_rank_descending_is_the_plain_rule(values: list[float], dtype: torch.dtype) -> None:
    keys = [-torch.inf if v != v else v for v in values]
    order = sorted(range(len(keys)), key=lambda i: (-keys[i], i))
    got = _math.rank_descending(torch.tensor(values, dtype=dtype), len(values))
    assert got[1].tolist() == order
    assert got[0].tolist() == [keys[i] for i in order]


def test_an_output_that_overlaps_itself_is_refused() -> None:
    args = (-torch.rand(1, 1, 2), torch.zeros(1, 1, 2, dtype=torch.int64), 0)
    outs = dict(zip(OPS["tree_expand"].out_names, (torch.full_like(t, 99) for t in call("tree_expand", *args))))
    outs["out_row_index"] = torch.full((1, 1), 99).expand(1, 2)
    with pytest.raises(ArgumentError) as error:
        torch.ops.mtp.tree_expand.out(*args, **outs)
    assert str(error.value) == (
        "tree_expand: out_row_index: expected an element of its own for each result, got strides [1, 0]"
    )
    assert all((t == 99).all() for t in outs.values())  # nothing was written


def test_debug_bounds_beyond_int32() -> None:
    cache = torch.randn(1, 4, 1, 64)
    args = (torch.randn(1, 1, 2, 64), cache, cache, torch.zeros(1, 1, dtype=torch.int32))
    with debug():
        call("draft_attention", *args, torch.tensor([3], dtype=torch.int32), 1.0, max_seq_len=2**31)


def test_full_precision_keeps_inheritance(precision: None) -> None:
    """A setting that came from the process's general one still follows it afterwards."""
    for backend in MATMULS:
        backend.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32"
    with _math.full_precision():
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"

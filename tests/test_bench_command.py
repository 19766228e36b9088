"""`mtp-kernels bench` on the command line: what it prints, writes and draws, and what it says where it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_kernels.bench import command, machine
from mtp_kernels.bench.case import LEVELS, MODELS, Case, Result
from mtp_kernels.bench.gpus import GPUS
from mtp_kernels.bench.peers import Peers
from mtp_kernels.bench.record import PeerStatus, Record, Run
from mtp_kernels.bench.runner import BrokenDevice

from mtp_kernels.cli import main
from mtp_kernels.ops import OPS

SMALL = ["--models", "tiny", "--context", "20", "--dtype", "fp32", "--samples", "2", "--device", "cpu"]
TWO_OPS = ["--level", "op", "--ops", "commit,norm_linear", *SMALL]


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, no transformers, little memory to copy: nothing here is about how fast something is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(machine, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(machine, "SAMPLES", 2)
    monkeypatch.setattr(command, "find_peers", no_peers)
    yield
    torch.set_num_threads(before)


real_find_peers = command.find_peers


def no_peers(wheels: list[Path]) -> Peers:
    if wheels:
        return real_find_peers(wheels)
    return Peers(tuple(PeerStatus(name, why_absent="not here") for name in ("flashinfer", "transformers")))


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*args: object) -> None:
        raise AssertionError("something was measured before the arguments were checked")

    monkeypatch.setattr(command, "run_case", measured)
    monkeypatch.setattr(machine, "bandwidths", measured)


def parsed(text: str, folder: Path) -> Record:
    (folder / "parsed.jsonl").write_text(text)
    return Record.load(folder / "parsed.jsonl")


def test_json_prints_the_record_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json", *TWO_OPS]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [row["kind"] for row in rows] == ["run"] + ["result"] * (len(rows) - 1)
    record = parsed(printed.out, tmp_path)
    assert {(r.case.name, r.candidate) for r in record.results} == {
        ("commit", "mtp"), ("norm_linear", "mtp"), ("norm_linear", "pytorch")}
    assert all(r.status == "ok" and r.us is not None and r.case.model == "tiny" for r in record.results)
    run = record.run
    assert run.device == "cpu" and run.device_name and run.node_us is None
    assert min(run.copy_bandwidth, run.read_bandwidth, run.flops_per_second) > 0
    assert run.machine["torch"] == torch.__version__ and run.machine["threads"] == 1
    assert run.command.startswith("mtp-kernels bench --") and run.commit and run.date.endswith("+00:00")


def test_the_machine_is_measured_as_it_is() -> None:
    copy, read = machine.bandwidths(torch.device("cpu"))
    assert 1e8 < read < 1e13 and 1e8 < copy < 1e13
    assert 1e8 < machine.flops_per_second(torch.device("cpu")) < 1e15
    assert machine.cache_bytes(torch.device("cpu")) >= 1 << 18
    name, about = machine.describe(torch.device("cpu"))
    assert name == about["cpu"] == machine.cpu_name()


def test_the_commit_is_that_of_this_repository_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"--show-toplevel": str(tmp_path), "HEAD": "0123abc\n", "--porcelain": ""}
    monkeypatch.setattr(machine, "_git", lambda folder, *arguments: answers[
        next(a for a in arguments if a in answers)])
    monkeypatch.delenv("MTP_COMMIT", raising=False)
    assert machine.commit() == "unknown"  # a repository that holds an environment that holds this
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "machine.py").touch()
    assert machine.commit() == "0123abc"
    answers["--porcelain"] = " M bench/machine.py"
    assert machine.commit() == "0123abc+"
    monkeypatch.setenv("MTP_COMMIT", "feed")
    assert machine.commit() == "feed"


def test_tables_and_the_record_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "record.jsonl"
    assert main(["bench", *TWO_OPS, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "mtp-kernels bench" in shown and "absent" in shown and "norm_linear" in shown
    assert "floor" in shown and "peer /" in shown  # the columns that only a wide console has
    assert 100 < max(map(len, shown.splitlines())) <= 120
    record = Record.load(out)
    assert len(record.results) == 5
    assert main(["bench", "show", str(out)]) == 0
    assert capsys.readouterr().out == shown


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "b"
    steps = ["--level", "step", "--batch", "1,2", *SMALL]
    assert main(["bench", "--json", "--out", str(tmp_path / "r"), "--plot", str(folder), *steps]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 5 and all(json.loads(line) for line in printed.out.splitlines())
    drawn = sorted(p.name for p in folder.iterdir())
    assert {p.rsplit(".")[-1] for p in drawn} == {"png", "svg"} and "latency_batch.png" in drawn
    assert all((folder / name).stat().st_size > 1000 and str(folder / name) in printed.err for name in drawn)
    assert main(["bench", "show", str(tmp_path / "r"), "--plot", str(tmp_path / "again")]) == 0
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == drawn


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The cases that a run would measure."""
    cases: list[Case] = []

    def run_case(case: Case, *others: object) -> list[Result]:
        cases.append(case)
        return []

    monkeypatch.setattr(command, "run_case", run_case)
    return cases


def test_every_axis_reaches_the_cases(planned: list[Case]) -> None:
    axes = ["--models", "tiny,tiny-dense", "--batch", "1,2", "--context", "8,20", "--rows", "1,3", "--dtype",
            "bf16,fp16", "--kv-dtype", "fp8", "--page-size", "4,1", "--layout", "HND,NHD", "--mode", "eager", "--warm"]
    arguments = ["--level", "op,round", "--ops", "draft_attention", *axes, "--steps", "2"]
    assert main(["bench", "--json", "--device", "cpu", *arguments]) == 0
    ops = [c for c in planned if c.level == "op"]
    assert len(ops) == len(set(ops)) == 2 * 2**7  # two layer types
    assert Case("op", "draft_attention", "tiny", 2, 20, 3, "full_attention", "fp16", "fp8", 4, "HND", "eager", True,
                2) in ops
    assert {(c.name, c.rows, c.topk, c.num_steps) for c in planned if c.level == "round"} == {
        ("chain", 1, 1, 2), ("tree", 3, 3, 2)}


def test_what_is_measured_unless_told(planned: list[Case]) -> None:
    assert main(["bench", "--json", "--device", "cpu"]) == 0
    ops = [op for op in OPS if op != "lm_head_topk"]  # E4B has the other head
    assert {c.name for c in planned} == {*ops, "step"}
    assert {(c.model, c.batch, c.context, c.rows, c.dtype, c.kv_dtype, c.page_size, c.warm) for c in planned} == {
        ("E4B", 1, 1024, 1, "bf16", "bf16", 16, False)}


def test_caches_have_the_dtype_of_the_rest_unless_told(planned: list[Case]) -> None:
    arguments = ["--ops", "draft_attention", "--level", "op", "--dtype", "bf16,fp32"]
    assert main(["bench", "--json", "--device", "cpu", *arguments]) == 0
    assert {(c.dtype, c.kv_dtype) for c in planned} == {("bf16", "bf16"), ("fp32", "fp32")}


@pytest.mark.parametrize("plan", ["quick", "sweep"])
def test_a_plan_is_run_as_it_is(plan: str, planned: list[Case]) -> None:
    assert main(["bench", f"--{plan}", "--json", "--dtype", "fp32", "--device", "cpu"]) == 0
    assert {c.level for c in planned} == set(LEVELS) and {c.name for c in planned if c.level == "op"} == set(OPS)
    assert {c.dtype for c in planned} == {"fp32"} and {c.mode for c in planned} == {"eager"}


def names(known: Any) -> str:
    return f"expected names of {', '.join(known)}, got"


COUNTS = "expected numbers of at least 1, separated by commas, got"


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "E5B"], f"--models: {names(MODELS)} 'E5B'"),
        (["--models", "tiny,,E2B"], f"--models: {names(MODELS)} ''"),
        (["--ops", "norm_liner"], f"--ops: {names(OPS)} 'norm_liner'"),
        (["--level", "op,ops"], f"--level: {names(LEVELS)} 'ops'"),
        (["--dtype", "fp8"], f"--dtype: {names(('bf16', 'fp16', 'fp32'))} 'fp8'"),
        (["--kv-dtype", "int8"], f"--kv-dtype: {names(('bf16', 'fp16', 'fp32', 'fp8'))} 'int8'"),
        (["--kv-dtype", "fp8,fp32"], "--kv-dtype: expected fp8 or the dtype, bf16, got fp32"),
        (["--layout", "nhd"], f"--layout: {names(('NHD', 'HND'))} 'nhd'"),
        (["--mode", "graphs"], f"--mode: {names(('graph', 'eager'))} 'graphs'"),
        (["--batch", "one"], f"--batch: {COUNTS} 'one'"),
        (["--batch", "1,"], f"--batch: {COUNTS} '1,'"),
        (["--context", "0"], f"--context: {COUNTS} '0'"),
        (["--rows", "-1"], f"--rows: {COUNTS} '-1'"),
        (["--page-size", "16.0"], f"--page-size: {COUNTS} '16.0'"),
        (["--steps", "0"], "--steps: expected a number of at least 1, got '0'"),
        (["--threads", "two"], "--threads: expected a number of at least 1, got 'two'"),
        (["--samples", "0"], "--samples: expected a number of at least 1, got '0'"),
        (["--seconds", "nan"], "--seconds: expected a number of seconds, got 'nan'"),
        (["--device", "tpu"], "--device: expected one of cpu, cuda, got 'tpu'"),
        (["--predict", "h900"], f"--predict: expected one of {', '.join(GPUS)}, got 'h900'"),
        (["--predict", "h100", "--device", "cpu"],
         f"--predict: expected a run on one of {', '.join(GPUS)}, got one on a CPU"),
        (["--predict", "h100", "--json"], "--predict: prints tables: expected no --json beside it"),
        (["--ops", "lm_head_topk", "--level", "op"], "--ops: expected an op of E4B, got lm_head_topk"),
        (["--quick", "--sweep"], "--sweep: not allowed with argument --quick"),
        (["--quick", "--models", "E2B"], "--quick: has cases of its own: expected no --models beside it"),
        (["--sweep", "--page-size", "4"], "--sweep: has cases of its own: expected no --page-size beside it"),
        (["--quick", "--dtype", "bf16,fp32"], "--dtype: expected one beside --quick, got bf16,fp32"),
        (["compare", "a"], "the following arguments are required: b"),
        (["compare", "a", "b", "--tolerance", "-1"], "--tolerance: expected a finite number >= 0, got '-1'"),
        (["compare", "no/such", "b"], "no/such: [Errno 2] No such file or directory: 'no/such'"),
        (["show", "no/such"], "no/such: [Errno 2] No such file or directory: 'no/such'"),
        (["show", "x", "--predict", "h900"], f"--predict: expected one of {', '.join(GPUS)}, got 'h900'"),
        (["readme", "no/such"], "no/such: [Errno 2] No such file or directory: 'no/such'"),
        (["readme", "no/such", "--check"], "no/such: [Errno 2] No such file or directory: 'no/such'"),
        (["--peer-wheel", "no/such.whl"], "--peer-wheel: no/such.whl: expected a .whl file (whole or slim) or the "
         "folder of an unpacked wheel of vllm or sglang, got no such file or folder"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    who, said = printed.err.split(": ", 1)
    assert who in ("mtp-kernels bench", f"mtp-kernels bench {arguments[0]}")
    assert said == message + "\n" and printed.out == ""


def exit_code(arguments: list[str]) -> int:
    """argparse ends the process where an argument cannot be parsed."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.usefixtures("no_measuring")
def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        f"mtp-kernels bench: --device: cuda: torch {torch.__version__} finds no CUDA device here\n")


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize("option", ["--plot", "--out"])
def test_where_nothing_can_be_written(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", *TWO_OPS, option, str(tmp_path / "file" / "x")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mtp-kernels bench: {option}: ") and error.count("\n") == 1


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize(
    ("package", "arguments", "what"),
    [
        ("rich", TWO_OPS, "the tables (or pass --json)"),
        ("matplotlib", [*TWO_OPS, "--plot", "x"], "--plot"),
        ("rich", ["show", "{record}"], "the tables"),
        ("rich", ["compare", "{record}", "{record}"], "the comparison"),
        ("matplotlib", ["show", "{record}", "--plot", "x"], "--plot"),
    ],
)
def test_what_an_option_needs_is_said(
    package: str, arguments: list[str], what: str, record: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = command.importlib.util.find_spec
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    assert main(["bench", *(a.format(record=record) for a in arguments)]) == 2
    assert capsys.readouterr().err == f"mtp-kernels bench: {what}: needs {package}: pip install 'mtp-kernels[bench]'\n"


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one small run."""
    run = Run("mtp-kernels bench", "0123abc", "2026-01-02T03:04:05+00:00", "cpu", "Some CPU", {"torch": "2.13"}, 1e10,
              1e10, 1e11, peers=(PeerStatus("vllm", why_absent="not installed"),))
    results = [
        Result(Case("step", "step", "E4B", batch), candidate, "reference" * (candidate == "mtp"), us=us * batch,
               p10=us * batch, p90=us * batch, samples=3, bytes=1000, flops=1000, floor_us=0.1)
        for batch in (1, 8) for candidate, us in (("mtp", 20.0), ("pytorch", 30.0))
    ]
    path = tmp_path_factory.mktemp("record") / "a.jsonl"
    Record(run, results).save(path)
    return path


def doctored(path: Path, to: Path, candidate: str, factor: float) -> str:
    """The record with the last time of a candidate changed."""
    record = Record.load(path)
    place = max(i for i, r in enumerate(record.results) if r.candidate == candidate)
    result = record.results[place]
    assert result.us is not None
    us = result.us * factor
    record.results[place] = replace(result, us=us, p10=us, p90=us)
    record.save(to)
    return str(to)


def test_compare(record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(record)
    assert main(["bench", "compare", a, a]) == 0
    assert "ours: 2 same" in capsys.readouterr().out
    slower = doctored(record, tmp_path / "b", "mtp", 1.2)
    assert main(["bench", "compare", a, slower]) == 1
    shown = capsys.readouterr().out
    assert "ours: 1 slower, 1 same" in shown and "1.20" in shown and "slower" in shown
    assert main(["bench", "compare", slower, a]) == 0
    assert "ours: 1 faster, 1 same" in capsys.readouterr().out
    assert main(["bench", "compare", a, slower, "--tolerance", "0.3"]) == 0
    assert main(["bench", "compare", a, doctored(record, tmp_path / "c", "pytorch", 2.0)]) == 0
    assert "peers: 1 slower, 1 same" in capsys.readouterr().out


def test_readme(record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme, own = tmp_path / "README.md", tmp_path / "own.jsonl"
    own.write_bytes(record.read_bytes())
    readme.write_text("# Numbers\n\n<!-- bench:steps own.jsonl -->\n<!-- /bench:steps -->\n\nEnd\n")
    check = ["bench", "readme", str(readme), "--check"]
    before = readme.read_text()
    assert main(check) == 1 and readme.read_text() == before
    assert capsys.readouterr().out == (
        f"{readme}: the table steps own.jsonl is not what its record gives: mtp-kernels bench readme {readme}\n")
    assert main(["bench", "readme", str(readme)]) == 0
    after = readme.read_text()
    assert "| E4B | 8 |" in after and after.startswith("# Numbers\n") and after.endswith("\nEnd\n")
    assert main(check) == 0 and readme.read_text() == after and capsys.readouterr().out == ""
    doctored(own, own, "mtp", 3.0)
    assert main(check) == 1
    readme.write_text("<!-- bench:steps -->\n")
    assert main(check) == 2 and "line 1: bench:steps: expected the path of a record" in capsys.readouterr().err


def test_a_record_of_a_cpu_predicts_nothing(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "show", str(record), "--predict", "h100"]) == 2
    assert capsys.readouterr().err == (
        f"mtp-kernels bench: predict: record: expected one of {', '.join(GPUS)}, got one of 'Some CPU'\n")


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [(KeyboardInterrupt(), 130, ""), (BrokenDevice("vllm broke the device"), 2, "vllm broke the device")],
)
@pytest.mark.parametrize("json_lines", [False, True])
def test_what_was_measured_before_the_end_stays(
    json_lines: bool, end: BaseException, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "record.jsonl"
    monkeypatch.setattr(command, "run_case", ending(command.run_case, 1, end))
    assert main(["bench", *TWO_OPS, "--out", str(out), *["--json"] * json_lines]) == code
    assert [r.case.name for r in Record.load(out).results] == ["commit"]
    printed = capsys.readouterr()
    assert printed.err == (f"mtp-kernels bench: {said}\n" if said else "")
    assert printed.out == (out.read_text() if json_lines else "")


def ending(run_case: Callable[..., Any], after: int, end: BaseException) -> Callable[..., Any]:
    """run_case that raises once it was called `after` times."""
    calls = iter(range(after))

    def run(*args: Any) -> Any:
        if next(calls, None) is None:
            raise end
        return run_case(*args)

    return run

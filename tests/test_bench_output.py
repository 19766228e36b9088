"""The benchmark's output: tables in the terminal, pictures, README's tables. On synthetic records."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from bench_records import full_record, quick_record, result, run
from mtp_kernels.bench.case import Case
from mtp_kernels.bench.display import progress, show_record
from mtp_kernels.bench.plots import draw
from mtp_kernels.bench.readme import TABLES, ReadmeError, stale, update
from mtp_kernels.bench.record import Record
from rich.console import Console

PICTURES = ["roofline", "latency_batch", "latency_context"]


def shown(record: Record, width: int = 120) -> str:
    file = io.StringIO()
    show_record(Console(file=file, width=width), record)
    return file.getvalue()


def line_with(text: str, *words: str) -> str:
    """The one line that holds all the words."""
    found = [line for line in text.splitlines() if all(word in line for word in words)]
    assert len(found) == 1, (words, found)
    return found[0]


def steps(*results: object) -> Record:
    return Record(run(), list(results))  # type: ignore[arg-type]


CASE = Case("step", "step", "E4B", 8, 4096)


def test_a_row_has_floor_ours_and_the_best_peer() -> None:
    slow, quick = result(CASE, "vllm", 80.0), result(CASE, "flashinfer", 30.0)
    text = shown(steps(result(CASE, "mtp", 20.0, floor_us=8.0, p10=19.0, p90=22.0), slow, quick))
    row = " ".join(line_with(text, "E4B").split())
    assert row == "step E4B 8 4096 1 8.0 20.0 (19.0-22.0) reference 2.50 flashinfer 30.0 1.50"


def test_the_reference_is_said_clearly_and_a_kernel_is_not_called_one() -> None:
    other = replace(CASE, batch=1)
    ours = [result(CASE), result(other, implementation="triton")]
    text = shown(steps(*ours))
    assert "reference" in line_with(text, "E4B", " 8 4096")
    assert "triton" in line_with(text, "E4B", " 1 4096")
    assert "Ours is the reference (plain PyTorch, no kernel of this library), or partly, in 1 of these 2 cases." in text
    assert "reference" not in shown(steps(ours[1]))
    assert "reference" in line_with(shown(steps(ours[0]), width=80), "E4B")


def test_results_without_a_time_are_explained_once_and_counted() -> None:
    cases = [replace(CASE, batch=batch) for batch in (1, 2, 4)]
    lacking = [result(case, "sglang", None, status="unsupported", why="no [fp8] KV") for case in cases]
    wrong = result(CASE, "mtp", None, status="wrong", why="output differs", error=0.5, allowed=0.01)
    text = shown(steps(wrong, *lacking))
    assert "sglang: unsupported in 3 cases (step): no [fp8] KV" in text
    assert "mtp: wrong in 1 case (step): output differs (off by up to 0.5, allowed 0.01)" in text
    assert text.index("mtp: wrong") < text.index("sglang: unsupported")
    assert "wrong" in line_with(text, "E4B", " 8 4096")


def test_unusual_settings_are_named_in_their_row_only() -> None:
    one = replace(CASE, level="op", name="draft_attention", variant="full_attention")
    cases = [replace(one, batch=batch) for batch in (1, 2, 4)] + [replace(one, kv_dtype="fp8", warm=True)]
    text = shown(steps(*map(result, cases)), width=160)
    assert "op, microseconds a call: bf16, KV bf16, page 16, NHD, graph, cold cache" in text
    assert "full_attention, KV fp8, warm cache" in line_with(text, "KV fp8")


def test_only_ops_have_a_cold_cache() -> None:
    """A step reads the same weights in every call."""
    text = shown(steps(result(CASE)))
    assert "step, microseconds a step: bf16, KV bf16, page 16, NHD, graph\n" in text


def test_header_names_machine_bandwidths_and_peers() -> None:
    text = shown(full_record())
    for words in (
        ("device", "NVIDIA H200"),
        ("clocks", "sm mhz 1980"),
        ("copy bandwidth", "4.23 TB/s"),
        ("read bandwidth", "4.38 TB/s"),
        ("node", "0.61 us"),
        ("peers", "flashinfer 0.6.18, vllm 0.33.0"),
        ("absent", "sglang (not installed [no wheel given])"),
        ("commit", run().commit),
    ):
        line_with(text, *words)


def test_generate_lists_each_candidate_with_its_counts() -> None:
    text = shown(full_record())
    assert "5210" in line_with(text, "generate", "mtp", "2.71")
    assert "5210" in line_with(text, "generate", "transformers", "2.71")


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("record", [full_record(), quick_record(), Record(run())], ids=["full", "quick", "empty"])
def test_no_line_is_wider_than_the_console(record: Record, width: int) -> None:
    text = shown(record, width)
    assert "H200" in text or "Some CPU" in text
    assert max(map(len, text.splitlines())) <= width


def test_a_full_record_has_one_line_a_row_at_120_columns() -> None:
    record = full_record()
    cases = {r.case for r in record.results if r.case.level == "op"}
    rows = [line for line in shown(record).splitlines() if " reference " in line and "torch.compile" in line]
    assert sum("(" in line for line in rows) >= len(cases)


def test_progress_is_silent_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    with progress(Console(file=file), 2) as bar:
        bar.advance("step E4B")
    assert file.getvalue() == ""


def test_progress_shows_what_is_measured_on_a_terminal() -> None:
    file = io.StringIO()
    with progress(Console(file=file, force_terminal=True, width=100), 3) as bar:
        bar.advance("step [E4B]")
        bar.advance("step [31B]")
    assert "step [31B]" in file.getvalue() and "1/3" in file.getvalue()


@pytest.mark.parametrize("record", [full_record(["E2B", "12B"]), quick_record()], ids=["full", "quick"])
def test_every_picture_is_drawn(record: Record, tmp_path: Path) -> None:
    """Of two models, which lack a result each: a panel takes half a second."""
    paths = draw(record, tmp_path / "plots")
    assert paths == [tmp_path / "plots" / f"{name}.{ending}" for name in PICTURES for ending in ("png", "svg")]
    for path in paths:
        data = path.read_bytes()
        if path.suffix == ".png":
            assert data.startswith(b"\x89PNG\r\n") and len(data) > 10_000
        else:
            assert ElementTree.fromstring(data).tag.endswith("svg") and len(data) > 10_000


def test_pictures_need_only_one_result_and_repeat_bit_for_bit(tmp_path: Path) -> None:
    record = steps(result(CASE, "someone's", 30.0, floor_us=3.0, bytes=1000, flops=0))
    once, again = draw(record, tmp_path / "a"), draw(record, tmp_path / "b")
    assert [p.stem for p in once[::2]] == ["roofline", "latency_batch"]
    assert [p.read_bytes() for p in once] == [p.read_bytes() for p in again]


def test_nothing_is_drawn_without_a_time(tmp_path: Path) -> None:
    wrong = result(CASE, us=None, status="wrong", why="output differs")
    assert draw(steps(wrong), tmp_path / "plots") == []


def readme(name: str, inside: str = "old\n", record: str = "results/r.jsonl") -> str:
    return f"# Title\n\n<!-- bench:{name} {record} -->\n{inside}<!-- /bench:{name} -->\n\nText.\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    full_record().save(tmp_path / "results" / "r.jsonl")
    return tmp_path


@pytest.mark.parametrize("name", list(TABLES))
def test_a_table_is_made_once_and_then_is_not_stale(name: str, root: Path) -> None:
    text = readme(name)
    assert stale(text, root) == [f"{name} results/r.jsonl"]
    new = update(text, root)
    assert new.startswith("# Title\n\n<!-- bench:") and new.endswith(f"<!-- /bench:{name} -->\n\nText.\n")
    assert "old" not in new and stale(new, root) == [] and update(new, root) == new
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in new.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_steps_table_names_the_best_peer_and_every_time(tmp_path: Path) -> None:
    ours = result(CASE, "mtp", 20.0, floor_us=8.0)
    wrong = result(CASE, "sglang", None, status="wrong", why="|")
    steps(ours, result(CASE, "vllm", 80.0), result(CASE, "flashinfer", 30.0), wrong).save(tmp_path / "results/r.jsonl")
    new = update(readme("steps"), tmp_path)
    assert "| model | batch | context | floor | ours | served by | best peer | best peer / ours | vllm | flash" in new
    assert "| E4B | 8 | 4096 | 8.0 | 20.0 | reference | flashinfer 30.0 | 1.50 | 80.0 | 30.0 |" in new


def test_attention_table_has_the_fixed_peers_and_says_why_a_time_is_missing(root: Path) -> None:
    new = update(readme("attention"), root)
    assert "| model | layer | batch | context | rows | floor | ours | served by | flashinfer | vllm | sglang |" in new
    assert re.search(r"^\| E2B \| full \| 1 \| 8192 \| 1 \|.*\| reference \| unsupported \| [\d.]+ \|", new, re.M)
    assert re.search(r"^\| 12B \| full \| 64 \|.*\| wrong \| \d+ \|$", new, re.M)


def test_ops_table_keeps_to_two_models_and_two_batches(root: Path) -> None:
    new = update(readme("ops"), root)
    found = re.findall(r"^\| ([a-z_]+)[a-z ]* \| (\S+) \| (\d+) \|", new, re.M)
    assert {model for _, model, _ in found} == {"E4B", "31B"} and {batch for *_, batch in found} == {"1", "64"}
    assert "draft_attention" not in {op for op, *_ in found} and "norm_linear" in {op for op, *_ in found}


def test_machine_table_repeats_the_command_and_the_commit(root: Path) -> None:
    new = update(readme("machine"), root)
    assert f"| command | `{run().command}` |" in new and f"| commit | {run().commit} |" in new


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (readme("speed"), "line 3: bench:speed: unknown table; known: steps, "),
        ("<!-- bench:steps results/r.jsonl -->\n", "line 1: bench:steps: expected a line <!-- /bench:steps --> behind"),
        (
            "<!-- bench:ops r -->\n" + readme("steps"),
            "line 1: bench:ops: expected a line <!-- /bench:ops --> behind it",
        ),
        ("\n<!-- /bench:steps -->\n", "line 2: /bench:steps: no bench:steps before it is open"),
        (readme("steps", record=""), "line 3: bench:steps: expected the path of a record behind the name, got none"),
        (readme("steps", record="no.jsonl"), "line 3: bench:steps no.jsonl: .*no.jsonl"),
        (readme("steps", record="bad.jsonl"), "line 3: bench:steps bad.jsonl: .*expected a record"),
        (readme("steps", record="empty.jsonl"), "empty.jsonl: the record has no results for this table"),
    ],
)
def test_readme_errors_name_line_table_and_what_is_wanted(text: str, message: str, root: Path) -> None:
    (root / "bad.jsonl").write_text('{"kind": "result"}\n')
    Record(run()).save(root / "empty.jsonl")
    with pytest.raises(ReadmeError, match=message):
        update(text, root)
    with pytest.raises(ReadmeError, match=message):
        stale(text, root)


def test_a_text_without_markers_stays() -> None:
    text = "Nothing, and `<!-- bench:steps r -->` inside a line.\n"
    assert update(text, Path()) == text and stale(text, Path()) == []

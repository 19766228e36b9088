"""`mtp-kernels bench compare`: what is a change and what is noise."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace

import pytest
from bench_records import full_record, result, run
from mtp_kernels.bench.case import Case, Result
from mtp_kernels.bench.compare import compare, differences, exit_code, show
from mtp_kernels.bench.record import PeerStatus, Record
from rich.console import Console

CASE = Case("op", "norm_linear", "E4B", 1, variant="q")


def timed(us: float, spread: float = 0.0, candidate: str = "mtp") -> Result:
    return result(CASE, candidate, us, p10=us - spread, p90=us + spread)


def lost(status: str, candidate: str = "mtp") -> Result:
    return result(CASE, candidate, None, status=status, why="because")


def records(a: Result | None, b: Result | None) -> tuple[Record, Record]:
    return Record(run(), [a] if a else []), Record(run(), [b] if b else [])


def kind(a: Result | None, b: Result | None, floor: float = 0.05) -> str:
    (change,) = compare(*records(a, b), floor=floor)
    return change.kind


def shown(a: Record, b: Record) -> str:
    file = io.StringIO()
    show(Console(file=file, width=120), compare(a, b), (a.run, b.run))
    return file.getvalue()


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (timed(100), timed(106), "slower"),
        (timed(106), timed(100), "faster"),
        (timed(100), timed(104), "same"),
        (timed(104), timed(100), "same"),
        (timed(100, 8), timed(110, 8), "same"),  # within sqrt(8^2 + 8^2) = 11.3
        (timed(100, 8), timed(112, 8), "slower"),
        (timed(100, 20), timed(130, 5), "slower"),
        (timed(100, 1), lost("wrong"), "now wrong"),
        (timed(100, 1), lost("error"), "now error"),
        (timed(100, 1), lost("unsupported"), "now unsupported"),
        (lost("error"), lost("wrong"), "now wrong"),
        (lost("unsupported"), lost("error"), "now error"),
        (lost("wrong"), lost("wrong"), "same"),
        (lost("error"), lost("unsupported"), "same"),
        (lost("wrong"), timed(100), "has a time now"),
        (timed(100), None, "only in A"),
        (None, timed(100), "only in B"),
    ],
)
def test_kind_of_a_change(a: Result | None, b: Result | None, expected: str) -> None:
    assert kind(a, b) == expected


def test_swapping_the_records_swaps_slower_and_faster() -> None:
    for percent in range(1, 12):
        one, two = timed(100), timed(100 + percent)
        swapped = {"slower": "faster", "faster": "slower", "same": "same"}[kind(one, two)]
        assert kind(two, one) == swapped
    assert kind(timed(100), timed(105.001)) == "slower" and kind(timed(100), timed(104.999)) == "same"


def test_the_floor_is_a_parameter() -> None:
    assert kind(timed(100), timed(104), floor=0.03) == "slower"
    assert kind(timed(100), timed(130), floor=0.5) == "same"
    for bad in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="compare: floor: expected a finite number >= 0, got"):
            compare(*records(None, None), floor=bad)


def test_a_doctored_result_is_the_only_one_flagged() -> None:
    a, b = full_record(), full_record()
    index = next(i for i, r in enumerate(b.results) if r.candidate == "mtp" and r.case.level == "step")
    right = b.results[index]
    assert right.us is not None
    b.results[index] = replace(right, us=right.us * 1.2, p10=right.us * 1.19, p90=right.us * 1.21)
    changes = compare(a, b)
    assert Counter(c.kind for c in changes) == {"slower": 1, "same": len(changes) - 1}
    (slower,) = (c for c in changes if c.kind == "slower")
    assert (slower.case, slower.candidate) == (right.case, "mtp") and slower.ratio == pytest.approx(1.2)
    assert exit_code(changes) == 1 and exit_code(compare(a, a)) == 0 and exit_code(compare(b, a)) == 0


def test_noise_within_the_spread_of_the_runs_is_no_change() -> None:
    """Two runs whose medians differ by less than their p10-p90 intervals, each result its own way."""
    a, b = full_record(), full_record()
    for i, r in enumerate(b.results):
        if r.us is not None:
            us = r.us * (1.04 if i % 2 else 0.965)
            b.results[i] = replace(r, us=us, p10=us * 0.97, p90=us * 1.03)
    assert {c.kind for c in compare(a, b)} == {"same"}


@pytest.mark.parametrize("status", ["wrong", "error", "unsupported"])
def test_only_ours_decides_the_exit_code(status: str) -> None:
    assert exit_code(compare(*records(timed(10), lost(status)))) == 1
    assert exit_code(compare(*records(timed(10, candidate="vllm"), lost(status, "vllm")))) == 0
    assert exit_code(compare(*records(timed(10, candidate="vllm"), timed(90, candidate="vllm")))) == 0
    assert exit_code(compare(*records(timed(10), timed(90)))) == 1
    assert exit_code(compare(*records(timed(10), None))) == 0


def test_the_later_of_two_results_counts_and_settings_tell_cases_apart() -> None:
    fp8 = replace(timed(50), case=replace(CASE, kv_dtype="fp8"))
    a = Record(run(), [timed(500), timed(100), fp8])
    b = Record(run(), [timed(100), fp8])
    assert [c.kind for c in compare(a, b)] == ["same", "same"]


def test_the_table_starts_with_the_worst_and_leaves_out_what_stayed() -> None:
    others = [replace(CASE, batch=batch) for batch in (2, 4, 8, 16)]
    a = Record(run(), [timed(100), *(replace(timed(100), case=case) for case in others)])
    changed = [timed(80), replace(timed(150), case=others[0]), replace(timed(300), case=others[1])]
    b = Record(run(), [*changed, replace(lost("wrong"), case=others[2]), replace(timed(101), case=others[3])])
    lines = [line.split() for line in shown(a, b).splitlines() if "norm_linear" in line]
    assert [line[-2:] for line in lines] == [
        ["now", "wrong"],
        ["3.00", "slower"],
        ["1.50", "slower"],
        ["0.80", "faster"],
    ]
    assert "ours: 1 now wrong, 2 slower, 1 faster, 1 same" in shown(a, b)


def test_moved_peers_are_shown_as_a_hint_at_the_machine() -> None:
    text = shown(*records(timed(10, candidate="vllm"), timed(90, candidate="vllm")))
    assert "1 results of peers moved. They do not count" in text
    assert "peers moved" not in shown(*records(timed(10), timed(90)))


def test_another_device_is_said_first() -> None:
    a = run()
    b = run(device_name="NVIDIA B200", machine={**a.machine, "driver": "590.2"}, copy_bandwidth=7e12)
    b = replace(b, peers=(PeerStatus("vllm", "0.34.0"), PeerStatus("flashinfer", why_absent="no wheel")))
    found = differences(a, b)
    assert found[0].startswith("DIFFERENT DEVICES: A is NVIDIA H200, B is NVIDIA B200")
    assert "driver: 580.1 in A, 590.2 in B" in found
    assert "copy bandwidth: 4.23 TB/s in A, 7.00 TB/s in B" in found
    assert "vllm: version 0.33.0 in A, 0.34.0 in B" in found
    assert len(found) == 4 and differences(a, a) == []
    text = shown(Record(a), Record(b))
    assert "DIFFERENT DEVICES" in text and "DIFFERENT DEVICES" not in shown(Record(a), Record(a))


def test_what_served_ours_is_shown_where_it_changed() -> None:
    assert "mtp (reference -> triton)" in shown(*records(timed(100), replace(timed(20), implementation="triton")))

"""`--predict`: the two-term model, its error on its own GPU, and what it leaves out."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from bench_records import full_record, quick_record, result, run
from mtp_kernels.bench.case import Case, Result
from mtp_kernels.bench.gpus import GPUS, gpu_of
from mtp_kernels.bench.predict import Prediction, PredictionError, predict, show
from mtp_kernels.bench.record import Record
from rich.console import Console

COPY, NODE = 4.23e12, 0.61


def exact(node_us: float, slowdown: float, count: int = 6, candidate: str = "mtp") -> Record:
    """Results that follow the model to the letter."""
    results = []
    for i in range(count):
        size, nodes = 10_000_000 * 4**i, 40 + 7 * (i % 3)
        us = nodes * node_us + slowdown * size / COPY * 1e6
        case = Case("step", "step", "E4B", batch=i + 1)
        results.append(result(case, candidate, us, bytes=size, nodes=nodes, floor_us=size / COPY * 1e6))
    return Record(run(copy_bandwidth=COPY, node_us=NODE), results)


def shown(prediction: Prediction, width: int = 120) -> str:
    file = io.StringIO()
    show(Console(file=file, width=width), prediction)
    return file.getvalue()


def test_the_measured_launch_cost_and_bytes_are_kept_where_they_explain_everything() -> None:
    prediction = predict(exact(NODE, 1.0), "h200")
    assert not any(p.model.fitted for p in prediction.results)
    assert prediction.errors[0].median == pytest.approx(0, abs=1e-12)
    for p in prediction.results:
        assert p.target_us == pytest.approx(p.result.us)


def test_slower_kernels_are_fitted_and_the_bytes_scale_with_the_datasheets() -> None:
    record = exact(3.0, 1.25)
    prediction = predict(record, "b200")
    ratio = GPUS["b200"].bandwidth / GPUS["h200"].bandwidth
    assert prediction.target_bandwidth == pytest.approx(COPY * ratio)
    for p in prediction.results:
        assert p.model.fitted and (p.model.node_us, p.model.slowdown) == pytest.approx((3.0, 1.25))
        nodes, size = p.result.nodes, p.result.bytes
        assert nodes is not None
        assert p.target_us == pytest.approx(nodes * 3.0 + 1.25 * size / (COPY * ratio) * 1e6)
        assert p.target_floor_us == pytest.approx(size / (COPY * ratio) * 1e6)
    error = prediction.errors[0]
    assert error.p90 < 1e-6 and error.plain_median > 0.2


def test_the_stated_error_is_that_of_results_left_out_of_the_fit() -> None:
    """One result that doubles what the others say: a fit that had seen it would come closer."""
    record = exact(3.0, 1.25)
    odd = record.results[3]
    assert odd.us is not None
    record.results[3] = replace(odd, us=odd.us * 2)
    found = predict(record, "h100").results[3]
    assert found.model.fitted and found.checked_us == pytest.approx(odd.us, rel=1e-6)


def test_error_is_the_median_and_p90_of_the_relative_deviation() -> None:
    record = exact(NODE, 1.0, count=3)
    factors = (1.0, 1.25, 2.0)
    record.results = [replace(r, us=(r.us or 0) * f) for r, f in zip(record.results, factors)]
    (error,) = predict(record, "h100").errors
    assert (error.level, error.count) == ("step", 3)
    assert error.median == pytest.approx(0.2) and error.p90 == pytest.approx(0.2 + 0.8 * 0.3)


def test_few_results_are_not_fitted() -> None:
    assert not any(p.model.fitted for p in predict(exact(3.0, 1.25, count=3), "h100").results)


@pytest.mark.parametrize(("node_us", "slowdown"), [(0.0, 3.0), (5.0, 0.0)])
def test_constants_are_never_negative(node_us: float, slowdown: float) -> None:
    record = exact(node_us, slowdown)
    record.results = [replace(r, us=(r.us or 0) * (0.9 if i % 2 else 1.1)) for i, r in enumerate(record.results)]
    for p in predict(record, "h100").results:
        assert p.model.node_us >= 0 and p.model.slowdown >= 0 and p.checked_us >= 0


def test_errors_are_stated_for_each_level_of_a_full_record() -> None:
    prediction = predict(full_record(), "a100-80gb-sxm")
    assert [error.level for error in prediction.errors] == ["op", "step", "round"]
    for error in prediction.errors:
        assert error.median < 0.05 < error.plain_median
    text = shown(prediction)
    assert "Predicted for a100-80gb-sxm, not measured" in text and "error on h200 itself" in text
    assert text.index("error on h200 itself") < text.index("step on a100-80gb-sxm, predicted us")
    assert shown(prediction, width=60)


def left_out(**changes: object) -> dict[str, int]:
    record = exact(NODE, 1.0)
    record.results = [replace(r, **changes) for r in record.results]  # type: ignore[arg-type]
    prediction = predict(record, "h100")
    assert prediction.results == [] and "Nothing to predict" in shown(prediction)
    return prediction.left_out


def test_results_without_nodes_or_with_a_warm_cache_are_left_out_and_said_so() -> None:
    assert left_out(nodes=None) == {"mtp: not in a CUDA graph, so its kernels are not counted": 6}
    record = exact(NODE, 1.0)
    record.results[0] = replace(record.results[0], case=replace(record.results[0].case, warm=True))
    prediction = predict(record, "h100")
    assert len(prediction.results) == 5
    assert "left out: 1 of mtp: measured with a warm cache" in shown(prediction)


def test_results_without_a_time_do_not_count() -> None:
    assert left_out(us=None, status="wrong") == {}


def test_what_fits_the_targets_cache_is_marked() -> None:
    def fits(target: str) -> list[bool]:
        return [p.fits_l2 for p in predict(exact(NODE, 1.0, count=3), target).results]

    assert fits("a100-80gb-sxm") == [True, True, False] and fits("h100") == [True, True, False]
    assert "the bytes fit h100's L2" in shown(predict(exact(NODE, 1.0, count=3), "h100"))


def test_each_driver_name_belongs_to_one_gpu() -> None:
    names = [name for gpu in GPUS.values() for name in gpu.names]
    assert len(names) == len(set(names))
    assert gpu_of("NVIDIA H200") == "h200" and gpu_of("NVIDIA H100 NVL") is None


@pytest.mark.parametrize(
    ("record", "target", "message"),
    [
        (exact(NODE, 1.0), "h900", "predict: target: expected one of h200, h100, .*, got 'h900'"),
        (quick_record(), "h100", "predict: record: expected one of h200, .*, got one of 'cpu'"),
        (
            Record(run(node_us=None)),
            "h100",
            "predict: record: expected node_us and copy_bandwidth measured .*, got none",
        ),
    ],
)
def test_errors_say_what_is_wanted(record: Record, target: str, message: str) -> None:
    with pytest.raises(PredictionError, match=message):
        predict(record, target)


def test_every_candidate_of_a_case_has_a_column() -> None:
    record = exact(NODE, 1.0)
    others: list[Result] = exact(2.0, 1.0, candidate="flashinfer").results
    text = shown(predict(Record(record.run, [*others, *record.results]), "h100"))
    assert next(line for line in text.splitlines() if "floor" in line).split()[-3:] == ["floor", "mtp", "flashinfer"]

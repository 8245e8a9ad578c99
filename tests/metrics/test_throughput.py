"""Sums of tokens, seconds and FLOPs, with a clock the test turns by hand."""

import re

import pytest
import torch

from titan5d.metrics.calibrate import Peak
from titan5d.metrics.flops import FULL_RECOMPUTE, FlopShape, Work, training_flops, work_of
from titan5d.metrics.throughput import Throughput, work_of_rows

TINY_D = training_flops(FlopShape(64, 4, 8, 4, 8, 128, 256))
BY_HAND = Peak(1e12, "set by metrics.peak_flops")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def global_step(n_micro_batches):
    """Global batch 8 of 64 tokens, added up from equal micro-batches."""
    work = Work(0, 0)
    for _ in range(n_micro_batches):
        work += work_of_rows(8 // n_micro_batches, 64, document_ids=None)
    return work


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("n_devices", [1, 4])
def test_case_079_sums(n_devices, accumulation):
    """Tokens/s/device x devices x seconds = 512 a step; MFU = FLOPs/token x tokens/s/device / set peak."""
    clock = Clock()
    throughput = Throughput(n_devices, TINY_D, BY_HAND, clock=clock)
    for seconds in (0.5, 0.25, 0.25):
        throughput.add_step(global_step(accumulation))
        clock.now += seconds
    report = throughput.report()
    assert (report.tokens, report.steps) == (3 * 512, 3)
    assert report.tps_per_device * n_devices * report.time_step == pytest.approx(512, rel=1e-12)
    assert report.tps == pytest.approx(3 * 512 / 1.0, rel=1e-12)
    assert report.mfu == pytest.approx(TINY_D.per_token(64) * report.tps_per_device / 1e12, rel=1e-12)
    assert report.tflops == pytest.approx(report.mfu, rel=1e-12)  # of a peak of one TFLOP/s
    assert report.hfu == report.mfu


def test_no_peak_no_mfu():
    clock = Clock()
    throughput = Throughput(1, TINY_D, peak=None, clock=clock)
    throughput.add_step(work_of([64]))
    clock.now += 1
    metrics = throughput.report().metrics()
    assert [metrics[key] for key in ("mfu", "hfu", "peak_flops", "peak_source")] == [None] * 4
    assert metrics["tflops"] == pytest.approx(TINY_D.per_token(64) * 64 / 1e12)


def test_excluded_time_is_taken_out_and_shown():
    clock = Clock()
    throughput = Throughput(2, TINY_D, BY_HAND, clock=clock)
    for _ in range(2):
        with throughput.loading_data():
            clock.now += 0.1
        clock.now += 0.9
        throughput.add_step(work_of([64] * 8))
    with throughput.excluded():  # a checkpoint
        clock.now += 30
    throughput.exclude(5)  # a compilation timed elsewhere
    clock.now += 5
    metrics = throughput.report().metrics()
    assert metrics["tps"] == pytest.approx(2 * 512 / 2.0)
    assert metrics["time_step"] == pytest.approx(1.0)
    assert metrics["time_excluded"] == pytest.approx(35)
    assert metrics["time_data"] == pytest.approx(0.1)
    assert metrics["time_data_percent"] == pytest.approx(10)


def test_time_of_a_block_that_raises_is_still_taken_out():
    clock = Clock()
    throughput = Throughput(1, TINY_D, clock=clock)

    def failing_save():
        with throughput.excluded():
            clock.now += 7
            raise RuntimeError("save failed")

    with pytest.raises(RuntimeError, match="save failed"):
        failing_save()
    throughput.add_step(work_of([64]))
    clock.now += 1
    assert throughput.report().seconds == pytest.approx(1)


def test_report_starts_a_new_interval():
    clock = Clock()
    throughput = Throughput(1, TINY_D, BY_HAND, clock=clock)
    throughput.add_step(work_of([64] * 8))
    throughput.exclude(1)
    clock.now += 10
    throughput.report()
    throughput.add_step(work_of([64] * 8))
    clock.now += 0.5
    report = throughput.report()
    assert (report.steps, report.tokens, report.time_excluded) == (1, 512, 0)
    assert report.tps == pytest.approx(1024)


def test_hfu_counts_the_second_forward():
    clock = Clock()
    throughput = Throughput(4, TINY_D, BY_HAND, FULL_RECOMPUTE, clock=clock)
    work = work_of([64] * 8)
    throughput.add_step(work)
    clock.now += 2
    report = throughput.report()
    assert report.hfu == pytest.approx(TINY_D.hardware_flops(work, FULL_RECOMPUTE) / (2 * 4 * 1e12))
    assert 4 / 3 > report.hfu / report.mfu > 1.2  # the head is not run again
    assert report.hardware_tflops == pytest.approx(report.hfu)


def test_mistakes_are_refused_with_the_numbers():
    clock = Clock()
    throughput = Throughput(1, TINY_D, clock=clock)
    with pytest.raises(ValueError, match="no step was added since the last report"):
        throughput.report()
    throughput.add_step(work_of([64]))
    clock.now += 2
    throughput.exclude(3)
    with pytest.raises(
        ValueError, match=re.escape("3.000 s were excluded of an interval of 2.000 s with 1 steps")
    ):
        throughput.report()
    with pytest.raises(ValueError, match="cannot exclude -1"):
        throughput.exclude(-1)


def test_work_of_packed_rows_is_that_of_its_documents():
    """Ids may repeat across rows and need not be sorted: a change or a row's end closes a document."""
    ids = torch.tensor(
        [[0] * 5 + [1] * 11 + [2] * 48, [2] * 64, [7] * 1 + [3] * 62 + [7] * 1], dtype=torch.int32
    )
    lengths = [5, 11, 48, 64, 1, 62, 1]
    assert work_of_rows(3, 64, ids) == work_of(lengths)
    assert work_of_rows(3, 64, ids, window=16) == work_of(lengths, window=16)
    assert work_of_rows(3, 64, None, window=16) == work_of([64] * 3, window=16)
    assert work_of_rows(3, 64, torch.zeros(3, 64, dtype=torch.int32)) == work_of_rows(3, 64, None)
    with pytest.raises(
        ValueError, match=re.escape("document_ids has shape (3, 64), not (2, 64) like the tokens")
    ):
        work_of_rows(2, 64, ids)


def test_work_of_random_rows_equals_a_count_of_pairs():
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(4, 40, generator=generator) < 0.2).cumsum(dim=1)
    same = ids[:, :, None] == ids[:, None, :]  # (B, S, S): pairs of the same document
    assert work_of_rows(4, 40, ids).squares == int(same.sum())

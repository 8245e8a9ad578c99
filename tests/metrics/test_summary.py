"""The closing lines, to the letter."""

from pathlib import Path

from titan5d.metrics.summary import MFU_CONVENTION, ClosingSummary


def summary_of(steps, **extra):
    now = iter([100.0, 292.0])
    summary = ClosingSummary(clock=lambda: next(now))
    for step, loss, tps in steps:
        summary.log(
            step,
            {
                "loss": loss,
                "tps": tps,
                "tps_per_device": tps / 2,
                "memory_peak_gib": 1.0 + step / 1000,
                "memory_peak_percent": 5.0,
                "n_tokens_seen": step * 512,
            }
            | extra,
        )
    summary.close()
    return summary


STEPS = [(1, 8.35, 10.0), (10, 7.5, 1000.0), (300, 5.71234, 1200.0)]


def test_whole_summary():
    extra = {
        "mfu": 0.451,
        "hfu": 0.55,
        "peak_flops": 98.1e9,
        "peak_source": "measured on this device (float32 matmul, 1 CPU thread)",
    }
    text = summary_of(STEPS, **extra).text(300, 300, Path("outputs/metrics.jsonl"), Path("outputs/tb"))
    assert text.splitlines() == [
        "Finished 300 of 300 steps, this start took 3m12s",
        "  loss            8.3500 (step 1) -> 5.7123 (step 300)",
        "  tokens          153,600",
        "  throughput      1,000 tokens/s (median), 500 per device",
        f"  MFU             45.1% (median), HFU 55.0%; of 0.0981 TFLOP/s per device, {extra['peak_source']}",
        f"                  {MFU_CONVENTION}",
        "  peak memory     1.30 GiB per device (5.0%)",
        "  metrics         outputs/metrics.jsonl",
        "  curves          tensorboard --logdir outputs/tb",
    ]
    assert text.count("forward and backward") == 1


def test_stopped_run_without_peak_validation_or_tensorboard():
    summary = summary_of(STEPS[:2], mfu=None)
    summary.log(11, {"validation_loss": 7.25})
    text = summary.text(11, 300, Path("m.jsonl"), None)
    assert text.splitlines()[0] == "Stopped after 11 of 300 steps, this start took 3m12s"
    assert "  validation loss 7.2500 (step 11) -> 7.2500 (step 11)" in text.splitlines()
    assert "MFU" not in text
    assert "tensorboard" not in text


def test_run_that_had_nothing_to_do():
    text = summary_of([]).text(300, 300, Path("m.jsonl"), Path("tb"))
    assert text.splitlines() == [
        "Finished 300 of 300 steps, this start took 3m12s",
        "  metrics         m.jsonl",
        "  curves          tensorboard --logdir tb",
    ]


def test_non_finite_values_do_not_spoil_the_medians():
    text = summary_of([(1, float("nan"), 10.0), (2, float("inf"), float("nan"))]).text(2, 2, Path("m"), None)
    assert "loss            nan (step 1) -> inf (step 2)" in text
    assert "throughput      10 tokens/s (median), 5 per device" in text

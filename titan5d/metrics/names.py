"""Names of the metrics: one in metrics.jsonl, and for those TorchTitan users know, theirs in TensorBoard.

A metric that is not listed has the same name in both. TensorBoard holds percent where the name says so.
"""

from __future__ import annotations

MetricValue = float | int | str | None
"""Numbers go everywhere; strings and None (not known) go to metrics.jsonl only."""

TENSORBOARD_NAMES: dict[str, str] = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "validation_loss": "validation_metrics/loss",
    "tps": "throughput(tps)",
    "tps_per_device": "throughput_per_device(tps)",
    "mfu": "mfu(%)",
    "hfu": "hfu(%)",
    "time_step": "time_metrics/end_to_end(s)",
    "time_data": "time_metrics/data_loading(s)",
    "time_data_percent": "time_metrics/data_loading(%)",
    "time_forward": "time_metrics/forward(s)",
    "time_backward": "time_metrics/backward(s)",
    "time_optimizer": "time_metrics/optimizer(s)",
    "time_messages": "time_metrics/pipeline_messages(s)",
    "time_excluded": "time_metrics/excluded(s)",
    "rank_busy_min": "ranks/busy_min(s)",
    "rank_busy_median": "ranks/busy_median(s)",
    "rank_busy_max": "ranks/busy_max(s)",
    "rank_busy_slowest": "ranks/busiest_rank",
    "memory_peak_gib": "memory/max_reserved(GiB)",
    "memory_peak_percent": "memory/max_reserved(%)",
    "memory_active_gib": "memory/max_active(GiB)",
    "memory_active_percent": "memory/max_active(%)",
    "memory_current_gib": "memory/current(GiB)",
    "memory_alloc_retries": "memory/num_alloc_retries",
    "memory_ooms": "memory/num_ooms",
}

FRACTIONS = ("mfu", "hfu")
"""0 to 1 in metrics.jsonl, percent in TensorBoard and on the console."""


EXPOSED = "time_exposed/"
"""Beginning of the names of exposed communication; the mesh axis follows."""
LINK = "time_link/"
"""Beginning of the names of transfer times; the mesh axis follows."""


def tensorboard_scalars(metrics: dict[str, MetricValue], optimizer_name: str) -> dict[str, float]:
    """The numbers of one step under their TensorBoard names; strings and unknowns are left out.

    The learning rate is named after the optimizer, `lr/AdamW`.
    """
    scalars = {}
    for key, value in metrics.items():
        if value is None or isinstance(value, str):
            continue
        name = f"lr/{optimizer_name}" if key == "lr" else TENSORBOARD_NAMES.get(key, key)
        if key.startswith(EXPOSED):
            name = f"time_metrics/exposed_{key.removeprefix(EXPOSED)}(s)"
        if key.startswith(LINK):
            name = f"ranks/link_{key.removeprefix(LINK)}(s)"
        scalars[name] = 100.0 * value if key in FRACTIONS else float(value)
    return scalars

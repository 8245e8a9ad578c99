"""A schedule's timeline as lines of text, for terminals and plain-text pages.

    rank 0  F0F1F2F3......B0--B1--B2--B3--        each action from its letter to the next one, to scale
    rank 1  ..F0F1F2F3..B0--B1--B2--B3--..        dots: idle

With two chunks a rank, capitals are its first stage and small letters its second; with more, the chunk
follows as a letter: F0a, F0b, F0c. An OVERLAP_F_B slot is written F4&b1.
"""

from __future__ import annotations

from titan5d.schedules.table import Overlap, Schedule, Slot
from titan5d.schedules.timeline import Timeline


def text_gantt(timeline: Timeline, width: int = 160) -> str:
    """One line per rank, all to one scale, at most `width` characters of picture. Where an action is narrower
    than its label, the label is cut off: the letter of its kind stays."""
    schedule = timeline.schedule
    scale = _characters_per_time(timeline, width)
    n_columns = round(timeline.makespan * scale)
    lines = []
    for rank, row in enumerate(timeline.spans):
        line = ["."] * n_columns
        for span in row:
            if span.end == span.start:
                continue
            first = round((span.start - timeline.start) * scale)
            last = max(first + 1, round((span.end - timeline.start) * scale))
            bar = _label(span.slot, schedule).ljust(last - first, "-")[: last - first]
            line[first:last] = bar
        lines.append(f"rank {rank:<{len(str(len(timeline.spans) - 1))}}  {''.join(line[:n_columns])}")
    return "\n".join(lines)


def _characters_per_time(timeline: Timeline, width: int) -> float:
    """So that every label fits its action, if the width allows."""
    if timeline.makespan <= 0:
        return 0.0
    needed = max(
        (
            len(_label(span.slot, timeline.schedule)) / (span.end - span.start)
            for row in timeline.spans
            for span in row
            if span.end > span.start
        ),
        default=1.0,
    )
    return min(needed, width / timeline.makespan)


def _label(slot: Slot, schedule: Schedule) -> str:
    if isinstance(slot, Overlap):
        return f"{_label(slot.forward, schedule)}&{_label(slot.backward, schedule)}"
    chunk = schedule.chunk_of_stage[slot.stage]
    if schedule.most_chunks == 1:
        return f"{slot.kind}{slot.microbatch}"
    if schedule.most_chunks == 2:
        return f"{slot.kind if chunk == 0 else slot.kind.lower()}{slot.microbatch}"
    return f"{slot.kind}{slot.microbatch}{chr(ord('a') + chunk) if chunk < 26 else f':{chunk}'}"

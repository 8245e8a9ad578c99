"""Pipeline schedules as tables: built, read, checked, simulated and drawn, without torch.

docs/schedules.md shows them all. The way in:

    catalog.build("1F1B", p=4, v=1, m=8)         -> table.Schedule
    simulate.simulate(schedule, StageTimes.even(schedule, f=1, b=1, w=1)) -> timeline.Timeline
    draw.svg([timeline]), text.text_gantt(timeline), memory.peak_activations(schedule)
    csv.read_csv(path), csv.write_csv(schedule, path), table.plain_tuples(schedule)
"""

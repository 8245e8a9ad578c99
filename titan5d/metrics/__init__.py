"""What a run measures about itself: FLOPs, throughput, MFU, memory; and the writers that keep it."""

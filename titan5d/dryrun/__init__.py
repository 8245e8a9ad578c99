"""One step of a run of any size, on a laptop: the real code on tensors without memory and ranks without machines."""

"""What a run will need, predicted without running it."""

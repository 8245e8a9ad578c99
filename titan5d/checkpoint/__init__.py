"""Saving and continuing runs: checkpoints for any layout, Hugging Face's format in and out (docs/checkpoints.md)."""

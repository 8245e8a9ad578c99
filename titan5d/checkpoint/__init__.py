"""Saving and continuing runs: checkpoints for any layout, and Hugging Face's format in and out (docs/checkpoints.md)."""

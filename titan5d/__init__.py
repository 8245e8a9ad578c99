"""Titan5D: train language models under five cuts of [batch, sequence, hidden, layers, experts]."""

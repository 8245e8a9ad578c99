"""TOML + flags -> one validated object. Imports no torch, so that a wrong key is refused in a moment."""

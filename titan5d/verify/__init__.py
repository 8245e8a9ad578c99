"""`titan5d verify`: proves for any TOML that its cuts train the same model as one process (contract 1)."""

"""The five cuts, one file each, applied to single-device model code from outside."""

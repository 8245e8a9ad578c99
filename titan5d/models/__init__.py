"""Single-device models: plain nn.Modules that know nothing of ranks. A cut is applied to them from outside."""

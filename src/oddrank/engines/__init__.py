"""Other people's engines: one folder each, which teaches an engine to run a plan without changing the engine."""

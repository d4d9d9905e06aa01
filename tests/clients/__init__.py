"""A package, so that fixtures of its scope end their servers when its tests are over."""

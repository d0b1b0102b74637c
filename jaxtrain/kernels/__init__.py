"""Functions on arrays: no models, no config."""

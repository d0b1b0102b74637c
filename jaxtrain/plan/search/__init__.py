"""Search for layouts: order them by formula (bound.py), compile them in parallel (parallel.py), cache the plans (cache.py)."""

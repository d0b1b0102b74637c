"""Search for layouts: order them by formula (bound.py), compile them in parallel (parallel.py), cache the plans (cache.py)."""

FOLDER = "~/.cache/jaxtrain/plans"
MOST = 24  # largest number of plans of a search, unless --most is given

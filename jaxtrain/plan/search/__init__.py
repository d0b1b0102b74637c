"""Search for layouts: ordered by formula (bound), compiled in parallel (parallel), kept on disk (cache)."""

FOLDER = "~/.cache/jaxtrain/plans"
MOST = 24  # largest number of plans of a search, unless --most is given

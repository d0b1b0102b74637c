"""Search for layouts: ordered by formula (bound), compiled side by side (parallel), kept on disk (cache)."""

FOLDER = "~/.cache/jaxtrain/plans"
MOST = 24  # largest number of plans of a search, unless --most is given

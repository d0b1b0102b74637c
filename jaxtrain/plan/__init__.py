"""A plan: the train step compiled for GPUs that need not be present, its memory, communication and step time."""

FOLDER = "~/.cache/jaxtrain/plans"  # finished plans
MOST = 8  # largest number of plans of a search, unless --most is given

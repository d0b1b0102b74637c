"""Plan a run: compile its train step for GPUs that need not be present, and estimate memory and step time."""

FOLDER = "~/.cache/jaxtrain/plans"  # finished plans
MOST = 24  # largest number of plans of a search, unless --most is given

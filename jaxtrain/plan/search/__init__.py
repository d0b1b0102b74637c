"""Many plans: made side by side, kept on disk, bounded by formula, searched for the best."""

FOLDER = "~/.cache/jaxtrain/plans"  # where they are kept
MOST = 56  # plans of one search: of 8B, two at a time, within ten minutes where one takes up to 20 s

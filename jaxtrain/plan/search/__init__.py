"""Many plans: made side by side, kept on disk, bounded by formula, searched for the best."""

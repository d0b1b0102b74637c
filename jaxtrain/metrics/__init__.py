"""What a run writes: metrics, progress, trackers, goodput, receipts."""

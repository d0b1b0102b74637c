"""The report of a plan: its sections, on a terminal and as a page; progress while plans are made."""

"""The report of a plan: its sections, on a terminal and as an HTML page; progress while plans are made."""

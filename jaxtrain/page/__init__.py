"""The one writer of pages: plans, profiles and reports of runs are documents made of it."""

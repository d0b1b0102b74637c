"""The same steps on several layouts, compared number by number."""

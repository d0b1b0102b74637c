"""A run, or several, as one page or live on a terminal."""

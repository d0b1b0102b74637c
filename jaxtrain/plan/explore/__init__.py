"""Which device holds what, for notebooks and the shell."""

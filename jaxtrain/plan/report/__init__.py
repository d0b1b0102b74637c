"""A plan for people: on a terminal, as a page, while it is made."""

"""A compiled program, read: what it computes, what it holds, what travels, how long it takes, what is amiss."""

"""What is compiled: the train step and its state, and the checks that a config fits them."""

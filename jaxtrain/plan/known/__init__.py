"""Plans made to be compared: shipped configs with those kept, well-known models, published runs."""

"""Plans of what is known elsewhere: the shipped configs, well-known models, published runs."""

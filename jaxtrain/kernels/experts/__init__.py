"""Feed-forward blocks of which each token takes a few: routing, the exchange of tokens between devices, grouped matmuls."""

"""Feed-forward blocks of experts: routing, the exchange of tokens between devices, grouped matmuls."""

"""Feed-forward blocks of experts: routing, dispatch and combine between devices, grouped matmuls."""

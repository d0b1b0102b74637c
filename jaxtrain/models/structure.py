"""What sets a family of models apart beyond the keys of the config. No jax."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Structure:
    """The same for all sizes of a family, and for models that nobody configures otherwise: so these are no keys."""

    activation: str = "silu"  # of the gate: silu | gelu_tanh
    norm_offset: bool = False  # norms multiply by 1 + scale, also those of queries and keys
    scaled_embedding: bool = False  # embeddings are multiplied by the root of d_model

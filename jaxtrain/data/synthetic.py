"""Synthetic tokens that a model can learn, for tests and for runs that measure speed.

256 symbols have one fixed random cyclic order. A document begins at a random symbol and continues with its own stride of 1 to 4
in this order. One symbol in sixteen is replaced by a random symbol. So a model must first learn the order, then infer the
stride from the context. A row is a pure function of (seed, row index). numpy computes all rows of a batch at once.
"""

import numpy as np

SYMBOLS = 256
EOT = 256
VOCAB = 257
DOCUMENTS = 4  # in a row
ROWS = 1 << 31  # before rows repeat

_CIRCLE = np.random.Generator(np.random.PCG64(20)).permutation(SYMBOLS)


def mix(x: np.ndarray) -> np.ndarray:
    """Return 64 pseudorandom bits for each counter in x: the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Synthetic:
    """A source of synthetic rows. `name`, `windows` and `rows` are as in `windows.FileWindows`."""

    name = "synthetic"
    windows = ROWS

    def __init__(self, seed: int, split: str, seq_len: int, max_segments: int):
        self.key = mix(np.asarray([2 * seed + (split == "validation") + 1], np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        self.length = seq_len + 1
        self.documents = max(1, min(DOCUMENTS, max_segments, self.length // 8))

    def rows(self, index_R: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, None, None]:
        """Return a `windows.RowArrays`: tokens (R, T+1), then row and column of each start of a later document in a row.

        The last two fields are None, because every target counts in the loss and no row has padding.
        """
        R, M, length = len(index_R), self.documents, self.length
        row_key_R1 = mix(self.key + index_R.astype(np.uint64)[:, None])
        bits_RM = mix(row_key_R1 + np.arange(M, dtype=np.uint64) + np.uint64(1 << 32))
        # Documents have about equal lengths; each start is moved by up to half a length.
        step = length // M
        start_RM = np.arange(M) * step + (bits_RM % np.uint64(max(1, step // 2))).astype(np.int64)
        start_RM[:, 0] = 0
        length_RM = np.diff(start_RM, axis=1, append=length)
        stride_RM = (bits_RM >> np.uint64(32)).astype(np.int64) % 4 + 1
        phase_RM = (bits_RM >> np.uint64(40)).astype(np.int64) % SYMBOLS - stride_RM * start_RM
        counts = length_RM.ravel()
        stride_RS = np.repeat(stride_RM.ravel(), counts).reshape(R, length)
        phase_RS = np.repeat(phase_RM.ravel(), counts).reshape(R, length)
        noise_RS = mix(row_key_R1 + np.arange(1, length + 1, dtype=np.uint64))
        symbol_RS = _CIRCLE[(phase_RS + stride_RS * np.arange(length)) % SYMBOLS]
        random_RS = (noise_RS >> np.uint64(8)).astype(np.int64) % SYMBOLS
        tokens_RS = np.where(noise_RS % np.uint64(16) == 0, random_RS, symbol_RS).astype(np.uint16)
        row, column = np.repeat(np.arange(R), M - 1), start_RM[:, 1:].ravel()
        tokens_RS[row, column - 1] = EOT
        return tokens_RS, row, column, None, None

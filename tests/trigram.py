"""An interpolated trigram model of bytes (Jelinek and Mercer 1980): a neural model of the same text has to reach a lower loss.

The probability of a token is a weighted mean of four: uniform, the token's frequency, its frequency after the previous token,
and its frequency after the two previous tokens. Counts do not cross a document's border, with one exception: the end-of-text
id of the previous document is context for the second token of a document.
"""

import numpy as np

from jaxtrain.data.tokenfile import TokenFile

HELD_OUT = 20  # every 20th document of the training split fits the mixture's weights and is not counted


def occurrences(file: TokenFile, end: int, documents: np.ndarray | None = None) -> np.ndarray:
    """Return (token two before, token before, token) for each predicted token 1 .. end - 1, as int64 (3, N).

    The first token of a document is not predicted. documents: numbers of the documents to use; None for all.
    """
    tokens = np.asarray(file.tokens[:end]).astype(np.int64)
    offsets = np.asarray(file.doc_offsets)
    eot = file.header["tokenizer"]["eot"]
    predicted = np.ones(end, bool)
    predicted[offsets[offsets < end]] = False
    if documents is not None:
        number = np.searchsorted(offsets, np.arange(end), side="right") - 1
        predicted &= np.isin(number, documents)
    at = np.flatnonzero(predicted)  # position 0 starts a document, so it is not predicted
    two_before = np.where(at >= 2, tokens[at - 2], eot)
    return np.stack([two_before, tokens[at - 1], tokens[at]])


class Trigram:
    """A trigram model. Its counts and its mixture weights are from different documents of a training split."""

    def __init__(self, train: TokenFile, steps: int = 30):
        self.vocab = V = train.header["tokenizer"]["vocab_size"]
        number = np.arange(train.header["documents"])
        fit = number % HELD_OUT == 0
        a, b, c = occurrences(train, train.header["tokens"], number[~fit])
        self.one_V = np.bincount(c, minlength=V).astype(np.float64)
        self.two_VV = np.bincount(b * V + c, minlength=V * V).reshape(V, V)
        self.three_VVV = np.bincount((a * V + b) * V + c, minlength=V**3).reshape(V, V, V)
        self.contexts_VV = self.three_VVV.sum(2)
        parts_4N = self.parts(occurrences(train, train.header["tokens"], number[fit]))
        self.weights_4 = np.full(4, 0.25)
        for _ in range(steps):  # expectation maximisation; no step lowers the likelihood
            share_4N = self.weights_4[:, None] * parts_4N
            self.weights_4 = (share_4N / share_4N.sum(0)).mean(1)

    def parts(self, seen: np.ndarray) -> np.ndarray:
        """Return the probability that each of the four models gives each occurrence, (4, N); 0 for a context that does
        not occur in the counted documents.
        """
        a, b, c = seen
        return np.stack(
            [
                np.full(len(c), 1 / self.vocab),
                self.one_V[c] / self.one_V.sum(),
                self.two_VV[b, c] / np.maximum(self.two_VV.sum(1)[b], 1),
                self.three_VVV[a, b, c] / np.maximum(self.contexts_VV[a, b], 1),
            ]
        )

    def loss(self, file: TokenFile, end: int) -> float:
        """Return the mean loss in nats over the predicted tokens among tokens 1 .. end - 1 of a file."""
        return float(-np.log(self.weights_4 @ self.parts(occurrences(file, end))).mean())

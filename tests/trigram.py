"""An interpolated trigram model of bytes (Jelinek and Mercer 1980): what a neural model of the same text has to beat.

The probability of a token is a mixture of four: uniform, by frequency, given the token before, and given the two before.
Counts never cross a document's border except that its first token is a context like any other: the end-of-text id that
closes the document before stands in front of it.
"""

import numpy as np

from jaxtrain.data.tokenfile import TokenFile

HELD_OUT = 20  # every twentieth document of the training split fits the mixture's weights and is not counted


def occurrences(file: TokenFile, end: int, documents: np.ndarray | None = None) -> np.ndarray:
    """(token two before, token before, token), each predicted one of tokens 1 .. end - 1, as int64 (3, N).

    The first token of a document is never predicted. `documents`: only those of these document numbers.
    """
    tokens = np.asarray(file.tokens[:end]).astype(np.int64)
    offsets = np.asarray(file.doc_offsets)
    eot = file.header["tokenizer"]["eot"]
    predicted = np.ones(end, bool)
    predicted[offsets[offsets < end]] = False
    if documents is not None:
        number = np.searchsorted(offsets, np.arange(end), side="right") - 1
        predicted &= np.isin(number, documents)
    at = np.flatnonzero(predicted)  # never 0, which starts a document
    two_before = np.where(at >= 2, tokens[at - 2], eot)
    return np.stack([two_before, tokens[at - 1], tokens[at]])


class Trigram:
    """Counted on a training split, its weights fitted on documents of that split that were not counted."""

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
        for _ in range(steps):  # expectation maximisation; each step can only raise the likelihood
            share_4N = self.weights_4[:, None] * parts_4N
            self.weights_4 = (share_4N / share_4N.sum(0)).mean(1)

    def parts(self, seen: np.ndarray) -> np.ndarray:
        """The probability each of the four models gives to each occurrence, (4, N). A context never seen gives 0."""
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
        """Mean loss in nats over the predicted ones of a file's tokens 1 .. end - 1."""
        return float(-np.log(self.weights_4 @ self.parts(occurrences(file, end))).mean())

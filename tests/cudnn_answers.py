"""Workspace sizes that cuDNN 9.23.2 reported for attention's backward calls on an H200."""

ALIGNMENT = 1024  # most bytes that cuDNN may add to the formula for each sequence of a call
LLAMA3_8B = {"rows": 1, "documents": 33, "T": 8192, "S": 8192, "N": 32, "K": 8, "H": 128}

# Reported by cuDNN 9.23.2 for an H200: (case, workspace in bytes).
ANSWERS = {
    "unpacked": (LLAMA3_8B | {"documents": 0}, 269_484_288),
    "8 documents": (LLAMA3_8B | {"documents": 9}, 2_425_359_104),
    "32 documents": (LLAMA3_8B, 8_892_982_016),
    "window": (LLAMA3_8B | {"window": 1024}, 8_892_982_016),
    "64 heads": (LLAMA3_8B | {"N": 64}, 17_785_955_072),
    "4 rows, head_dim 64": (LLAMA3_8B | {"rows": 4, "H": 64}, 17_855_186_688),
    "one group of heads": (LLAMA3_8B | {"N": 4, "K": 1}, 1_111_630_592),
    "as many keys as queries": (LLAMA3_8B | {"K": 32}, 4_463_801_344),
    "head_dim 256": (LLAMA3_8B | {"H": 256}, 17_751_352_064),
    "256 documents, head_dim 96": (LLAMA3_8B | {"documents": 257, "N": 8, "K": 2, "H": 96}, 13_002_670_848),
    "256 documents": (LLAMA3_8B | {"documents": 257}, 69_257_462_528),
    "odd length": (LLAMA3_8B | {"documents": 5, "T": 1000, "S": 1000, "N": 8, "K": 2}, 41_121_792),
    "off the diagonal": (LLAMA3_8B | {"documents": 2, "T": 4096, "causal": False}, 403_703_040),
    "off the diagonal, unpacked": (LLAMA3_8B | {"documents": 0, "S": 2048, "causal": False}, 168_820_992),
    "off the diagonal, no groups": (LLAMA3_8B | {"documents": 0, "T": 2048, "K": 32, "causal": False}, 33_816_832),
    "deterministic": (LLAMA3_8B | {"documents": 0, "deterministic": True}, 4_430_233_856),
    "deterministic, 32 documents": (LLAMA3_8B | {"deterministic": True}, 146_197_717_760),
    "deterministic, off the diagonal": (
        LLAMA3_8B | {"documents": 2, "T": 4096, "causal": False, "deterministic": True},
        4_564_452_608,
    ),
}


def sequences(case: dict) -> int:
    return case["rows"] * max(1, case["documents"])


def near(case: dict, said: int, counted: int) -> bool:
    return 0 <= said - counted <= ALIGNMENT * sequences(case)

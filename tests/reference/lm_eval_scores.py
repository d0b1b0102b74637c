"""Log-likelihoods by lm-evaluation-harness's own model of a Hugging Face folder.

`python lm_eval_scores.py PACKAGES DIR PAIRS.json` prints JSON: [sum of log p, whether greedy] of each [context, continuation].
PACKAGES is a folder of packages that contains lm_eval.
"""

import json
import sys
from pathlib import Path

packages, folder, pairs = sys.argv[1:]
sys.path.append(packages)

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

model = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1)
requests = [Instance("loglikelihood", {}, (context, end), 0) for context, end in json.loads(Path(pairs).read_text())]
print(json.dumps(model.loglikelihood(requests, disable_tqdm=True)))

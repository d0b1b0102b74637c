"""Print transformers' model types with a class for causal language modelling, as benchmarks/model_types.json has them."""

import json

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES


def text_type(kind):
    """Return the type of the text part of a model that also sees or hears; "" for others, and if its config needs arguments."""
    if "text_config" not in (getattr(CONFIG_MAPPING[kind], "sub_configs", None) or {}):
        return ""
    try:
        return CONFIG_MAPPING[kind]().text_config.model_type
    except Exception:
        return ""


types = {kind: {"class": CLASSES[kind]} for kind in sorted(CLASSES)}
for kind, about in types.items():
    if found := text_type(kind):
        about["text"] = found
print(json.dumps({"transformers": transformers.__version__, "types": types}))

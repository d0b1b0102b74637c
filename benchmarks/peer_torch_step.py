"""A train step in PyTorch: transformers' Llama, torch.compile, SDPA, fused AdamW. It does not import jaxtrain.

    PYTHON benchmarks/peer_torch_step.py SPEC.json ANSWER.json

benchmarks/peer_torch.py writes SPEC.json and reads ANSWER.json.
Parameters and moments are float32. If the precision is bf16, computation runs under bfloat16 autocast. Gradients of
microbatches are summed and clipped by their global norm. If the spec has settings, the first of them that works is timed.
Otherwise several settings are tried for a few steps each, and the fastest is timed: SDPA with cuDNN or with flash attention,
and torch.compile of each layer or of the whole model.
"""

import contextlib
import gc
import json
import statistics
import sys
import time

import numpy as np
import torch
import torch._dynamo
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import __version__ as transformers_version

# Layers are compiled one by one from one function. Above a limit of versions of a function (8 by default), torch.compile runs
# further layers uncompiled, with only a line in its log. The largest models here have fewer layers than this limit.
VERSIONS = 128

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
TRIED = (2, 3)  # steps of a setting in a search: to warm up, and timed


def attention_kernel(attention: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which SDPA uses one kernel. On a CPU, or if `attention` is "sdpa", PyTorch chooses the kernel."""
    if device.type != "cuda" or attention == "sdpa":
        return contextlib.nullcontext()
    return sdpa_kernel([BACKENDS[attention]])


def make_model(spec: dict, device: torch.device) -> LlamaForCausalLM:
    """Return the model in float32, with the weights of the spec's file if it names one.

    Raises ValueError if weights, number of parameters or number of rotary frequencies differ from the spec.
    """
    m = spec["model"]
    config = LlamaConfig(
        vocab_size=m["vocab_size"],
        hidden_size=m["d_model"],
        intermediate_size=m["d_ff"],
        num_hidden_layers=m["num_layers"],
        num_attention_heads=m["num_heads"],
        num_key_value_heads=m["num_kv_heads"],
        head_dim=m["head_dim"],
        rms_norm_eps=m["norm_eps"],
        tie_word_embeddings=m["tied_head"],
        max_position_embeddings=spec["seq_len"],
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config).float()
    if spec["weights"]:
        arrays = np.load(spec["weights"])
        state = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        left = model.load_state_dict(state, strict=False)
        missing = [name for name in left.missing_keys if name != "lm_head.weight" or not m["tied_head"]]
        if missing or left.unexpected_keys:
            raise ValueError(f"weights that do not match: missing {missing}, unexpected {left.unexpected_keys}")
    count = sum(p.numel() for p in model.parameters())
    if count != spec["parameters"]:
        raise ValueError(f"another model: {count:,} parameters here, {spec['parameters']:,} in the spec")
    # The spec has frequencies as numbers, because the settings of scaling differ among versions of transformers.
    wanted = torch.tensor(spec["rotary_frequencies"], dtype=torch.float32, device=device)
    if wanted.shape != model.model.rotary_emb.inv_freq.shape:
        raise ValueError(f"{tuple(wanted.shape)} rotary frequencies in the spec, but not in the model")
    model.model.rotary_emb.inv_freq = wanted
    return model.train()


def compiled(function):
    """Return the function compiled as one graph. If it cannot be compiled, its first call raises an error."""
    return torch.compile(function, dynamic=False, fullgraph=True)


def dynamo() -> dict:
    """Return the numbers of graphs and graph breaks of torch.compile since the last reset."""
    counters = torch._dynamo.utils.counters
    return {"graphs": counters["stats"]["unique_graphs"], "graph breaks": sum(counters["graph_break"].values())}


class Step:
    """A train step. how: SDPA kernel `attention`; `compile` ("layers", "model" or "none"); whether to `checkpoint` layers."""

    def __init__(self, spec: dict, model: LlamaForCausalLM, device: torch.device, how: dict):
        self.spec, self.model, self.device, self.how = spec, model, device, how
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        o = spec["optimizer"]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": o["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}],
            lr=o["lr"][0],
            betas=(o["beta1"], o["beta2"]),
            eps=o["eps"],
            fused=True,
        )
        layers = [self.layer(module) for module in model.model.layers]

        def head_loss(hidden, targets, total):
            logits = model.lm_head(model.model.norm(hidden)).float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / total

        if how["compile"] == "layers":
            head_loss = compiled(head_loss)

        def loss_of(tokens, targets, total):
            hidden = model.model.embed_tokens(tokens)
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            rotary = model.model.rotary_emb(hidden, position_ids=positions)
            for layer in layers:
                hidden = layer(hidden, rotary)
            return head_loss(hidden, targets, total)

        self.loss_of = compiled(loss_of) if how["compile"] == "model" else loss_of

    def layer(self, module):
        """Return a function that calls a decoder layer without a mask array, so that SDPA's kernels apply the causal mask."""

        def forward(hidden, rotary):
            out = module(hidden, attention_mask=None, position_embeddings=rotary)
            return out[0] if isinstance(out, tuple) else out

        if self.how["compile"] == "layers":
            forward = compiled(forward)
        if self.how["checkpoint"]:
            return lambda hidden, rotary: checkpoint(forward, hidden, rotary, use_reentrant=False)
        return forward

    def __call__(self, number: int, tokens_ABT: torch.Tensor, targets_ABT: torch.Tensor) -> torch.Tensor:
        """Take step `number`. Return its loss before the update, on the device. A: microbatches."""
        o, total = self.spec["optimizer"], tokens_ABT.numel()
        for group in self.optimizer.param_groups:
            group["lr"] = o["lr"][min(number, len(o["lr"]) - 1)]
        value = torch.zeros((), device=self.device)
        bfloat16 = self.spec["precision"] == "bf16"
        for tokens, targets in zip(tokens_ABT, targets_ABT, strict=True):
            # Also around the backward pass, because a recomputed layer must use the same kernel.
            with attention_kernel(self.how["attention"], self.device):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=bfloat16):
                    loss = self.loss_of(tokens, targets, total)
                loss.backward()
            value += loss.detach()
        if o["clip_norm"]:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), o["clip_norm"], foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value


def take(step: Step, batch: tuple, warmup: int, steps: int) -> tuple[list[float], list[float]]:
    """Take `warmup` and then `steps` steps. Return (seconds of each of `steps` steps, losses of all steps).

    On a GPU, CUDA events measure the times, so the host does not wait for a step.
    """
    losses, marks = [], []

    def mark():
        if step.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    for i in range(warmup + steps):
        if i >= warmup:
            marks.append(mark())
        losses.append(step(i, *batch))
    marks.append(mark())
    values = [float(loss) for loss in losses]  # waits for the GPU
    pairs = list(zip(marks, marks[1:], strict=False))
    if step.device.type == "cuda":
        return [a.elapsed_time(b) / 1e3 for a, b in pairs], values
    return [b - a for a, b in pairs], values


def measure(spec: dict, device: torch.device, batch: tuple, how: dict, warmup: int, steps: int) -> dict:
    """Build and time a step with the settings `how`. Return the part of the answer that was measured."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    step = Step(spec, make_model(spec, device), device, how)
    seconds, losses = take(step, batch, warmup, steps)
    return {
        "settings": how,
        "step_times": seconds,
        "losses": losses,
        "dynamo": dynamo(),
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None,
    }


def release(device: torch.device) -> None:
    """Free the memory and the compiled functions of steps that are not used any more."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()  # a step has reference cycles, so only the collector frees it
    if device.type == "cuda":
        torch.cuda.empty_cache()


def candidates(spec: dict, device: torch.device) -> list[dict]:
    """Return the settings to try: those of the spec, or all, probably fastest first."""
    if spec["settings"]:
        return list(spec["settings"])
    kernels = list(BACKENDS) if device.type == "cuda" else ["sdpa"]
    return [{"attention": k, "compile": c, "checkpoint": False} for c in ("layers", "model") for k in kernels]


def choose(spec: dict, device: torch.device, batch: tuple) -> dict:
    """Return the results of `measure` for the chosen settings, with all settings that were `tried`.

    If the spec has settings, or no time for a search, the first settings that work are chosen, and the steps of their trial are
    the timed ones: nothing is compiled twice. In a search the fastest settings are chosen. Settings that run out of memory are
    tried again with checkpointing, unless the spec has settings.
    """
    queue, tried, began = candidates(spec, device), [], time.perf_counter()
    at_once = bool(spec["settings"]) or not spec["tune_s"]
    counts = (spec["warmup"], spec["steps"]) if at_once else TRIED
    best, best_s = None, float("inf")
    while queue:
        how = queue.pop(0)
        if best and (at_once or time.perf_counter() - began > spec["tune_s"]):
            why = "an earlier setting works" if at_once else "no time was left to try it"
            tried.append({**how, "step_s": None, "why": why})
            continue
        why, seconds = "", None
        try:
            measured = measure(spec, device, batch, how, *counts)
            seconds = statistics.median(measured["step_times"])
            if seconds < best_s:
                best, best_s = measured, seconds
        except torch.OutOfMemoryError:
            why = "out of memory"
            if not (how["checkpoint"] or spec["settings"]):
                queue.append({**how, "checkpoint": True})
        except RuntimeError as error:  # this kernel does not support these inputs on this device
            why = (str(error).strip().splitlines() or ["RuntimeError"])[0][:200]
        tried.append({**how, "step_s": seconds, "why": why})
        print(json.dumps(tried[-1]), flush=True)  # the log has it if this process is killed
        release(device)
    if best is None:
        names = [f"{t['attention']}, compile {t['compile']}{', checkpoint' if t['checkpoint'] else ''}" for t in tried]
        raise SystemExit("no setting works: " + "; ".join(f"{n}: {t['why']}" for n, t in zip(names, tried, strict=True)))
    if not at_once:
        best = measure(spec, device, batch, best["settings"], spec["warmup"], spec["steps"])
    return {**best, "tried": tried}


def main(asked: str, answered: str) -> None:
    """Time the step of the spec in the file `asked`, and write the answer to the file `answered`."""
    with open(asked) as file:
        spec = json.load(file)
    device = torch.device("cuda" if torch.cuda.is_available() and spec["platform"] != "cpu" else "cpu")
    if spec["platform"] == "gpu" and device.type != "cuda":
        raise SystemExit("torch finds no GPU here, but jaxtrain does. Fix: install a torch that is built for CUDA.")
    # The name of this limit changed in torch 2.7.
    settings = torch._dynamo.config
    setattr(settings, "recompile_limit" if hasattr(settings, "recompile_limit") else "cache_size_limit", VERSIONS)
    torch.set_float32_matmul_precision("highest" if spec["precision"] == "f32" else "high")
    arrays = np.load(spec["batch"])
    shape = (spec["grad_accum"], -1, spec["seq_len"])
    batch = tuple(torch.from_numpy(arrays[k].astype(np.int64)).reshape(shape).to(device) for k in ("tokens", "targets"))

    answer = {
        "verdict": "ok",
        "torch": torch.__version__,
        "transformers": transformers_version,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        **choose(spec, device, batch),
    }
    with open(answered, "w") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main(*sys.argv[1:])

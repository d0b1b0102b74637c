"""The model of a config: its modules, its dtypes, and the roles of its parameters (trained, frozen, multiplied in FP8)."""

import dataclasses
import fnmatch
import functools
from collections.abc import Sequence

import jax
from flax import nnx

from jaxtrain.config import own_parts, schema
from jaxtrain.config.schema import ConfigError, Problem, RunConfig, Train, own_settings, split_items
from jaxtrain.config.shapes import MTP, without_layer_key
from jaxtrain.models import family, layers
from jaxtrain.models.attention import Kernel
from jaxtrain.models.lora import EQUATIONS, LoraSpec, is_adapter
from jaxtrain.models.module import Definition, Params, leaf_names
from jaxtrain.models.precision import fp8_weight_names
from jaxtrain.models.remat import make_remat_plan
from jaxtrain.models.rules import target_problems
from jaxtrain.models.stored import StoredWeight
from jaxtrain.models.structure import Structure
from jaxtrain.models.transformer import build_as
from jaxtrain.models.zero import Zero
from jaxtrain.sharding import Axes
from jaxtrain.step.balance import is_bias


def make_definition(run: RunConfig, zero: Zero, kernel: Kernel) -> Definition:
    """Return the `Definition` of a config's model, with this mesh, these dtypes and this attention kernel."""
    module, placement, numerics = family(run.model.family), zero.placement, zero.numerics
    if not hasattr(module, "build") and not hasattr(module, "STRUCTURE"):
        rule = "has no function `build`, which returns the model"
        raise ConfigError([Problem("model.family", run.model.family, rule, "Give it one, as in docs/extending.md.")])
    delays_load = placement.size("tensor") == 1
    plan = make_remat_plan(run.remat, run.sharding.gather, not run.parallel.scan_layers, delays_load, run.model.period)
    ctx = layers.Context(
        numerics,
        placement,
        zero,
        lora=LoraSpec(run.lora.rank, run.lora.scale, split_items(run.lora.targets), run.lora.experts, numerics.adapters),
        moe=run.moe,
        own=own_settings(run.own),
        structure=getattr(module, "STRUCTURE", Structure()),
    )
    # A family from outside the package builds its own module.
    build = module.build if hasattr(module, "build") else functools.partial(build_as, module.STRUCTURE)

    def make_model(rngs: nnx.Rngs) -> nnx.Module:
        with own_parts.calling("model.family", run.model.family, "build(model, kernel, remat, ctx, rngs)"):
            model = build(run.model, kernel, plan, ctx, rngs)
        if not isinstance(model, nnx.Module):
            rule = f"its build returns {type(model).__name__}, not an nnx.Module"
            raise own_parts.WrongPart("model.family", run.model.family, rule, "Return a model such as a Transformer.")
        return model

    def store(name: str, shape: tuple[int, ...], axes: Axes, dot: bool) -> StoredWeight | None:
        return stored_as(run.lora.base, name, shape, axes, dot) if run.lora.rank else None

    return Definition(make_model, store, placement)


def stored_as(base: str, name: str, shape: tuple[int, ...], axes: Axes, dot: bool) -> StoredWeight | None:
    """Return how a frozen weight is stored; None: as it is.

    Args:
      base: lora.base.
      name, shape, axes: of the parameter.
      dot: the flag of `param`.
    """
    last = name.rpartition(".")[2]
    adaptable = dot and last in EQUATIONS and not name.startswith(f"{MTP}.")  # adapters are trained without these modules
    if base == "bf16" or not adaptable or (base == "mxfp4" and "experts" not in axes):
        return None
    xs, ws = EQUATIONS[last].split("->")[0].split(",")
    return StoredWeight(base, shape, axes, inputs_first=ws[0] in xs)


def for_inference(run: RunConfig) -> RunConfig:
    """Return the run with the settings for programs without a train step, such as the sampler.

    Experts have no capacity factor: the tokens that a capacity drops depend on the other tokens of the batch. Each layer
    gathers its weights when it runs, since there is no train step that could gather them once.
    """
    sharding = dataclasses.replace(run.sharding, zero=3 if run.sharding.zero else 0, gather="layer")
    return dataclasses.replace(run, moe=dataclasses.replace(run.moe, capacity_factor=0.0), sharding=sharding)


def fp8_weights(precision: str, exclude: str, definition: Definition) -> Params:
    """Return a tree of bools: whether each parameter is multiplied in FP8.

    With `precision=fp8`, the weights of linear layers and experts are multiplied in FP8, except those in `fp8.exclude`.
    Raises ConfigError for names in fp8.exclude that the model does not have.
    """
    name_tree = jax.tree.map(without_layer_key, leaf_names(definition.dots))
    multiplied = [name for name, dot in zip(*map(jax.tree.leaves, (name_tree, definition.dots)), strict=True) if dot]
    chosen, problems = fp8_weight_names(precision, exclude, [*dict.fromkeys(multiplied)])
    if problems:
        raise ConfigError(problems)
    return jax.tree.map(lambda name: name in chosen, name_tree)


def trained_parameters(lora: schema.Lora, train: Train, definition: Definition) -> Params:
    """Return a tree of bools: whether each parameter is trained.

    With LoRA, only the adapters are trained. Otherwise all parameters are, except routers' biases and matches of train.freeze.
    Raises ConfigError for a pattern of train.freeze that matches no parameter, if no parameter is trained, and for a model
    without the adapters in lora.targets.
    """
    name_tree = jax.tree.map(without_layer_key, leaf_names(definition.abstract))
    parameter_names = [*dict.fromkeys(jax.tree.leaves(name_tree))]
    if lora.rank:
        adapted = {
            name.rpartition(".")[2].removesuffix("_a") for name in parameter_names if is_adapter(name) and name.endswith("_a")
        }
        if problems := target_problems(lora, sorted(adapted), any(name.endswith(".router") for name in parameter_names)):
            raise ConfigError(problems)
        return jax.tree.map(is_adapter, name_tree)
    patterns = split_items(train.freeze)
    remedy = f"Set '', or patterns of these parameters: {', '.join(parameter_names)}."
    unmatched = [p for p in patterns if not fnmatch.filter(parameter_names, p)]
    if unmatched:
        rule = f"no parameter is called {', '.join(unmatched)}"
        raise ConfigError([Problem("train.freeze", train.freeze, rule, remedy)])
    trained = jax.tree.map(lambda name: not is_bias(name) and not matches(name, patterns), name_tree)
    if not any(jax.tree.leaves(trained)):
        raise ConfigError([Problem("train.freeze", train.freeze, "freezes all parameters", remedy)])
    return trained


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a parameter's name matches one of these patterns of fnmatch, as in `train.freeze`."""
    return any(fnmatch.fnmatchcase(name, p) for p in patterns)

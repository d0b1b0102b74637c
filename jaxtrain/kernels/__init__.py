"""The kernels of a layer, as functions of arrays. They import no model and no config."""

"""Pipeline parallelism: a model as a list of layers, cut into stages that run on different ranks."""

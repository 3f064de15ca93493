"""The ZeRO runtime: what is sharded, when it moves, and the sharded step. Each room imports those below it.

access     what users read and write of a sharded model: whole parameters, state, gradients, bytes held
step       the optimizer's step: agree on the gradients, decide, update what this rank owns, publish
contents   what state dicts and checkpoints hold of it
guards     what watches for changes by user code that a step would ignore
deal       from a model to what is sharded: which parameters lie together, and where they wait
passes     forward and backward: when parameters are gathered and released, and gradients reduced
group      what is sharded: flat parameters, their gradients and their master weights
"""

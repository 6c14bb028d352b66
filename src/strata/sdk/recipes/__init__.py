"""Recipes: a file that says what to train on what, and the loops that train it through the API of a training server.

`recipe` reads the file, `rows` and `rendering` make tokens of data, `batches` says which examples a step has,
`supervised`, `preference`, `reinforcement` and `distillation` are the kinds of training, `trainer` is the loop with
evaluation, checkpoints and resumption, `run_folder` what is on disk. No torch.
"""

"""Whether a run fits a machine, computed before it starts: tokens of a step, memory of trainer and engines.

Nothing here imports torch: the arithmetic needs a model's configuration only.
"""

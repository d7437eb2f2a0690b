"""Rollouts on many processes and machines: workers of a Ray cluster grow the trees, the trainer gets them as they end.

Ray is imported by :mod:`turntree.trainers.cluster.connect` only, when a run asks for it.
"""

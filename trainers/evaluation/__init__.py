"""Evaluation in all its ways: rows, samples, trees, baselines, passports, tables, comparisons.

``turntree.trainers.scoring.score`` is the whole of ``turntree evaluate``.
"""

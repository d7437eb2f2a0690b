"""Trees, expansion, credit, packing, objectives, learner."""

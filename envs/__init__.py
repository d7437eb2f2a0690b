"""The tasks: state, turn grammar, rewards, data sets, worlds. Never imports torch."""

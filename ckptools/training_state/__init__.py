"""The parts of a tree that matter to training: model, optimizers, schedulers, random states, steps."""

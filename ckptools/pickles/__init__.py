"""The inert unpickler and what it rebuilds: what a pickle names is data, and nothing of it is imported or called."""

"""The inert unpickler and the objects that it rebuilds: names in a pickle are data, never imported or called."""

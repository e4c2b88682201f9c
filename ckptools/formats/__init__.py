"""The formats that are read: a module or folder each; `open` finds the one that fits, in the order of `registry`."""

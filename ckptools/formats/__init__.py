"""The formats that ckptools reads, a module or folder each; `open` tries them in the order of `registry`."""

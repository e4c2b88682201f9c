"""The content of a checkpoint, key by key: names, values, layout, and which keys the user selected."""

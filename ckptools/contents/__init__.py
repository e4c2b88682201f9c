"""What a checkpoint holds, key by key: names, values, layout, and which of them were asked for."""

"""Is a checkpoint whole, unharmed and coherent? One file per subject; nothing is written and nothing is changed."""

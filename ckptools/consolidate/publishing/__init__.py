"""From a plan to files: copy bytes, keep a journal, read back; an output appears whole or not at all."""

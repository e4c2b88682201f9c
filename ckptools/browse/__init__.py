"""`browse`: look around in a checkpoint, in a terminal. A view: every record comes from the room of a command."""

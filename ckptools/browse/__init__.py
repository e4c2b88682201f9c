"""`browse`: explore a checkpoint in the terminal. It only displays: the packages of other commands make the records."""

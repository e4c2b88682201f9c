"""Several processes, of one machine or many, that do one thing together: who they are, and where they meet."""

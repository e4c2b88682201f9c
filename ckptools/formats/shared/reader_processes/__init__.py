"""Reading many rank files in processes of our own: what asks them, what they run, and what they answer."""

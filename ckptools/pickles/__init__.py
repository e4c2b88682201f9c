"""pickles."""

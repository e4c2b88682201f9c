"""Callbacks for trainers that verify what was just saved; each imports its trainer, and is imported on request."""

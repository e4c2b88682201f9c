"""Callbacks for trainers that verify each checkpoint after it was saved; each module imports its trainer."""

"""`explain`: what a problem code means, what causes it, and what to do; `problems.md` says it for all codes."""

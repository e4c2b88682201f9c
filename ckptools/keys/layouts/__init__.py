"""Documented names of weights in trainers and libraries, and the forms in which they store projections and experts."""

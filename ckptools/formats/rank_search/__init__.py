"""The files of the ranks: parse their names, find and distinguish them, and report their problems."""

"""The files of the ranks: their names, how they are found and distinguished, and what is wrong with them."""

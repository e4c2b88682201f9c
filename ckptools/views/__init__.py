"""What people and programs see: rows of data about a checkpoint, and the text, JSON and HTML made of them."""

"""Files on disk and in stores: detect their content, open them safely, and read their containers."""

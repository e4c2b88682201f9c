"""Code that several formats share: finding, checking and merging the files of the ranks."""

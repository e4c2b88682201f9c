"""What several formats share: finding, checking and merging the files of the ranks."""

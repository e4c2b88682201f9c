"""All code that loads files with torch."""

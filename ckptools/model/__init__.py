"""The one in-memory model of all formats: data only, no file is opened here."""

"""The in-memory model that every format fills: data only, no file is opened here."""

"""What a notebook shows, and what pages are made of: tables that fold, in HTML and CSS alone."""

"""Display of any record: tables, lines, pages of HTML, drawings, JSON."""

"""Pictures: drawn from records, as SVG and in words; whoever shows one imports it from here."""

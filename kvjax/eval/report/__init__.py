"""What rows say: tables, figures, one HTML page, and the papers' claims."""
